//! Numbers that look random and are drawn from a seed: the same everywhere.

/// Small and fast.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Equal seeds roll the same.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `sides`.
    pub fn below(&mut self, sides: u64) -> u64 {
        self.roll() % sides.max(1)
    }

    /// True once in `sides` times.
    pub fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }
}
