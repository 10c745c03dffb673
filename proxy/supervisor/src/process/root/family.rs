//! The root's children that successors have requested or taken over, and which of them serves. Also decides
//! which instances get an order that the root receives. One lock protects that decision and the number of
//! the serving instance, so an order during a handover reaches the next serving instance exactly once.
//!
//! | order | receivers |
//! |---|---|
//! | end | all, and later instances too |
//! | reload | all; the next one too, if it may have read its configuration before |
//! | upgrade | the serving one; the next one, if it was created before |

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use tokio::sync::watch;

use super::ChildId;
use crate::process::child::ChildProcess;
use crate::process::group::ProcessExit;
use crate::sync::lock;

/// Children of the root that live as long as another instance needs them. Owned by the nursery.
#[derive(Debug, Default)]
pub(crate) struct RootFamily {
    next: AtomicU64,
    children: Mutex<HashMap<ChildId, Arc<ChildProcess>>>,
    instances: watch::Sender<InstanceOrders>,
}

impl RootFamily {
    pub(super) fn child(&self, id: ChildId) -> Option<Arc<ChildProcess>> {
        lock(&self.children).get(&id).cloned()
    }

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

    pub(super) async fn await_retired(&self, id: ChildId) {
        if let Some(child) = self.child(id) {
            child.wait().await;
        }
        self.forget(id);
        self.instances.send_modify(|instances| instances.note_ended(id));
    }

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

    /// Waits until all instances that have handed over have ended.
    pub(crate) async fn retired_ended(&self) {
        let mut instances = self.instances.subscribe();
        // Waiting fails only if there is no sender, and we hold one.
        drop(instances.wait_for(|instances| instances.retired.is_empty()).await);
    }

    /// Waits for the end of the serving instance, if it is not this process.
    pub(crate) async fn until_serving_ends(&self) -> ProcessExit {
        let mut changes = self.instances.subscribe();
        loop {
            let now = changes.borrow_and_update().serving;
            let child = now.and_then(|id| self.child(id));
            tokio::select! {
                exit = async {
                    match &child {
                        Some(child) => child.wait().await,
                        None => std::future::pending().await,
                    }
                } => {
                    // If the instance handed over just now, wait for its successor instead.
                    if self.instances.borrow().serving == now {
                        return exit;
                    }
                }
                _ = changes.changed() => {}
            }
        }
    }
}

/// Order of an operator or the system to instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceOrder {
    /// End, also instances that are created later.
    End,
    /// Reload the configuration; instances that no longer serve only reopen their files.
    Reload,
    /// Hand over to a new instance, started from the file now at the program's path.
    Upgrade,
}

impl InstanceOrder {
    const fn signal(self) -> Signal {
        match self {
            Self::End => Signal::TERM,
            Self::Reload => Signal::HUP,
            Self::Upgrade => Signal::USR2,
        }
    }
}

/// Instances after the root, and the orders that they have to get.
#[derive(Debug, Default)]
struct InstanceOrders {
    serving: Option<ChildId>,
    /// Instances that have handed over and still have requests.
    retired: Vec<ChildId>,
    ending: bool,
    /// Orders since the creation of the next instance was requested. They are repeated to that instance: it
    /// does not handle signals yet, and its predecessor handles none during the handover.
    missed: [Option<InstanceOrder>; 2],
}

impl InstanceOrders {
    /// Records an order. Returns the instances that have to get it now.
    fn note_order(&mut self, order: InstanceOrder) -> Vec<ChildId> {
        let serving = self.serving.into_iter();
        match order {
            InstanceOrder::End => self.ending = true,
            InstanceOrder::Reload => self.missed[0] = Some(order),
            InstanceOrder::Upgrade => {
                self.missed[1] = Some(order);
                return serving.collect();
            }
        }
        serving.chain(self.retired.iter().copied()).collect()
    }

    /// Records that the next instance is about to be created. Earlier orders need not be repeated to it.
    fn note_next_instance(&mut self) {
        self.missed = [None, None];
    }

    /// Records which instance serves now. Returns its predecessor, and the orders to repeat to it.
    fn note_serving(&mut self, id: ChildId) -> (Option<ChildId>, Vec<InstanceOrder>) {
        let before = self.serving.replace(id);
        self.retired.extend(before);
        let missed = std::mem::take(&mut self.missed).into_iter().flatten();
        let heard = if self.ending { vec![InstanceOrder::End] } else { missed.collect() };
        (before, heard)
    }

    fn note_ended(&mut self, id: ChildId) {
        self.retired.retain(|retired| *retired != id);
    }
}

#[cfg(test)]
mod tests {
    use super::InstanceOrder::{End, Reload, Upgrade};
    use super::*;

    #[test]
    fn what_meets_a_hand_over_is_heard_by_whoever_serves_after_it_and_once() {
        let mut orders = InstanceOrders::default();
        assert!(orders.note_order(Reload).is_empty(), "nobody serves but us");
        orders.note_next_instance();
        assert_eq!(orders.note_serving(1), (None, Vec::<InstanceOrder>::new()));
        // Before the next instance is made: that one reads the present state.
        assert_eq!(orders.note_order(Reload), [1]);
        orders.note_next_instance();
        assert_eq!(
            (orders.note_order(Upgrade), orders.note_order(Reload), orders.note_order(Reload)),
            (vec![1], vec![1], vec![1])
        );
        assert_eq!(orders.note_serving(2), (Some(1), vec![Reload, Upgrade]));
        orders.note_next_instance();
        assert_eq!(orders.note_serving(3), (Some(2), Vec::<InstanceOrder>::new()), "it was heard");
        orders.note_next_instance();
        assert_eq!((orders.note_order(Reload), orders.note_order(End)), (vec![3, 1, 2], vec![3, 1, 2]));
        assert_eq!(orders.note_serving(4), (Some(3), vec![End]), "nothing else matters then");
    }

    #[test]
    fn those_that_have_handed_over_hear_of_the_end_and_of_files_until_they_have_ended() {
        let mut orders = InstanceOrders::default();
        for id in 1..=3 {
            orders.note_serving(id);
        }
        assert_eq!(orders.note_order(Upgrade), [3], "they have nothing to hand over any more");
        assert_eq!(orders.note_order(Reload), [3, 1, 2]);
        orders.note_ended(1);
        assert_eq!(orders.note_order(End), [3, 2]);
        assert!(!orders.retired.is_empty());
        orders.note_ended(2);
        assert!(orders.retired.is_empty());
        assert_eq!((orders.note_order(End), orders.serving), (vec![3], Some(3)));
    }
}
