//! Measures how long answers to probes take, by the program's own clock. Waits for a CPU core count only
//! between accept and answer, because a program cannot distinguish them from work.
//!
//! ```text
//!   accept ── first poll ──> … the request arrives, however slowly … ── last byte ── the answer's first byte
//!          └─ counted ─┘                                                          └──── counted ─────┘
//! ```

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;
use warden_supervisor::sync::lock;

use crate::metrics::probe_pace::ProbePace;

/// The stream and the handler of a connection share this clock.
#[derive(Clone, Debug)]
pub(super) struct AnswerClock(Arc<Mutex<ClockState>>);

#[derive(Debug)]
struct ClockState {
    /// Start of the client's current wait for the program; `None` if the client does not wait.
    since: Option<Instant>,
    /// Time that the client waited before `since`.
    waited: Duration,
    /// After the client's first input, polling the stream for more input does not stop the clock.
    heard: bool,
}

impl AnswerClock {
    pub(super) fn start() -> Self {
        Self(Arc::new(Mutex::new(ClockState {
            since: Some(Instant::now()),
            waited: Duration::ZERO,
            heard: false,
        })))
    }

    /// Before the client's first input, polling for input stops the clock.
    fn polled(&self) {
        let mut state = lock(&self.0);
        if !state.heard
            && let Some(since) = state.since.take()
        {
            state.waited += since.elapsed();
        }
    }

    /// Input starts the clock again.
    fn input_arrived(&self) {
        let mut state = lock(&self.0);
        (state.since, state.heard) = (Some(Instant::now()), true);
    }

    /// Restarts the clock after a wait for another thread, which does not count.
    pub(super) fn restart(&self) {
        *lock(&self.0) = ClockState { since: Some(Instant::now()), waited: Duration::ZERO, heard: true };
    }

    /// Stops the clock at the first byte of the answer. Returns `None` if the answer had already begun.
    fn stop(&self) -> Option<Duration> {
        let mut state = lock(&self.0);
        let took = state.since.take()?.elapsed() + state.waited;
        state.waited = Duration::ZERO;
        Some(took)
    }
}

pub(super) struct TimedStream<S> {
    pub(super) stream: S,
    pub(super) clock: AnswerClock,
    pub(super) pace: ProbePace,
    /// An answer that takes at least this long counts as late.
    pub(super) late: Duration,
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let own = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut own.stream).poll_read(context, buffer);
        if read.is_pending() {
            own.clock.polled();
        }
        ready!(read)?;
        if buffer.filled().len() > before {
            own.clock.polled();
            own.clock.input_arrived();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let own = self.get_mut();
        let wrote = ready!(Pin::new(&mut own.stream).poll_write(context, bytes))?;
        if let Some(took) = own.clock.stop() {
            own.pace.record(took, own.late);
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

    /// Pretends that the client has waited for this long.
    fn waited(clock: &AnswerClock, time: Duration) {
        let mut state = lock(&clock.0);
        state.since = state.since.map(|since| since.checked_sub(time).unwrap());
    }

    #[tokio::test]
    async fn what_the_other_side_takes_is_not_counted_and_what_we_take_is() {
        let (mut client, stream) = tokio::io::duplex(1024);
        let (pace, minute) = (ProbePace::default(), Duration::from_secs(60));
        let mut own =
            TimedStream { stream, clock: AnswerClock::start(), pace: pace.clone(), late: 3 * minute };
        let counted = || (pace.answers.get(), pace.late.get(), (pace.longest.get() / 60.0).floor());
        let mut bytes = [0; 16];
        // The connection is not polled for a minute; then the request arrives slowly, which does not count.
        waited(&own.clock, minute);
        assert!(tokio::time::timeout(Duration::from_millis(1), own.read(&mut bytes)).await.is_err());
        waited(&own.clock, 100 * minute);
        client.write_all(b"question").await.unwrap();
        assert_eq!(own.read(&mut bytes).await.unwrap(), 8);
        // The handler polls for more input before it answers.
        assert!(tokio::time::timeout(Duration::from_millis(1), own.read(&mut bytes)).await.is_err());
        waited(&own.clock, minute);
        own.write_all(b"answer").await.unwrap();
        assert_eq!(counted(), (1, 0, 2.0));
        waited(&own.clock, 100 * minute);
        own.write_all(b"its rest").await.unwrap();
        assert_eq!(counted(), (1, 0, 2.0), "an answer counts once");
        // The next request on the same connection, after a wait for another thread.
        client.write_all(b"next").await.unwrap();
        assert_eq!(own.read(&mut bytes).await.unwrap(), 4);
        waited(&own.clock, 100 * minute);
        own.clock.restart();
        waited(&own.clock, 4 * minute);
        own.write_all(b"answer").await.unwrap();
        assert_eq!(counted(), (2, 1, 4.0));
    }
}
