//! Lengths of the texts that processes are sent. All compared processes get the same texts, so the first
//! process sets the lengths. Otherwise builds with other default slots, or a count that came too late,
//! would lead to other texts.

use serde::{Deserialize, Serialize};
use warden_supervisor::SoloProcess;

use crate::client::{LabClient, LabRequestError};
use crate::lab::Lab;
use crate::workload::{SAMPLE_WORDS, ServerLimits, TextGenerator};

/// Lengths for all compared processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextLengths {
    /// Tokens of a text of a known number of words; 0 where a server does not count.
    tokens: u32,
    /// Tokens of context in a slot; `None` if unknown.
    n_ctx: Option<u64>,
}

impl TextLengths {
    /// Measures a process.
    pub(super) async fn measure(
        lab: &Lab,
        solo: &SoloProcess,
        client: &LabClient,
    ) -> Result<Self, LabRequestError> {
        let counted = client.count_tokens(&TextGenerator::sample(), lab.numbers.question_limit).await;
        Self::from_count(counted, solo.props().n_ctx)
    }

    /// A server that refuses to count does so each time, so a refusal counts as 0. A count that came too late
    /// is an error: the next process might count in time, and would get other texts.
    fn from_count(
        counted: Result<u32, LabRequestError>,
        n_ctx: Option<u64>,
    ) -> Result<Self, LabRequestError> {
        match counted {
            Ok(tokens) => Ok(Self { tokens, n_ctx }),
            Err(LabRequestError::Refused { .. }) => Ok(Self { tokens: 0, n_ctx }),
            Err(error) => Err(error),
        }
    }

    /// The lengths as facts of a server.
    pub(super) fn facts(self, slots: u32) -> ServerLimits {
        let tokens_per_word = f64::from(self.tokens) / f64::from(SAMPLE_WORDS);
        ServerLimits { slots, n_ctx: self.n_ctx, tokens_per_word }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proof::questions;
    use std::time::Duration;
    use warden_supervisor::SoloProps;

    #[test]
    fn a_count_that_came_too_late_is_no_count_of_zero() {
        let late = Err(LabRequestError::Late(Duration::from_secs(5)));
        assert_eq!(TextLengths::from_count(late, None), Err(LabRequestError::Late(Duration::from_secs(5))));
        let refused = Err(LabRequestError::Refused { status: 501, message: String::new() });
        assert_eq!(TextLengths::from_count(refused, Some(9)), Ok(TextLengths { tokens: 0, n_ctx: Some(9) }));
    }

    #[test]
    fn what_is_kept_asks_the_same() {
        let all = warden_policies::defaults();
        let asked = |lengths: TextLengths, slots| -> Vec<_> {
            let questions = questions::all_questions(
                &all.diagnose,
                &all.proof,
                lengths.facts(slots),
                SoloProps::default(),
            );
            questions.unwrap().into_iter().map(|question| question.ask).collect()
        };
        let first = TextLengths { tokens: 301, n_ctx: Some(1000) };
        let kept: TextLengths = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
        assert_eq!(asked(kept, 4), asked(first, 1), "whatever else another build has");
        // Other lengths would give other texts.
        assert_ne!(asked(TextLengths { tokens: 0, ..first }, 1), asked(first, 1));
        assert_ne!(asked(TextLengths { n_ctx: Some(250), ..first }, 1), asked(first, 1));
    }
}
