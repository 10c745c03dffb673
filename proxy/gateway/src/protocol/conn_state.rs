//! State of a client connection, shared by its task, its requests and its socket: idle time, time in a
//! request head, the deadline of an answer, and how to close the connection.

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
    /// Within a request head since this time.
    Head(Instant),
    /// While a request is being answered, with its deadline.
    Busy(Option<Instant>),
}

/// An answer that can be read from its backend before the client reads it.
pub(crate) trait AnswerReadAhead: Send + Sync {
    /// Reads from the backend as far as memory permits. The task that serves the client calls this.
    fn read_ahead(&self, context: &mut Context<'_>);
}

#[derive(Debug)]
pub(crate) struct ConnState {
    inner: Mutex<ConnInner>,
    /// True if the last poll of the answer returned a piece that hyper may still be sending.
    is_ahead: AtomicBool,
    pub(crate) cancelling: CancelState,
}

struct ConnInner {
    phase: ConnPhase,
    /// Answer of the running request, if a slow client could keep its slot waiting.
    answer: Option<Weak<dyn AnswerReadAhead>>,
    linger: bool,
    ended: bool,
    /// Start of the time in which the client does not read; `None` while it reads.
    blocked: Option<Instant>,
    /// True if the connection has to be closed without sending the remaining bytes.
    abort: bool,
    /// Second reader, which checks the raw request heads.
    heads: RawHeadReader,
}

impl ConnState {
    /// Creates the state of a new connection, for request heads of at most `head_limit` bytes.
    pub(crate) fn new(head_limit: usize) -> Arc<Self> {
        let inner = ConnInner {
            phase: ConnPhase::Idle(Instant::now()),
            answer: None,
            linger: false,
            ended: false,
            blocked: None,
            abort: false,
            heads: RawHeadReader::new(head_limit),
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

    /// Marks the connection as busy when a request head is complete.
    pub(crate) fn begin(self: &Arc<Self>) -> ConnBusy {
        self.with(|inner| inner.phase = ConnPhase::Busy(None));
        self.cancelling.begin();
        ConnBusy(self.clone())
    }

    pub(crate) fn set_deadline(&self, until: Instant) {
        self.with(|inner| inner.phase = ConnPhase::Busy(Some(until)));
    }

    /// Requests lingering before the close, because the client may still be sending.
    pub(crate) fn must_linger(&self) {
        self.with(|inner| inner.linger = true);
    }

    /// Records whether bytes wait because the client does not read.
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

    /// Requests an abortive close, or the kernel would try for minutes to send the rest.
    pub(crate) fn abort(&self) {
        self.with(|inner| inner.abort = true);
    }

    /// To be called after each poll: hyper does not poll the answer of a client that does not read.
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

    pub(crate) fn note_frame(&self, has_piece: bool) {
        self.is_ahead.store(has_piece, Ordering::Relaxed);
    }

    /// Returns the second reader's result for the next head.
    pub(crate) fn next_head(&self) -> HeadResult {
        self.with(|inner| inner.heads.next_result())
    }

    /// Returns whether the client may still send bytes that must be read before the close.
    pub(crate) fn lingers(&self) -> bool {
        self.with(|inner| inner.linger && !inner.ended)
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.with(|inner| inner.abort)
    }

    /// Records received bytes; none means that the client has closed its side.
    pub(crate) fn note_bytes(&self, bytes: &[u8]) {
        self.with(|inner| {
            match inner.phase {
                _ if bytes.is_empty() => inner.ended = true,
                ConnPhase::Idle(_) => inner.phase = ConnPhase::Head(Instant::now()),
                ConnPhase::Head(_) | ConnPhase::Busy(_) => {}
            }
            inner.heads.feed(bytes);
        });
    }
}

/// Keeps a connection busy with a request. The answer's body owns this value.
#[derive(Debug)]
pub(crate) struct ConnBusy(Arc<ConnState>);

impl ConnBusy {
    /// Takes a pending cancel request. If it returns true, the caller must end the request.
    pub(crate) fn takes_cancel(&self) -> bool {
        self.0.cancelling.take_request()
    }

    pub(crate) fn conn(&self) -> &ConnState {
        &self.0
    }

    /// Polls a future of the request; `None` if the request was cancelled.
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
        // A late cancel request must not hit the next request.
        self.0.cancelling.begin();
        self.0.note_frame(false);
        self.0.with(|inner| (inner.phase, inner.answer) = (ConnPhase::Idle(Instant::now()), None));
    }
}

impl std::fmt::Debug for ConnInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnInner")
            .field("phase", &self.phase)
            .field("blocked", &self.blocked)
            .finish_non_exhaustive()
    }
}

const NOTHING: u8 = 0;
const ASKED: u8 = 1;
const TAKEN: u8 = 2;

/// Passes an operator's cancel request to a request on another thread. The request is a flag: the task of the
/// connection is woken, and checks the flag at each poll. No thread waits, and each poll costs one atomic
/// load.
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
    /// Registers the calling task as the one that serves the connection. Its waker stays the same.
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

    /// Cancels the running request. A second call has no effect.
    pub(crate) fn request_cancel(&self) {
        if self.state.compare_exchange(NOTHING, ASKED, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(task) = task {
                task.wake();
            }
        }
    }

    /// Takes a pending cancel request. If it returns true, the caller must end the request.
    pub(crate) fn take_request(&self) -> bool {
        self.is_asked()
            && self.state.compare_exchange(ASKED, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn is_asked(&self) -> bool {
        self.state.load(Ordering::Acquire) == ASKED
    }

    /// Returns `None` if a cancel request is older than this poll: the client does not read.
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
