//! Symptoms, judgements and conclusions of a search between two revisions.

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

/// Difference in behaviour between the two ends: the oldest and the newest revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RevisionSymptom {
    /// A kind of memory grows.
    Growth {
        /// Kind of memory and workload.
        track: WorkloadMemory,
        /// Measured without the prompt cache.
        control: bool,
    },
    /// The server dies.
    Crash {
        /// Workload under which the server dies.
        workload: Workload,
        /// Measured without the prompt cache.
        control: bool,
    },
    /// The same work takes longer.
    Slowdown {
        /// Metric that got worse.
        metric: BuildMetric,
    },
    /// The ends answer differently. The newer end counts as ill, because neither answer is known to be right.
    Answers {
        /// Names of the requests that show the difference.
        requests: Vec<String>,
    },
}

impl RevisionSymptom {
    /// Also returns true if the newer end has the symptom. Crashes precede growth, because a process that
    /// dies does not leak for long. A crash that did not recur does not count.
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

    /// Returns the workload that shows the symptom, and true if it runs without the prompt cache.
    pub const fn work(&self) -> Option<(Workload, bool)> {
        match self {
            Self::Growth { track, control } => Some((track.workload, *control)),
            Self::Crash { workload, control } => Some((*workload, *control)),
            Self::Slowdown { .. } | Self::Answers { .. } => None,
        }
    }

    pub(super) fn findings(&self, all: &[LegFinding]) -> Vec<LegFinding> {
        let work = self.work();
        let is_own = |finding: &&LegFinding| work == Some((finding.workload, finding.control));
        all.iter().filter(is_own).cloned().collect()
    }
}

/// Judgement of a revision: whether it has the symptom.
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

/// Outcome of a search for the revision that changed the behaviour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum RevisionOutcome {
    /// This revision differs from its predecessor; both were judged twice.
    Found {
        /// Index in the line of revisions.
        revision: usize,
    },
    /// The change lies in this range, whose inner revisions cannot be judged.
    Among {
        /// First candidate.
        first: usize,
        /// Last candidate.
        last: usize,
    },
    /// The second judgement of a revision next to the change differed from the first.
    Unsteady {
        /// Index of that revision.
        revision: usize,
    },
    /// Both ends have the symptom.
    BothIll,
    /// Neither end has a symptom.
    NeitherIll {
        /// True if there were too few readings for a stronger statement.
        short: bool,
        /// True if a kind of memory is suspected to leak.
        suspected: bool,
    },
    /// Both ends are equally fast, or give the same answers.
    Alike {
        /// True if shown to be alike; false if noise may hide a difference.
        sure: bool,
    },
    /// The crash did not recur, so there is nothing to search for.
    NotAgain,
    /// An end cannot be built, run or judged.
    EndFailed {
        /// True if the newer end failed, false if the older did.
        newer: bool,
        /// Reason.
        why: String,
    },
    /// The end with the symptom stopped running during the search.
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
    /// Number of processes that were measured.
    pub legs: usize,
    /// Growth compared with that of the end with the symptom.
    pub judgement: Option<SwitchJudgement>,
    /// Runs of the revision's processes, in a search for a crash.
    pub runs: Vec<CrashRun>,
    /// The revision was judged a second time.
    pub again: bool,
    /// Speed compared with the ends, in a search for a slowdown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace: Option<RevisionPace>,
    /// Answers compared with the ends, in a search for changed answers.
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

/// Conclusion of a search, complete or interrupted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RevisionConclusion {
    /// Outcome of the search.
    pub outcome: RevisionOutcome,
    /// Kind of behaviour that was searched for.
    #[serde(default, skip_serializing_if = "RevisionAim::is_growth")]
    pub aim: RevisionAim,
    /// Symptom; `None` if it was not found.
    pub symptom: Option<RevisionSymptom>,
    /// True if the newer end has the symptom, so a revision introduced it; false if a revision removed it.
    pub ill_is_newer: Option<bool>,
    /// Closest healthy and ill revision, in this order; the change lies between them.
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

/// Returns the growth per request even if it is too small for a leak.
fn growth_of(found: &[LegFinding], track: WorkloadMemory, control: bool) -> f64 {
    let own = found.iter().find(|one| one.workload == track.workload && one.control == control);
    let rate = own.and_then(|one| one.series_of(track.series)).and_then(|series| series.per_request);
    rate.map_or(0.0, |rate| rate.value.max(0.0))
}
