//! How each model stands.

use std::time::Duration;

use super::demand::Demand;
use super::facts::{Reading, Spec};
use super::room::Amounts;

/// Where a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Out,
    /// It is to come along with another one, and has not asked yet.
    Called {
        since: Duration,
    },
    Wants {
        /// Among those who do.
        place: u64,
        /// Others leave for it even if nobody waits.
        urgent: bool,
    },
    Comes {
        since: Duration,
    },
    Serves {
        since: Duration,
    },
    Leaves,
}

#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
#[derive(Debug)]
pub(super) struct Model {
    pub(super) spec: Spec,
    pub(super) state: State,
    pub(super) demand: Demand,
    /// What it was promised.
    pub(super) promised: Amounts,
    /// Bytes of its file that it maps, which the kernel counts as free although they are in use.
    pub(super) mapped: u64,
    pub(super) reading: Option<Reading>,
    /// It serves, or has other settings, and was not read yet: what it has taken is not known, until then at most.
    pub(super) settles: Option<Duration>,
    /// Its next reading is the first one of what it is now.
    pub(super) unread: bool,
    /// The GPUs of each of its processes.
    pub(super) places: Vec<Vec<usize>>,
    /// It has other settings since then, and was not told yet whether it may stay.
    pub(super) remade: Option<Duration>,
    /// What it was promised with them, as long as processes with earlier ones are there, ...
    pub(super) renewed: Option<Amounts>,
    /// ... and until then at most.
    pub(super) renewed_until: Duration,
    /// It was let in although it is too large by the book: what it was promised is everything.
    pub(super) alone: bool,
    pub(super) load_time: Duration,
    /// It was on its way out when another one was loaded that it is loaded along with.
    pub(super) comes_again: bool,
    /// It was asked to give memory back, and has not answered.
    pub(super) gives: bool,
    /// When it was asked last.
    pub(super) asked_back: Option<Duration>,
    /// What it needs as a multiple of what was thought, since its start found too little.
    pub(super) raised: f64,
    /// Since when.
    pub(super) raised_at: Duration,
}

impl Model {
    pub(super) fn new(spec: Spec) -> Self {
        Self {
            spec,
            state: State::Out,
            demand: Demand::default(),
            promised: Amounts::none(),
            mapped: 0,
            reading: None,
            settles: None,
            unread: true,
            places: Vec::new(),
            remade: None,
            renewed: None,
            renewed_until: Duration::ZERO,
            alone: false,
            load_time: Duration::ZERO,
            comes_again: false,
            gives: false,
            asked_back: None,
            raised: 1.0,
            raised_at: Duration::ZERO,
        }
    }

    /// What it has of its promise by now is only seen by what is free.
    pub(super) const fn is_taking(&self) -> bool {
        matches!(self.state, State::Comes { .. }) || self.settles.is_some()
    }

    pub(super) const fn is_there(&self) -> bool {
        matches!(self.state, State::Comes { .. } | State::Serves { .. } | State::Leaves)
    }
}
