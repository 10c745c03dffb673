//! Trial of a bisection: a set of switches, its legs, and their comparison with the baseline legs.

use serde::{Deserialize, Serialize};

use super::sequential::{CurePolicy, Does, Judgement, judge, partly};
use super::{Finding, Workload};
use warden_policies::growth::{Interval, Verdict};
use warden_policies::sample::MemoryKind;

/// A memory under a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Track {
    /// Workload of the process.
    pub workload: Workload,
    /// Measured memory.
    pub series: MemoryKind,
}

/// Switches of a process, by index; none is the baseline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arm {
    /// Indices in ascending order.
    pub switches: Vec<usize>,
}

impl Arm {
    /// Returns true for the server without switches.
    pub fn is_baseline(&self) -> bool {
        self.switches.is_empty()
    }
}

/// Result of one fresh process.
#[derive(Clone, Debug)]
pub(super) struct Leg {
    /// Growth per request and verdict, where memory could be read.
    pub(super) tracks: Vec<(Track, Interval, Verdict)>,
    /// Some memory has too few readings, or none.
    pub(super) short: bool,
    speeds: Vec<(Workload, Pace)>,
}

/// Speed under one workload.
#[derive(Clone, Copy, Debug)]
struct Pace {
    tokens_per_second: Option<f64>,
    first_token: Option<f64>,
}

impl Leg {
    pub(super) fn of(findings: &[Finding]) -> Self {
        let mut tracks = Vec::new();
        let mut speeds = Vec::new();
        // A leg without the prompt cache replaces the one with it for the same work.
        let again = |finding: &Finding| {
            let same = |other: &Finding| other.control && other.workload == finding.workload;
            !finding.control && findings.iter().any(same)
        };
        for finding in findings.iter().filter(|finding| !again(finding)) {
            for found in &finding.series {
                // A leg without a fit did not grow, within its detection limit.
                let flat = Interval { value: 0.0, low: -found.sees, high: found.sees };
                let track = Track { workload: finding.workload, series: found.series };
                // Growth into measured pools is no leak.
                let pooled = found.pooled_per_request.unwrap_or(0.0);
                let all = found.per_request.unwrap_or(flat);
                let rest =
                    Interval { value: all.value - pooled, low: all.low - pooled, high: all.high - pooled };
                tracks.push((track, rest, found.verdict));
            }
            let pace = Pace {
                tokens_per_second: finding.speed.tokens_per_second,
                first_token: finding.speed.first_token.map(|time| time.as_secs_f64()),
            };
            speeds.push((finding.workload, pace));
        }
        let short = findings.iter().any(Finding::is_too_short);
        Self { tracks, short, speeds }
    }

    pub(super) fn of_track(&self, track: Track) -> Option<(Interval, Verdict)> {
        self.tracks.iter().find(|(own, ..)| *own == track).map(|(_, rate, verdict)| (*rate, *verdict))
    }
}

/// Cost of a set of switches in speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Tokens per second with and without the switches, medians over the legs.
    pub tokens_per_second: Option<Beside>,
    /// Seconds to the first token, with and without.
    pub first_token: Option<Beside>,
}

/// A figure with the switches and without them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Beside {
    /// Value without the switches.
    pub without: f64,
    /// Value with the switches.
    pub with: f64,
    /// Every process with them was slower than every one without; anything less is timing noise.
    pub slower: bool,
}

impl Beside {
    /// Returns the change as a share of the figure without: -0.1 is a tenth less.
    pub fn change(self) -> f64 {
        if self.without > 0.0 { self.with / self.without - 1.0 } else { 0.0 }
    }
}

impl Cost {
    /// Returns the lost share of tokens per second; 0 if no loss is certain or known.
    pub fn lost(&self) -> f64 {
        self.tokens_per_second.filter(|rate| rate.slower).map_or(0.0, |rate| (-rate.change()).max(0.0))
    }

    /// Returns true if more than this share is lost.
    pub(crate) fn is_dear(&self, share: f64) -> bool {
        self.lost() > share
    }
}

#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub(super) arm: Arm,
    pub(super) legs: Vec<Leg>,
    pub(super) crashed: Option<String>,
    pub(super) closed: bool,
    judgements: Vec<(Track, Judgement)>,
}

/// Report on a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialReport {
    /// Indices of the switches.
    pub switches: Vec<usize>,
    /// Number of processes with them.
    pub legs: usize,
    /// Judgement by memory.
    pub tracks: Vec<(Track, Judgement)>,
    /// Loss of speed with the switches.
    pub cost: Cost,
    /// Reason, if the server ended or did not start.
    pub crashed: Option<String>,
}

impl Trial {
    pub(super) fn new(arm: Arm) -> Self {
        Self { arm, legs: Vec::new(), crashed: None, closed: false, judgements: Vec::new() }
    }

