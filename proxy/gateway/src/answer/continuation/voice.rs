//! How the events of another server become those of the stream that it goes on with.

use bytes::Bytes;
use serde_json::{Map, Value};
use warden_policies::Work;

use super::repeat::Repeat;
use super::rest::Rest;

/// The end of a stream in `OpenAI`'s dialect.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// What all events of one stream have in common, in that dialect.
pub(super) const SAME: [&str; 4] = ["id", "created", "model", "system_fingerprint"];

/// Why a continuation is none.
pub(crate) type Why = &'static str;

/// In which way the other server goes on.
#[derive(Debug)]
pub(crate) enum Voice {
    /// It was told the tokens of the answer so far.
    Rest(Rest),
    /// It computes the whole answer once more.
    Repeat(Repeat),
}

impl Voice {
    /// Whether the answer has its end.
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            Self::Rest(rest) => rest.has_ended(),
            Self::Repeat(repeat) => repeat.has_ended(),
        }
    }

    /// Whether the other server is not yet where the first one was.
    pub(crate) fn is_catching_up(&self) -> bool {
        matches!(self, Self::Repeat(repeat) if repeat.is_catching_up())
    }

    /// The number of the last event that the client has, where they are numbered.
    pub(crate) fn sequence(&self) -> Option<u64> {
        match self {
            Self::Rest(_) => None,
            Self::Repeat(repeat) => repeat.sequence(),
        }
    }

    /// The work of the whole answer, of which that of the other server is known.
    pub(crate) fn work(&self, continued: Work) -> Work {
        match self {
            Self::Rest(rest) => rest.work(continued),
            Self::Repeat(repeat) => repeat.work(continued),
        }
    }

    /// Tokens of the whole answer, if the other server has generated so many.
    pub(crate) fn tokens(&self, continued: u64) -> u64 {
        self.work(Work { output_tokens: continued, ..Work::default() }).output_tokens
    }

    /// Whole events of the other server, as the client gets them.
    pub(crate) fn say(&mut self, whole: &[u8]) -> Result<Bytes, Why> {
        match self {
            Self::Rest(rest) => rest.say(whole),
            Self::Repeat(repeat) => repeat.say(whole),
        }
    }
}

/// Puts a value in, at the place of the one that was there.
pub(super) fn set(event: &mut Map<String, Value>, name: &str, value: Value) {
    event.insert(name.to_owned(), value);
}

pub(super) fn put(out: &mut Vec<u8>, event: &Map<String, Value>) {
    out.extend_from_slice(b"data: ");
    // Values that were read can be written.
    drop(serde_json::to_writer(&mut *out, event));
    out.extend_from_slice(b"\n\n");
}
