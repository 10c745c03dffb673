//! Backends that share a budget or a GPU: who is replaced first, and one at a time.
//!
//! - [`first`]: where several together are over a shared budget, the one that gives back most for what its replacement
//!   costs goes first. The others are looked at again when it is done.
//! - [`Arbiter`]: never two replicas of one model at once, one replacement per GPU at a time. It hands out turns; whoever
//!   has one gives it back when the replacement has ended, however it ended.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names::ModelName;
use crate::sample::{GpuIndex, Series};

/// Which of the two shared budgets is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// When quiet.
    Soft,
    /// Now.
    Hard,
}

/// A backend was chosen because a shared budget is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chosen {
    /// Which memory.
    pub series: Series,
    /// Which budget.
    pub level: Level,
    /// The shared budget in bytes.
    pub limit: u64,
}

/// One backend's part of a shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Bytes that it holds; `None` if not known.
    pub charged: Option<u64>,
    /// Bytes that a fresh, settled process of it holds; `None` if not known.
    pub fresh: Option<u64>,
    /// How long its replacement keeps clients waiting: zero with overlap, else its load time; `None` if not known.
    pub cost: Option<Duration>,
    /// Whether it may be replaced: ready, not held back, not being replaced.
    pub free_to_go: bool,
}

/// A shared budget in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBudget {
    /// When quiet.
    pub soft: Option<u64>,
    /// Now.
    pub hard: Option<u64>,
}

/// Which member goes first, by its place in the list; `None` while the sum is within the budget, or if replacing nobody
/// would bring anything back. Members whose figure is not known count as nothing, so the sum is a lower bound.
pub fn first(series: Series, members: &[Member], budget: SharedBudget) -> Option<(usize, Chosen)> {
    let sum = members.iter().filter_map(|member| member.charged).fold(0, u64::saturating_add);
    let over = |limit: Option<u64>| limit.filter(|limit| sum >= *limit);
    let (level, limit) = match (over(budget.hard), over(budget.soft)) {
        (Some(limit), _) => (Level::Hard, limit),
        (None, Some(limit)) => (Level::Soft, limit),
        (None, None) => return None,
    };
    let gains = members.iter().enumerate().filter_map(|(index, member)| {
        let gain = member.charged?.saturating_sub(member.fresh?);
        (member.free_to_go && gain > 0).then_some((index, gain, member))
    });
    let best =
        gains.max_by(|(_, a, first), (_, b, second)| per_cost(*a, first).total_cmp(&per_cost(*b, second)))?;
    Some((best.0, Chosen { series, level, limit }))
}

/// Bytes that come back per second of waiting; one second is added, so that a replacement that costs nothing does not win
/// with a trifle.
#[expect(clippy::cast_precision_loss, reason = "a comparison of amounts of memory")]
fn per_cost(gain: u64, member: &Member) -> f64 {
    gain as f64 / (1.0 + member.cost.unwrap_or_default().as_secs_f64())
}

/// Names a turn; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TurnId(u64);

/// The answer to a request for a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It may begin, and has to be given back.
    Granted(TurnId),
    /// Another one has to end first.
    Wait {
        /// Whose.
        model: ModelName,
        /// And which replica.
        replica: u32,
        /// The GPU that both use; `None` if both are of one model.
        gpu: Option<GpuIndex>,
    },
}

#[derive(Clone, Debug)]
struct Holder {
    id: TurnId,
    model: ModelName,
    replica: u32,
    gpus: Vec<GpuIndex>,
}

/// Hands out turns for replacements. One for the whole fleet, behind a lock.
#[derive(Clone, Debug, Default)]
pub struct Arbiter {
    next: u64,
    holders: Vec<Holder>,
}

impl Arbiter {
    /// Nobody has a turn.
    pub const fn new() -> Self {
        Self { next: 0, holders: Vec::new() }
    }

    /// Asks for a turn for a replacement of one replica, which uses these GPUs (none, if it uses none). A replica that
    /// has a turn already gets the same one again.
    pub fn request(&mut self, model: &ModelName, replica: u32, gpus: &[GpuIndex]) -> Turn {
        for holder in &self.holders {
            let gpu = holder.gpus.iter().copied().find(|gpu| gpus.contains(gpu));
            if holder.model == *model {
                if holder.replica == replica {
                    return Turn::Granted(holder.id);
                }
                return Turn::Wait { model: holder.model.clone(), replica: holder.replica, gpu: None };
            }
            if gpu.is_some() {
                return Turn::Wait { model: holder.model.clone(), replica: holder.replica, gpu };
            }
        }
        self.next += 1;
        let id = TurnId(self.next);
        self.holders.push(Holder { id, model: model.clone(), replica, gpus: gpus.to_vec() });
        Turn::Granted(id)
    }

    /// The replacement has ended, or does not take place. Giving back twice does nothing.
    pub fn release(&mut self, turn: TurnId) {
        self.holders.retain(|holder| holder.id != turn);
    }

    /// How many have a turn.
    pub const fn held(&self) -> usize {
        self.holders.len()
    }
}
