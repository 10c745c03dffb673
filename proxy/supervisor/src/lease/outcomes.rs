//! Health figures from the completed requests of one generation. They take bounded space; other modules judge
//! them.
//!
//! ```text
//!   2xx, no compute error -> the streak ends      compute error (5xx, or within a 2xx stream) -> streak + 1
//!   4xx, other 5xx        -> no effect: llama-server answers many client mistakes with a 500
//! ```

use std::collections::VecDeque;

use warden_policies::WorkDone;
use warden_policies::health::{AnswerRuns, HealthSymptom};

/// Limit of unread speeds: more answers never end between two samples.
const SPEEDS_KEPT: usize = 256;

/// Outcome of a request to a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExchangeOutcome {
    /// Status of the answer; `None` without an answer.
    pub status: Option<u16>,
    /// True if the backend reported a failed computation (`compute error`). With a poisoned GPU context,
    /// every later answer reports it.
    pub compute_error: bool,
    /// Prompt tokens with cached ones, if reported.
    pub prompt: Option<u64>,
    /// Generated tokens and their milliseconds, if reported.
    pub decode: Option<(u64, f64)>,
    /// Evaluated prompt tokens and their milliseconds, if reported.
    pub prefill: Option<(u64, f64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PrefillSpeed {
    /// Evaluated tokens, at least 1.
    pub(crate) new: u64,
    /// Prompt tokens with cached ones.
    pub(crate) all: u64,
    pub(crate) ms: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DecodeSpeed {
    pub(crate) tokens: u64,
    pub(crate) ms: f64,
    /// Requests that shared the hardware at the end of the answer, with this one.
    pub(crate) busy: u32,
}

#[derive(Debug, Default)]
pub(crate) struct OutcomeStats {
    pub(super) work: WorkDone,
    /// Compute errors since the last successful answer.
    pub(crate) compute_errors: u32,
    /// Speeds that no reading has taken, oldest first.
    pub(crate) decodes: VecDeque<DecodeSpeed>,
    pub(crate) prefills: VecDeque<PrefillSpeed>,
    /// Faulty answers since the last sound one.
    pub(crate) answers: AnswerRuns,
    /// Symptom found by `answers`.
    pub(crate) faulty_answers: Option<HealthSymptom>,
    /// True if the latest answers are a reason to test the process.
    pub(crate) are_unusual: bool,
    /// Tokens of the largest prompt, with cached ones.
    pub(crate) largest_prompt: u64,
}

impl OutcomeStats {
    /// `busy`: see [`DecodeSpeed::busy`].
    pub(crate) fn note(&mut self, outcome: &ExchangeOutcome, busy: u32) {
        let succeeded = outcome.status.is_some_and(|status| (200..300).contains(&status));
        if outcome.compute_error {
            self.compute_errors = self.compute_errors.saturating_add(1);
        } else if succeeded {
            self.compute_errors = 0;
        }
        self.largest_prompt = self.largest_prompt.max(outcome.prompt.unwrap_or(0));
        if !succeeded || outcome.compute_error {
            return;
        }
        if let Some((tokens, ms)) = outcome.decode
            && tokens > 0
            && ms.is_finite()
            && ms > 0.0
        {
            push_bounded(&mut self.decodes, DecodeSpeed { tokens, ms, busy });
        }
        if let Some((new, ms)) = outcome.prefill
            && new > 0
        {
            let all = outcome.prompt.unwrap_or(new).max(new);
            push_bounded(&mut self.prefills, PrefillSpeed { new, all, ms });
        }
    }
}

fn push_bounded<T>(speeds: &mut VecDeque<T>, speed: T) {
    if speeds.len() == SPEEDS_KEPT {
        speeds.pop_front();
    }
    speeds.push_back(speed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(status: u16, compute_error: bool) -> ExchangeOutcome {
        ExchangeOutcome { status: Some(status), compute_error, ..ExchangeOutcome::default() }
    }

    #[test]
    fn only_a_success_ends_a_streak_of_compute_errors() {
        let mut outcomes = OutcomeStats::default();
        for (outcome, streak) in [
            (ended(500, true), 1),
            (ended(400, false), 1),
            (ended(500, false), 1),
            (ExchangeOutcome::default(), 1),
            // A stream that began successfully.
            (ended(200, true), 2),
            (ended(200, false), 0),
            (ended(500, false), 0),
            (ended(500, true), 1),
        ] {
            outcomes.note(&outcome, 1);
            assert_eq!(outcomes.compute_errors, streak, "{outcome:?}");
        }
    }

    #[test]
    fn speeds_are_handed_over_once_and_kept_in_bounds() {
        let mut outcomes = OutcomeStats::default();
        let told = |tokens, ms| ExchangeOutcome { decode: Some((tokens, ms)), ..ended(200, false) };
        for tokens in 1..=300 {
            outcomes.note(&told(tokens, 10.0), 2);
        }
        for senseless in [told(0, 5.0), told(5, 0.0), told(5, f64::NAN), told(5, f64::INFINITY)] {
            outcomes.note(&senseless, 1);
        }
        outcomes.note(&ExchangeOutcome { compute_error: true, ..told(7, 1.0) }, 1);
        let decodes = std::mem::take(&mut outcomes.decodes);
        assert_eq!(decodes.len(), SPEEDS_KEPT);
        assert_eq!(decodes.back(), Some(&DecodeSpeed { tokens: 300, ms: 10.0, busy: 2 }));
        assert_eq!(outcomes.decodes, []);
    }

    #[test]
    fn the_largest_prompt_stays() {
        let mut outcomes = OutcomeStats::default();
        for prompt in [Some(5), Some(900), None, Some(20)] {
            outcomes.note(&ExchangeOutcome { prompt, ..ended(200, false) }, 1);
        }
        assert_eq!(outcomes.largest_prompt, 900);
    }
}
