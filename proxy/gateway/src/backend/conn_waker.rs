//! The waker of a connection to a backend. The connection has no task: the task that waits for an answer
//! polls it. The waker records whether polling can make progress ("due"), and wakes no task that is already
//! polling. It also records received bytes, because hyper reports the same error for a broken and for a
//! missing head.
//!
//! ```text
//!   idle in a pool   wake --> due                         (no task is woken: the next user looks)
//!   awaited          wake --> due, and the task is woken
//!   being driven     wake --> due                         (the task looks again before it returns)
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Wake, Waker};

use std::sync::Arc;

/// Waker of one connection, which one thread uses. Calls from other threads are correct, but slower.
#[derive(Debug)]
pub(crate) struct ConnWaker {
    due: AtomicBool,
    driven: AtomicBool,
    heard: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl ConnWaker {
    /// A new connection is due for its first poll.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            due: AtomicBool::new(true),
            driven: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            task: Mutex::default(),
        })
    }

    pub(crate) fn reset_heard(&self) {
        self.heard.store(false, Ordering::Relaxed);
    }

    pub(crate) fn note_bytes(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }

    /// Marks the connection as being polled by `task`; later progress wakes the task.
    pub(crate) fn start_driving(&self, task: &Waker) {
        let mut known = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_mut() {
            Some(known) => known.clone_from(task),
            None => *known = Some(task.clone()),
        }
        drop(known);
        self.driven.store(true, Ordering::SeqCst);
    }

    /// Marks the connection as being polled; later progress wakes no task.
    pub(crate) fn start_driving_alone(&self) {
        let known = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(known);
        self.driven.store(true, Ordering::SeqCst);
    }

    /// Ends the polling. If true, the caller has to poll again, because nothing wakes its task.
    pub(crate) fn stop_driving(&self) -> bool {
        self.driven.store(false, Ordering::SeqCst);
        self.is_due()
    }

    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::SeqCst)
    }

    /// Returns whether the connection is due, and clears the mark.
    pub(crate) fn take_due(&self) -> bool {
        self.due.swap(false, Ordering::SeqCst)
    }
}

impl Wake for ConnWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.due.store(true, Ordering::SeqCst);
        if !self.driven.load(Ordering::SeqCst)
            && let Some(task) = &*self.task.lock().unwrap_or_else(PoisonError::into_inner)
        {
            task.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_for_what_comes_while_it_is_away_and_looks_itself_while_it_is_there() {
        let count = Arc::new(WakeCount(AtomicUsize::new(0)));
        let task = Waker::from(count.clone());
        let woken = || count.0.load(Ordering::SeqCst);
        let conn_waker = ConnWaker::new();
        let waker = Waker::from(conn_waker.clone());
        conn_waker.start_driving(&task);
        assert!(conn_waker.take_due() && !conn_waker.take_due());
        waker.wake_by_ref();
        assert_eq!(woken(), 0, "it is there");
        assert!(conn_waker.stop_driving(), "and told when it goes");
        assert!(conn_waker.take_due());
        waker.wake_by_ref();
        assert_eq!(woken(), 1, "it is away");
        conn_waker.start_driving_alone();
        assert!(conn_waker.take_due() && !conn_waker.stop_driving());
        waker.wake();
        assert_eq!((woken(), conn_waker.is_due()), (1, true), "nobody waits");
    }
}
