//! Compares a process's answers to fixed prompts with those of its youth: a process whose computation is damaged
//! gives other log-probabilities.
//!
//! Slots, batches and other requests change the order of sums, so sound answers differ a little. A young process
//! answers twice, which shows by how much:
//!
//! ```text
//!   distance: largest difference of a log-probability, over all tokens with a probability of 1 % or more
//!   altered: distance > 1 + 4 * distance between the two first answers, or a log-probability is null
//! ```

use super::HealthSymptom;

/// Least difference of a log-probability that counts: a factor of 2.7 in the probability.
const MIN_DISTANCE: f64 = 1.0;
/// Multiple of the first two answers' distance that sound answers may differ by.
const NOISE_FACTOR: f64 = 4.0;
/// A server whose first two answers differ by more is not compared.
const MAX_NOISE: f64 = 2.0;
/// Log-probability of 1 %. Those of less likely tokens differ more, and do not affect answers.
const MIN_COMPARED: f64 = -4.6;

/// A candidate for a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChance {
    /// Number of the token.
    pub token: u64,
    /// Natural logarithm of its probability; NaN if the server reported null.
    pub log: f64,
}

/// Answers to the fixed prompts: for each prompt, for each generated token, the candidates with the generated
/// one first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProbePrint(pub Vec<Vec<Vec<TokenChance>>>);

impl ProbePrint {
    fn has_null(&self) -> bool {
        self.0.iter().flatten().flatten().any(|chance| chance.log.is_nan())
    }

    /// Returns the largest difference of a log-probability.
    fn distance(&self, other: &Self) -> f64 {
        let mut largest = 0.0_f64;
        for (own, others) in self.0.iter().zip(&other.0) {
            for (left, right) in own.iter().zip(others) {
                largest = largest.max(candidate_distance(left, right)).max(candidate_distance(right, left));
                let first = |chances: &[TokenChance]| chances.first().map(|chance| chance.token);
                if first(left) != first(right) {
                    // The texts differ from here on.
                    break;
                }
            }
        }
        largest
    }
}

fn candidate_distance(one: &[TokenChance], other: &[TokenChance]) -> f64 {
    let lowest = other.iter().map(|chance| chance.log).fold(0.0, f64::min);
    let differences = one.iter().filter(|chance| chance.log >= MIN_COMPARED).map(|chance| {
        let known = other.iter().find(|known| known.token == chance.token);
        // The other answer has only its most likely tokens.
        known.map_or_else(|| (chance.log - lowest).max(0.0), |known| (chance.log - known.log).abs())
    });
    differences.fold(0.0, f64::max)
}

/// Answers of a young process to the fixed prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeBaseline {
    print: ProbePrint,
    /// Largest distance of a sound answer.
    allowed: f64,
}

impl ProbeBaseline {
    /// Returns `None` if these two answers of one process cannot be compared with others.
    pub fn from_answers(first: ProbePrint, second: &ProbePrint) -> Option<Self> {
        let has_any = first.0.iter().any(|prompt| !prompt.is_empty());
        let noise = first.distance(second);
        let is_usable = has_any && !first.has_null() && !second.has_null() && noise <= MAX_NOISE;
        is_usable.then(|| Self { print: first, allowed: NOISE_FACTOR.mul_add(noise, MIN_DISTANCE) })
    }

    /// Returns the symptom if this answer differs by more than sound answers do.
    pub fn find_alteration(&self, now: &ProbePrint) -> Option<HealthSymptom> {
        let distance = self.print.distance(now);
        let distance = (!now.has_null()).then_some(distance);
        let is_altered = distance.is_none_or(|distance| distance > self.allowed);
        is_altered.then_some(HealthSymptom::Altered { distance, allowed: self.allowed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SplitMix;

    /// An answer whose logits deviate by up to `noise`, and by `damage` if the process is damaged.
    fn answer(random: &mut SplitMix, noise: f64, damage: f64) -> ProbePrint {
        let prompt = |prompt: u64| {
            let token = |position: u64| {
                let mut fixed = SplitMix::new(prompt * 100 + position);
                let logits: Vec<f64> = (0..40)
                    .map(|_| {
                        let deviation =
                            (random.unit() * 2.0 - 1.0) * noise + (random.unit() * 2.0 - 1.0) * damage;
                        fixed.unit() * 8.0 + deviation
                    })
                    .collect();
                let sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
                let mut all: Vec<TokenChance> = (0_u64..)
                    .zip(&logits)
                    .map(|(token, logit)| TokenChance { token, log: logit - sum })
                    .collect();
                all.sort_by(|a, b| b.log.total_cmp(&a.log));
                all.truncate(20);
                all
            };
            (0..4).map(token).collect()
        };
        ProbePrint((0..3).map(prompt).collect())
    }

    #[test]
    fn sound_answers_are_never_altered_and_damaged_ones_are() {
        let mut random = SplitMix::new(7);
        for noise in [0.0, 0.01, 0.1, 0.3] {
            let (mut alarms, mut found) = (0, 0);
            for _ in 0..1000 {
                let first = answer(&mut random, noise, 0.0);
                let second = answer(&mut random, noise, 0.0);
                let baseline = ProbeBaseline::from_answers(first, &second).unwrap();
                alarms += usize::from(baseline.find_alteration(&answer(&mut random, noise, 0.0)).is_some());
                found += usize::from(baseline.find_alteration(&answer(&mut random, noise, 8.0)).is_some());
            }
            println!(
                "logits vary by {noise}: {alarms} alarms in 1,000, {found} of 1,000 damaged processes found"
            );
            assert_eq!((alarms, found), (0, 1000));
        }
    }

    #[test]
    fn null_is_an_alteration_and_no_baseline() {
        let mut random = SplitMix::new(1);
        let sound = answer(&mut random, 0.0, 0.0);
        let mut null = sound.clone();
        null.0[2][3][4].log = f64::NAN;
        let baseline = ProbeBaseline::from_answers(sound.clone(), &sound).unwrap();
        assert_eq!(baseline.find_alteration(&sound), None);
        let found = baseline.find_alteration(&null);
        assert_eq!(found, Some(HealthSymptom::Altered { distance: None, allowed: 1.0 }));
        assert_eq!(ProbeBaseline::from_answers(sound.clone(), &null), None);
        assert_eq!(ProbeBaseline::from_answers(ProbePrint::default(), &ProbePrint::default()), None);
        assert_eq!(
            ProbeBaseline::from_answers(sound, &answer(&mut random, 0.0, 20.0)),
            None,
            "a random server"
        );
    }
}
