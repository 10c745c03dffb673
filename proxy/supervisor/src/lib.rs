//! Owns llama-server processes: starts them, probes them, hands out the right to use them, watches their memory,
//! replaces them and keeps a record of it.
//!
//! # Theory of operation
//!
//! ```text
//!   gateway --lease()--> Shared (one lock per model: queue, leases, generations) --wakes--> model task
//!                                                                                             |
//!   main thread: Nursery <---spawn--- World (processes, probes, /proc) <---acts through------+
//!                                                                                             |
//!   status, metrics <--- FleetView (watch) ; events, logs (rings) ; ledger (file) <---tells--+
//! ```
//!
//! * Nobody asks whether a backend is ready in order to then use it: [`Fleet::lease`] waits for the right to send one
//!   request to one generation, and a [`Lease`] is that right.
//! * Every model has one task. It alone owns the [`warden_policies::lifecycle::Machine`]s of its processes, carries out
//!   their effects and arms their timers. Helper tasks only report, and their reports carry the generation, so a late
//!   one about an old process is recognised and ignored.
//! * Everything that the task reads before it acts, it reads in the same step: what may change meanwhile is judged again
//!   at every turn of its loop.
//!
//! # Invariants
//!
//! * Leases are granted only on generations that answered a probe, never on one that drains.
//! * Every caller of [`Fleet::lease`] is answered: with a lease, a reason, or by its own leaving.
//! * Every child is reaped, and its whole process group is gone when it is.
//! * [`Fleet::shutdown`] ends within its deadline, the stop grace and a little.
//!
//! | module | job |
//! |---|---|
//! | [`spec`], [`view`] | what comes in, what is shown |
//! | [`nursery`] | the main thread, which alone forks |
//! | [`private_dir`] | the directory for sockets: made by us, removed file by file |
//! | [`fleet`] | the models by name; reload; shutdown |
//! | [`lease`] | the right to use a generation |
//! | [`solo`] | one process outside of any fleet, for experiments |
//! | [`event`], [`log`], [`ledger`] | what is told and kept |
//! | [`error`] | why something was refused |

pub mod error;
pub mod event;
pub mod fleet;
pub mod lease;
pub mod ledger;
pub mod log;
pub mod nursery;
pub mod private_dir;
pub mod solo;
pub mod spec;
pub mod view;

mod admit;
mod backend_http;
mod backend_slots;
mod census;
mod child;
mod clock;
mod context;
mod directories;
mod discreet;
mod elf;
mod failure;
mod gpus;
mod hints;
mod kept;
mod libraries;
mod lines;
mod listening;
mod model;
mod needs;
mod outcomes;
mod population;
mod priors;
mod process;
mod publish;
mod pulse;
mod record;
mod report;
mod settings;
mod shared;
mod spawn;
mod sync;

pub use admit::{Size, Weighed};
pub use error::{ControlError, Denied, FleetError, NoRoom, ResolveError, SpawnError};
pub use event::{Event, EventKind, EventTail};
pub use fleet::{ApplyReport, Fleet};
pub use lease::{Asked, Endpoint, Lease, Outcome};
pub use ledger::{Evidence, LedgerEntry, Mode};
pub use log::{LogLine, LogTail, Stream};
pub use nursery::{Child, Exit, Nursery, NurseryHandle, SpawnRequest};
pub use priors::remember;
pub use private_dir::PrivateDir;
pub use shared::Alone;
pub use solo::{Solo, SoloOutput, SoloProps, SoloReading, SoloSpec, Starter};
pub use spec::*;
pub use view::*;
pub use warden_policies::dispatch::LeaseKind;
pub use warden_policies::quarantine::{Fingerprint, QuarantinePolicy, Standing};
