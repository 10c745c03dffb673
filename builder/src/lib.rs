//! Builds a verified llama-server from upstream source, and the sample model for its verification.
//!
//! This crate prints nothing and reads no configuration. Folders, limits and pinned versions are parameters;
//! progress is reported as [`BuildEvent`]s. `warden-patches` reads, judges and applies patch sets.
//!
//! ```text
//!  BuildSource --examine--> ExaminedSource --+
//!                                            +--> BuildPlan --build--> work folder --verify--> BuildStore
//!  PATH ------------------> BuildCompilers --+     |
//!                                                  +--> BuildId: hash of everything that shapes the binary
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`source`] | finds llama.cpp in a folder, an archive or a commit, and identifies it |
//! | [`git`] | fetches commits, reads repositories, lists ranges |
//! | [`sdist`] | obtains a pinned source archive through pip |
//! | [`toolchain`] | finds compilers and GPU toolkits, finds or obtains cmake and ninja |
//! | [`machine`] | checks disk, memory and cores |
//! | [`plan`] | describes a build as a hashed value |
//! | [`Builder`] | executes a plan |
//! | [`mod@verify`] | verifies the result |
//! | [`store`] | keeps builds with their provenance |
//! | [`weights`] | obtains pinned model files through pip |
//! | [`sample_model`] | writes a tiny model with random weights, reproducible by seed |
//!
//! # Invariants
//!
//! - A build is in the store complete and verified, or not at all.
//! - When a call returns, even after cancellation, none of its processes is left.
//! - A source's files are written only into the work folder of its build.

mod archive;
mod build;
mod builder;
mod clock;
mod environment;
mod error;
mod event;
pub mod gguf;
pub mod git;
mod lock;
pub mod machine;
mod owned;
pub mod plan;
mod process;
pub mod prove;
pub mod sample_model;
pub mod sdist;
pub mod source;
pub mod store;
pub mod toolchain;
pub mod verify;
pub mod weights;

pub use builder::{BuildRequest, Builder, BuilderDirs, StoredBuild};
pub use environment::BuildEnvironment;
pub use error::{BuilderError, ErrorClass, Result};
pub use event::{BuildEvent, BuildPhase, EventReporter};
pub use machine::MachineNeeds;
pub use plan::{AmxKernels, ArchChoice, BackendChoice, BuildPlan, ComputeBackend, CpuTarget};
pub use process::RunPriority;
pub use source::{BuildSource, ExaminedSource};
pub use store::{
    BuildChoices, BuildDecision, BuildId, BuildMove, BuildStore, GcKeep, GcPlan, Provenance,
    SuccessorObstacle, check_successor,
};
pub use verify::{
    ComputeResults, ComputedTrial, HttpThreads, ServerBehaviour, StreamHead, VerifyResults, verify,
};
