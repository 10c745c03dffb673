//! Makes a verified llama-server out of upstream source, and the sample model that it verifies with.
//!
//! This crate prints nothing and reads no settings: folders, limits and pinned versions come in as values, progress
//! goes out as [`Event`]s, and a [`CancellationToken`](tokio_util::sync::CancellationToken) ends whatever runs. Patch
//! sets are read, judged and written by `warden-patches`.
//!
//! ```text
//!  Source --examine--> Found --+
//!                              +--> Plan --build--> work folder --verify--> Store
//!  PATH ---------> Compilers --+     |
//!                                    +--> BuildId: hash of everything that shapes the binary
//! ```
//!
//! | module | is for |
//! |---|---|
//! | [`source`] | finds llama.cpp in a folder, an archive or a commit and gives it an identity |
//! | [`git`] | fetches commits, reads repositories, lists ranges |
//! | [`sdist`] | obtains a pinned source archive through pip |
//! | [`toolchain`] | finds compilers and toolkits for GPUs, finds or obtains cmake and ninja |
//! | [`machine`] | disk, memory and cores |
//! | [`plan`] | what will be built, as a value with a hash |
//! | [`build`] | makes it |
//! | [`mod@verify`] | makes the result prove itself |
//! | [`store`] | keeps it, with its provenance |
//! | [`weights`] | obtains pinned model files through pip |
//! | [`sample_model`] | a tiny model with random weights, the same bytes for the same seed |
//!
//! # Invariants
//!
//! - A build is in the store whole and verified, or not at all.
//! - When a call returns, also by cancellation, no process that it started is left.
//! - Nothing from a source is written outside of its work folder.
//!
//! # Example
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use warden_builder::{
//!     Arch, Backend, Builder, Dirs, Environment, Needs, Reporter, Request, Source,
//! };
//! use warden_patches::{Catalogue, Selection};
//!
//! let (reporter, mut events) = Reporter::channel();
//! let builder = Builder {
//!     dirs: Dirs { cache: "/home/me/.cache/llama-warden".into(), data: "/home/me/.local/share/llama-warden".into() },
//!     env: Environment::from_process(),
//!     memory: || None,
//!     reporter,
//!     cancel: tokio_util::sync::CancellationToken::new(),
//! };
//! let request = Request {
//!     source: Source::at("llama.cpp.tar.gz".as_ref())?,
//!     backend: Backend::Cpu.into(),
//!     arch: Arch::Native.into(),
//!     patches: Selection { catalogue: Catalogue::embedded()?, ..Default::default() },
//!     options: vec![],
//!     jobs: None,
//!     needs: Needs { disk: 2 << 30, memory: 1 << 30, memory_per_job: 700 << 20, memory_per_gpu_job: 2 << 30 },
//!     page_timeout: Duration::from_secs(600),
//!     verify_timeout: Duration::from_secs(60),
//! };
//! let built = builder.build(&request).await?;
//! while let Ok(event) = events.try_recv() { /* show it */ }
//! assert!(built.binary.ends_with("llama-server"));
//! # Ok(()) }
//! ```

mod archive;
pub mod build;
mod clock;
mod environment;
mod error;
mod event;
pub mod gguf;
pub mod git;
mod kind;
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
mod whole;

pub use build::{Builder, Built, Dirs, Request};
pub use environment::Environment;
pub use error::{Error, Result};
pub use event::{Event, Phase, Reporter};
pub use kind::Kind;
pub use machine::Needs;
pub use plan::{AmxKernels, Arch, ArchWish, Backend, BackendWish, Plan};
pub use source::{Found, Source};
pub use store::{BuildId, Choices, Decided, Keep, Move, NoSuccessor, Provenance, Store, Sweep, succeeds};
pub use verify::{Computed, ComputedTrial, HttpThreads, Measured, StreamHead, Verified, verify};
