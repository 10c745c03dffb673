//! Shared state of a client connection: its task, its requests and its socket report to each other how long
//! it has been idle or in a request head, when an answer must be complete, and how to close it.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use tokio::time::Instant;

use crate::protocol::cancelling::CancelState;
use crate::protocol::raw_head::{HeadResult, RawHeadReader};

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnPhase {
    /// Between requests since this time.
    Idle(Instant),
    /// In a request head, whose first byte came at this time.
    Head(Instant),
    /// A request is being answered, with its deadline, if any.
    Busy(Option<Instant>),
}

/// An answer that can be read ahead of its client.
pub(crate) trait AnswerReadAhead: Send + Sync {
    /// Reads data from its backend, as far as there is room. Called by the task that serves the client.
    fn read_ahead(&self, context: &mut Context<'_>);
}

/// State shared by the task of a connection, its requests and its socket.
#[derive(Debug)]
pub(crate) struct ConnState {
    inner: Mutex<ConnInner>,
    /// The answer's last poll returned a piece. The next poll comes once that piece was sent to the client.
    is_ahead: AtomicBool,
    /// Cancellation state of the running request.
    pub(crate) cancelling: CancelState,
}

struct ConnInner {
    phase: ConnPhase,
    /// Answer of the running request, if its slot may wait for the client.
    answer: Option<Weak<dyn AnswerReadAhead>>,
    linger: bool,
    ended: bool,
    /// Time since which the client reads nothing.
    blocked: Option<Instant>,
    /// The connection is closed without sending the remaining bytes.
    abort: bool,
    /// Second reader of the heads, if hyper reads HTTP/1.
    heads: Option<RawHeadReader>,
}

impl ConnState {
    pub(crate) fn new() -> Arc<Self> {
        let inner = ConnInner {
            phase: ConnPhase::Idle(Instant::now()),
            answer: None,
            linger: false,
            ended: false,
            blocked: None,
            abort: false,
            heads: None,
        };
        let (is_ahead, cancelling) = (AtomicBool::new(false), CancelState::default());
        Arc::new(Self { inner: Mutex::new(inner), is_ahead, cancelling })
    }

    fn with<T>(&self, act: impl FnOnce(&mut ConnInner) -> T) -> T {
        act(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn phase(&self) -> ConnPhase {
        self.with(|inner| inner.phase)
    }

    /// Marks the connection busy, once a request head is complete.
    pub(crate) fn begin(self: &Arc<Self>) -> ConnBusy {
        self.with(|inner| inner.phase = ConnPhase::Busy(None));
        self.cancelling.begin();
        ConnBusy(self.clone())
    }

    /// Sets the deadline of the running request.
    pub(crate) fn set_deadline(&self, until: Instant) {
        self.with(|inner| inner.phase = ConnPhase::Busy(Some(until)));
    }

    /// Requests lingering: the client may still be sending when we close, and sees its answer only if its
    /// bytes are read.
    pub(crate) fn must_linger(&self) {
        self.with(|inner| inner.linger = true);
    }

    /// Records whether the client lets bytes wait.
    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.with(|inner| {
            if blocked != inner.blocked.is_some() {
                inner.blocked = blocked.then(Instant::now);
            }
        });
    }

    /// Returns the time since which the client reads nothing.
    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.with(|inner| inner.blocked)
    }

    /// Marks the connection for an abortive close: the kernel must not try for minutes to send the
    /// remaining bytes.
    pub(crate) fn abort(&self) {
        self.with(|inner| inner.abort = true);
    }

    /// Called with each poll of the task that serves the client. hyper does not poll the answer while the
    /// client does not read, so the answer is read ahead from here.
    pub(crate) fn after_poll<T>(&self, polled: Poll<T>, context: &mut Context<'_>) -> Poll<T> {
        if polled.is_pending() && self.is_ahead.load(Ordering::Relaxed) {
            let answer = self.with(|inner| inner.answer.as_ref().and_then(Weak::upgrade));
            if let Some(answer) = answer {
                answer.read_ahead(context);
            }
        }
        polled
    }

    /// Sets the answer that may be read ahead.
    pub(crate) fn set_answer(&self, answer: Weak<dyn AnswerReadAhead>) {
        self.with(|inner| inner.answer = Some(answer));
    }

    /// Records whether a poll of the answer returned a piece.
    pub(crate) fn note_frame(&self, has_piece: bool) {
        self.is_ahead.store(has_piece, Ordering::Relaxed);
    }

    /// Returns the second reader's result for the head of the request that begins, if there is such a reader.
    pub(crate) fn next_head(&self) -> Option<HeadResult> {
        self.with(|inner| inner.heads.as_mut().map(RawHeadReader::next_result))
    }

    /// Starts the second reader of the connection's heads, which may have at most `limit` bytes.
    pub(crate) fn read_heads(&self, limit: usize) {
        self.with(|inner| inner.heads = Some(RawHeadReader::new(limit)));
    }

    /// Returns whether the client may still be sending bytes that must be read before the connection is
    /// closed.
    pub(crate) fn lingers(&self) -> bool {
        self.with(|inner| inner.linger && !inner.ended)
    }

    /// Returns whether unsent bytes are to be dropped.
    pub(crate) fn is_aborted(&self) -> bool {
        self.with(|inner| inner.abort)
    }

    /// Records received bytes; an empty slice is the end.
    pub(crate) fn note_bytes(&self, bytes: &[u8]) {
        self.with(|inner| {
            match inner.phase {
                _ if bytes.is_empty() => inner.ended = true,
                ConnPhase::Idle(_) => inner.phase = ConnPhase::Head(Instant::now()),
                ConnPhase::Head(_) | ConnPhase::Busy(_) => {}
            }
            if let Some(heads) = &mut inner.heads {
                heads.feed(bytes);
            }
        });
    }
}

/// Marks a request as being answered. Lives in the answer's body.
#[derive(Debug)]
pub(crate) struct ConnBusy(Arc<ConnState>);

impl ConnBusy {
    /// Takes a pending cancel request. If this returns true, the caller must end the request.
    pub(crate) fn takes_cancel(&self) -> bool {
        self.0.cancelling.take_request()
    }

    pub(crate) fn conn(&self) -> &ConnState {
        &self.0
    }

    /// Polls the work for the request. `None` if the request was cancelled.
    pub(crate) fn unless_cancelled<F: Future>(
        &self,
        future: Pin<&mut F>,
        context: &mut Context<'_>,
    ) -> Poll<Option<F::Output>> {
        if self.takes_cancel() { Poll::Ready(None) } else { future.poll(context).map(Some) }
    }
}

impl Drop for ConnBusy {
    fn drop(&mut self) {
        // Its request is over: a cancel request in its last moment must not hit the next one.
        self.0.cancelling.begin();
        self.0.note_frame(false);
        self.0.with(|inner| (inner.phase, inner.answer) = (ConnPhase::Idle(Instant::now()), None));
    }
}

impl std::fmt::Debug for ConnInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("phase", &self.phase)
            .field("blocked", &self.blocked)
            .finish_non_exhaustive()
    }
}
