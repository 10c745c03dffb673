//! Trial of a bisection: a set of switches, its legs, and their comparison with the baseline legs.

use serde::{Deserialize, Serialize};

use super::sequential::{CurePolicy, SwitchEffect, SwitchJudgement, judge, partial_effect};
use super::{LegFinding, LegSpeed, Workload};
use warden_policies::growth::stats::median;
use warden_policies::growth::{GrowthVerdict, IntervalEstimate};
use warden_policies::sample::MemoryKind;

/// A kind of memory under a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadMemory {
    /// Workload of the process.
    pub workload: Workload,
    /// Kind of memory that was measured.
    pub series: MemoryKind,
}

/// Switches of a process, by index; the empty set is the baseline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchSet {
    /// Indices in ascending order.
    pub switches: Vec<usize>,
}

impl SwitchSet {
    /// Returns true without switches.
    pub fn is_baseline(&self) -> bool {
        self.switches.is_empty()
    }
}

#[derive(Clone, Debug)]
pub(super) struct TrialLeg {
    /// Growth per request, and verdict, for each kind of memory that could be read.
    pub(super) tracks: Vec<(WorkloadMemory, IntervalEstimate, GrowthVerdict)>,
    /// Some kind of memory has too few readings, or no memory was read.
    pub(super) short: bool,
    speeds: Vec<(Workload, LegSpeed)>,
}

impl TrialLeg {
    pub(super) fn from_findings(findings: &[LegFinding]) -> Self {
        let mut tracks = Vec::new();
        let mut speeds = Vec::new();
        // Under one workload, the leg without the prompt cache counts.
        let again = |finding: &LegFinding| {
            let same = |other: &LegFinding| other.control && other.workload == finding.workload;
            !finding.control && findings.iter().any(same)
        };
        for finding in findings.iter().filter(|finding| !again(finding)) {
            for found in &finding.series {
                // Without a fit, the memory did not grow within the detection limit.
                let flat = IntervalEstimate { value: 0.0, low: -found.sees, high: found.sees };
                let track = WorkloadMemory { workload: finding.workload, series: found.series };
                // Growth within measured pools is no leak.
                let pooled = found.pooled_per_request.unwrap_or(0.0);
                let all = found.per_request.unwrap_or(flat);
                let rest = IntervalEstimate {
                    value: all.value - pooled,
                    low: all.low - pooled,
                    high: all.high - pooled,
                };
                tracks.push((track, rest, found.verdict));
            }
            speeds.push((finding.workload, finding.speed));
        }
        let short = findings.iter().any(LegFinding::is_too_short);
        Self { tracks, short, speeds }
    }

    pub(super) fn of_track(&self, track: WorkloadMemory) -> Option<(IntervalEstimate, GrowthVerdict)> {
        self.tracks.iter().find(|(own, ..)| *own == track).map(|(_, rate, verdict)| (*rate, *verdict))
    }
}

/// Loss of speed caused by a set of switches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SwitchCost {
    /// Tokens per second with and without the switches, as medians over the legs.
    pub tokens_per_second: Option<ComparedFigure>,
    /// Seconds to the first token with and without the switches, as medians over the legs.
    pub first_token: Option<ComparedFigure>,
}

/// Value with and without the switches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComparedFigure {
    /// Value without the switches.
    pub without: f64,
    /// Value with the switches.
    pub with: f64,
    /// True if every process with the switches was slower than every process without.
    pub slower: bool,
}

impl ComparedFigure {
    /// Returns the change as a share of the value without the switches: -0.1 is a tenth less.
    pub fn change(self) -> f64 {
        if self.without > 0.0 { self.with / self.without - 1.0 } else { 0.0 }
    }
}

impl SwitchCost {
    /// Returns the lost share of tokens per second; 0 if no loss is certain or known.
    pub fn lost_share(&self) -> f64 {
        self.tokens_per_second.filter(|rate| rate.slower).map_or(0.0, |rate| (-rate.change()).max(0.0))
    }

    pub(crate) fn exceeds(&self, share: f64) -> bool {
        self.lost_share() > share
    }
}

#[derive(Clone, Debug)]
pub(super) struct SwitchTrial {
    pub(super) arm: SwitchSet,
    pub(super) legs: Vec<TrialLeg>,
    pub(super) crashed: Option<String>,
    pub(super) closed: bool,
    judgements: Vec<(WorkloadMemory, SwitchJudgement)>,
}

/// Report on a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialReport {
    /// Indices of the switches.
    pub switches: Vec<usize>,
    /// Number of processes with these switches.
    pub legs: usize,
    /// Judgement for each kind of memory and workload.
    pub tracks: Vec<(WorkloadMemory, SwitchJudgement)>,
    /// Loss of speed with the switches.
    pub cost: SwitchCost,
    /// Reason, if the server died or did not start.
    pub crashed: Option<String>,
}

impl SwitchTrial {
    pub(super) fn new(arm: SwitchSet) -> Self {
        Self { arm, legs: Vec::new(), crashed: None, closed: false, judgements: Vec::new() }
    }

