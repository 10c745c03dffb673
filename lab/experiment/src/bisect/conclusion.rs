//! What a bisection found out, at its end or when it is broken off.

use serde::{Deserialize, Serialize};

use super::{Phase, Planner};
use crate::trial::{Track, TrialReport};

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// Without any switch nothing leaks.
    NothingToCure,
    /// Nobody knows whether anything leaks: nothing was run, or not long enough.
    NotKnown {
        /// Why.
        why: String,
    },
    /// Everything that leaked is stopped.
    Cured,
    /// Some of it is stopped.
    PartlyCured,
    /// Nothing is stopped.
    NotCured,
    /// The server cannot do the work without any switch.
    BaselineFailed {
        /// Why.
        why: String,
    },
    /// It was broken off.
    Interrupted,
}

/// What was found out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conclusion {
    /// How it ended.
    pub outcome: Outcome,
    /// Memories that leak without any switch.
    pub leaking: Vec<Track>,
    /// The smallest set that was found to stop what can be stopped, as indices of the switches.
    pub cure: Vec<usize>,
    /// What it stops.
    pub stopped: Vec<Track>,
    /// For each memory that something stops: the smallest set that was seen to.
    pub by_track: Vec<(Track, Vec<usize>)>,
    /// All that was tried, in order.
    pub trials: Vec<TrialReport>,
    /// Processes that were run, those without switches included.
    pub legs: usize,
}

impl Planner {
    pub(super) fn over(&mut self, cure: Vec<usize>) -> Phase {
        self.cure = cure;
        let stopped = self.stopped();
        Phase::Over(if stopped.is_empty() {
            Outcome::NotCured
        } else if self.leaking.iter().all(|track| stopped.contains(track)) {
            Outcome::Cured
        } else {
            Outcome::PartlyCured
        })
    }

    /// What the cure stops.
    fn stopped(&self) -> Vec<Track> {
        let own = self.trials.iter().find(|trial| trial.arm.switches == self.cure);
        let Some(own) = own else { return Vec::new() };
        self.leaking.iter().copied().filter(|track| own.stops(*track)).collect()
    }

    pub(super) fn conclude(&self, outcome: Outcome) -> Conclusion {
        let mut by_track = Vec::new();
        for track in &self.leaking {
            let stops = self.trials.iter().filter(|trial| trial.stops(*track));
            if let Some(least) = stops.min_by_key(|trial| trial.arm.switches.len()) {
                by_track.push((*track, least.arm.switches.clone()));
            }
        }
        Conclusion {
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
