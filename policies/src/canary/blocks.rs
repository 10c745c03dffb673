//! Which requests are compared with each other: one of the build that is tried, and those of the other that ended at about the same time.
//! So whatever changes for both, the load or the hour, changes nothing between them. Who is in a block is decided by when requests
//! end, and not by what they say.

use std::collections::VecDeque;

use super::Arm;

/// Values that wait to be compared.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Blocks<T> {
    serves: VecDeque<T>,
    tried: VecDeque<T>,
    most: usize,
}

impl<T> Blocks<T> {
    /// A block has at most so many of the build that serves.
    pub(super) fn new(most: usize) -> Self {
        Self { serves: VecDeque::new(), tried: VecDeque::new(), most: most.max(1) }
    }

    /// Takes a value in. What is returned is compared now: one of the build that is tried, and at least one of the other.
    pub(super) fn note(&mut self, arm: Arm, value: T) -> Option<(T, Vec<T>)> {
        let (own, other) = match arm {
            Arm::Base => (&mut self.serves, &self.tried),
            Arm::Canary => (&mut self.tried, &self.serves),
        };
        if own.len() == self.most && other.is_empty() {
            own.pop_front();
        }
        own.push_back(value);
        if self.serves.is_empty() {
            return None;
        }
        let tried = self.tried.pop_front()?;
        Some((tried, self.serves.drain(..).collect()))
    }
}
