//! Which models are loaded: what they tell, who decides, and what all of them may know of that.
//!
//! ```text
//!   models ── told ──> desk ──> loader: decides, with what the machine has left ── word ──> models
//!                       ^              │
//!                       └── promised ──┘   what is free and not to be had
//! ```

pub(crate) mod loader;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::{mpsc, oneshot};
use warden_policies::loading::{Amounts, Reading, Spec, Who};
use warden_policies::{MemoryKind, ModelName};

use crate::lease::queue::Leases;
use crate::sync::lock;

/// What a model's task tells the loader.
pub(crate) enum Told {
    /// The model exists from now on. The loader answers through the listener.
    Joins { leases: Arc<Leases>, listener: Listener },
    /// It wants to be loaded. `urgent`: others leave for it even if nobody waits. `number`: how often it has asked.
    Wants { spec: Box<Spec>, urgent: bool, number: u64 },
    /// Other settings.
    Is(Box<Spec>),
    /// With them its processes are made anew, and it waits to be told whether it may stay for that. The number is that of the question.
    Remade(u64),
    /// No process with them comes: it has what it had.
    Kept,
    /// An instance before us has loaded it, each process on these GPUs.
    Inherited(Vec<Vec<usize>>),
    /// All its processes serve.
    Loaded,
    /// What they hold.
    Read(Reading),
    /// It goes by itself.
    Leaves,
    /// It was asked to give memory back, and what came of that is in its last reading.
    GaveBack,
    /// Its start found too little memory.
    Short,
    /// It has no process any more, and wants none.
    Gone,
    /// The same, and it is no longer configured.
    Removed,
}

/// What the loader tells a model's task.
#[derive(Debug)]
pub(crate) enum Word {
    /// There is room: each process on these GPUs. The number is that with which it had asked.
    Load(Vec<Vec<usize>>, u64),
    /// This model needs the room.
    Unload(Who),
    /// Another model needs what it hoards.
    GiveBack,
    /// There is room for what it is now where it is: each process on these GPUs; and whether there is while its old ones are there.
    /// It answers the question with this number.
    Stay { places: Vec<Vec<usize>>, beside: bool, question: u64 },
    /// There is not, in words: it has to leave, and may ask.
    Anew { why: String, question: u64 },
    /// Another one is loaded, and this one along with it.
    Come,
    /// Memory of the host is short: what it left there when it was unloaded has to go.
    ClearAway,
    /// It is never loaded, for this reason: who waits does so in vain. `by_room`: with less memory it would be.
    Never { why: String, by_room: bool },
}

/// Takes a word to a model.
pub(crate) type Listener = Box<dyn Fn(Word) + Send + Sync>;

/// Where the loader hears them, and the watchdog.
pub(crate) struct LoaderInbox {
    told: mpsc::UnboundedReceiver<(Who, Told)>,
    asked: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

/// Where models tell it.
#[derive(Debug)]
pub(crate) struct LoadingDesk {
    sender: mpsc::UnboundedSender<(Who, Told)>,
    beats: mpsc::UnboundedSender<oneshot::Sender<()>>,
    lives: AtomicU64,
    promised: Mutex<BTreeMap<Who, Amounts>>,
    roomy: Mutex<BTreeSet<Who>>,
    refused: Mutex<BTreeSet<Who>>,
    company: Mutex<BTreeSet<Who>>,
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
            LoaderInbox { told, asked },
        )
    }

    /// Asks whether the loader turns. It fails if that task has ended.
    pub(crate) fn ask(&self) -> oneshot::Receiver<()> {
        let (question, answer) = oneshot::channel();
        // A task that has ended drops it, and that is the answer.
        drop(self.beats.send(question));
        answer
    }

    /// A number that no other model of this run has.
    pub(crate) fn next_life(&self) -> u64 {
        self.lives.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn tell(&self, who: &Who, told: Told) {
        // Fails only when everything ends; then nobody is loaded any more.
        drop(self.sender.send((who.clone(), told)));
    }

    /// Whether a model is loaded, or could be without another one's leaving.
    pub(crate) fn has_room(&self, name: &ModelName) -> bool {
        lock(&self.roomy).iter().any(|who| who.name == *name)
    }

    /// Whether who asks for a model is refused, because it is never loaded beside what is there.
    pub(crate) fn refuses(&self, name: &ModelName) -> bool {
        lock(&self.refused).iter().any(|who| who.name == *name)
    }

    /// Whether a model stays because another one is there that it was loaded along with.
    pub(crate) fn keeps_company(&self, who: &Who) -> bool {
        lock(&self.company).contains(who)
    }

    /// Bytes of one memory that are free, and that others than this model were promised.
    pub(crate) fn promised_to_others(&self, besides: &Who, memory: MemoryKind) -> u64 {
        let promised = lock(&self.promised);
        let others = promised.iter().filter(|(who, _)| *who != besides);
        others.map(|(_, amounts)| amounts.of(memory)).fold(0, u64::saturating_add)
    }
}

impl Debug for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Joins { .. } => "Joins",
            Self::Wants { urgent: false, .. } => "Wants",
            Self::Wants { urgent: true, .. } => "Wants now",
            Self::Is(_) => "Is",
            Self::Remade(_) => "Remade",
            Self::Kept => "Kept",
            Self::Inherited(_) => "Inherited",
            Self::Loaded => "Loaded",
            Self::Read(_) => "Read",
            Self::Leaves => "Leaves",
            Self::GaveBack => "GaveBack",
            Self::Short => "Short",
            Self::Gone => "Gone",
            Self::Removed => "Removed",
        })
    }
}
