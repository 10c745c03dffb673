//! Reproducible random numbers, equal on every machine. Not suitable for secrets.

/// The generator `SplitMix64` (Steele, Lea, Flood 2014): small, fast, and sufficient for simulated worlds.
#[derive(Clone, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// Creates a generator; equal seeds give equal numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number from 0 to below 1.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number from `low` to below `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Returns a number from 0 to below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        // The modulo bias is below end / 2^64.
        self.bits().checked_rem(end).unwrap_or(0)
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Returns a normally distributed number with mean 0 and deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_published_generator() {
        // First outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) for the seed 1234567.
        let mut random = SplitMix::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.bits()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn distributions_have_their_means() {
        let mut random = SplitMix::new(7);
        let n = 20_000_u32;
        let mean = |draw: &mut dyn FnMut() -> f64| (0..n).map(|_| draw()).sum::<f64>() / f64::from(n);
        assert!((mean(&mut || random.unit()) - 0.5).abs() < 0.01);
        assert!((mean(&mut || random.exponential(3.0)) - 3.0).abs() < 0.1);
        assert!(mean(&mut || random.normal()).abs() < 0.03);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 0.05);
    }
}
