//! Input facts about models, and the orders returned to the caller.

use std::time::Duration;

use super::room::MemoryAmounts;
use crate::ModelName;
use crate::book::MemoryNeeds;

/// Identifies a model. A model that was removed and configured again under the same name has another
/// identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId {
    /// Configured name.
    pub name: ModelName,
    /// Distinguishes successive models of the same name.
    pub incarnation: u64,
}

/// Configured properties of a model.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadSpec {
    /// Needs of one process. `None` if unknown: the model is admitted and counts with its measured memory.
    pub needs: Option<MemoryNeeds>,
    /// Number of processes.
    pub replicas: u32,
    /// GPUs that the model may use; empty: any.
    pub gpus: Vec<usize>,
    /// The model may be split over several GPUs.
    pub may_split: bool,
    /// The model is never unloaded for another one.
    pub pin: bool,
    /// Models that are never loaded at the same time.
    pub never_with: Vec<ModelName>,
    /// Companions: models that are loaded along with it and stay loaded while it is.
    pub companions: Vec<ModelName>,
    /// Idle time after which the model is unloaded, even if it is pinned.
    pub ttl: Option<Duration>,
    /// The model can start with less memory, so a start that cannot fit is not tried.
    pub can_do_with_less: bool,
    /// Guest: loaded only into room that no other model needs. Nothing is reserved for it, and it is
    /// unloaded before any other model, in use or not.
    pub guest: bool,
}

/// Observed requests of a model at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelActivity {
    /// Total requests so far.
    pub requests: u64,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests in flight.
    pub in_flight: u32,
    /// Time without waiting or running requests.
    pub idle_for: Duration,
    /// Prompt evaluation time that the model's conversations would lose if it were unloaded.
    pub conversations: Duration,
}

impl ModelActivity {
    pub(super) const fn is_in_use(&self) -> bool {
        self.waiting > 0 || self.in_flight > 0
    }
}

/// Measured memory of all processes of a model.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelReading {
    /// Bytes per memory, without the mapped model file.
    pub held: MemoryAmounts,
    /// GPU memory is unknown, so the promise counts instead.
    pub gpus_unknown: bool,
    /// The model leaks.
    pub leaks: bool,
    /// The processes can reclaim memory on request.
    pub can_reclaim: bool,
    /// Some processes still have earlier settings and will be replaced.
    pub outdated: bool,
}

/// Reasons for which a model waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRoom {
    /// Needs of all processes, each on one GPU, if known.
    pub needed: Option<MemoryAmounts>,
    /// Bytes left for the model: not promised, not in use, and not reserved for earlier waiters.
    pub left: MemoryAmounts,
    /// Loaded models exclude it, or `loading.max_loaded` is reached.
    pub excluded: bool,
}

/// Order to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoaderOrder {
    /// Start the processes of a model on the given GPUs; an empty list leaves the choice to the command.
    Load {
        /// Model to load.
        model: ModelId,
        /// GPUs of each replica.
        places: Vec<Vec<usize>>,
    },
    /// Drain a model and stop it.
    Unload {
        /// Model to unload.
        model: ModelId,
        /// Model that needs the room.
        replaced_by: ModelId,
    },
    /// Make a companion ask to be loaded; room is reserved for it.
    CallCompanion {
        /// Companion to call.
        model: ModelId,
    },
    /// Ask a model's processes to reclaim memory while they serve.
    Reclaim {
        /// Model to ask.
        model: ModelId,
    },
    /// A model fits in place with its new settings: its processes may be replaced.
    Renew {
        /// Model to renew.
        model: ModelId,
        /// GPUs of each replica.
        places: Vec<Vec<usize>>,
        /// Old and new processes fit at the same time.
        beside: bool,
    },
    /// A model does not fit in place with its new settings: drain and stop it, so that it can ask to be
    /// loaded.
    Restart {
        /// Model to stop.
        model: ModelId,
        /// Missing memory. `left` is the room the model would have after the stop.
        lacks: MissingRoom,
    },
}
