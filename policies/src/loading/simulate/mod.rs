//! Which rule loads models best: the same requests under our decisions and under the rules that other programs have.
//!
//! ```text
//!   Trace ──> run(rule) ──> Score: loads, bytes moved, how long requests waited
//!     │          └── Ours: Loading, as it is; Rival: count, memory, time
//!     └── made (chats, agents, nights), or from an access log
//! ```
//!
//! A model has slots; a request holds one for as long as it was answered. A model that leaves takes no request any more, ends when
//! those that it has are answered, and its memory is free a moment later. Nothing is random here: the same trace gives the same scores.

mod made;
mod rivals;
mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::made::made;
pub use self::rivals::Rival;
pub use self::run::run;

/// A model of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Bytes of memory that it needs.
    pub bytes: u64,
    /// From its start to its first answer.
    pub load: Duration,
    /// Requests at a time.
    pub slots: u32,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// When it comes.
    pub at: Duration,
    /// The number of its model.
    pub model: usize,
    /// How long its answer takes.
    pub takes: Duration,
}

/// Requests for several models that share one memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// What happens in it, in some words.
    pub name: String,
    /// Bytes of the memory.
    pub memory: u64,
    /// The models.
    pub models: Vec<Tenant>,
    /// The requests, by the time at which they come.
    pub requests: Vec<Request>,
}

/// How a rule did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Models loaded.
    pub loads: u64,
    /// Bytes loaded.
    pub bytes: u64,
    /// Half of the requests waited no longer than this before their answer began.
    pub median: Duration,
    /// 99 of 100.
    pub p99: Duration,
    /// All of them.
    pub longest: Duration,
    /// Requests that were never answered.
    pub unserved: usize,
}

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// We do.
    Ours,
    /// Another program's rule.
    Rival(Rival),
}

impl Rule {
    /// All of them, for this trace.
    pub fn all(trace: &Trace) -> Vec<Self> {
        let rivals = [
            Rival::Count(rivals::safe_count(trace)),
            Rival::Idle(Duration::from_secs(300)),
            Rival::OneOfAGroup,
        ];
        std::iter::once(Self::Ours).chain(rivals.map(Self::Rival)).collect()
    }

    /// Its name for people.
    pub fn name(self) -> String {
        match self {
            Self::Ours => "llama-warden".to_owned(),
            Self::Rival(rival) => rival.name(),
        }
    }
}
