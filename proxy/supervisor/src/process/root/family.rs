//! Children of the root that successors have requested or taken over, and the receivers of orders. One lock
//! protects the receivers and the serving instance, so an order during a handover is delivered once.
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

/// Children of the root that live as long as another instance needs them.
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

    /// Releases a child. Kills it if nothing else owns it.
    pub(crate) fn forget(&self, id: ChildId) {
        let gone = lock(&self.children).remove(&id);
        drop(gone);
    }

    pub(super) fn note_next_instance(&self) {
        self.instances.send_modify(InstanceOrders::note_next_instance);
    }

    /// Records the serving instance and sends it the orders that its predecessor missed. Returns the
    /// predecessor.
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

    pub(crate) async fn retired_ended(&self) {
        let mut instances = self.instances.subscribe();
        // Waiting cannot fail, because `self` holds a sender.
        drop(instances.wait_for(|instances| instances.retired.is_empty()).await);
    }

    /// Waits for the end of the serving instance, unless that is this process.
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
                    // After a handover, wait for the successor instead.
                    if self.instances.borrow().serving == now {
                        return exit;
                    }
                }
                _ = changes.changed() => {}
            }
        }
    }
}

/// Order of an operator or the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceOrder {
    /// End this and all later instances.
    End,
    /// Reload the configuration; retired instances only reopen their files.
    Reload,
    /// Hand over to a new instance of the program file.
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

#[derive(Debug, Default)]
struct InstanceOrders {
    serving: Option<ChildId>,
    retired: Vec<ChildId>,
    ending: bool,
    /// Orders since the creation of the next instance, which cannot handle signals yet. They are repeated to
    /// it.
    missed: [Option<InstanceOrder>; 2],
}

impl InstanceOrders {
    /// Returns the instances that get the order now.
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

    /// Forgets earlier orders: the next instance will read the present state.
    fn note_next_instance(&mut self) {
        self.missed = [None, None];
    }

    /// Returns the predecessor, and the orders to repeat.
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
