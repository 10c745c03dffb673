//! Messages between models and the loader, and its published state.
//!
//! ```text
//!     models ── told ──> desk ──> loader: decides by the machine's free memory ── word ──> models
//!                         ^          │
//!                         └ promised ┘   free memory that is not available
//! ```

pub(crate) mod loader;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::{mpsc, oneshot};
use warden_policies::loading::{LoadSpec, MemoryAmounts, ModelId, ModelReading};
use warden_policies::{MemoryKind, ModelName};

use crate::lease::queue::LeaseQueue;
use crate::sync::lock;

/// Report of a model's task to the loader.
pub(crate) enum LoadingReport {
    /// The model exists from now on. The loader answers through the listener.
    Joined { leases: Arc<LeaseQueue>, listener: LoadingListener },
    /// The model wants to be loaded. `urgent`: evict others even if no request waits. `number`: of the wish.
    Wanted { spec: Box<LoadSpec>, urgent: bool, number: u64 },
    /// New settings.
    SettingsChanged(Box<LoadSpec>),
    /// The model's processes will be replaced for the settings, and it waits for permission to stay. The
    /// number is that of the question.
    ReplacementPlanned(u64),
    /// No process with the settings comes; the previous ones stay.
    ReplacementDropped,
    /// The previous instance has loaded it, with these GPUs per process.
    Inherited(Vec<Vec<usize>>),
    /// All its processes serve.
    Loaded,
    /// Memory of its processes.
    Measured(ModelReading),
    /// The model unloads by itself.
    Leaving,
    /// The model has finished a reclaim, whose effect is in its last reading.
    Reclaimed,
    /// A start lacked memory.
    StartShort,
    /// The model has no process and wants none.
    Unloaded,
    /// The model has no process and is no longer configured.
    Removed,
}

/// Order of the loader to a model's task.
#[derive(Debug)]
pub(crate) enum LoadingOrder {
    /// Room granted: GPUs per process, and the number of the wish.
    Load(Vec<Vec<usize>>, u64),
    /// Unload for this model.
    Unload(ModelId),
    /// Another model needs memory that the model hoards.
    ReclaimMemory,
    /// The model may stay with its new settings: GPUs per process, and room next to its old processes.
    /// Answers this question.
    Stay { places: Vec<Vec<usize>>, beside: bool, question: u64 },
    /// The model may not stay, for this reason: it has to unload, and may ask again.
    Reload { why: String, question: u64 },
    /// Load together with another model.
    LoadAlong,
    /// Host memory is short: remove the state kept since the model was unloaded.
    DropKeptState,
    /// The model can never be loaded, for this reason. `by_room`: less memory would suffice.
    NeverLoad { why: String, by_room: bool },
}

/// Delivers orders to a model.
pub(crate) type LoadingListener = Box<dyn Fn(LoadingOrder) + Send + Sync>;

/// Receives the models' reports and the watchdog's checks.
pub(crate) struct LoaderInbox {
    reports: mpsc::UnboundedReceiver<(ModelId, LoadingReport)>,
    beats: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

/// Channel from the models to the loader, and its published state.
#[derive(Debug)]
pub(crate) struct LoadingDesk {
    sender: mpsc::UnboundedSender<(ModelId, LoadingReport)>,
    beats: mpsc::UnboundedSender<oneshot::Sender<()>>,
    lives: AtomicU64,
    promised: Mutex<BTreeMap<ModelId, MemoryAmounts>>,
    roomy: Mutex<BTreeSet<ModelId>>,
    refused: Mutex<BTreeSet<ModelId>>,
    company: Mutex<BTreeSet<ModelId>>,
}

impl LoadingDesk {
    pub(crate) fn new() -> (Arc<Self>, LoaderInbox) {
        let (sender, told) = mpsc::unbounded_channel();
        let (beats, asked) = mpsc::unbounded_channel();
        (
            Arc::new(Self {
                sender,
                beats,
                lives: AtomicU64::new(0),
                promised: Mutex::default(),
                roomy: Mutex::default(),
                refused: Mutex::default(),
                company: Mutex::default(),
            }),
            LoaderInbox { reports: told, beats: asked },
        )
    }

    /// Checks that the loader is responsive. Fails if its task has ended.
    pub(crate) fn check_loader(&self) -> oneshot::Receiver<()> {
        let (question, answer) = oneshot::channel();
        // A task that has ended drops the question, which is the answer.
        drop(self.beats.send(question));
        answer
    }

    /// Number that no other model of this run has.
    pub(crate) fn next_life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn send_report(&self, who: &ModelId, told: LoadingReport) {
        // Fails only at shutdown, when no model is loaded any more.
        drop(self.sender.send((who.clone(), told)));
    }

    /// True if a model is loaded, or could be without unloading another one.
    pub(crate) fn has_room(&self, name: &ModelName) -> bool {
        lock(&self.roomy).iter().any(|who| who.name == *name)
    }

    /// True if requests for a model are refused, because it can never be loaded next to the present ones.
    pub(crate) fn refuses(&self, name: &ModelName) -> bool {
        lock(&self.refused).iter().any(|who| who.name == *name)
    }

    /// True if a model stays because another one is loaded with which it belongs.
    pub(crate) fn keeps_company(&self, who: &ModelId) -> bool {
        lock(&self.company).contains(who)
    }

    /// Free bytes of a memory that are promised to other models.
    pub(crate) fn promised_to_others(&self, besides: &ModelId, memory: MemoryKind) -> u64 {
        let promised = lock(&self.promised);
        let others = promised.iter().filter(|(who, _)| *who != besides);
        others.map(|(_, amounts)| amounts.bytes_of(memory)).fold(0, u64::saturating_add)
    }
}

impl Debug for LoadingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Joined { .. } => "Joins",
            Self::Wanted { urgent: false, .. } => "Wants",
            Self::Wanted { urgent: true, .. } => "Wants now",
            Self::SettingsChanged(_) => "Is",
            Self::ReplacementPlanned(_) => "Remade",
            Self::ReplacementDropped => "Kept",
            Self::Inherited(_) => "Inherited",
            Self::Loaded => "Loaded",
            Self::Measured(_) => "Read",
            Self::Leaving => "Leaves",
            Self::Reclaimed => "GaveBack",
            Self::StartShort => "Short",
            Self::Unloaded => "Gone",
            Self::Removed => "Removed",
        })
    }
}
