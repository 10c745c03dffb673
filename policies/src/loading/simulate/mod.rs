//! How requests for several models would fare under our decisions: a recorded [`Trace`] is played, and the [`Score`]
//! says how often models were loaded and how long requests waited.
//!
//! A model has slots; a request holds one until it is answered. A model that is being unloaded takes no request any
//! more, ends when those that it has are answered, and its memory is free a moment later. Nothing is random here: the
//! same trace gives the same score.

mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use self::run::run;

/// A model of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// The model's name.
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
    /// A description in some words.
    pub name: String,
    /// Bytes of the memory.
    pub memory: u64,
    /// The models.
    pub models: Vec<Tenant>,
    /// The requests, by the time at which they come.
    pub requests: Vec<Request>,
}

/// The result of a trace.
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
