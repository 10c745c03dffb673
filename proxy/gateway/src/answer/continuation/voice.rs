//! Translates the events of the continuing server into events of the first stream.

use bytes::Bytes;
use serde_json::{Map, Value};
use warden_policies::WorkDone;

use super::repeat::{RepeatTranslator, UnrepeatedAnswer};
use super::rest::RestTranslator;

/// Last line of a stream in `OpenAI`'s dialect.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Members with the same value in all events of one stream, in `OpenAI`'s dialect.
pub(super) const SHARED_MEMBERS: [&str; 4] = ["id", "created", "model", "system_fingerprint"];

/// Reason why a second stream cannot continue the first.
pub(crate) type MismatchReason = &'static str;

#[derive(Debug)]
pub(crate) enum EventTranslator {
    /// The server got the tokens of the answer so far, and computes only the rest.
    Rest(RestTranslator),
    /// The server computes the whole answer again.
    Repeat(Box<RepeatTranslator>),
}

impl EventTranslator {
    pub(crate) fn repeat(repeat: RepeatTranslator) -> Self {
        Self::Repeat(Box::new(repeat))
    }

    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Rest(rest) => rest.ended,
            Self::Repeat(repeat) => repeat.is_ended,
        }
    }

    pub(crate) fn is_catching_up(&self) -> bool {
        matches!(self, Self::Repeat(repeat) if repeat.is_catching_up())
    }

    /// Returns whether another method may continue the answer if its repetition differs.
    pub(crate) fn may_continue_otherwise(&self) -> bool {
        matches!(self, Self::Repeat(repeat) if repeat.may_continue_otherwise())
    }

    /// Returns what another method needs, once.
    pub(crate) fn take_answer(&mut self) -> Option<UnrepeatedAnswer> {
        match self {
            Self::Rest(_) => None,
            Self::Repeat(repeat) => repeat.take_answer(),
        }
    }

    pub(crate) fn sequence(&self) -> Option<u64> {
        match self {
            Self::Rest(_) => None,
            Self::Repeat(repeat) => repeat.sequence,
        }
    }

    pub(crate) fn work(&self, continued: WorkDone) -> WorkDone {
        match self {
            Self::Rest(rest) => rest.work(continued),
            Self::Repeat(repeat) => repeat.work(continued),
        }
    }

    /// Returns the number of tokens of the whole answer, given the other server's number.
    pub(crate) fn total_tokens(&self, continued: u64) -> u64 {
        self.work(WorkDone { output_tokens: continued, ..WorkDone::default() }).output_tokens
    }

    pub(crate) fn translate(&mut self, whole: &[u8]) -> Result<Bytes, MismatchReason> {
        match self {
            Self::Rest(rest) => rest.translate(whole),
            Self::Repeat(repeat) => repeat.translate(whole),
        }
    }
}

/// Sets a member; an existing member keeps its position.
pub(super) fn set_member(event: &mut Map<String, Value>, name: &str, value: Value) {
    event.insert(name.to_owned(), value);
}

pub(super) fn set_shared_members(event: &mut Map<String, Value>, first: &Map<String, Value>) {
    for name in SHARED_MEMBERS {
        if let Some(value) = first.get(name) {
            set_member(event, name, value.clone());
        }
    }
}

pub(super) fn write_event(out: &mut Vec<u8>, event: &Map<String, Value>) {
    out.extend_from_slice(b"data: ");
    // Serializing cannot fail, because the value was parsed from JSON.
    drop(serde_json::to_writer(&mut *out, event));
    out.extend_from_slice(b"\n\n");
}
