//! What a model's task is told: by its helpers, about one generation each, and by operators.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;
use warden_policies::start_search::StartFinding;
use warden_policies::warmth::Warmth;
use warden_policies::{GenerationId, ModelName, ServerFacts};

use super::bequeath::ModelWill;
use super::recipe::Recipe;
use super::warm::pack::Parcel;
use super::warm::unpack::Unpacked;
use crate::error::{ControlError, SpawnError};
use crate::lease::refused::Refused;
use crate::memory::fleet_memory::Returned;
use crate::memory::tracker::Taken;
use crate::process::failure::OutOfMemory;
use crate::process::group::Exit;
use crate::process::heir::Gate;
use crate::process::needs::Sight;
use crate::process::reclaim_file::Reclaimed;
use crate::process::{Health, Process, Props, Sample};
use crate::spec::{RemoteSpec, SharedSpec, Watch};
use crate::view::ledger::LedgerEntry;
use crate::view::pin_entry::PinView;
use crate::view::reclaim_entry::ReclaimEntry;

/// Who asks, as far as that is known, for the ledger.
pub(crate) type By = Option<Arc<str>>;

/// A message to a model's task.
#[derive(Debug)]
pub(crate) enum Message {
    /// A helper reports about a generation. Those about one that is gone are ignored.
    Report(GenerationId, Report),
    /// What a process made of this needs was looked at.
    Looked(Box<Recipe>, Sight),
    /// The search of this number, for a switch that starts the model, has ended.
    StartSearched(u64, Box<StartFinding>),
    /// An operator, a reload or the end.
    Control(Control),
    /// Somebody wants to know whether the task turns.
    Beat(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(crate) enum Report {
    /// The process was created, or not.
    Spawned(Result<Arc<dyn Process>, SpawnError>),
    /// It said something that may tell what it is told to keep.
    Said(String, OwnedSemaphorePermit),
    /// It logged what a crash looks like.
    Alarmed(OwnedSemaphorePermit),
    /// A probe that was sent at this time has ended.
    Probed {
        sent: Instant,
        health: Health,
        /// Asked for by the probe that finds it ready for the first time.
        props: Option<Props>,
        /// Bytes of VRAM that it holds, asked for by the probe that finds it ready to take another one's place; `None` if
        /// that was not asked or is not known.
        vram: Option<u64>,
        /// Settings of clients that could not be set again before it is used, in words.
        unset: Vec<String>,
        /// What goes along from the process that it follows, if anything does.
        warmed: Option<Box<Unpacked>>,
    },
    /// Slots of the process, which has drained, are saved.
    Packed(Box<Parcel>),
    /// What was due behind its gate for conversations of the process that it follows.
    Warmed(Box<Warmth>),
    /// What was set in another process of the model could not be set in this one, in words.
    Unset(Vec<String>),
    /// What it needs was looked at, just before its creation.
    Looked(Sight),
    /// It starts, and has done nothing for so long.
    StandsStill(Duration),
    /// The process is reaped. If SIGKILL ended it: whether that was for lack of memory.
    Exited(Exit, OutOfMemory),
    /// So much of the memory of an ended process came back.
    Returned(Returned),
    /// Memory was read, or could not be.
    Sampled { taken: Taken, sample: Box<Sample> },
    /// It was asked to give memory back, and has answered or not.
    Reclaimed(Box<Reclaimed>),
}

#[derive(Debug)]
pub(crate) enum Control {
    Restart(By, oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>),
    Drain(oneshot::Sender<Result<(), ControlError>>),
    /// Ask the processes to give memory back.
    Reclaim(By, oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>),
    /// Whether the model may leave for another one, and who says so.
    Pin(bool, Arc<str>, oneshot::Sender<Result<PinView, ControlError>>),
    /// New settings. Answered with whether processes are replaced because of them.
    Apply(SharedSpec, Box<Watch>, oneshot::Sender<bool>),
    /// New settings of a model that somebody else's endpoint serves. Answered with whether it has another address.
    Point(Box<RemoteSpec>, oneshot::Sender<bool>),
    /// There is room: each process on these GPUs. The number is that with which it had asked.
    Load(Vec<Vec<usize>>, u64),
    /// This model needs the room.
    Unload(ModelName),
    /// Another model needs what its processes hoard.
    GiveBack,
    /// What it is by its new settings has room where it is: each process on these GPUs; and whether there is room beside the old ones.
    /// The number is that with which it had asked.
    Stay {
        places: Vec<Vec<usize>>,
        beside: bool,
        question: u64,
    },
    /// It has none, for this reason.
    Anew {
        why: String,
        question: u64,
    },
    /// Another one is loaded, and this one along with it.
    Come,
    /// What it left in memory when it was unloaded has to go.
    ClearAway,
    /// It is never loaded, for this reason.
    Never {
        why: String,
        by_room: bool,
    },
    /// How a binary behaves, as it was measured.
    Learn(PathBuf, ServerFacts),
    /// Everything that the instance after us needs; from now on nothing is decided.
    HandOver(oneshot::Sender<Result<ModelWill, String>>),
    /// It does not come to that.
    Thaw,
    /// It has taken over.
    LetGo(oneshot::Sender<()>),
    /// The instance before us has let go.
    Begin,
    /// Where the instance after us sends requests now, and whom it turned away.
    Gates(Vec<Gate>, Vec<Refused>),
    /// Nothing runs here any more, and all else is somebody else's.
    Disband,
    Remove,
    /// End by this time, as far as leases are concerned.
    Shutdown(Instant),
}
