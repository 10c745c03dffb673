//! Distinguishes a process whose answers have become endless repetitions from a model that repeats itself now
//! and then.
//!
//! A process with corrupt weights, a corrupt cache or NaN in its logits often generates one token for ever
//! (`//////`), and is healthy otherwise. But small models repeat themselves too, and users ask for repetitions.
//! So consecutive repeating answers in different conversations are compared with the model's own past:
//!
//! ```text
//!   p: upper bound (3 standard deviations) of the share of the model's earlier answers that repeat
//!   p ^ (length of the run / 4) <= 1e-9: chance does not explain the run
//! ```
//!
//! The divisor allows for groups of four conversations that repeat together, such as those of one script. With
//! fewer than 20 sound answers there is no symptom. Nor is there one for a process without sound answers of its
//! own: if the model's file is damaged, another process would repeat, too.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::HealthSymptom;
use crate::units::as_f64;

/// Highest probability of a false alarm at one answer, if a model's repetitions are independent.
const MAX_CHANCE: f64 = 1e-9;
/// Shortest run that is a symptom: repetitions of one user come in groups, so they are not independent.
const MIN_RUN_LENGTH: u32 = 8;
/// Sound answers of the model that must be known.
const MIN_SOUND_ANSWERS: u64 = 20;
/// Sound answers of the process itself that must be known.
const MIN_OWN_SOUND: u64 = 5;
/// Conversations that may repeat for the same cause.
const GROUP_SIZE: f64 = 4.0;
/// Standard deviations by which the true share may exceed the counted one.
const SHARE_MARGIN: f64 = 3.0;
/// Most conversations remembered in a run. A forgotten one can count again.
const MAX_CONVERSATIONS: usize = 64;

/// Earlier answers of all processes of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerHistory {
    /// Answers long enough to be judged.
    pub judged: u64,
    /// Answers among them that ended in a repetition.
    pub repeating: u64,
}

/// Repeating answers of one process since its last sound answer.
#[derive(Clone, Debug, Default)]
pub struct RepetitionRun {
    length: u32,
    /// Sound answers of the process.
    sound: u64,
    conversations: VecDeque<u64>,
}

impl RepetitionRun {
    /// Records an answer that was long enough to be judged. A sound answer ends the run, and adds it to
    /// `history`.
    ///
    /// A conversation (its key) counts once in a run, because a repetition in its history leads to another
    /// one. An answer of an unknown conversation counts only if it starts a run.
    pub fn record_answer(&mut self, repeats: bool, conversation: Option<u64>, history: &mut AnswerHistory) {
        if !repeats {
            history.judged += 1 + u64::from(self.length);
            history.repeating += u64::from(self.length);
            *self = Self { sound: self.sound + 1, ..Self::default() };
            return;
        }
        let is_new = conversation.map_or(self.length == 0, |key| !self.conversations.contains(&key));
        if !is_new {
            return;
        }
        if self.conversations.len() == MAX_CONVERSATIONS {
            self.conversations.pop_front();
        }
        self.conversations.extend(conversation);
        self.length = self.length.saturating_add(1);
    }

    /// Returns true if the latest judged answer ended in a repetition.
    pub const fn is_repeating(&self) -> bool {
        self.length > 0
    }

    /// Returns the symptom if chance does not explain the run.
    pub fn symptom(&self, history: &AnswerHistory) -> Option<HealthSymptom> {
        let sound = history.judged.saturating_sub(history.repeating);
        if self.length < MIN_RUN_LENGTH || sound < MIN_SOUND_ANSWERS || self.sound < MIN_OWN_SOUND {
            return None;
        }
        let repeating = as_f64(history.repeating + 1);
        let share = SHARE_MARGIN.mul_add(repeating.sqrt(), repeating) / as_f64(history.judged + 2);
        let explained = share.powf(f64::from(self.length) / GROUP_SIZE) > MAX_CHANCE;
        (!explained).then_some(HealthSymptom::Repeating {
            in_a_row: self.length,
            judged: history.judged,
            repeating: history.repeating,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SplitMix;

    /// Returns true if a simulated history raises an alarm. Each `group` of conversations repeats together.
    fn alarms(seed: u64, share: f64, group: u32, answers: u32) -> bool {
        let mut random = SplitMix::new(seed);
        let (mut run, mut history) = (RepetitionRun::default(), AnswerHistory::default());
        let mut conversation = 0;
        for _ in 0..answers / group {
            let repeats = random.chance(share);
            for _ in 0..group {
                conversation += 1;
                run.record_answer(repeats, Some(conversation), &mut history);
                if run.symptom(&history).is_some() {
                    return true;
                }
            }
        }
        false
    }

    #[test]
    fn healthy_histories_raise_no_alarm() {
        let mut seed = 0;
        for (share, group) in
            [(0.0, 1), (0.001, 1), (0.01, 3), (0.05, 4), (0.1, 2), (0.3, 4), (0.6, 1), (0.9, 4), (0.01, 8)]
        {
            let found = (0..1000)
                .filter(|_| {
                    seed += 1;
                    alarms(seed, share, group, 1400)
                })
                .count();
            println!(
                "{share} repeat, in groups of {group}: {found} alarms in 1,000 histories of 1,400 answers"
            );
            // Larger groups than the divisor allows for are found now and then.
            assert!(found <= if f64::from(group) > GROUP_SIZE { 10 } else { 0 });
        }
    }

    #[test]
    fn a_process_that_only_repeats_is_found_after_a_few_answers() {
        for (before, repeating, found) in [
            (20, 0, 49),
            (200, 0, 22),
            (200, 2, 26),
            (200, 20, 48),
            (200, 100, 192),
            (2000, 0, 14),
            (19, 0, 0),
        ] {
            let (mut run, mut history) = (RepetitionRun::default(), AnswerHistory::default());
            for n in 0..before {
                run.record_answer(n < repeating, Some(n), &mut history);
            }
            let first = (1_u32..=300).find(|n| {
                run.record_answer(true, Some(1000 + u64::from(*n)), &mut history);
                run.symptom(&history).is_some()
            });
            println!("{repeating} of {before} answers repeated before: found at answer {first:?}");
            assert_eq!(first.unwrap_or(0), found);
        }
    }

    #[test]
    fn one_conversation_is_no_evidence_however_long_it_goes_on() {
        let (mut run, mut history) = (RepetitionRun::default(), AnswerHistory::default());
        for n in 0..50 {
            run.record_answer(false, Some(n), &mut history);
        }
        for _ in 0..100 {
            run.record_answer(true, Some(7), &mut history);
            run.record_answer(true, None, &mut history);
        }
        assert_eq!(run.symptom(&history), None);
        run.record_answer(false, Some(8), &mut history);
        assert_eq!(history, AnswerHistory { judged: 52, repeating: 1 });
    }
}
