//! Random numbers from a seed, the same on all machines.

use warden_policies::world::SplitMix;

/// Small and fast generator.
#[derive(Debug, Clone)]
pub struct Dice(SplitMix);

impl Dice {
    /// Equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix::new(seed))
    }

    /// Returns a number less than `sides`.
    pub fn below(&mut self, sides: u64) -> u64 {
        self.0.below(sides)
    }

    /// Returns true once in `sides` times.
    pub fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }
}
