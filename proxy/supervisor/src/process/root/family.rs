//! The root's side: the children that others have asked for or taken over, and which of them serves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use tokio::sync::watch;

use crate::process::child::Child;
use crate::process::group::Exit;
use crate::process::root::ask::ChildId;
use crate::sync::lock;

/// Those that live as long as somebody else wants. Owned by the nursery.
#[derive(Debug)]
pub(crate) struct Family {
    next: AtomicU64,
    children: Mutex<HashMap<ChildId, Arc<Child>>>,
    serving: watch::Sender<Option<ChildId>>,
}

impl Family {
    pub(super) fn child(&self, id: ChildId) -> Option<Arc<Child>> {
        lock(&self.children).get(&id).cloned()
    }

    /// Keeps a child for whoever serves next.
    pub(crate) fn keep(&self, child: Arc<Child>) -> ChildId {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.children).insert(id, child);
        id
    }

    /// Nobody else will ask for it. Without another owner it is killed.
    pub(crate) fn forget(&self, id: ChildId) {
        let gone = lock(&self.children).remove(&id);
        drop(gone);
    }

    /// This one serves from now on. Returns which one did.
    pub(crate) fn serves(&self, id: ChildId) -> Option<ChildId> {
        self.serving.send_replace(Some(id))
    }

    /// Waits for the end of one that has handed over.
    pub(super) async fn see_off(&self, id: ChildId) {
        if let Some(child) = self.child(id) {
            child.wait().await;
        }
        self.forget(id);
    }

    /// Tells the one that serves what we were told.
    pub(crate) fn pass_on(&self, signal: Signal) {
        if let Some(child) = self.serving().and_then(|id| self.child(id)) {
            child.signal(signal);
        }
    }

    fn serving(&self) -> Option<ChildId> {
        *self.serving.borrow()
    }

    /// Waits for the end of whoever serves, if that is not us.
    pub(crate) async fn ended(&self) -> Exit {
        let mut changes = self.serving.subscribe();
        loop {
            let now = *changes.borrow_and_update();
            let child = now.and_then(|id| self.child(id));
            tokio::select! {
                exit = async {
                    match &child {
                        Some(child) => child.wait().await,
                        None => std::future::pending().await,
                    }
                } => {
                    // It may have handed over in this moment.
                    if self.serving() == now {
                        return exit;
                    }
                }
                _ = changes.changed() => {}
            }
        }
    }
}

impl Default for Family {
    fn default() -> Self {
        Self { next: AtomicU64::new(0), children: Mutex::default(), serving: watch::Sender::new(None) }
    }
}
