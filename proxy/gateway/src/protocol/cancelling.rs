//! Passes an operator's cancel request to a request that runs on another thread. The cancel request is a
//! flag; the task of the request's connection (over HTTP/2: of its stream) is woken and checks the flag
//! whenever it is polled. No thread waits, so the cost is one atomic load per poll.
//!
//! ```text
//!   Nothing ── ask ──> Asked ── taken by the exchange or the answer's body ──> Taken: the client is informed
//!      ^                 └── not taken in a poll ──> the client reads nothing: the connection is cut
//!      └── the next request of the connection begins
//! ```

use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

const NOTHING: u8 = 0;
const ASKED: u8 = 1;
const TAKEN: u8 = 2;

/// Cancellation state of the running request.
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

    /// Sets the task that is woken when the request is cancelled.
    fn set_task(&self, task: &Waker) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.clone());
    }

    /// Resets the state for the next request.
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
