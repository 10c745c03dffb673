//! Limits and modes of a relay.

use std::time::Duration;

use crate::answer::assemble::AnswerFormat;
use crate::answer::continuation::AnswerTranscript;
use crate::refusal::ErrorDialect;

pub(crate) struct RelayTerms {
    /// Bytes that may be held to read an answer's counters; `None` if the counters are not read.
    pub(crate) tail_bytes: Option<usize>,
    /// The answer is generated text.
    pub(crate) generates: bool,
    /// Limits of the stream, if the answer is an event stream.
    pub(crate) events: Option<EventTerms>,
    /// Format of error events.
    pub(crate) dialect: ErrorDialect,
    /// The connection may carry another request after this answer.
    pub(crate) reusable: bool,
}

/// Limits of an event stream.
#[derive(Clone, Copy)]
pub(crate) struct EventTerms {
    /// Most bytes held of an incomplete event.
    pub(crate) limit: usize,
    /// Longest time without data from the backend.
    pub(crate) max_silence: Duration,
    /// Interval of keep-alives while another backend is searched for.
    pub(crate) comment_interval: Duration,
    /// Terms for a continuation by another backend; `None` if the stream cannot be continued.
    pub(crate) continuation: Option<ContinuationTerms>,
}

/// Terms under which another backend can continue a generated stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContinuationTerms {
    pub(crate) kind: AnswerFormat,
    /// Most bytes of the stream that are kept.
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
