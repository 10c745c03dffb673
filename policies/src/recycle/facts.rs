//! What a decision is made of.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::policy::{Budget, RecyclePolicy};
use crate::growth::{Forecast, Growth, Monitor};
use crate::health::Symptom;
use crate::replacement_cost::Load;
use crate::sample::{MemoryKind, Work};
use crate::share::Chosen;

/// One memory of a generation, as it was read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Which memory.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if not known, which switches the rules of this series off.
    pub charged: Option<u64>,
    /// Bytes at the reading before, some seconds ago; `None` if not known.
    pub before: Option<u64>,
    /// Bytes when it had become ready; `None` if not known.
    pub at_ready: Option<u64>,
    /// Whether `charged` is an estimate.
    pub estimated: bool,
    /// Bytes of the machine or the device.
    pub total: Option<u64>,
    /// Bytes that the machine has available, or the device free.
    pub free: Option<u64>,
    /// Bytes that the server is told to keep here, beyond what was measured.
    pub allowance: u64,
    /// The most bytes that a process like this held in an experiment with its largest prompts; `None` without one.
    pub worst: Option<u64>,
}

/// All that is known about one memory of a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesFacts {
    /// Which memory.
    pub series: MemoryKind,
    /// Bytes charged to the process group; `None` if not known, which switches the rules of this series off.
    pub charged: Option<u64>,
    /// Whether it grew since the reading before; false if that is not known.
    pub rising: bool,
    /// Bytes when it had become ready; `None` if not known.
    pub at_ready: Option<u64>,
    /// Whether `charged` is an estimate. Budgets hold for estimates, too; nobody is ended on the word of one.
    pub estimated: bool,
    /// Bytes of the machine or the device.
    pub total: Option<u64>,
    /// Bytes that the machine has available, or the device free.
    pub free: Option<u64>,
    /// Bytes that the server is told to keep here.
    pub allowance: u64,
    /// The most bytes that a process like this held in an experiment with its largest prompts; `None` without one.
    #[serde(default)]
    pub worst: Option<u64>,
    /// What the detector says.
    pub growth: Option<Growth>,
    /// Until the soft budget.
    pub to_soft: Option<Forecast>,
    /// Until the hard budget.
    pub to_hard: Option<Forecast>,
    /// Until the memory is at its end.
    pub to_end: Option<Forecast>,
    /// The budgets in bytes.
    #[serde(default)]
    pub budget: Budget,
}

impl SeriesFacts {
    /// A series of which only a figure is known.
    pub const fn of(series: MemoryKind, charged: Option<u64>) -> Self {
        Self {
            series,
            charged,
            rising: false,
            at_ready: None,
            estimated: false,
            total: None,
            free: None,
            allowance: 0,
            worst: None,
            growth: None,
            to_soft: None,
            to_hard: None,
            to_end: None,
            budget: Budget { soft: None, hard: None },
        }
    }

    /// Puts a reading and the detector's picture of it together: the one way from readings to facts, for the supervisor,
    /// `policy replay` and the simulation alike.
    pub fn gather(policy: &RecyclePolicy, monitor: &Monitor, reading: &Reading) -> Self {
        let Reading { series, charged, before, at_ready, estimated, total, free, allowance, worst } =
            *reading;
        let mut facts = Self {
            rising: charged.zip(before).is_some_and(|(now, before)| now > before),
            at_ready,
            estimated,
            total,
            free,
            allowance,
            worst,
            growth: monitor.growth().iter().find(|growth| growth.series == series).cloned(),
            ..Self::of(series, charged)
        };
        let budget = policy.budget(&facts);
        facts.budget = budget;
        let until = |limit: Option<u64>| limit.and_then(|limit| monitor.forecast(series, limit));
        facts.to_soft = until(budget.soft);
        facts.to_hard = until(budget.hard);
        facts.to_end = until(charged.zip(free).map(|(charged, free)| charged.saturating_add(free)));
        facts
    }

    /// The size of a fresh, settled process in bytes: the detector's baseline, before that its size when it was ready.
    pub fn fresh(&self) -> Option<u64> {
        self.growth.as_ref().and_then(|growth| growth.baseline).or(self.at_ready)
    }

    /// Bytes that a recycle would bring back; `None` if that cannot be told.
    pub fn gain(&self) -> Option<u64> {
        Some(self.charged?.saturating_sub(self.fresh()?))
    }
}

/// What is known about a generation at the moment of the decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// Its memories. One that is not in the list is not known, and its rules are off.
    pub series: Vec<SeriesFacts>,
    /// Signs of illness ([`crate::health::Health`]).
    pub symptoms: Vec<Symptom>,
    /// A shared budget chose it ([`crate::share`]).
    pub shared: Option<Chosen>,
    /// A prompt waits for a fresh process, because it would not fit into this memory of the present one
    /// ([`crate::admission`]).
    pub admission: Option<MemoryKind>,
    /// Time since it became ready.
    pub age: Duration,
    /// Work done.
    pub work: Work,
    /// For how long no request has been in flight; `None` while one is.
    pub idle_for: Option<Duration>,
    /// For how long a replacement has been wanted; `None` if it is wanted only now.
    pub wanted_for: Option<Duration>,
    /// For how long it has drained while [`super::Action::DrainNow`] or more was wanted; `None` if only since now, or if it
    /// does not drain. A unit that drains is to be judged, too: this is how a drain that lasts too long becomes a kill.
    pub urgent_for: Option<Duration>,
    /// Local time, in minutes of the day; `None` if it is not known, which closes no window.
    pub minute: Option<u16>,
    /// What a replacement would cost now.
    pub load: Load,
    /// This generation's own random number in `[0, 1)`, drawn once.
    pub unit: f64,
}

impl Facts {
    /// Bytes that it holds of one memory; `None` if that is not known.
    pub fn charged(&self, series: Option<MemoryKind>) -> Option<u64> {
        self.series.iter().find(|facts| Some(facts.series) == series)?.charged
    }
}
