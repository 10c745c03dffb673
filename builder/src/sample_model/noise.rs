//! Seeded noise whose bits are the same on every platform.
//!
//! Uses only integer arithmetic and exactly rounded IEEE operations. The last bit of `ln` or `cos` depends on
//! the C library, which excludes the usual normal distributions.

/// Pseudo-random numbers by splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
/// Generators", 2014): a counter and a mixing function.
#[derive(Clone, Debug)]
pub(crate) struct NoiseStream(u64);

const COUNTER_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl NoiseStream {
    /// A stream that depends on seed and name, so that adding a tensor does not change the others.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, to spread the name over 64 bits.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(COUNTER_STEP);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number of mean 0 and variance 1: the sum of four 16-bit uniforms (Irwin-Hall), within ±3.47.
    fn unit(&mut self) -> f64 {
        let bits = self.next();
        let sum: u64 = [0, 16, 32, 48].iter().map(|shift| (bits >> shift) & 0xffff).sum();
        let sum = u32::try_from(sum).unwrap_or(u32::MAX);
        // Four uniforms on [0, 65535]: mean 131070 in all, standard deviation 65536 / sqrt(12) * sqrt(4).
        (f64::from(sum) - 131_070.0) * (3.0_f64.sqrt() / 65_536.0)
    }

    /// `count` numbers of mean 0 and the given standard deviation.
    pub(crate) fn take(&mut self, count: usize, deviation: f64) -> Vec<f32> {
        (0..count).map(|_| self.draw(deviation)).collect()
    }

    fn draw(&mut self, deviation: f64) -> f32 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "weights are stored as f32; rounding is exact IEEE"
        )]
        let weight = (self.unit() * deviation) as f32;
        weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_splitmix64() {
        // Published first outputs for the state 1234567.
        let mut noise = NoiseStream(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| noise.next()).collect();
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn mean_and_variance_are_those_of_a_unit_normal() {
        let mut noise = NoiseStream::new(1, "test");
        let draws: Vec<f64> = (0..100_000).map(|_| noise.unit()).collect();
        let mean = draws.iter().sum::<f64>() / 1e5;
        let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.02, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
    }

    #[test]
    fn names_and_seeds_give_different_streams() {
        let draw = |seed, name| NoiseStream::new(seed, name).next();
        assert_ne!(draw(1, "a"), draw(2, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        assert_eq!(draw(1, "a"), draw(1, "a"));
    }
}
