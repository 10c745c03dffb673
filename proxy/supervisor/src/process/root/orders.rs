//! What the root is told goes to the instances that it keeps. Who hears of what is decided here, at once with who serves: so an order that
//! meets a hand-over is heard by whoever serves after it, and once.
//!
//! | order | heard by |
//! |---|---|
//! | end | all; whoever serves later, too |
//! | reload | all; the next one, too, if it may have read its configuration before |
//! | upgrade | whoever serves; the next one, if it was made before |

use rustix::process::Signal;

use super::ask::ChildId;

/// An order to instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    End,
    Reload,
    Upgrade,
}

impl Order {
    pub(super) const fn signal(self) -> Signal {
        match self {
            Self::End => Signal::TERM,
            Self::Reload => Signal::HUP,
            Self::Upgrade => Signal::USR2,
        }
    }
}

/// The instances after us, and what they were told.
#[derive(Debug, Default)]
pub(super) struct Orders {
    serving: Option<ChildId>,
    /// Have handed over, and still have something to do.
    retired: Vec<ChildId>,
    ending: bool,
    /// Told since the next instance was asked for: it does not hear signals yet, and whoever hands over to it looks at none.
    missed: [Option<Order>; 2],
}

impl Orders {
    pub(super) const fn serving(&self) -> Option<ChildId> {
        self.serving
    }

    pub(super) fn nobody_is_retired(&self) -> bool {
        self.retired.is_empty()
    }

    /// We are told this. Returns who hears it now.
    pub(super) fn told(&mut self, order: Order) -> Vec<ChildId> {
        let serving = self.serving.into_iter();
        match order {
            Order::End => self.ending = true,
            Order::Reload => self.missed[0] = Some(order),
            Order::Upgrade => {
                self.missed[1] = Some(order);
                return serving.collect();
            }
        }
        serving.chain(self.retired.iter().copied()).collect()
    }

    /// The next instance is about to be made: it will read what there is then.
    pub(super) fn next_begins(&mut self) {
        self.missed = [None, None];
    }

    /// This one serves from now on. Returns which one did, and what the new one has to hear.
    pub(super) fn serves(&mut self, id: ChildId) -> (Option<ChildId>, Vec<Order>) {
        let before = self.serving.replace(id);
        self.retired.extend(before);
        let missed = std::mem::take(&mut self.missed).into_iter().flatten();
        let heard = if self.ending { vec![Order::End] } else { missed.collect() };
        (before, heard)
    }

    /// One that had handed over has ended.
    pub(super) fn ended(&mut self, id: ChildId) {
        self.retired.retain(|retired| *retired != id);
    }
}

#[cfg(test)]
mod tests {
    use super::Order::{End, Reload, Upgrade};
    use super::*;

    #[test]
    fn what_meets_a_hand_over_is_heard_by_whoever_serves_after_it_and_once() {
        let mut orders = Orders::default();
        assert!(orders.told(Reload).is_empty(), "nobody serves but us");
        orders.next_begins();
        assert_eq!(orders.serves(1), (None, Vec::<Order>::new()));
        // Told before the next one is made: that one reads what there is.
        assert_eq!(orders.told(Reload), [1]);
        orders.next_begins();
        assert_eq!(
            (orders.told(Upgrade), orders.told(Reload), orders.told(Reload)),
            (vec![1], vec![1], vec![1])
        );
        assert_eq!(orders.serves(2), (Some(1), vec![Reload, Upgrade]));
        orders.next_begins();
        assert_eq!(orders.serves(3), (Some(2), Vec::<Order>::new()), "it was heard");
        orders.next_begins();
        assert_eq!((orders.told(Reload), orders.told(End)), (vec![3, 1, 2], vec![3, 1, 2]));
        assert_eq!(orders.serves(4), (Some(3), vec![End]), "nothing else matters then");
    }

    #[test]
    fn those_that_have_handed_over_hear_of_the_end_and_of_files_until_they_have_ended() {
        let mut orders = Orders::default();
        for id in 1..=3 {
            orders.serves(id);
        }
        assert_eq!(orders.told(Upgrade), [3], "they have nothing to hand over any more");
        assert_eq!(orders.told(Reload), [3, 1, 2]);
        orders.ended(1);
        assert_eq!(orders.told(End), [3, 2]);
        assert!(!orders.nobody_is_retired());
        orders.ended(2);
        assert!(orders.nobody_is_retired());
        assert_eq!((orders.told(End), orders.serving()), (vec![3], Some(3)));
    }
}
