//! Experiments with fresh llama-servers: one process, one kind of work, and what its memory does.
//!
//! ```text
//!   Experiment ── leg by leg ──> run_leg ── Starter ──> a fresh process
//!                                   │ workload ──> requests ──> client ──> answers
//!                                   │ idle ──> reading ──> Judge
//!                                   └──> LegResult ──┐
//!   Outcome <── who pays, over all legs together <───┘──> report: JSON, HTML
//! ```
//!
//! It starts processes through [`warden_supervisor::solo`], leaves every judgement to [`warden_policies::experiment`], and
//! shows nothing: whoever runs it is told of its progress.
//!
//! | module | part |
//! |---|---|
//! | [`lab`] | what all legs share |
//! | [`leg`] | one leg, from start to stop |
//! | [`experiment`] | leg after leg, and what they say together |
//! | [`cure`] | the same with switches and without, until it is known which ones stop the growth, or a crash |
//! | [`between`] | the same for the revisions of a line: which one brought it |
//! | [`proof`] | whether one build may take the place of another |
//! | [`headroom`] | prompts up to the context, and what they take |
//! | `workload` | what is asked: texts, pictures, sounds, conversations |
//! | [`replay`] | recorded requests |
//! | [`redact`] | requests without what they say, for recordings |
//! | `client` | one request and its answer |
//! | [`report`] | what is kept of an experiment: JSON, and a page with plots |
//! | [`shell`] | words of a command line |
//! | [`error`] | why a leg could not be run |

pub mod between;
pub mod cure;
pub mod error;
pub mod experiment;
pub mod headroom;
pub mod lab;
pub mod leg;
pub mod proof;
pub mod redact;
pub mod replay;
pub mod report;
pub mod shell;

mod client;
mod workload;

pub use error::DiagnoseError;
pub use experiment::{Experiment, Outcome, Skipped, without_prompt_cache};
pub use lab::Lab;
pub use leg::{Leg, LegResult, Progress};
pub use redact::Redactor;
pub use replay::Recording;
pub use report::{About, Report};
