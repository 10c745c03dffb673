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

pub(crate) enum LoadingReport {
    /// The model exists from now on. The loader sends its orders to `listener`.
    Joined {
        leases: Arc<LeaseQueue>,
        listener: LoadingListener,
    },
    /// The model wants to be loaded; if `urgent`, others are unloaded even if no request waits.
    Wanted {
        spec: Box<LoadSpec>,
        urgent: bool,
        number: u64,
    },
    SettingsChanged(Box<LoadSpec>),
    /// Question, with its number, whether the model may stay loaded with new settings.
    ReplacementPlanned(u64),
    /// The planned replacement is given up: the processes with the previous settings stay.
    ReplacementDropped,
    /// The model was loaded by the previous instance, with these GPUs for each process.
    Inherited(Vec<Vec<usize>>),
    /// All processes of the model serve.
    Loaded,
    Measured(ModelReading),
    /// The model is being unloaded for a reason of its own.
    Leaving,
    /// The model's processes have been asked for memory, and its last reading shows the effect.
    Reclaimed,
    /// A start of the model failed for lack of memory.
    StartShort,
    /// The model has no process and wants none.
    Unloaded,
    /// The model has no process and is no longer configured.
    Removed,
}

#[derive(Debug)]
pub(crate) enum LoadingOrder {
    /// Load the model: GPUs of each process, and the number of the request that this answers.
    Load(Vec<Vec<usize>>, u64),
    /// Unload the model to make room for the named one.
    Unload(ModelId),
    /// Ask the model's processes to give memory back, because another model needs it.
    ReclaimMemory,
    /// The model may stay loaded with its new settings. `places`: GPUs of each process. `beside`: new
    /// processes fit next to the old ones. `question`: number of the question that this answers.
    Stay { places: Vec<Vec<usize>>, beside: bool, question: u64 },
    /// The model may not stay loaded, for this reason: it has to unload, and may ask for room again.
    Reload { why: String, question: u64 },
    /// Load the model because another one, with which it is loaded together, is loaded.
    LoadAlong,
    /// Host memory is short: remove conversations and slots kept since the model was unloaded.
    DropKeptState,
    /// The model can never be loaded; if `by_room`, a configuration that needs less memory could be.
    NeverLoad { why: String, by_room: bool },
}

/// Function that delivers the loader's orders to a model.
pub(crate) type LoadingListener = Box<dyn Fn(LoadingOrder) + Send + Sync>;

/// Receivers for the models' reports and the watchdog's questions.
pub(crate) struct LoaderInbox {
    reports: mpsc::UnboundedReceiver<(ModelId, LoadingReport)>,
    beats: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

/// Channel from the models to the loader, and the results that the loader publishes.
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

    /// Asks the loader whether it is alive. The receiver fails if the loader's task has ended.
    pub(crate) fn check_loader(&self) -> oneshot::Receiver<()> {
        let (question, answer) = oneshot::channel();
        // If the task has ended, the question is dropped, and so the receiver fails.
        drop(self.beats.send(question));
        answer
    }

    /// Number for a new model that no other model of this run has.
    pub(crate) fn next_life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn send_report(&self, who: &ModelId, told: LoadingReport) {
        // Sending fails only at shutdown, when no model is loaded any more.
        drop(self.sender.send((who.clone(), told)));
    }

    /// True if a model is loaded, or could be loaded without unloading another one.
    pub(crate) fn has_room(&self, name: &ModelName) -> bool {
        lock(&self.roomy).iter().any(|who| who.name == *name)
    }

    /// True if requests for a model are refused, because it can never be loaded next to the pinned models.
    pub(crate) fn refuses(&self, name: &ModelName) -> bool {
        lock(&self.refused).iter().any(|who| who.name == *name)
    }

    /// True if a model has to stay loaded because another one, with which it is loaded together, is loaded.
    pub(crate) fn keeps_company(&self, who: &ModelId) -> bool {
        lock(&self.company).contains(who)
    }

    /// Bytes of a memory that are free but reserved for other models.
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
