//! What was looked for, and what was found.

use serde::{Deserialize, Serialize};

use super::super::crash::Run;
use super::super::sequential::Judgement;
use super::super::trial::Track;
use super::super::{Finding, Workload};
use super::tracks;

/// What one end does and the other does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Symptom {
    /// A memory grows.
    Growth {
        /// Which, under which work.
        track: Track,
        /// Without the prompt cache.
        control: bool,
    },
    /// The server dies.
    Crash {
        /// Under which work.
        workload: Workload,
        /// Without the prompt cache.
        control: bool,
    },
}

impl Symptom {
    /// What one of two ends has, and whether it is the newer one. A crash comes before growth: who dies does not leak for long.
    pub(super) fn between(newer: &[Finding], older: &[Finding]) -> Result<(Self, bool), Outcome> {
        let crash = |found: &[Finding]| {
            let finding = found.iter().find(|finding| finding.crash.is_some())?;
            Some(Self::Crash { workload: finding.workload, control: finding.control })
        };
        match (crash(newer), crash(older)) {
            (Some(_), Some(_)) => return Err(Outcome::BothIll),
            (Some(symptom), None) => return Ok((symptom, true)),
            (None, Some(symptom)) => return Ok((symptom, false)),
            (None, None) => {}
        }
        let leaks = |found: &[Finding]| {
            let mut all: Vec<(f64, Self, Track)> = Vec::new();
            for (track, finding) in tracks(found) {
                let Some(series) = finding.of(track.series).filter(|series| series.verdict.leaks()) else {
                    continue;
                };
                let rate = series.per_request.map_or(0.0, |rate| rate.value);
                all.push((rate, Self::Growth { track, control: finding.control }, track));
            }
            all
        };
        let (new, old) = (leaks(newer), leaks(older));
        let only = |these: &[(f64, Self, Track)], those: &[(f64, Self, Track)]| {
            let own = these.iter().filter(|(.., track)| !those.iter().any(|(.., other)| other == track));
            own.max_by(|one, other| one.0.total_cmp(&other.0))
                .map(|(rate, symptom, _)| (*rate, symptom.clone()))
        };
        match (only(&new, &old), only(&old, &new)) {
            (Some((rate, _)), Some((other, symptom))) if other > rate => Ok((symptom, false)),
            (Some((_, symptom)), _) => Ok((symptom, true)),
            (None, Some((_, symptom))) => Ok((symptom, false)),
            (None, None) if !new.is_empty() => Err(Outcome::BothIll),
            (None, None) => {
                let short = newer.iter().chain(older).any(Finding::is_too_short);
                Err(Outcome::NeitherIll { short })
            }
        }
    }

    /// Those findings of an end that are about it.
    pub(super) fn findings(&self, all: &[Finding]) -> Vec<Finding> {
        let (Self::Growth { control, .. } | Self::Crash { control, .. }) = self;
        let own: Vec<Finding> = all.iter().filter(|finding| finding.control == *control).cloned().collect();
        // The other end may not have done it without the cache.
        if own.is_empty() { all.to_vec() } else { own }
    }
}

/// How a revision stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Standing {
    /// It does not have the symptom.
    Healthy,
    /// It has it, or a part of it.
    Ill,
    /// Nobody can tell.
    Unknown {
        /// Why.
        why: String,
    },
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Outcome {
    /// This revision made the difference: its predecessor stands otherwise, and both were judged twice.
    Found {
        /// By its place in the line.
        revision: usize,
    },
    /// One of these did; those between them cannot be told.
    Among {
        /// The first that may be it.
        first: usize,
        /// The last that may be it.
        last: usize,
    },
    /// A neighbour that was judged again was judged otherwise.
    Unsteady {
        /// Which.
        revision: usize,
    },
    /// Both ends have the symptom.
    BothIll,
    /// Neither end has any.
    NeitherIll {
        /// There were too few readings to say more.
        short: bool,
    },
    /// The crash did not come again.
    NotAgain,
    /// An end cannot be had or told.
    EndFailed {
        /// The newer one.
        newer: bool,
        /// Why.
        why: String,
    },
    /// The ill end could not be run any more.
    IllFailed {
        /// Why.
        why: String,
    },
    /// It was broken off.
    Interrupted,
}

/// What was found of a revision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    /// By its place in the line.
    pub revision: usize,
    /// How it stands.
    pub standing: Standing,
    /// Processes that were measured.
    pub legs: usize,
    /// Its growth beside that of the ill end.
    pub judgement: Option<Judgement>,
    /// What its processes did, where a crash is looked for.
    pub runs: Vec<Run>,
    /// It was judged once more.
    pub again: bool,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conclusion {
    /// How it ended.
    pub outcome: Outcome,
    /// What was looked for.
    pub symptom: Option<Symptom>,
    /// Whether the newer end has it: then a revision brought it, else one ended it.
    pub ill_is_newer: Option<bool>,
    /// The healthy and the ill revision between which it lies.
    pub bounds: Option<(usize, usize)>,
    /// What was judged, in order.
    pub judged: Vec<Judged>,
    /// What the processes of the ill end did, where a crash is looked for.
    pub baseline: Vec<Run>,
    /// Processes that were run.
    pub legs: usize,
}
