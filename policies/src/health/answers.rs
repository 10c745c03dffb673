//! Distinguishes a process whose answers have become faulty from a model that answers so now and then.
//!
//! A process with corrupt weights, a corrupt cache or NaN in its logits often generates one token for ever
//! (`//////`), no text, or null in place of numbers, and is healthy otherwise. But small models repeat
//! themselves too, and users ask for repetitions and for short answers. So consecutive faulty answers in
//! different conversations are compared with the model's own past, each fault by itself:
//!
//! ```text
//!   p: upper bound (3 standard deviations) of the share of the model's earlier answers with the fault
//!   p ^ (length of the run / group) <= 1e-9: chance does not explain the run
//! ```
//!
//! The divisor allows for groups of four conversations with the same fault, such as those of one script. No
//! prompt makes a model compute null, so there the group is one request. With fewer than 20 sound answers there
//! is no symptom. Nor is there one for a process without sound answers of its own: if the model's file is
//! damaged, the answers of another process would be faulty, too.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::HealthSymptom;
use crate::units::as_f64;

/// Highest probability of a false alarm at one answer, if a model's faulty answers are independent.
const MAX_CHANCE: f64 = 1e-9;
/// Shortest run that is a symptom: faulty answers to one user come in groups, so they are not independent.
const MIN_RUN_LENGTH: u32 = 8;
/// Sound answers of the model that must be known.
const MIN_SOUND_ANSWERS: u64 = 20;
/// Sound answers of the process itself that must be known.
const MIN_OWN_SOUND: u64 = 5;
/// Conversations whose answers may have a fault for the same cause.
const GROUP_SIZE: f64 = 4.0;
/// Standard deviations by which the true share may exceed the counted one.
const SHARE_MARGIN: f64 = 3.0;
/// Highest probability of consecutive faulty answers, also of one conversation, that are a reason to test the
/// process.
const UNUSUAL_CHANCE: f64 = 0.05;
/// Most conversations remembered in a run. A forgotten one can count again.
const MAX_CONVERSATIONS: usize = 64;

/// First build for which a NaN that stays in the recurrent state was reported.
const FIRST_NAN_BUILD: u32 = 9803;

/// Fault of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFault {
    /// The text ends in an endless repetition.
    Repeating,
    /// The answer has no text, no thought and no tool call.
    Empty,
    /// Numbers of the answer are null, or all entries of a vector are equal.
    Null,
}

impl AnswerFault {
    const ALL: [Self; 3] = [Self::Repeating, Self::Empty, Self::Null];

    const fn group_size(self) -> f64 {
        match self {
            Self::Repeating | Self::Empty => GROUP_SIZE,
            Self::Null => 1.0,
        }
    }
}

/// For each fault: whether an answer has it; `None` if the answer shows neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerSigns {
    /// See [`AnswerFault::Repeating`].
    pub repeating: Option<bool>,
    /// See [`AnswerFault::Empty`].
    pub empty: Option<bool>,
    /// See [`AnswerFault::Null`].
    pub null: Option<bool>,
}

impl AnswerSigns {
    const fn by_fault(self) -> [Option<bool>; 3] {
        [self.repeating, self.empty, self.null]
    }

    /// Returns true if the answer shows anything.
    pub fn is_judged(self) -> bool {
        self.by_fault().iter().any(Option::is_some)
    }
}

/// Keys of an answer's conversation and request; `None` if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerKeys {
    /// Equal for all turns of a conversation.
    pub conversation: Option<u64>,
    /// Equal for equal requests.
    pub request: Option<u64>,
}

/// Earlier answers of all processes of one model, by fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerHistory([AnswerCounts; 3]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct AnswerCounts {
    /// Answers that show whether they have the fault.
    judged: u64,
    /// Answers among them with the fault.
    faulty: u64,
}

impl AnswerCounts {
    /// Returns an upper bound of the probability that so many answers have the fault by chance.
    fn chance(&self, fault: AnswerFault, answers: u32) -> f64 {
        let faulty = as_f64(self.faulty + 1);
        let share = SHARE_MARGIN.mul_add(faulty.sqrt(), faulty) / as_f64(self.judged + 2);
        share.powf(f64::from(answers) / fault.group_size())
    }
}

