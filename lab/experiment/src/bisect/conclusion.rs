//! The conclusion of a bisection, at its end or after an interruption.

use serde::{Deserialize, Serialize};

use super::{CurePhase, CurePlanner};
use crate::trial::{TrialReport, WorkloadMemory};

/// Outcome of a bisection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum CureOutcome {
    /// Nothing leaks without switches.
    NothingToCure,
    /// Unknown if anything leaks: no process ran, or none ran long enough.
    NotKnown {
        /// Reason.
        why: String,
    },
    /// All leaks are stopped.
    Cured,
    /// Some leaks are stopped.
    PartlyCured,
    /// No leak is stopped.
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
    /// Memories that leak without switches.
    pub leaking: Vec<WorkloadMemory>,
    /// Smallest set found to stop all targets, as indices of the switches.
    pub cure: Vec<usize>,
    /// Memories that the cure stops.
    pub stopped: Vec<WorkloadMemory>,
    /// Smallest working set for each memory that can be stopped.
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

    /// Returns the memories that the cure stops.
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
