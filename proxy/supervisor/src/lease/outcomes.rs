//! What the ends of one generation's exchanges tell about its health: errors in a row, speeds of decoding, the largest
//! prompt. Facts only, in bounded space; what follows from them is judged elsewhere.
//!
//! ```text
//!   2xx, no compute error -> the streak ends          compute error (5xx, or within a 2xx stream) -> streak + 1
//!   4xx, other 5xx        -> neither: llama-server answers many mistakes of clients with a 500
//! ```

use std::collections::VecDeque;

/// Speeds kept until somebody reads them: more than any number of slots ends between two samples.
const KEPT: usize = 256;

/// How an exchange with a backend ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The status of its answer; `None` if it gave none.
    pub status: Option<u16>,
    /// The backend itself said that computing failed (`compute error` in a 500 or in the stream): with a poisoned GPU
    /// context every answer does.
    pub compute_error: bool,
    /// Prompt tokens of this request, cached ones included; `None` if the answer did not tell.
    pub prompt: Option<u64>,
    /// Tokens generated and the milliseconds that this took, from `timings`; `None` if the answer did not tell.
    pub decode: Option<(u64, f64)>,
    /// Prompt tokens evaluated, without cached ones, and the milliseconds that this took; `None` if the answer did not tell.
    pub prefill: Option<(u64, f64)>,
}

/// How fast one prompt was evaluated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prefill {
    /// Tokens evaluated, 1 or more.
    pub(crate) new: u64,
    /// With those that the cache spared.
    pub(crate) all: u64,
    /// Milliseconds that they took.
    pub(crate) ms: f64,
}

/// How fast one answer was generated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decode {
    /// Tokens generated, 1 or more.
    pub(crate) tokens: u64,
    /// Milliseconds that they took, above 0.
    pub(crate) ms: f64,
    /// Leases that the generation held when the answer ended, this one included: what shared the hardware with it.
    pub(crate) busy: u32,
}

/// The outcomes of one generation.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    compute_errors: u32,
    decodes: VecDeque<Decode>,
    prefills: VecDeque<Prefill>,
    largest_prompt: u64,
}

impl Outcomes {
    /// Takes one in; `busy` as in [`Decode`].
    pub(crate) fn note(&mut self, outcome: &Outcome, busy: u32) {
        let succeeded = outcome.status.is_some_and(|status| (200..300).contains(&status));
        if outcome.compute_error {
            self.compute_errors = self.compute_errors.saturating_add(1);
        } else if succeeded {
            self.compute_errors = 0;
        }
        self.largest_prompt = self.largest_prompt.max(outcome.prompt.unwrap_or(0));
        if let Some((tokens, ms)) = outcome.decode
            && succeeded
            && !outcome.compute_error
            && tokens > 0
            && ms.is_finite()
            && ms > 0.0
        {
            if self.decodes.len() == KEPT {
                self.decodes.pop_front();
            }
            self.decodes.push_back(Decode { tokens, ms, busy });
        }
        if let Some((new, ms)) = outcome.prefill
            && succeeded
            && !outcome.compute_error
            && new > 0
        {
            if self.prefills.len() == KEPT {
                self.prefills.pop_front();
            }
            let all = outcome.prompt.unwrap_or(new).max(new);
            self.prefills.push_back(Prefill { new, all, ms });
        }
    }

    /// Compute errors since the last success.
    pub(crate) fn compute_errors(&self) -> u32 {
        self.compute_errors
    }

    /// The speeds since the last call, oldest first.
    pub(crate) fn take_decodes(&mut self) -> Vec<Decode> {
        self.decodes.drain(..).collect()
    }

    /// Prompts since the last call, oldest first.
    pub(crate) fn take_prefills(&mut self) -> Vec<Prefill> {
        self.prefills.drain(..).collect()
    }

    /// Tokens of the largest prompt so far.
    pub(crate) fn largest_prompt(&self) -> u64 {
        self.largest_prompt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(status: u16, compute_error: bool) -> Outcome {
        Outcome { status: Some(status), compute_error, ..Outcome::default() }
    }

    #[test]
    fn only_a_success_ends_a_streak_of_compute_errors() {
        let mut outcomes = Outcomes::default();
        for (outcome, streak) in [
            (ended(500, true), 1),
            (ended(400, false), 1),
            (ended(500, false), 1),
            (Outcome::default(), 1),
            // A stream that had begun well.
            (ended(200, true), 2),
            (ended(200, false), 0),
            (ended(500, false), 0),
            (ended(500, true), 1),
        ] {
            outcomes.note(&outcome, 1);
            assert_eq!(outcomes.compute_errors(), streak, "{outcome:?}");
        }
    }

    #[test]
    fn speeds_are_handed_over_once_and_kept_in_bounds() {
        let mut outcomes = Outcomes::default();
        let told = |tokens, ms| Outcome { decode: Some((tokens, ms)), ..ended(200, false) };
        for tokens in 1..=300 {
            outcomes.note(&told(tokens, 10.0), 2);
        }
        for senseless in [told(0, 5.0), told(5, 0.0), told(5, f64::NAN), told(5, f64::INFINITY)] {
            outcomes.note(&senseless, 1);
        }
        outcomes.note(&Outcome { compute_error: true, ..told(7, 1.0) }, 1);
        let decodes = outcomes.take_decodes();
        assert_eq!(decodes.len(), KEPT);
        assert_eq!(decodes.last(), Some(&Decode { tokens: 300, ms: 10.0, busy: 2 }));
        assert_eq!(outcomes.take_decodes(), []);
    }

    #[test]
    fn the_largest_prompt_stays() {
        let mut outcomes = Outcomes::default();
        for prompt in [Some(5), Some(900), None, Some(20)] {
            outcomes.note(&Outcome { prompt, ..ended(200, false) }, 1);
        }
        assert_eq!(outcomes.largest_prompt(), 900);
    }
}
