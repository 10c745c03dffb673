//! Limits and modes of a relay.

use std::time::Duration;

use crate::answer::assemble::AnswerFormat;
use crate::answer::continuation::AnswerTranscript;
use crate::refusal::ErrorDialect;

pub(crate) struct RelayTerms {
    /// Bytes held to read the counters of an answer; `None` if they are not read.
    pub(crate) tail_bytes: Option<usize>,
    /// The answer is generated text.
    pub(crate) generates: bool,
    /// Set for an event stream.
    pub(crate) events: Option<EventTerms>,
    /// Format of errors.
    pub(crate) dialect: ErrorDialect,
    /// The connection may carry another request afterwards.
    pub(crate) reusable: bool,
}

/// Limits of an event stream.
#[derive(Clone, Copy)]
pub(crate) struct EventTerms {
    /// Bytes held of an incomplete event.
    pub(crate) limit: usize,
    /// Longest time without data from the backend.
    pub(crate) max_silence: Duration,
    /// Interval of keep-alives while another backend is looked for.
    pub(crate) comment_interval: Duration,
    /// Terms of a continuation by another backend; `None` if there is none.
    pub(crate) continuation: Option<ContinuationTerms>,
}

/// Terms under which another backend can continue a generated stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContinuationTerms {
    pub(crate) kind: AnswerFormat,
    /// Bytes of the stream that are kept, at most.
    pub(crate) max_bytes: usize,
    /// The generated text is inserted into the middle of another text.
    pub(crate) fills_in: bool,
}

impl ContinuationTerms {
    pub(super) fn transcript(self) -> AnswerTranscript {
        let heard = AnswerTranscript::for_stream(self.kind, self.max_bytes);
        if self.fills_in { heard.marked_not_plain("it fills in a gap with text after it") } else { heard }
    }
}