/// Answers of one process since its last sound answer, by fault.
#[derive(Clone, Debug, Default)]
pub struct AnswerRuns([FaultRun; 3]);

#[derive(Clone, Debug, Default)]
struct FaultRun {
    /// Conversations with a faulty answer.
    length: u32,
    /// Faulty answers, also several of one conversation.
    answers: u32,
    /// Sound answers of the process.
    sound: u64,
    conversations: VecDeque<u64>,
}

impl FaultRun {
    /// Records an answer. A sound answer ends the run, and adds it to `counts`.
    ///
    /// A conversation (its key) counts once in a run, because a repetition in its history leads to another
    /// one. An answer of an unknown conversation counts only if it starts a run.
    fn record_answer(&mut self, is_faulty: bool, key: Option<u64>, counts: &mut AnswerCounts) {
        if !is_faulty {
            counts.judged += 1 + u64::from(self.length);
            counts.faulty += u64::from(self.length);
            *self = Self { sound: self.sound + 1, ..Self::default() };
            return;
        }
        self.answers = self.answers.saturating_add(1);
        let is_new = key.map_or(self.length == 0, |key| !self.conversations.contains(&key));
        if !is_new {
            return;
        }
        if self.conversations.len() == MAX_CONVERSATIONS {
            self.conversations.pop_front();
        }
        self.conversations.extend(key);
        self.length = self.length.saturating_add(1);
    }

    fn symptom(&self, fault: AnswerFault, counts: &AnswerCounts) -> Option<HealthSymptom> {
        let sound = counts.judged.saturating_sub(counts.faulty);
        if self.length < MIN_RUN_LENGTH || sound < MIN_SOUND_ANSWERS || self.sound < MIN_OWN_SOUND {
            return None;
        }
        (counts.chance(fault, self.length) <= MAX_CHANCE).then_some(HealthSymptom::FaultyAnswers {
            fault,
            in_a_row: self.length,
            judged: counts.judged,
            faulty: counts.faulty,
        })
    }
}

impl AnswerRuns {
    /// Records an answer of the process.
    pub fn record_answer(&mut self, signs: AnswerSigns, keys: AnswerKeys, history: &mut AnswerHistory) {
        let is_faulty = signs.by_fault().contains(&Some(true));
        for (index, sign) in signs.by_fault().into_iter().enumerate() {
            // An answer with another fault does not show that the process is sound.
            let Some(has_fault) = sign.filter(|has_fault| *has_fault || !is_faulty) else { continue };
            let key = match AnswerFault::ALL[index] {
                AnswerFault::Repeating | AnswerFault::Empty => keys.conversation,
                AnswerFault::Null => keys.request,
            };
            self.0[index].record_answer(has_fault, key, &mut history.0[index]);
        }
    }

    /// Returns true if the latest judged answer has a fault.
    pub fn is_faulty(&self) -> bool {
        self.0.iter().any(|run| run.length > 0)
    }

    /// Returns true if the latest answers are faulty, but may be so by chance: a reason to test the process.
    pub fn is_unusual(&self, history: &AnswerHistory) -> bool {
        let mut all = AnswerFault::ALL.into_iter().zip(self.0.iter().zip(&history.0));
        all.any(|(fault, (run, counts))| {
            run.sound >= MIN_OWN_SOUND && counts.chance(fault, run.answers) <= UNUSUAL_CHANCE
        })
    }

    /// Returns the symptom if chance does not explain a run.
    pub fn symptom(&self, history: &AnswerHistory) -> Option<HealthSymptom> {
        let mut all = AnswerFault::ALL.into_iter().zip(self.0.iter().zip(&history.0));
        all.find_map(|(fault, (run, counts))| run.symptom(fault, counts))
    }
}

/// Returns the id of a known defect with such answers in `patches/mitigations.toml`, if a process of this build of
/// llama.cpp may have it. `None`: the build is unknown.
pub const fn known_answer_defect(build: Option<u32>) -> Option<&'static str> {
    match build {
        Some(..FIRST_NAN_BUILD) => None,
        _ => Some("recurrent-state-nan"),
    }
}

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;
