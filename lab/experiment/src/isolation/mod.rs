//! Decides whether a server mixes conversations: whether an answer has content of another conversation's prompt.
//!
//! ```text
//!  truth     one slot, no caches, each prompt evaluated completely   ──> the right answer to each prompt
//!            some prompts once more, in another order                ──> noise of a repeated answer
//!  alone     the server's own arguments, one conversation            ──> noise of reused prompts, slots and batches
//!  together  the server's own arguments, more conversations than slots
//!                                                                    ──> answers, each compared with all truths
//! ```
//!
//! Words prove nothing, because a model may answer with any words. The judge compares the log probabilities
//! of the likeliest tokens (`proof::answers`). All conversations end with the same words, so an answer
//! differs between conversations only by the content that the server had in memory.

mod judge;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::judge::{judge_answers, judge_cure};
pub use self::plan::{CONVERSATION_TURNS, IsolationPlan, IsolationRound, PromptPlace};
use crate::proof::BuildReply;

/// Answers of all processes of an experiment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IsolationAnswers {
    /// Right answer to each prompt.
    pub truths: BTreeMap<PromptPlace, BuildReply>,
    /// Second answers of the same process to some prompts.
    pub repeated: Vec<(PromptPlace, BuildReply)>,
    /// Answers of a process that only ever had one conversation.
    pub alone: Vec<(PromptPlace, BuildReply)>,
    /// Answers of the tested process, in the order of the requests.
    pub together: Vec<AskedAnswer>,
}

/// Answer of the tested process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AskedAnswer {
    /// Round, from 1.
    pub round: usize,
    /// True if other requests ran at the same time.
    pub concurrent: bool,
    /// Prompt of the request.
    pub place: PromptPlace,
    /// Tokens of the prompt that the server reports as cached; `None` without a report.
    pub cached: Option<u64>,
    /// Answer.
    pub reply: BuildReply,
}

/// Answer to the question if a server mixes conversations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum IsolationOutcome {
    /// Answers have content of other conversations, or depend on them.
    Mixed,
    /// Each answer is the right one to its prompt, within the noise.
    Separate,
    /// Neither is shown.
    Undecided {
        /// Reason.
        why: String,
    },
}

/// Distances in nats between answers that should be equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NoiseSample {
    /// Number of compared answers.
    pub count: usize,
    /// Largest distance.
    pub most: f64,
}

/// Scales in nats by which an answer is judged. All are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IsolationScales {
    /// Noise of the process with the right answers.
    pub repeated: NoiseSample,
    /// Noise of the process with one conversation.
    pub alone: NoiseSample,
    /// Median distance of a right answer from the nearest right answer of another conversation.
    pub apart: f64,
    /// Distance above which an answer is not the right one.
    pub limit: f64,
}

/// Answer that is not the right one to its prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForeignAnswer {
    /// Number of the request, from 1.
    pub request: usize,
    /// Round, from 1.
    pub round: usize,
    /// True if other requests ran at the same time.
    pub concurrent: bool,
    /// Prompt of the request.
    pub place: PromptPlace,
    /// Tokens of the prompt that the server reports as cached; `None` without a report.
    pub cached: Option<u64>,
    /// Distance from the right answer, in nats.
    pub distance: f64,
    /// Another conversation's prompt that the answer fits; `None` if it fits none.
    pub fits: Option<FittingPrompt>,
}

/// Prompt of another conversation to which an answer is the right one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FittingPrompt {
    /// The prompt.
    pub place: PromptPlace,
    /// Distance from the right answer to that prompt, in nats.
    pub distance: f64,
}

/// Result of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IsolationFinding {
    /// Outcome.
    #[serde(flatten)]
    pub outcome: IsolationOutcome,
    /// Number of the server's slots.
    pub slots: usize,
    /// Number of conversations.
    pub conversations: usize,
    /// Number of rounds with an answer.
    pub rounds: usize,
    /// Number of answers of the tested process.
    pub answers: usize,
    /// Answers whose prompt has a right answer of its own, so that another conversation's content shows.
    pub telling: usize,
    /// Measured scales.
    pub scales: IsolationScales,
    /// Least share of mixed answers, 0 to 1, that so many requests find with 95 %; `None` if nothing was decided.
    pub finds: Option<f64>,
    /// Answers that are not the right ones, in order.
    pub foreign: Vec<ForeignAnswer>,
}

impl IsolationFinding {
    /// Returns the answers with recognized content of another conversation.
    pub fn fitting(&self) -> impl Iterator<Item = (&ForeignAnswer, FittingPrompt)> {
        self.foreign.iter().filter_map(|one| Some((one, one.fits?)))
    }

    /// Returns true if conversations are mixed.
    pub fn is_mixed(&self) -> bool {
        self.outcome == IsolationOutcome::Mixed
    }
}

/// Effect of a switch on a server that mixes conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationEffect {
    /// No answer is mixed, and without the switch chance would have mixed one.
    Stops,
    /// Answers are still mixed.
    Nothing,
    /// No answer is mixed, but too few were mixed without the switch to exclude chance.
    Undecided,
}
