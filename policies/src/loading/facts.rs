//! The types in which a caller describes models, and the orders that it gets back.

use std::time::Duration;

use super::room::Amounts;
use crate::ModelName;
use crate::book::Needs;

/// A model. One that was removed and has come again with the same name is another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Who {
    /// Its name.
    pub name: ModelName,
    /// Which of those that have had it.
    pub life: u64,
}

/// What is configured of a model.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spec {
    /// What one process needs; `None`: not known, so it is let in, and counts with what it holds.
    pub needs: Option<Needs>,
    /// Processes.
    pub replicas: u32,
    /// The GPUs that it may be on; empty: any.
    pub gpus: Vec<usize>,
    /// It may be spread over several GPUs.
    pub may_split: bool,
    /// It never leaves for another one.
    pub pin: bool,
    /// Models that are not loaded while it is.
    pub never_with: Vec<ModelName>,
    /// Models that are loaded along with it, and do not leave for another one while it is there.
    pub with: Vec<ModelName>,
    /// It goes when nobody has asked for it for so long, even if it is pinned.
    pub ttl: Option<Duration>,
    /// If this is too much, it can be started with less: then it is not tried.
    pub can_do_with_less: bool,
    /// It is loaded only where there is room beside all others, nobody waits behind it, and it leaves before anybody else does, in use or
    /// not.
    pub guest: bool,
}

/// What is seen of a model at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests so far.
    pub asked: u64,
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that are answered.
    pub in_flight: u32,
    /// Since when there is none of both.
    pub idle_for: Duration,
    /// What its conversations would have to evaluate again if they went on after it had been unloaded.
    pub conversations: Duration,
}

impl Seen {
    pub(super) const fn is_in_use(&self) -> bool {
        self.waiting > 0 || self.in_flight > 0
    }
}

/// What all processes of a model hold.
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of each memory, without the mapped file.
    pub held: Amounts,
    /// What they hold of GPUs is not known: it counts as what they were promised.
    pub gpus_unknown: bool,
    /// It leaks.
    pub leaks: bool,
    /// Its processes can be asked to give back what they hoard.
    pub can_give: bool,
    /// Some of them have earlier settings of the model, and will be replaced.
    pub outdated: bool,
}

/// What one that waits has to wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacks {
    /// What all its processes need, on one GPU each, where that is known.
    pub needed: Option<Amounts>,
    /// What is left for it: neither promised, nor taken by anybody, nor kept for those who came before it.
    pub left: Amounts,
    /// Others are loaded that exclude it, or as many as may be.
    pub company: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Start the processes of a model, each on these GPUs; none: on the host, or wherever its command says.
    Load {
        /// Whose.
        model: Who,
        /// The GPUs of each replica.
        places: Vec<Vec<usize>>,
    },
    /// Let a model's requests end, and stop it.
    Unload {
        /// Which.
        model: Who,
        /// Who wants its room.
        makes_room_for: Who,
    },
    /// Have a model ask to be loaded, because another one is; its room is kept.
    Call {
        /// Which.
        model: Who,
    },
    /// Ask a model's processes for what they hoard, while they serve.
    GiveBack {
        /// Which.
        model: Who,
    },
    /// A model that has other settings has room for them where it is: its processes may be made anew.
    Stay {
        /// Which.
        model: Who,
        /// The GPUs of each replica.
        places: Vec<Vec<usize>>,
        /// There is room for the new processes while the old ones are still there.
        beside: bool,
    },
    /// A model that has other settings has no room for them where it is: let its requests end and stop it; it may ask to be loaded then.
    Anew {
        /// Which.
        model: Who,
        /// What for: what is left would be its own.
        lacks: Lacks,
    },
}
