//! Experiments with fresh llama-servers: one process, one kind of work, and the verdict on its memory.
//!
//! ```text
//!   Experiment ── leg by leg ──> run_leg ── SoloStarter ──> a fresh process
//!                                   │ workload ──> requests ──> client ──> answers
//!                                   │ idle ──> reading ──> LegJudge
//!                                   └──> LegResult ──┐
//!   ExperimentOutcome <── blame, over all legs <─────┘──> report: JSON, Markdown
//! ```
//!
//! [`warden_supervisor::solo`] starts processes; [`warden_experiment`] gives verdicts. Nothing is printed:
//! the caller receives the progress.
//!
//! | module | part |
//! |---|---|
//! | [`lab`] | everything that legs share |
//! | [`leg`] | one leg, from start to stop |
//! | [`experiment`] | several legs and their combined result |
//! | [`cure`] | experiments with switches and without, to find switches that stop the growth, or a crash |
//! | [`between`] | experiments over a line of revisions, to find the one that introduced a symptom |
//! | [`proof`] | tests if one build may replace another |
//! | [`isolation`] | tests if a server mixes conversations |
//! | `workload` | content of requests: texts, pictures, sounds, conversations |
//! | `client` | one request and its answer |
//! | [`report`] | reports of an experiment: JSON, and a folder to share |
//! | [`shell`] | words of a command line |
//! | [`error`] | errors of legs |

pub mod between;
pub mod cure;
pub mod error;
pub mod experiment;
pub mod isolation;
pub mod lab;
pub mod leg;
pub mod proof;
pub mod report;
pub mod shell;

mod client;
mod workload;

pub use error::DiagnoseError;
pub use experiment::{Experiment, ExperimentOutcome, SkippedWorkload, without_prompt_cache};
pub use lab::Lab;
pub use leg::{LegProgress, LegResult, LegSpec};
pub use report::{DiagnoseReport, ExperimentSetup};
