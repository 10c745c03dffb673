//! The root's children that successors have requested or taken over, and which of them serves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::process::child::ChildProcess;
use crate::process::group::ProcessExit;
use crate::process::root::ask::ChildId;
use crate::process::root::orders::{InstanceOrder, InstanceOrders};
use crate::sync::lock;

/// Children of the root that live as long as another instance needs them. Owned by the nursery.
#[derive(Debug)]
pub(crate) struct RootFamily {
    next: AtomicU64,
    children: Mutex<HashMap<ChildId, Arc<ChildProcess>>>,
    instances: watch::Sender<InstanceOrders>,
}

impl RootFamily {
    pub(super) fn child(&self, id: ChildId) -> Option<Arc<ChildProcess>> {
        lock(&self.children).get(&id).cloned()
    }

    /// Keeps a child for the next instance.
    pub(crate) fn keep(&self, child: Arc<ChildProcess>) -> ChildId {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.children).insert(id, child);
        id
    }

    /// Releases a child. If nothing else owns it, it is killed.
    pub(crate) fn forget(&self, id: ChildId) {
        let gone = lock(&self.children).remove(&id);
        drop(gone);
    }

    /// Records that another instance is about to be created.
    pub(super) fn note_next_instance(&self) {
        self.instances.send_modify(InstanceOrders::note_next_instance);
    }

    /// Records that this child, an instance, serves now. Sends it the orders that its predecessor missed,
    /// and returns the predecessor.
    pub(crate) fn note_serving(&self, id: ChildId) -> Option<ChildId> {
        let (mut before, mut heard) = (None, Vec::new());
        self.instances.send_modify(|instances| (before, heard) = instances.note_serving(id));
        for order in heard {
            self.send_order([id], order);
        }
        before
    }

    /// Waits for the end of an instance that has handed over.
    pub(super) async fn await_retired(&self, id: ChildId) {
        if let Some(child) = self.child(id) {
            child.wait().await;
        }
        self.forget(id);
        self.instances.send_modify(|instances| instances.note_ended(id));
    }

    /// Sends an order to the instances that should get it.
    pub(crate) fn pass_on(&self, order: InstanceOrder) {
        let mut to = Vec::new();
        self.instances.send_modify(|instances| to = instances.note_order(order));
        self.send_order(to, order);
    }

    fn send_order(&self, to: impl IntoIterator<Item = ChildId>, order: InstanceOrder) {
        for child in to.into_iter().filter_map(|id| self.child(id)) {
            child.signal(order.signal());
        }
    }

    fn serving(&self) -> Option<ChildId> {
        self.instances.borrow().serving()
    }

    /// Waits until all instances that have handed over have ended.
    pub(crate) async fn retired_ended(&self) {
        let mut instances = self.instances.subscribe();
        // Waiting fails only if there is no sender, and we hold one.
        drop(instances.wait_for(InstanceOrders::has_no_retired).await);
    }

    /// Waits for the end of the serving instance, if it is not this process.
    pub(crate) async fn until_serving_ends(&self) -> ProcessExit {
        let mut changes = self.instances.subscribe();
        loop {
            let now = changes.borrow_and_update().serving();
            let child = now.and_then(|id| self.child(id));
            tokio::select! {
                exit = async {
                    match &child {
                        Some(child) => child.wait().await,
                        None => std::future::pending().await,
                    }
                } => {
                    // If the instance handed over just now, wait for its successor instead.
                    if self.serving() == now {
                        return exit;
                    }
                }
                _ = changes.changed() => {}
            }
        }
    }
}

impl Default for RootFamily {
    fn default() -> Self {
        Self { next: AtomicU64::new(0), children: Mutex::default(), instances: watch::Sender::default() }
    }
}
