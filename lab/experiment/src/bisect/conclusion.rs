//! The conclusion of a bisection, drawn at its end or after an interruption.

use serde::{Deserialize, Serialize};

use super::{CurePhase, CurePlanner};
use crate::trial::{TrialReport, WorkloadMemory};

/// Outcome of a bisection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum CureOutcome {
    /// Nothing leaks without switches.
    NothingToCure,
    /// Leaks could not be looked for: no process ran, or none ran long enough.
    NotKnown {
        /// Reason.
        why: String,
    },
    /// Switches stop all leaks.
    Cured,
    /// Switches stop some of the leaks.
    PartlyCured,
    /// Switches stop no leak.
    NotCured,
    /// The server cannot do the work even without switches.
    BaselineFailed {
        /// Reason.
        why: String,
    },
    /// The bisection was interrupted.
    Interrupted,
}

/// Result of a bisection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CureConclusion {
    /// Outcome of the bisection.
    pub outcome: CureOutcome,
    /// Kinds of memory that leak without switches, by workload.
    pub leaking: Vec<WorkloadMemory>,
    /// Smallest set found that stops every leak which can be stopped, as indices of switches.
    pub cure: Vec<usize>,
    /// Leaks that the cure stops.
    pub stopped: Vec<WorkloadMemory>,
    /// For each leak that can be stopped, the smallest set that stops it.
    pub by_track: Vec<(WorkloadMemory, Vec<usize>)>,
    /// Trials in order.
    pub trials: Vec<TrialReport>,
    /// Number of processes run, baseline included.
    pub legs: usize,
}

impl CurePlanner {
    pub(super) fn finish_with(&mut self, cure: Vec<usize>) -> CurePhase {
        self.cure = cure;
        let stopped = self.stopped();
        CurePhase::Over(if stopped.is_empty() {
            CureOutcome::NotCured
        } else if self.leaking.iter().all(|track| stopped.contains(track)) {
            CureOutcome::Cured
        } else {
            CureOutcome::PartlyCured
        })
    }

    /// Returns the leaks that the cure stops.
    fn stopped(&self) -> Vec<WorkloadMemory> {
        let own = self.trials.iter().find(|trial| trial.arm.switches == self.cure);
        let Some(own) = own else { return Vec::new() };
        self.leaking.iter().copied().filter(|track| own.stops(*track)).collect()
    }

    pub(super) fn conclude(&self, outcome: CureOutcome) -> CureConclusion {
        let mut by_track = Vec::new();
        for track in &self.leaking {
            let stops = self.trials.iter().filter(|trial| trial.stops(*track));
            if let Some(least) = stops.min_by_key(|trial| trial.arm.switches.len()) {
                by_track.push((*track, least.arm.switches.clone()));
            }
        }
        CureConclusion {
            outcome,
            leaking: self.leaking.clone(),
            cure: self.cure.clone(),
            stopped: self.stopped(),
            by_track,
            trials: self.trials.iter().map(|trial| trial.report(&self.baseline)).collect(),
            legs: self.legs,
        }
    }
}
