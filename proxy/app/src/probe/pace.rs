//! How long answers to probes take by our own clock: the part of a probe's time that passes between our hands. The wait for a core before
//! a connection is accepted is not in it, nor one after the answer; one in between is, and no program can tell it from work.
//!
//! ```text
//!   accept ── looked at ──> … the question comes, however slowly … ── its last byte ── the answer's first byte
//!          └─ counted ─┘                                                            └──── counted ────┘
//! ```

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::admin::pool_metrics::Fraction;
use crate::sync::lock;

/// What is counted of all answers. Atomics: the thread that answers waits for nobody who reads them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    pub(crate) answers: Counter,
    pub(crate) late: Counter,
    /// Seconds. Written by that one thread alone.
    pub(crate) longest: Fraction,
}

impl Pace {
    fn note(&self, took: Duration, late: Duration) {
        self.answers.inc();
        if took >= late {
            self.late.inc();
        }
        if took.as_secs_f64() > self.longest.get() {
            self.longest.set(took.as_secs_f64());
        }
    }
}

/// The clock of one connection, shared by its stream and by what answers on it.
#[derive(Clone, Debug)]
pub(super) struct Clock(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Since then somebody waits for us; `None`: nobody does.
    since: Option<Instant>,
    /// How long that was before.
    before: Duration,
    /// The other side has said something, so that looking for more does not make us wait for it.
    heard: bool,
}

impl Clock {
    /// A connection is accepted.
    pub(super) fn start() -> Self {
        Self(Arc::new(Mutex::new(State {
            since: Some(Instant::now()),
            before: Duration::ZERO,
            heard: false,
        })))
    }

    /// The connection is looked at.
    fn look(&self) {
        let mut state = lock(&self.0);
        if !state.heard
            && let Some(since) = state.since.take()
        {
            state.before += since.elapsed();
        }
    }

    /// The other side has said something.
    fn hear(&self) {
        let mut state = lock(&self.0);
        (state.since, state.heard) = (Some(Instant::now()), true);
    }

    /// What was awaited is another thread's work: the answer's time begins now.
    pub(super) fn again(&self) {
        *lock(&self.0) = State { since: Some(Instant::now()), before: Duration::ZERO, heard: true };
    }

    /// The answer begins. `None`: it has begun already.
    fn answered(&self) -> Option<Duration> {
        let mut state = lock(&self.0);
        let took = state.since.take()?.elapsed() + state.before;
        state.before = Duration::ZERO;
        Some(took)
    }
}

/// A stream that tells its clock, and counts.
pub(super) struct Timed<S> {
    pub(super) stream: S,
    pub(super) clock: Clock,
    pub(super) pace: Pace,
    /// From when on an answer counts as late.
    pub(super) late: Duration,
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let own = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut own.stream).poll_read(context, buffer);
        if read.is_pending() {
            own.clock.look();
        }
        ready!(read)?;
        if buffer.filled().len() > before {
            own.clock.look();
            own.clock.hear();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let own = self.get_mut();
        let wrote = ready!(Pin::new(&mut own.stream).poll_write(context, bytes))?;
        if let Some(took) = own.clock.answered() {
            own.pace.note(took, own.late);
        }
        Poll::Ready(Ok(wrote))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// As if so much time had passed since the other side began to wait for us.
    fn waited(clock: &Clock, time: Duration) {
        let mut state = lock(&clock.0);
        state.since = state.since.map(|since| since.checked_sub(time).unwrap());
    }

    #[tokio::test]
    async fn what_the_other_side_takes_is_not_counted_and_what_we_take_is() {
        let (mut client, stream) = tokio::io::duplex(1024);
        let (pace, minute) = (Pace::default(), Duration::from_secs(60));
        let mut own = Timed { stream, clock: Clock::start(), pace: pace.clone(), late: 3 * minute };
        let counted = || (pace.answers.get(), pace.late.get(), (pace.longest.get() / 60.0).floor());
        let mut bytes = [0; 16];
        // It is not looked at for a minute; then the question is slow, which is not our doing.
        waited(&own.clock, minute);
        assert!(tokio::time::timeout(Duration::from_millis(1), own.read(&mut bytes)).await.is_err());
        waited(&own.clock, 100 * minute);
        client.write_all(b"question").await.unwrap();
        assert_eq!(own.read(&mut bytes).await.unwrap(), 8);
        // Whoever has a question looks for more of it before it answers.
        assert!(tokio::time::timeout(Duration::from_millis(1), own.read(&mut bytes)).await.is_err());
        waited(&own.clock, minute);
        own.write_all(b"answer").await.unwrap();
        assert_eq!(counted(), (1, 0, 2.0));
        waited(&own.clock, 100 * minute);
        own.write_all(b"its rest").await.unwrap();
        assert_eq!(counted(), (1, 0, 2.0), "an answer counts once");
        // The next question on the same connection, with a wait that is not ours.
        client.write_all(b"next").await.unwrap();
        assert_eq!(own.read(&mut bytes).await.unwrap(), 4);
        waited(&own.clock, 100 * minute);
        own.clock.again();
        waited(&own.clock, 4 * minute);
        own.write_all(b"answer").await.unwrap();
        assert_eq!(counted(), (2, 1, 4.0));
    }
}
