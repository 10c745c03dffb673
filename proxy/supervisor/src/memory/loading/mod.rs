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
    /// The model exists from now on; `listener` receives the loader's orders.
    Joined {
        leases: Arc<LeaseQueue>,
        listener: LoadingListener,
    },
    /// The model needs room; if `urgent`, others are unloaded even without waiting requests.
    Wanted {
        spec: Box<LoadSpec>,
        urgent: bool,
        number: u64,
    },
    SettingsChanged(Box<LoadSpec>),
    /// Asks with this number whether the model may stay with new settings.
    ReplacementPlanned(u64),
    /// The model keeps its processes with the previous settings.
    ReplacementDropped,
    /// The previous instance loaded the model; GPUs of each process.
    Inherited(Vec<Vec<usize>>),
    /// All processes of the model serve.
    Loaded,
    Measured(ModelReading),
    Leaving,
    /// The last reading shows the effect of the requested reclaim.
    Reclaimed,
    /// A start of the model failed for lack of memory.
    StartShort,
    Unloaded,
    /// The removed model has no process.
    Removed,
}

#[derive(Debug)]
pub(crate) enum LoadingOrder {
    /// Load the model: GPUs of each process, and number of the model's request.
    Load(Vec<Vec<usize>>, u64),
    /// Unload the model for the named one.
    Unload(ModelId),
    /// Ask the processes to give memory back for another model.
    ReclaimMemory,
    /// Stay loaded. `places`: GPUs of each process. `beside`: new processes fit next to the old ones.
    /// `question`: number of the model's question.
    Stay { places: Vec<Vec<usize>>, beside: bool, question: u64 },
    /// Unload and request room again, for this reason.
    Reload { why: String, question: u64 },
    /// Load the model together with another one that is loaded.
    LoadAlong,
    /// Host memory is short: drop the state kept while the model is unloaded.
    DropKeptState,
    /// The model can never be loaded; if `by_room`, a smaller configuration could be.
    NeverLoad { why: String, by_room: bool },
}

pub(crate) type LoadingListener = Box<dyn Fn(LoadingOrder) + Send + Sync>;

pub(crate) struct LoaderInbox {
    reports: mpsc::UnboundedReceiver<(ModelId, LoadingReport)>,
    beats: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

/// Channel from the models to the loader, with published results.
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

    /// Sends a watchdog question. The receiver fails if the loader's task has ended.
    pub(crate) fn check_loader(&self) -> oneshot::Receiver<()> {
        let (question, answer) = oneshot::channel();
        // If the task has ended, the question is dropped and the receiver fails.
        drop(self.beats.send(question));
        answer
    }

    /// Returns a number that no other model of this run has.
    pub(crate) fn next_life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn send_report(&self, who: &ModelId, told: LoadingReport) {
        // Sending fails only at shutdown.
        drop(self.sender.send((who.clone(), told)));
    }

    /// True if the model is loaded or fits without unloading another one.
    pub(crate) fn has_room(&self, name: &ModelName) -> bool {
        lock(&self.roomy).iter().any(|who| who.name == *name)
    }

    /// True if the model can never be loaded next to the pinned models.
    pub(crate) fn refuses(&self, name: &ModelName) -> bool {
        lock(&self.refused).iter().any(|who| who.name == *name)
    }

    /// True if the model has to stay because a model that is loaded together with it is still loaded.
    pub(crate) fn keeps_company(&self, who: &ModelId) -> bool {
        lock(&self.company).contains(who)
    }

    /// Bytes that are free but reserved for other models.
    pub(crate) fn promised_to_others(&self, besides: &ModelId, memory: MemoryKind) -> u64 {
        let promised = lock(&self.promised);
        let others = promised.iter().filter(|(who, _)| *who != besides);
        others.map(|(_, amounts)| amounts.bytes_of(memory)).fold(0, u64::saturating_add)
    }
}

impl Debug for LoadingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Joined { .. } => "Joined",
            Self::Wanted { urgent: false, .. } => "Wanted",
            Self::Wanted { urgent: true, .. } => "Wanted at once",
            Self::SettingsChanged(_) => "SettingsChanged",
            Self::ReplacementPlanned(_) => "ReplacementPlanned",
            Self::ReplacementDropped => "ReplacementDropped",
            Self::Inherited(_) => "Inherited",
            Self::Loaded => "Loaded",
            Self::Measured(_) => "Measured",
            Self::Leaving => "Leaving",
            Self::Reclaimed => "Reclaimed",
            Self::StartShort => "StartShort",
            Self::Unloaded => "Unloaded",
            Self::Removed => "Removed",
        })
    }
}
