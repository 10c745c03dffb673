//! Symptoms, standings and conclusions of a search between two revisions.

use serde::{Deserialize, Serialize};

use super::super::crash::{CrashRecurrence, CrashRun};
use super::super::proof::{BuildMetric, MetricRatio};
use super::super::sequential::SwitchJudgement;
use super::super::trial::WorkloadMemory;
use super::super::{LegFinding, Workload};
use super::RevisionAim;
use super::pace::RevisionPace;
use super::replies::{EndsDifference, RevisionAnswers};
use warden_policies::growth::GrowthVerdict;

/// Difference in behaviour between the two ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RevisionSymptom {
    /// A memory grows.
    Growth {
        /// Memory and workload.
        track: WorkloadMemory,
        /// Measured without the prompt cache.
        control: bool,
    },
    /// The server dies.
    Crash {
        /// Workload under which it dies.
        workload: Workload,
        /// Measured without the prompt cache.
        control: bool,
    },
    /// The same work takes longer.
    Slowdown {
        /// Metric that takes longer.
        metric: BuildMetric,
    },
    /// The ends answer differently. By convention the newer end has this symptom, because neither answer is
    /// known to be right.
    Answers {
        /// Requests that show the difference.
        requests: Vec<String>,
    },
}

impl RevisionSymptom {
    /// Finds the symptom that one end has, and returns whether that is the newer end. Crashes come before
    /// growth, because a process that dies does not leak for long. A crash that did not recur does not
    /// count.
    pub(super) fn find_between(
        newer: &[LegFinding],
        older: &[LegFinding],
        share: f64,
    ) -> Result<(Self, bool), RevisionOutcome> {
        let ends = [(newer, older, true), (older, newer, false)];
        let crashes = |one: &&LegFinding| {
            one.crash.as_ref().is_some_and(|crash| crash.again != CrashRecurrence::NotAgain)
        };
        for (these, those, is_newer) in ends {
            let is_own = |one: &&LegFinding| {
                let also = |other: &LegFinding| crashes(&other) && other.workload == one.workload;
                crashes(one) && !those.iter().any(also)
            };
            if let Some(LegFinding { workload, control, .. }) = these.iter().find(is_own) {
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
                let track = WorkloadMemory { workload: finding.workload, series: series.series };
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
            None if is_everywhere => Err(RevisionOutcome::BothIll),
            None if newer.iter().chain(older).any(|finding| finding.crash.is_some()) => {
                Err(RevisionOutcome::NotAgain)
            }
            None => {
                let mut all = newer.iter().chain(older);
                let short = all.clone().any(LegFinding::is_too_short);
                let suspected = all.any(|finding| finding.worst().is_some_and(GrowthVerdict::grows));
                Err(RevisionOutcome::NeitherIll { short, suspected })
            }
        }
    }

    /// Returns the workload that shows the symptom, and whether to run it without the prompt cache; `None`
    /// if it needs none.
    pub const fn work(&self) -> Option<(Workload, bool)> {
        match self {
            Self::Growth { track, control } => Some((track.workload, *control)),
            Self::Crash { workload, control } => Some((*workload, *control)),
            Self::Slowdown { .. } | Self::Answers { .. } => None,
        }
    }

    /// Returns the findings of an end that concern the symptom.
    pub(super) fn findings(&self, all: &[LegFinding]) -> Vec<LegFinding> {
        let work = self.work();
        let is_own = |finding: &&LegFinding| work == Some((finding.workload, finding.control));
        all.iter().filter(is_own).cloned().collect()
    }
}

/// Judgement of a revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RevisionStanding {
    /// The revision does not have the symptom.
    Healthy,
    /// The revision has the symptom or a part of it.
    Ill,
    /// The revision cannot be judged.
    Unknown {
        /// Reason.
        why: String,
    },
}

/// Outcome of a search.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RevisionOutcome {
    /// This revision made the difference: its predecessor differs from it, and both were judged twice.
    Found {
        /// Index in the line of revisions.
        revision: usize,
    },
    /// A range of revisions contains the change; those in between cannot be judged.
    Among {
        /// First candidate.
        first: usize,
        /// Last candidate.
        last: usize,
    },
    /// A neighbour was judged differently the second time.
    Unsteady {
        /// Index of the neighbour.
        revision: usize,
    },
    /// Both ends have the symptom.
    BothIll,
    /// Neither end has a symptom.
    NeitherIll {
        /// Too few readings for a stronger statement.
        short: bool,
        /// A memory is suspected to leak.
        suspected: bool,
    },
    /// Both ends are equally fast, or give the same answers.
    Alike {
        /// Shown to be alike; otherwise noise may hide a difference.
        sure: bool,
    },
    /// The crash did not recur.
    NotAgain,
    /// An end cannot be built, run or judged.
    EndFailed {
        /// The newer end failed.
        newer: bool,
        /// Reason.
        why: String,
    },
    /// The ill end cannot be run any more.
    IllFailed {
        /// Reason.
        why: String,
    },
    /// The search was interrupted.
    Interrupted,
}

/// Findings on one revision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JudgedRevision {
    /// Index in the line of revisions.
    pub revision: usize,
    /// Judgement of the revision.
    pub standing: RevisionStanding,
    /// Number of measured processes.
    pub legs: usize,
    /// Growth compared with that of the ill end.
    pub judgement: Option<SwitchJudgement>,
    /// Runs of its processes, in a search for a crash.
    pub runs: Vec<CrashRun>,
    /// The revision was judged a second time.
    pub again: bool,
    /// Speed relative to the ends, in a search for a slowdown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<RevisionPace>,
    /// Answers relative to the ends, in a search for changed answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answers: Option<RevisionAnswers>,
}

impl JudgedRevision {
    pub(super) const fn new(revision: usize, standing: RevisionStanding, legs: usize) -> Self {
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

/// Result of a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RevisionConclusion {
    /// Outcome of the search.
    pub outcome: RevisionOutcome,
    /// Aim of the search.
    #[serde(default, skip_serializing_if = "RevisionAim::is_growth")]
    pub aim: RevisionAim,
    /// Symptom, once found.
    pub symptom: Option<RevisionSymptom>,
    /// True if the newer end has the symptom, so a revision introduced it; false if one ended it.
    pub ill_is_newer: Option<bool>,
    /// Healthy and ill revision that enclose the change.
    pub bounds: Option<(usize, usize)>,
    /// Judged revisions in order; the end with the symptom is last.
    pub judged: Vec<JudgedRevision>,
    /// Findings on the newer end, by workload.
    pub newer: Vec<LegFinding>,
    /// Findings on the older end, by workload.
    pub older: Vec<LegFinding>,
    /// Speed of the newer end relative to the older one, in a search for a slowdown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ratios: Vec<MetricRatio>,
    /// Differences between the ends' answers, in a search for changed answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<EndsDifference>,
    /// Number of processes run.
    pub legs: usize,
}

/// Returns a memory's growth per request; memories that do not leak count with their small growth.
fn growth_of(found: &[LegFinding], track: WorkloadMemory, control: bool) -> f64 {
    let own = found.iter().find(|one| one.workload == track.workload && one.control == control);
    let rate = own.and_then(|one| one.series_of(track.series)).and_then(|series| series.per_request);
    rate.map_or(0.0, |rate| rate.value.max(0.0))
}