    /// Judges the trial by all legs so far. Growth that the detector still calls a leak is not stopped,
    /// however small; two legs decide that.
    pub(super) fn judge(&mut self, policy: &CurePolicy, baseline: &[TrialLeg], leaking: &[WorkloadMemory]) {
        if self.closed {
            return;
        }
        let kept = baseline.len().saturating_sub(policy.baseline_kept);
        for track in leaking {
            let rates = |legs: &[TrialLeg]| -> Vec<IntervalEstimate> {
                legs.iter().filter_map(|leg| leg.of_track(*track).map(|(rate, _)| rate)).collect()
            };
            let mut found = judge(policy, &rates(&baseline[kept..]), &rates(&self.legs));
            let leaks = |leg: &TrialLeg| leg.of_track(*track).is_some_and(|(_, verdict)| verdict.leaks());
            if self.legs.iter().any(leaks) {
                let share = found.share.filter(|_| self.legs.len() > 1);
                found.does = match (found.does, share) {
                    (SwitchEffect::Stops, _) => SwitchEffect::Halves,
                    (SwitchEffect::Undecided, Some(share)) => partial_effect(share.value, policy),
                    (other, _) => other,
                };
            }
            self.judgements.retain(|(own, _)| own != track);
            self.judgements.push((*track, found));
        }
    }

    /// Closes the trial once it is decided if the switches stop all `targets`; with `informs`, once the
    /// effect on each kind of memory is decided as well.
    pub(super) fn close(&mut self, policy: &CurePolicy, targets: &[WorkloadMemory], informs: bool) {
        let legs = u32::try_from(self.legs.len()).unwrap_or(u32::MAX);
        if self.closed || legs == 0 {
            return;
        }
        let does = |track: &WorkloadMemory| {
            self.judgement(*track).map_or(SwitchEffect::Undecided, |found| found.does)
        };
        let open = targets.iter().any(|track| does(track) == SwitchEffect::Undecided);
        let stops = targets.iter().any(|track| does(track) == SwitchEffect::Stops);
        let fails =
            targets.iter().any(|track| matches!(does(track), SwitchEffect::Halves | SwitchEffect::Nothing));
        let confirmed = !stops || legs >= policy.legs_least;
        self.closed = legs >= policy.legs_most || if !informs && fails { true } else { !open && confirmed };
    }

    pub(super) fn judgement(&self, track: WorkloadMemory) -> Option<&SwitchJudgement> {
        self.judgements.iter().find(|(own, _)| *own == track).map(|(_, found)| found)
    }

    pub(super) fn stops(&self, track: WorkloadMemory) -> bool {
        self.closed
            && self.crashed.is_none()
            && self.judgement(track).is_some_and(|found| found.does == SwitchEffect::Stops)
    }

    pub(super) fn stops_all(&self, targets: &[WorkloadMemory]) -> bool {
        !targets.is_empty() && targets.iter().all(|track| self.stops(*track))
    }

    pub(super) fn cost(&self, baseline: &[TrialLeg]) -> SwitchCost {
        SwitchCost {
            tokens_per_second: compare_legs(baseline, &self.legs, true, |speed| speed.tokens_per_second),
            first_token: compare_legs(baseline, &self.legs, false, |speed| {
                speed.first_token.map(|time| time.as_secs_f64())
            }),
        }
    }

    pub(super) fn report(&self, baseline: &[TrialLeg]) -> TrialReport {
        TrialReport {
            switches: self.arm.switches.clone(),
            legs: self.legs.len(),
            tracks: self.judgements.clone(),
            cost: self.cost(baseline),
            crashed: self.crashed.clone(),
        }
    }
}

/// Compares medians over legs with and without the switches; of several workloads, the one that lost most
/// counts. With `more`, larger is better.
fn compare_legs(
    without: &[TrialLeg],
    with: &[TrialLeg],
    more: bool,
    of: impl Fn(&LegSpeed) -> Option<f64>,
) -> Option<ComparedFigure> {
    let mut kinds: Vec<Workload> = Vec::new();
    for (kind, _) in with.iter().flat_map(|leg| &leg.speeds) {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    let values = |legs: &[TrialLeg], kind: Workload| {
        let own = legs.iter().flat_map(|leg| &leg.speeds).filter(|(own, _)| *own == kind);
        let mut all: Vec<f64> = own.filter_map(|(_, speed)| of(speed)).filter(|value| *value > 0.0).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let pairs = kinds.into_iter().filter_map(|kind| {
        let mut before = values(without, kind);
        let mut after = values(with, kind);
        let (best, worst) =
            if more { (after.last(), before.first()) } else { (after.first(), before.last()) };
        let slower =
            best.zip(worst).is_some_and(|(best, worst)| if more { best < worst } else { best > worst });
        Some(ComparedFigure { without: median(&mut before)?, with: median(&mut after)?, slower })
    });
    let loss = |beside: &ComparedFigure| if more { -beside.change() } else { beside.change() };
    pairs.max_by(|a, b| loss(a).total_cmp(&loss(b)))
}
