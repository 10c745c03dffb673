//! Owns llama-server processes: starts and probes them, grants leases on them, watches their memory,
//! replaces them and records it.
//!
//! # Theory of operation
//!
//! ```text
//!   gateway --lease()--> Leases (one lock per model: queue, leases, generations) --wakes--> model task
//!                                                                                             |
//!   main thread: Nursery <---spawn--- World (processes, probes, /proc) <---acts through------+
//!                                                                                             |
//!   status, metrics <--- FleetView (watch) ; events, logs (rings) ; ledger (file) <--writes--+
//! ```
//!
//! * No caller checks whether a backend is ready and then sends to it. [`Fleet::lease_for`] waits until one
//!   request may be sent to one generation (one process of a model); the returned [`Lease`] is that right.
//! * Each model has one task. Only this task owns the
//!   [`warden_policies::lifecycle::LifecycleMachine`]s of the model's processes, carries out their effects
//!   and arms their timers. Helper tasks only send reports. Each report names the generation, so that a
//!   late report about an old process is ignored.
//! * When the task takes an action, it reads all inputs of the action in that step. Inputs that may change
//!   later are judged again at every turn of the task's loop.
//!
//! # Invariants
//!
//! * Leases are granted only on generations that answered a probe, never on one that drains.
//! * Each call of [`Fleet::lease_for`] gets a lease or a reason, unless its caller leaves.
//! * Every child process is reaped, and by then its whole process group is gone.
//! * [`Fleet::shutdown`] ends within its deadline plus the stop grace, with a small margin.
//!
//! docs/architecture.md lists the folders: each uses only those below it.

mod clock;
pub mod error;
pub mod fleet;
pub mod lease;
mod memory;
mod model;
mod origin;
mod process;
mod remote;
pub mod solo;
pub mod spec;
pub mod start_search;
mod state;
pub mod sync;
pub mod view;
mod worker_threads;

pub use error::{
    BackendFailure, CanaryError, ControlError, FailureKind, FleetError, LeaseDenied, NoRoom, ResolveError,
    SpawnError,
};
pub use fleet::handover::{
    FleetHandover, FleetWill, FrozenFleet, RemainingWork, RemoteCount, SlotShares, WillPiece,
};
pub use fleet::{CanaryRoute, Fleet};
pub use lease::Lease;
pub use lease::admit::{PromptFit, PromptSize};
pub use lease::cell::LeaseAddress;
pub use lease::outcomes::ExchangeOutcome;
pub use lease::pulse::SentRequest;
pub use lease::queue::ask::{NextProcess, PromptFacts};
pub use lease::queue::ward::SolitudeResult;
pub use lease::refused::ModelRefusal;
pub use lease::turns::ConversationTurn;
pub use memory::leak_history::{KnownMemory, known_memory, remember_start};
pub use origin::{EndpointStream, RemoteOrigin};
pub use process::child::ChildProcess;
pub use process::directories::restore_directory;
pub use process::endpoint::ListenAddress;
pub use process::group::ProcessExit;
pub use process::heir::OpenGate;
pub use process::hints::{no_slot_files, stays_cold};
pub use process::host::has_gpu;
pub use process::needs::AnswerIdentity;
pub use process::nursery::{NurseryHandle, ProcessNursery};
pub use process::private_dir::PrivateDir;
pub use process::root::family::InstanceOrder;
pub use process::root::{SuccessorProgram, instance_pid, set_root, wire};
pub use process::spawn::{SUCCESSION_VARIABLE, Succession};
pub use process::touch::AnswerText;
pub use process::{ServerProps, nursery, private_dir, regular_file, trusted_path};
pub use solo::{SoloProcess, SoloReading, SoloSpec, SoloStarter};
pub use spec::*;
pub use start_search::StartSearchRun;
pub use state::line_file::{LineFile, line_files, open_lines};
pub use state::{StateKind, StateView, StateWriter, is_tolerable};
pub use view::entry::{
    CanaryEntry, CanaryKind, CanaryState, CanaryView, PinEntry, PinKind, PinView, ReclaimEntry, ReclaimKind,
};
pub use view::event::{ApplyReport, EventKind, EventTail, FleetEvent};
pub use view::ledger::{LedgerEntry, ReplacementEvidence, ReplacementMode};
pub use view::log::{LogLine, LogTail, OutputStream};
pub use view::ready_since::ReadySince;
pub use view::*;
pub use warden_policies::dispatch::LeaseKind;
pub use warden_policies::quarantine::{QuarantinePolicy, RequestFingerprint, RequestStanding};
pub use worker_threads::{
    PendingWork, WorkError, WorkKind, finish_jobs, resolve_host, run_detached, run_job, start_worker_threads,
};
