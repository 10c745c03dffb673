//! Messages to a model's task: reports of its helper tasks, each about one generation, and requests of
//! operators and of the fleet.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::WarmthReport;
use warden_policies::{GenerationId, ModelName, ServerFacts};

use super::bequeath::ModelWill;
use super::recipe::ProcessRecipe;
use super::warm::pack::SavedSlots;
use super::warm::unpack::WarmingResult;
use crate::error::{ControlError, SpawnError};
use crate::lease::refused::ModelRefusal;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::tracker::ReadingContext;
use crate::process::failure::OomEvidence;
use crate::process::group::ProcessExit;
use crate::process::heir::OpenGate;
use crate::process::needs::NeedsCheck;
use crate::process::reclaim_file::ReclaimResult;
use crate::process::{BackendProcess, ProbeResult, ProcessSample, ServerProps};
use crate::spec::{RemoteSpec, SharedSpec, WatchConfig};
use crate::view::ledger::LedgerEntry;
use crate::view::pin_entry::PinView;
use crate::view::reclaim_entry::ReclaimEntry;

/// Name of the operator who requested an action, if known; written to the ledger.
pub(crate) type RequestedBy = Option<Arc<str>>;

/// A message to a model's task.
#[derive(Debug)]
pub(crate) enum TaskMessage {
    /// Report of a helper. Reports about generations that are gone are ignored.
    Report(GenerationId, HelperReport),
    /// A check of the files that a process with this recipe needs has ended.
    Looked(Box<ProcessRecipe>, NeedsCheck),
    /// The start search with this number has ended.
    StartSearched(u64, Box<StartFinding>),
    /// Request of an operator, a reload or the shutdown.
    Control(ControlMessage),
    /// Question of the watchdog: a task that is alive answers.
    Beat(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(crate) enum HelperReport {
    /// The process was created, or could not be.
    Spawned(Result<Arc<dyn BackendProcess>, SpawnError>),
    /// The process wrote an output line that may contain memory sizes.
    MemoryLine(String, OwnedSemaphorePermit),
    /// The process logged a crash.
    CrashLogged(OwnedSemaphorePermit),
    /// The probe that was sent at this time has ended.
    Probed {
        sent: Instant,
        health: ProbeResult,
        /// Properties of the process, requested after the first probe that finds it ready.
        props: Option<ServerProps>,
        /// VRAM in bytes, read after the probe that finds a successor ready; `None` if not read or unknown.
        vram: Option<u64>,
        /// Descriptions of client settings that could not be applied to the process.
        unset: Vec<String>,
        /// Result of carrying over conversations from the predecessor, if that was tried.
        warmed: Option<Box<WarmingResult>>,
    },
    /// The drained process has saved its slots.
    Packed(Box<SavedSlots>),
    /// Warming with the predecessor's conversations, which began after the gate opened, is over.
    Warmed(Box<WarmthReport>),
    /// Descriptions of client settings, made in other processes, that could not be applied to this one.
    SettingsFailed(Vec<String>),
    /// The needed files were checked just before the process was created.
    Looked(NeedsCheck),
    /// The starting process has made no progress for this time.
    Stalled(Duration),
    /// The process has ended and is reaped. After a SIGKILL, the second value says if lack of memory was
    /// the reason.
    Exited(ProcessExit, OomEvidence),
    /// Amount of memory that came back after the process had ended.
    MemoryReturned(ReturnedMemory),
    /// A reading of the process's memory has ended; values that could not be read are missing.
    Sampled { taken: ReadingContext, sample: Box<ProcessSample> },
    /// Result of a reclaim request.
    Reclaimed(Box<ReclaimResult>),
}

#[derive(Debug)]
pub(crate) enum ControlMessage {
    Restart(RequestedBy, oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>),
    Drain(oneshot::Sender<Result<(), ControlError>>),
    /// Ask the processes to give memory back.
    Reclaim(RequestedBy, oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>),
    /// Pin (true) or unpin (false) the model for the named operator.
    Pin(bool, Arc<str>, oneshot::Sender<Result<PinView, ControlError>>),
    /// New settings. Answered with true if processes are replaced because of them.
    Apply(SharedSpec, Box<WatchConfig>, oneshot::Sender<bool>),
    /// New settings of a remote model. Answered with true if its address changes.
    PointRemote(Box<RemoteSpec>, oneshot::Sender<bool>),
    /// The loader granted room: GPUs of each process, and the number of the request.
    Load(Vec<Vec<usize>>, u64),
    /// Unload the model to make room for the named one.
    Unload(ModelName),
    /// Ask the processes to give memory back, because another model needs it.
    ReclaimForOther,
    /// The model may stay loaded with its new settings. Fields: GPUs of each process, whether new processes
    /// fit next to the old ones, and the number of the question that this answers.
    Stay {
        places: Vec<Vec<usize>>,
        beside: bool,
        question: u64,
    },
    /// The model may not stay loaded with its new settings, for this reason.
    Reload {
        why: String,
        question: u64,
    },
    /// Load the model because another model, with which it is loaded together, is loaded.
    LoadAlong,
    /// Remove saved slots that were kept in memory when the model was unloaded.
    DropKeptState,
    /// The model can never be loaded, for this reason.
    NeverLoad {
        why: String,
        by_room: bool,
    },
    /// Store facts that were measured about a binary.
    LearnFacts(PathBuf, ServerFacts),
    /// Make no more decisions, and return everything that the next instance needs.
    HandOver(oneshot::Sender<Result<ModelWill, String>>),
    /// The handover failed: this task decides again.
    Thaw,
    /// The next instance has taken over: release the processes.
    LetGo(oneshot::Sender<()>),
    /// The previous instance has released the processes: begin to decide.
    Begin,
    /// Open gates of the next instance, and requests that it has refused.
    Gates(Vec<OpenGate>, Vec<ModelRefusal>),
    /// End the task: this instance has no more requests, and the next one owns the processes.
    Disband,
    Remove,
    /// Shut down; requests may run until this time.
    Shutdown(Instant),
}