    /// Judges the trial by all legs so far. Growth that the detector still calls a leak is not stopped,
    /// however small. Two legs decide that, and no more are run to find how close to a limit the rest is.
    pub(super) fn judge(&mut self, policy: &CurePolicy, baseline: &[Leg], leaking: &[Track]) {
        if self.closed {
            return;
        }
        let kept = baseline.len().saturating_sub(policy.baseline_kept);
        for track in leaking {
            let rates = |legs: &[Leg]| -> Vec<Interval> {
                legs.iter().filter_map(|leg| leg.of_track(*track).map(|(rate, _)| rate)).collect()
            };
            let mut found = judge(policy, &rates(&baseline[kept..]), &rates(&self.legs));
            let leaks = |leg: &Leg| leg.of_track(*track).is_some_and(|(_, verdict)| verdict.leaks());
            if self.legs.iter().any(leaks) {
                let share = found.share.filter(|_| self.legs.len() > 1);
                found.does = match (found.does, share) {
                    (Does::Stops, _) => Does::Halves,
                    (Does::Undecided, Some(share)) => partly(share.value, policy),
                    (other, _) => other,
                };
            }
            self.judgements.retain(|(own, _)| own != track);
            self.judgements.push((*track, found));
        }
    }

    /// Closes the trial if its question is answered. `informs`: the trial must judge every memory, not only
    /// if it stops all `targets`.
    pub(super) fn close(&mut self, policy: &CurePolicy, targets: &[Track], informs: bool) {
        let legs = u32::try_from(self.legs.len()).unwrap_or(u32::MAX);
        if self.closed || legs == 0 {
            return;
        }
        let does = |track: &Track| self.judgement(*track).map_or(Does::Undecided, |found| found.does);
        let open = targets.iter().any(|track| does(track) == Does::Undecided);
        let stops = targets.iter().any(|track| does(track) == Does::Stops);
        let fails = targets.iter().any(|track| matches!(does(track), Does::Halves | Does::Nothing));
        let confirmed = !stops || legs >= policy.legs_least;
        self.closed = legs >= policy.legs_most || if !informs && fails { true } else { !open && confirmed };
    }

    pub(super) fn judgement(&self, track: Track) -> Option<&Judgement> {
        self.judgements.iter().find(|(own, _)| *own == track).map(|(_, found)| found)
    }

    pub(super) fn stops(&self, track: Track) -> bool {
        self.closed
            && self.crashed.is_none()
            && self.judgement(track).is_some_and(|found| found.does == Does::Stops)
    }

    pub(super) fn stops_all(&self, targets: &[Track]) -> bool {
        !targets.is_empty() && targets.iter().all(|track| self.stops(*track))
    }

    /// Compares its speed with these legs.
    pub(super) fn cost(&self, baseline: &[Leg]) -> Cost {
        Cost {
            tokens_per_second: beside(baseline, &self.legs, true, |pace| pace.tokens_per_second),
            first_token: beside(baseline, &self.legs, false, |pace| pace.first_token),
        }
    }

    pub(super) fn report(&self, baseline: &[Leg]) -> TrialReport {
        TrialReport {
            switches: self.arm.switches.clone(),
            legs: self.legs.len(),
            tracks: self.judgements.clone(),
            cost: self.cost(baseline),
            crashed: self.crashed.clone(),
        }
    }
}

/// Medians over legs with and without the switches; of several workloads, the one that lost most. `more`:
/// larger is better.
fn beside(without: &[Leg], with: &[Leg], more: bool, of: impl Fn(&Pace) -> Option<f64>) -> Option<Beside> {
    let mut kinds: Vec<Workload> = Vec::new();
    for (kind, _) in with.iter().flat_map(|leg| &leg.speeds) {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    let values = |legs: &[Leg], kind: Workload| {
        let own = legs.iter().flat_map(|leg| &leg.speeds).filter(|(own, _)| *own == kind);
        let mut all: Vec<f64> = own.filter_map(|(_, pace)| of(pace)).filter(|value| *value > 0.0).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let median = |all: &[f64]| {
        let middle = all.len() / 2;
        let last = all.get(middle).copied()?;
        Some(if all.len().is_multiple_of(2) { f64::midpoint(all[middle - 1], last) } else { last })
    };
    let pairs = kinds.into_iter().filter_map(|kind| {
        let (before, after) = (values(without, kind), values(with, kind));
        let (best, worst) =
            if more { (after.last(), before.first()) } else { (after.first(), before.last()) };
        let slower =
            best.zip(worst).is_some_and(|(best, worst)| if more { best < worst } else { best > worst });
        Some(Beside { without: median(&before)?, with: median(&after)?, slower })
    });
    let loss = |beside: &Beside| if more { -beside.change() } else { beside.change() };
    pairs.max_by(|a, b| loss(a).total_cmp(&loss(b)))
}
