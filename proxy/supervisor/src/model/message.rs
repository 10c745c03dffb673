//! Messages to a model's task: reports of its helpers, each about one generation, and requests of operators
//! and the fleet.

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

/// Name of the operator who asked, if known; written to the ledger.
pub(crate) type RequestedBy = Option<Arc<str>>;

/// A message to a model's task.
#[derive(Debug)]
pub(crate) enum TaskMessage {
    /// Report of a helper. Reports about generations that are gone are ignored.
    Report(GenerationId, HelperReport),
    /// Files needed by a process with this recipe were checked.
    Looked(Box<ProcessRecipe>, NeedsCheck),
    /// The start search with this number has ended.
    StartSearched(u64, Box<StartFinding>),
    /// Request of an operator, a reload or the shutdown.
    Control(ControlMessage),
    /// Liveness check of the task.
    Beat(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(crate) enum HelperReport {
    /// The process was created, or could not be.
    Spawned(Result<Arc<dyn BackendProcess>, SpawnError>),
    /// Output line that may report memory.
    MemoryLine(String, OwnedSemaphorePermit),
    /// The process logged a crash.
    CrashLogged(OwnedSemaphorePermit),
    /// The probe sent at this time has ended.
    Probed {
        sent: Instant,
        health: ProbeResult,
        /// Requested by the first probe that finds the process ready.
        props: Option<ServerProps>,
        /// VRAM in bytes, read by the probe that finds a successor ready; `None` if not read or unknown.
        vram: Option<u64>,
        /// Descriptions of client settings that could not be applied before the process serves.
        unset: Vec<String>,
        /// State carried over from the predecessor, if any.
        warmed: Option<Box<WarmingResult>>,
    },
    /// Slots of the drained process are saved.
    Packed(Box<SavedSlots>),
    /// Conversations of the predecessor were warmed after the gate opened.
    Warmed(Box<WarmthReport>),
    /// Descriptions of settings of other processes that could not be applied to this one.
    SettingsFailed(Vec<String>),
    /// Files were checked just before the process was created.
    Looked(NeedsCheck),
    /// The starting process has made no progress for this long.
    Stalled(Duration),
    /// The process is reaped. For SIGKILL: whether lack of memory was the reason.
    Exited(ProcessExit, OomEvidence),
    /// Memory that came back after the process ended.
    MemoryReturned(ReturnedMemory),
    /// Memory was read, or could not be.
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
    /// Pin or unpin the model, and the operator's name.
    Pin(bool, Arc<str>, oneshot::Sender<Result<PinView, ControlError>>),
    /// New settings. Answered with true if processes are replaced because of them.
    Apply(SharedSpec, Box<WatchConfig>, oneshot::Sender<bool>),
    /// New settings of a remote model. Answered with true if its address changes.
    PointRemote(Box<RemoteSpec>, oneshot::Sender<bool>),
    /// Room granted: GPUs per process, and the number of the wish.
    Load(Vec<Vec<usize>>, u64),
    /// Unload for this model.
    Unload(ModelName),
    /// Another model needs memory that the processes hoard.
    ReclaimForOther,
    /// The model may stay with its new settings: GPUs per process, room next to the old processes, number
    /// of the question.
    Stay {
        places: Vec<Vec<usize>>,
        beside: bool,
        question: u64,
    },
    /// The model may not stay with its new settings, for this reason.
    Reload {
        why: String,
        question: u64,
    },
    /// Load together with another model.
    LoadAlong,
    /// Remove the state kept in memory since the model was unloaded.
    DropKeptState,
    /// The model can never be loaded, for this reason.
    NeverLoad {
        why: String,
        by_room: bool,
    },
    /// Measured behaviour of a binary.
    LearnFacts(PathBuf, ServerFacts),
    /// Freeze, and return everything that the next instance needs.
    HandOver(oneshot::Sender<Result<ModelWill, String>>),
    /// The handover failed.
    Thaw,
    /// The next instance has taken over.
    LetGo(oneshot::Sender<()>),
    /// The previous instance has let go.
    Begin,
    /// Open gates and refused requests of the next instance.
    Gates(Vec<OpenGate>, Vec<ModelRefusal>),
    /// End the task: nothing runs here, and the next instance owns the rest.
    Disband,
    Remove,
    /// Shut down; leases may run until this time.
    Shutdown(Instant),
}
