//! Numbers and manner of a relay.

use std::time::Duration;

use crate::answer::assemble::Kind;
use crate::answer::continuation::Transcript;
use crate::refusal::Dialect;

/// Numbers and manner of a relay.
pub(crate) struct RelayTerms {
    /// Count the work that the answer reports.
    pub(crate) tail_bytes: Option<usize>,
    /// The answer is text that was generated.
    pub(crate) generates: bool,
    /// For an event stream.
    pub(crate) events: Option<EventTerms>,
    /// How errors are spelled.
    pub(crate) dialect: Dialect,
    /// The connection may carry another request afterwards.
    pub(crate) reusable: bool,
}

/// Numbers of an event stream.
#[derive(Clone, Copy)]
pub(crate) struct EventTerms {
    /// Bytes held of an incomplete event.
    pub(crate) limit: usize,
    /// The longest silence.
    pub(crate) silence: Duration,
    /// How often a client hears of us while another backend is looked for.
    pub(crate) comment: Duration,
    /// What is kept so that another backend can go on with it.
    pub(crate) continues: Option<Continues>,
}

/// How a stream that is generated can go on by another backend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Continues {
    pub(crate) kind: Kind,
    /// Bytes of it that are kept, at most.
    pub(crate) most: usize,
    /// What it generates stands in the middle of a text.
    pub(crate) fills_in: bool,
}

impl Continues {
    pub(super) fn transcript(self) -> Transcript {
        let heard = Transcript::of(self.kind, self.most);
        if self.fills_in { heard.not_plain("what it fills in has text behind it") } else { heard }
    }
}
