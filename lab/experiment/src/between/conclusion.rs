//! What was looked for, and what was found.

use serde::{Deserialize, Serialize};

use super::super::crash::{Again, Run};
use super::super::proof::{Metric, Ratio};
use super::super::sequential::Judgement;
use super::super::trial::Track;
use super::super::{Finding, Workload};
use super::Aim;
use super::pace::Pace;
use super::replies::{Otherwise, Said};
use warden_policies::growth::Verdict;

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
    /// It takes longer for the same.
    Slowdown {
        /// What takes longer.
        metric: Metric,
    },
    /// It answers otherwise. The newer end always has it: no answer is the right one.
    Answers {
        /// The questions that show it.
        requests: Vec<String>,
    },
}

impl Symptom {
    /// What one of two ends has, and whether it is the newer one. A crash comes before growth: who dies does not leak for long. One that did
    /// not come again is none.
    pub(super) fn between(newer: &[Finding], older: &[Finding], share: f64) -> Result<(Self, bool), Outcome> {
        let ends = [(newer, older, true), (older, newer, false)];
        let crashes = |one: &&Finding| one.crash.as_ref().is_some_and(|crash| crash.again != Again::NotAgain);
        for (these, those, is_newer) in ends {
            let is_own = |one: &&Finding| {
                let also = |other: &Finding| crashes(&other) && other.workload == one.workload;
                crashes(one) && !those.iter().any(also)
            };
            if let Some(Finding { workload, control, .. }) = these.iter().find(is_own) {
                return Ok((Self::Crash { workload: *workload, control: *control }, is_newer));
            }
        }
        let mut worst: Option<(f64, Self, bool)> = None;
        let mut is_everywhere = newer.iter().any(|one| crashes(&one));
        for (these, those, is_newer) in ends {
            for (finding, series) in these.iter().flat_map(|one| one.series.iter().map(move |own| (one, own)))
            {
                if !series.verdict.leaks() {
                    continue;
                }
                let track = Track { workload: finding.workload, series: series.series };
                let own = series.per_request.map_or(0.0, |rate| rate.value);
                let other = growth_of(those, track, finding.control);
                if other >= own * share {
                    is_everywhere = true;
                } else if worst.as_ref().is_none_or(|(most, ..)| own - other > *most) {
                    worst = Some((own - other, Self::Growth { track, control: finding.control }, is_newer));
                }
            }
        }
        match worst {
            Some((_, symptom, is_newer)) => Ok((symptom, is_newer)),
            None if is_everywhere => Err(Outcome::BothIll),
            None if newer.iter().chain(older).any(|finding| finding.crash.is_some()) => {
                Err(Outcome::NotAgain)
            }
            None => {
                let mut all = newer.iter().chain(older);
                let short = all.clone().any(Finding::is_too_short);
                let suspected = all.any(|finding| finding.worst().is_some_and(Verdict::grows));
                Err(Outcome::NeitherIll { short, suspected })
            }
        }
    }

    /// The work under which it shows, and whether without the prompt cache; `None`: it needs none.
    pub const fn work(&self) -> Option<(Workload, bool)> {
        match self {
            Self::Growth { track, control } => Some((track.workload, *control)),
            Self::Crash { workload, control } => Some((*workload, *control)),
            Self::Slowdown { .. } | Self::Answers { .. } => None,
        }
    }

    /// Those findings of an end that are about it.
    pub(super) fn findings(&self, all: &[Finding]) -> Vec<Finding> {
        let work = self.work();
        let is_own = |finding: &&Finding| work == Some((finding.workload, finding.control));
        all.iter().filter(is_own).cloned().collect()
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
        /// A memory is suspected.
        suspected: bool,
    },
    /// Both ends are equally fast, or answer the same.
    Alike {
        /// It is shown; else they may differ by what chance hides.
        sure: bool,
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
    /// How fast it is beside the ends, where that is looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<Pace>,
    /// How it answers beside the ends, where that is looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<Said>,
}

impl Judged {
    pub(super) const fn new(revision: usize, standing: Standing, legs: usize) -> Self {
        Self {
            revision,
            standing,
            legs,
            judgement: None,
            runs: Vec::new(),
            again: false,
            pace: None,
            answers: None,
        }
    }
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conclusion {
    /// How it ended.
    pub outcome: Outcome,
    /// What was wanted.
    #[serde(default, skip_serializing_if = "Aim::is_growth")]
    pub aim: Aim,
    /// What was looked for.
    pub symptom: Option<Symptom>,
    /// Whether the newer end has it: then a revision brought it, else one ended it.
    pub ill_is_newer: Option<bool>,
    /// The healthy and the ill revision between which it lies.
    pub bounds: Option<(usize, usize)>,
    /// What was judged, in order; the end that has it last.
    pub judged: Vec<Judged>,
    /// What the newer end did, work by work.
    pub newer: Vec<Finding>,
    /// What the older one did.
    pub older: Vec<Finding>,
    /// How fast the newer end is beside the older one, where that is looked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ratios: Vec<Ratio>,
    /// What the ends answer otherwise, where that is looked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<Otherwise>,
    /// Processes that were run.
    pub legs: usize,
}

/// By how much a memory grows with each request. What does not leak counts with what little it does.
fn growth_of(found: &[Finding], track: Track, control: bool) -> f64 {
    let own = found.iter().find(|one| one.workload == track.workload && one.control == control);
    let rate = own.and_then(|one| one.of(track.series)).and_then(|series| series.per_request);
    rate.map_or(0.0, |rate| rate.value.max(0.0))
}
