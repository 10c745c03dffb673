//! How a connection to a backend wakes the task that drives it. The connection has no task of its own: whoever waits for
//! an answer polls it. The waker knows whether polling the connection can lead to anything, and keeps it from waking a task
//! that is at it already. It also knows whether a backend has sent any byte: the library reports the same for a head that broke
//! off and of one that never began.
//!
//! ```text
//!   idle in a pool   wake --> due                         (nobody is woken: the next user looks at it)
//!   awaited          wake --> due, and the task is woken
//!   being driven     wake --> due                         (the task looks again before it goes)
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Wake, Waker};

use std::sync::Arc;

/// See the module. Everything about one connection happens on one thread; other threads only make it slower.
#[derive(Debug)]
pub(crate) struct ConnWaker {
    due: AtomicBool,
    driven: AtomicBool,
    heard: AtomicBool,
    task: Mutex<Option<Waker>>,
}

impl ConnWaker {
    /// For a new connection, which is due.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            due: AtomicBool::new(true),
            driven: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            task: Mutex::default(),
        })
    }

    /// A request begins: nothing of its answer has come.
    pub(crate) fn listen(&self) {
        self.heard.store(false, Ordering::Relaxed);
    }

    /// Bytes came.
    pub(crate) fn hear(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Whether any byte has come since [`Self::listen`].
    pub(crate) fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }

    /// A task begins to drive the connection, and is the one that is woken from now on.
    pub(crate) fn enter(&self, task: &Waker) {
        let mut known = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_mut() {
            Some(known) => known.clone_from(task),
            None => *known = Some(task.clone()),
        }
        drop(known);
        self.driven.store(true, Ordering::SeqCst);
    }

    /// The connection is driven, and nobody is to be woken afterwards.
    pub(crate) fn enter_alone(&self) {
        let known = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(known);
        self.driven.store(true, Ordering::SeqCst);
    }

    /// The task goes. True if the connection is due nevertheless: then the task has to come back by itself.
    pub(crate) fn leave(&self) -> bool {
        self.driven.store(false, Ordering::SeqCst);
        self.is_due()
    }

    /// Whether polling can lead to anything.
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::SeqCst)
    }

    /// The same, and not until it is woken again.
    pub(crate) fn take(&self) -> bool {
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

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_for_what_comes_while_it_is_away_and_looks_itself_while_it_is_there() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let task = Waker::from(count.clone());
        let woken = || count.0.load(Ordering::SeqCst);
        let conn_waker = ConnWaker::new();
        let waker = Waker::from(conn_waker.clone());
        conn_waker.enter(&task);
        assert!(conn_waker.take() && !conn_waker.take());
        waker.wake_by_ref();
        assert_eq!(woken(), 0, "it is there");
        assert!(conn_waker.leave(), "and told when it goes");
        assert!(conn_waker.take());
        waker.wake_by_ref();
        assert_eq!(woken(), 1, "it is away");
        conn_waker.enter_alone();
        assert!(conn_waker.take() && !conn_waker.leave());
        waker.wake();
        assert_eq!((woken(), conn_waker.is_due()), (1, true), "nobody waits");
    }
}
