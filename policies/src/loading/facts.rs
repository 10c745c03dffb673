//! Input facts about models, and the orders returned to the caller.

use std::time::Duration;

use super::amounts::MemoryAmounts;
use crate::ModelName;
use crate::book::MemoryNeeds;

/// Identifies a model. A model that was removed and configured again has another identity.
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
    /// Needs of one process. `None` if unknown: the model is admitted, and its measured memory counts.
    pub needs: Option<MemoryNeeds>,
    /// Number of processes.
    pub replicas: u32,
    /// GPUs that the model may use; if empty, the model may use any GPU.
    pub gpus: Vec<usize>,
    /// The model may be split over several GPUs.
    pub may_split: bool,
    /// The model is never unloaded to make room for another model.
    pub pin: bool,
    /// Models that are never loaded at the same time as this model.
    pub never_with: Vec<ModelName>,
    /// Companions: models that are loaded along with this model and stay loaded as long as it.
    pub companions: Vec<ModelName>,
    /// Idle time after which the model is unloaded, even if it is pinned.
    pub ttl: Option<Duration>,
    /// The model can start with less memory, so a start that does not fit is not tried.
    pub can_do_with_less: bool,
    /// The model is a guest: loaded only into room that no other model needs, and unloaded before any other
    /// model, even while in use.
    pub guest: bool,
}

/// Observed requests of a model at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelActivity {
    /// Total requests so far.
    pub requests: u64,
    /// Number of requests that wait.
    pub waiting: usize,
    /// Number of requests in flight.
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
    /// Bytes in each kind of memory, without the mapped model file.
    pub held: MemoryAmounts,
    /// GPU memory could not be read, so the memory that the model was admitted with counts instead.
    pub gpus_unknown: bool,
    /// The model leaks.
    pub leaks: bool,
    /// The processes can reclaim memory on request.
    pub can_reclaim: bool,
    /// Some processes still have earlier settings and will be replaced.
    pub outdated: bool,
}

/// Reasons for which a model is not loaded yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRoom {
    /// Needs of all processes, each on one GPU, if known.
    pub needed: Option<MemoryAmounts>,
    /// Bytes left for the model: not promised to others, not in use, and not reserved for earlier waiters.
    pub left: MemoryAmounts,
    /// The model must not be loaded next to a loaded one, or `loading.max_loaded` is reached.
    pub excluded: bool,
}

/// Order to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoaderOrder {
    /// Start the processes of a model on the given GPUs; an empty list leaves the choice to llama-server.
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
    /// Make a companion ask to be loaded; its room is reserved.
    CallCompanion {
        /// Companion to call.
        model: ModelId,
    },
    /// Ask a model's processes to reclaim memory while they serve.
    Reclaim {
        /// Model to ask.
        model: ModelId,
    },
    /// A model may stay loaded with its new settings: its processes may be replaced.
    Renew {
        /// Model to renew.
        model: ModelId,
        /// GPUs of each replica.
        places: Vec<Vec<usize>>,
        /// Old and new processes fit into memory at the same time.
        beside: bool,
    },
    /// Drain and stop a model without room for its new settings, so that it can ask to be loaded again.
    Restart {
        /// Model to stop.
        model: ModelId,
        /// Missing memory; its `left` is the room for the model after the stop.
        lacks: MissingRoom,
    },
}
