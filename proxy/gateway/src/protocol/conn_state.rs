//! State of a client connection, shared by its task, its requests and its socket: how long the connection
//! has been idle or in a request head, the deadline of an answer, and how to close the connection.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use tokio::time::Instant;

use crate::protocol::{HeadResult, RawHeadReader};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnPhase {
    /// Between requests, since this time.
    Idle(Instant),
    /// Within a request head, whose first byte arrived at this time.
    Head(Instant),
    /// A request is being answered. Holds its deadline, if any.
    Busy(Option<Instant>),
}

/// An answer that can be read from its backend before the client reads it.
pub(crate) trait AnswerReadAhead: Send + Sync {
    /// Reads data from the backend as far as memory permits. Called by the task that serves the client.
    fn read_ahead(&self, context: &mut Context<'_>);
}

#[derive(Debug)]
pub(crate) struct ConnState {
    inner: Mutex<ConnInner>,
    /// The answer's last poll returned a piece. hyper polls again once this piece was sent to the client.
    is_ahead: AtomicBool,
    pub(crate) cancelling: CancelState,
}

struct ConnInner {
    phase: ConnPhase,
    /// Answer of the running request, if a slot could be kept waiting by a slow client.
    answer: Option<Weak<dyn AnswerReadAhead>>,
    linger: bool,
    ended: bool,
    /// Time since which the client does not read; `None` while it reads.
    blocked: Option<Instant>,
    /// The connection is to be closed without sending the remaining bytes.
    abort: bool,
    /// Second reader, which checks the raw request heads next to hyper; HTTP/1 only.
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
        Arc::new(Self {
            inner: Mutex::new(inner),
            is_ahead: AtomicBool::new(false),
            cancelling: CancelState::default(),
        })
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

    pub(crate) fn set_deadline(&self, until: Instant) {
        self.with(|inner| inner.phase = ConnPhase::Busy(Some(until)));
    }

    /// Requests lingering before the close: the client may still be sending, and gets its answer only if the
    /// gateway reads these bytes.
    pub(crate) fn must_linger(&self) {
        self.with(|inner| inner.linger = true);
    }

    /// Records whether bytes for the client wait because it does not read.
    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.with(|inner| {
            if blocked != inner.blocked.is_some() {
                inner.blocked = blocked.then(Instant::now);
            }
        });
    }

    pub(crate) fn blocked_since(&self) -> Option<Instant> {
        self.with(|inner| inner.blocked)
    }

    /// Marks the connection for an abortive close, so that the kernel does not try for minutes to send the
    /// remaining bytes.
    pub(crate) fn abort(&self) {
        self.with(|inner| inner.abort = true);
    }

    /// Reads the answer ahead if the client does not read: hyper then does not poll the answer. Called
    /// after each poll of the task that serves the client.
    pub(crate) fn after_poll<T>(&self, polled: Poll<T>, context: &mut Context<'_>) -> Poll<T> {
        if polled.is_pending() && self.is_ahead.load(Ordering::Relaxed) {
            let answer = self.with(|inner| inner.answer.as_ref().and_then(Weak::upgrade));
            if let Some(answer) = answer {
                answer.read_ahead(context);
            }
        }
        polled
    }

    pub(crate) fn set_answer(&self, answer: Weak<dyn AnswerReadAhead>) {
        self.with(|inner| inner.answer = Some(answer));
    }

    /// Records whether a poll of the answer returned a piece.
    pub(crate) fn note_frame(&self, has_piece: bool) {
        self.is_ahead.store(has_piece, Ordering::Relaxed);
    }

    /// Returns the second reader's result for the next request's head; `None` without a second reader.
    pub(crate) fn next_head(&self) -> Option<HeadResult> {
        self.with(|inner| inner.heads.as_mut().map(RawHeadReader::next_result))
    }

    /// Starts the second reader. A head may have at most `limit` bytes.
    pub(crate) fn read_heads(&self, limit: usize) {
        self.with(|inner| inner.heads = Some(RawHeadReader::new(limit)));
    }

    /// Returns whether the client may still be sending bytes that must be read before the connection is
    /// closed.
    pub(crate) fn lingers(&self) -> bool {
        self.with(|inner| inner.linger && !inner.ended)
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.with(|inner| inner.abort)
    }

