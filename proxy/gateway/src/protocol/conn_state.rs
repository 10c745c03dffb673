//! Where a client's connection is, as its task, its requests and its socket report it to each other: since when it is idle or
//! in a request head, until when an answer must be over, and how it is to be closed.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use tokio::time::Instant;

use crate::protocol::cancelling::Cancelling;
use crate::protocol::raw_head::{Heads, Seen};

/// Where a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Between requests, since then.
    Idle(Instant),
    /// In a request head, whose first byte came then.
    Head(Instant),
    /// A request is being answered; it must be over by then, if there is a bound.
    Busy(Option<Instant>),
}

/// An answer that can be read ahead of its client.
pub(crate) trait ReadAhead: Send + Sync {
    /// Reads what its backend has sent, as far as there is room. Called by the task that serves the client.
    fn read_ahead(&self, context: &mut Context<'_>);
}

/// What the task of a connection, its requests and its socket report to each other.
#[derive(Debug)]
pub(crate) struct ConnState {
    inner: Mutex<Inner>,
    /// The answer's last poll gave a piece. The next poll comes when that piece has gone out to the client.
    is_ahead: AtomicBool,
    /// Whether the running request is to end.
    pub(crate) cancelling: Cancelling,
}

struct Inner {
    phase: Phase,
    /// The answer of the running request, if its slot may wait for its client.
    answer: Option<Weak<dyn ReadAhead>>,
    linger: bool,
    ended: bool,
    /// Since when the client takes nothing of what waits for it.
    blocked: Option<Instant>,
    /// The connection ends without regard to what is unsent.
    abort: bool,
    /// Reads beside hyper, where hyper reads HTTP/1.
    heads: Option<Heads>,
}

impl ConnState {
    pub(crate) fn new() -> Arc<Self> {
        let inner = Inner {
            phase: Phase::Idle(Instant::now()),
            answer: None,
            linger: false,
            ended: false,
            blocked: None,
            abort: false,
            heads: None,
        };
        let (is_ahead, cancelling) = (AtomicBool::new(false), Cancelling::default());
        Arc::new(Self { inner: Mutex::new(inner), is_ahead, cancelling })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn phase(&self) -> Phase {
        self.with(|inner| inner.phase)
    }

    /// A request head is complete.
    pub(crate) fn begin(self: &Arc<Self>) -> Busy {
        self.with(|inner| inner.phase = Phase::Busy(None));
        self.cancelling.begin();
        Busy(self.clone())
    }

    /// The running request must be over by `until`.
    pub(crate) fn bound(&self, until: Instant) {
        self.with(|inner| inner.phase = Phase::Busy(Some(until)));
    }

    /// The client may still be sending when we close: its bytes must be read, or it never sees its answer.
    pub(crate) fn must_linger(&self) {
        self.with(|inner| inner.linger = true);
    }

    /// The client does, or does not, keep waiting what is to be sent.
    pub(crate) fn blocked(&self, blocked: bool) {
        self.with(|inner| {
            if blocked != inner.blocked.is_some() {
                inner.blocked = blocked.then(Instant::now);
            }
        });
    }

    /// Since when the client takes nothing.
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.with(|inner| inner.blocked)
    }

    /// The connection is over: what is unsent goes nowhere, and the kernel must not try for minutes.
    pub(crate) fn abort(&self) {
        self.with(|inner| inner.abort = true);
    }

    /// Called with each poll of the task that serves the client. If the client takes nothing, hyper does not poll the
    /// answer: it is read ahead from here.
    pub(crate) fn served<T>(&self, polled: Poll<T>, context: &mut Context<'_>) -> Poll<T> {
        if polled.is_pending() && self.is_ahead.load(Ordering::Relaxed) {
            let answer = self.with(|inner| inner.answer.as_ref().and_then(Weak::upgrade));
            if let Some(answer) = answer {
                answer.read_ahead(context);
            }
        }
        polled
    }

    /// This is the answer, which may be read ahead.
    pub(crate) fn answers(&self, answer: Weak<dyn ReadAhead>) {
        self.with(|inner| inner.answer = Some(answer));
    }

    /// The answer was polled, and had a piece or not.
    pub(crate) fn passed(&self, has_piece: bool) {
        self.is_ahead.store(has_piece, Ordering::Relaxed);
    }

    /// What the raw head of the request that begins was found to be, if anybody read it.
    pub(crate) fn next_head(&self) -> Option<Seen> {
        self.with(|inner| inner.heads.as_mut().map(Heads::next))
    }

    /// Reads the connection's heads beside hyper, of at most so many bytes.
    pub(crate) fn read_heads(&self, limit: usize) {
        self.with(|inner| inner.heads = Some(Heads::new(limit)));
    }

    /// Whether the client may still be sending what must be read before the connection is closed.
    pub(crate) fn lingers(&self) -> bool {
        self.with(|inner| inner.linger && !inner.ended)
    }

    /// Whether what is unsent goes nowhere.
    pub(crate) fn is_aborted(&self) -> bool {
        self.with(|inner| inner.abort)
    }

    /// These bytes came; none is the end.
    pub(crate) fn came(&self, bytes: &[u8]) {
        self.with(|inner| {
            match inner.phase {
                _ if bytes.is_empty() => inner.ended = true,
                Phase::Idle(_) => inner.phase = Phase::Head(Instant::now()),
                Phase::Head(_) | Phase::Busy(_) => {}
            }
            if let Some(heads) = &mut inner.heads {
                heads.feed(bytes);
            }
        });
    }
}

/// A request is being answered. Lives in the answer's body.
#[derive(Debug)]
pub(crate) struct Busy(Arc<ConnState>);

impl Busy {
    /// Whether the request is to end, and nobody has seen to that yet: who calls this does.
    pub(crate) fn takes_cancel(&self) -> bool {
        self.0.cancelling.take()
    }

    /// The connection that is busy.
    pub(crate) fn conn(&self) -> &ConnState {
        &self.0
    }

    /// Polls what is done for the request. `None`: it is to end.
    pub(crate) fn unless_cancelled<F: Future>(
        &self,
        future: Pin<&mut F>,
        context: &mut Context<'_>,
    ) -> Poll<Option<F::Output>> {
        if self.takes_cancel() { Poll::Ready(None) } else { future.poll(context).map(Some) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // Its request is over: a word that came in its last moment is not for the connection.
        self.0.cancelling.begin();
        self.0.passed(false);
        self.0.with(|inner| (inner.phase, inner.answer) = (Phase::Idle(Instant::now()), None));
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("phase", &self.phase)
            .field("blocked", &self.blocked)
            .finish_non_exhaustive()
    }
}
