//! Groups requests for comparison: one canary request with requests of the serving build that ended at
//! about the same time. Changes that affect both builds, such as load or time of day, cancel out. The
//! grouping depends only on the time when requests end, not on their results.

use std::collections::VecDeque;

use super::TrialArm;

/// Values waiting for comparison.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RequestBlocks<T> {
    serves: VecDeque<T>,
    tried: VecDeque<T>,
    most: usize,
}

impl<T> RequestBlocks<T> {
    /// Creates blocks with at most `most` values of the serving build.
    pub(super) fn new(most: usize) -> Self {
        Self { serves: VecDeque::new(), tried: VecDeque::new(), most: most.max(1) }
    }

    /// Adds a value. Returns a complete block: one canary value and at least one of the serving build.
    pub(super) fn add_value(&mut self, arm: TrialArm, value: T) -> Option<(T, Vec<T>)> {
        let (own, other) = match arm {
            TrialArm::Base => (&mut self.serves, &self.tried),
            TrialArm::Canary => (&mut self.tried, &self.serves),
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