    /// Records received bytes; an empty slice means that the client has closed its side.
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

/// Marks a connection as busy with a request. Owned by the answer's body.
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

    /// Polls a future that works for the request. Returns `None` if the request was cancelled.
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
        // The request has ended: a cancel request that came too late must not hit the next request.
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

const NOTHING: u8 = 0;
const ASKED: u8 = 1;
const TAKEN: u8 = 2;

/// Passes an operator's cancel request to a request that runs on another thread. The cancel request is a
/// flag; the task of the request's connection (over HTTP/2: of its stream) is woken and checks the flag
/// whenever it is polled. No thread waits, so the cost is one atomic load per poll.
///
/// ```text
///   Nothing ── ask ──> Asked ── taken by the exchange or the answer's body ──> Taken: the client is informed
///      ^                 └── not taken in a poll ──> the client reads nothing: the connection is cut
///      └── the next request of the connection begins
/// ```
#[derive(Debug, Default)]
pub(crate) struct CancelState {
    state: AtomicU8,
    task: Mutex<Option<Waker>>,
}

impl CancelState {
    /// Registers the calling task as the task that serves the requests of the connection. The task's waker
    /// stays the same, so one call is enough.
    pub(crate) async fn register_task(&self) {
        poll_fn(|context| {
            self.set_task(context.waker());
            Poll::Ready(())
        })
        .await;
    }

    fn set_task(&self, task: &Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.clone());
    }

    pub(crate) fn begin(&self) {
        self.state.store(NOTHING, Ordering::Relaxed);
    }

    /// Asks the running request to end. A second call has no effect.
    pub(crate) fn request_cancel(&self) {
        if self.state.compare_exchange(NOTHING, ASKED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(task) = task {
                task.wake();
            }
        }
    }

    /// Takes a pending cancel request. If this returns true, the caller must end the request.
    pub(crate) fn take_request(&self) -> bool {
        self.is_asked()
            && self.state.compare_exchange(ASKED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn is_asked(&self) -> bool {
        self.state.load(Ordering::Acquire) == ASKED
    }

    /// Polls the task that serves the request. Returns `None` if a cancel request was pending before the
    /// poll and still is, because the client does not read.
    pub(crate) fn unless_stuck<T>(&self, poll: impl FnOnce() -> Poll<T>) -> Poll<Option<T>> {
        let was_asked = self.is_asked();
        match poll() {
            Poll::Pending if was_asked && self.is_asked() => Poll::Ready(None),
            polled => polled.map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct WokenCount(AtomicUsize);

    impl Wake for WokenCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn it_is_seen_once_wakes_its_task_once_and_ends_with_the_request() {
        let (cancelling, woken) = (CancelState::default(), Arc::new(WokenCount::default()));
        cancelling.set_task(&Waker::from(woken.clone()));
        assert!(!cancelling.take_request());
        cancelling.request_cancel();
        cancelling.request_cancel();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(cancelling.take_request());
        assert!(!cancelling.take_request(), "it was seen to");
        cancelling.request_cancel();
        assert!(!cancelling.take_request(), "twice is once");
        cancelling.begin();
        assert!(!cancelling.take_request(), "the next request is another one");
        cancelling.request_cancel();
        assert!(cancelling.take_request());
    }

    #[test]
    fn only_what_was_asked_before_the_poll_and_not_seen_in_it_is_stuck() {
        let cancelling = CancelState::default();
        let asked_meanwhile = cancelling.unless_stuck(|| {
            cancelling.request_cancel();
            Poll::<()>::Pending
        });
        assert!(asked_meanwhile.is_pending(), "its task is woken and polled once more");
        assert_eq!(cancelling.unless_stuck(|| Poll::<()>::Pending), Poll::Ready(None));
        assert_eq!(cancelling.unless_stuck(|| Poll::Ready(1)), Poll::Ready(Some(1)));
        assert!(
            cancelling
                .unless_stuck(|| if cancelling.take_request() {
                    Poll::<()>::Pending
                } else {
                    Poll::Ready(())
                })
                .is_pending()
        );
    }
}
