//! Decides which instances get an order that the root receives. One lock protects that decision and the
//! number of the serving instance, so an order during a handover reaches the next serving instance exactly
//! once.
//!
//! | order | receivers |
//! |---|---|
//! | end | all, and later instances too |
//! | reload | all; the next one too, if it may have read its configuration before |
//! | upgrade | the serving one; the next one, if it was created before |

use rustix::process::Signal;

use super::ask::ChildId;

/// Order of an operator or the system to instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InstanceOrder {
    End,
    Reload,
    Upgrade,
}

impl InstanceOrder {
    pub(super) const fn signal(self) -> Signal {
        match self {
            Self::End => Signal::TERM,
            Self::Reload => Signal::HUP,
            Self::Upgrade => Signal::USR2,
        }
    }
}

/// Instances after the root, and the orders that they have to get.
#[derive(Debug, Default)]
pub(super) struct InstanceOrders {
    serving: Option<ChildId>,
    /// Instances that have handed over and still have requests.
    retired: Vec<ChildId>,
    ending: bool,
    /// Orders since the creation of the next instance was requested. They are repeated to that instance: it
    /// does not handle signals yet, and its predecessor handles none during the handover.
    missed: [Option<InstanceOrder>; 2],
}

impl InstanceOrders {
    pub(super) const fn serving(&self) -> Option<ChildId> {
        self.serving
    }

    pub(super) fn has_no_retired(&self) -> bool {
        self.retired.is_empty()
    }

    /// Records an order. Returns the instances that have to get it now.
    pub(super) fn note_order(&mut self, order: InstanceOrder) -> Vec<ChildId> {
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
    pub(super) fn note_next_instance(&mut self) {
        self.missed = [None, None];
    }

    /// Records which instance serves now. Returns its predecessor, and the orders to repeat to it.
    pub(super) fn note_serving(&mut self, id: ChildId) -> (Option<ChildId>, Vec<InstanceOrder>) {
        let before = self.serving.replace(id);
        self.retired.extend(before);
        let missed = std::mem::take(&mut self.missed).into_iter().flatten();
        let heard = if self.ending { vec![InstanceOrder::End] } else { missed.collect() };
        (before, heard)
    }

    /// Records the end of an instance that had handed over.
    pub(super) fn note_ended(&mut self, id: ChildId) {
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
        assert!(!orders.has_no_retired());
        orders.note_ended(2);
        assert!(orders.has_no_retired());
        assert_eq!((orders.note_order(End), orders.serving()), (vec![3], Some(3)));
    }
}
