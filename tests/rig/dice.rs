//! Numbers that look random and are drawn from a seed: the same everywhere.

use warden_policies::world::SplitMix;

/// Small and fast.
#[derive(Debug, Clone)]
pub struct Dice(SplitMix);

impl Dice {
    /// Equal seeds roll the same.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix::new(seed))
    }

    /// Less than `sides`.
    pub fn below(&mut self, sides: u64) -> u64 {
        self.0.below(sides)
    }

    /// True once in `sides` times.
    pub fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }
}
