//! Judges growth and crashes under workloads. Processes of a revision alternate with processes of the ill
//! end. The tests for switches compare the two, with the revision in place of the switch: [`sequential`] for
//! growth, [`crash`] for crashes. A revision is healthy if a switch with these results would count as a cure.

use super::super::LegFinding;
use super::super::crash::{self, CrashPolicy, CrashRun};
use super::super::sequential::{self, CurePolicy, SwitchEffect, SwitchJudgement};
use super::super::trial::{TrialLeg, WorkloadMemory};
use super::conclusion::{
    JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionStanding, RevisionSymptom,
};
use super::{JudgeReply, JudgingPolicies, ProcessOrder, ProcessResult, RevisionAim, SymptomJudge};
use warden_policies::growth::IntervalEstimate;

/// Processes of a revision: legs in a search for growth, runs in a search for a crash.
#[derive(Clone, Debug, Default)]
struct RevisionProcesses {
    legs: Vec<TrialLeg>,
    runs: Vec<CrashRun>,
}

impl RevisionProcesses {
    fn add(&mut self, symptom: &RevisionSymptom, seen: ProcessResult) -> Result<(), String> {
        let found = findings(seen)?;
        let died = found.iter().find_map(|finding| finding.ended.failure()).cloned();
        match (symptom, died) {
            (RevisionSymptom::Crash { .. }, died) => {
                let run = found.iter().find_map(LegFinding::as_crash_run);
                let run = run.ok_or_else(|| died.unwrap_or_else(|| "its work was cut short".to_owned()))?;
                self.runs.push(run);
            }
            (_, Some(why)) => return Err(why),
            (_, None) => self.legs.push(TrialLeg::from_findings(&found)),
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.legs.is_empty() && self.runs.is_empty()
    }

    fn rates(&self, track: WorkloadMemory) -> Vec<IntervalEstimate> {
        self.legs.iter().filter_map(|leg| leg.of_track(track).map(|(rate, _)| rate)).collect()
    }
}

#[derive(Debug)]
pub(super) struct WorkJudge {
    cure: CurePolicy,
    crash: CrashPolicy,
    last: usize,
    /// Findings on the newer end, which is measured first, and (`older`) on the older end.
    newer: Option<Vec<LegFinding>>,
    older: Vec<LegFinding>,
    symptom: Option<RevisionSymptom>,
    ill: usize,
    baseline: RevisionProcesses,
    /// Consecutive processes of the ill end without a result.
    failed: u32,
    /// Processes of other revisions since the last process of the ill end.
    since: u32,
    open: Option<(usize, RevisionProcesses)>,
}

impl SymptomJudge for WorkJudge {
    fn next(&self) -> Option<ProcessOrder> {
        let Some(symptom) = &self.symptom else {
            let revision = if self.newer.is_none() { self.last } else { 0 };
            return Some(ProcessOrder::new(RevisionAim::Growth, revision, true));
        };
        let open = self.open.as_ref().map(|(revision, _)| *revision);
        let revision = if self.wants_baseline() { self.ill } else { open? };
        let whole = matches!(symptom, RevisionSymptom::Crash { .. });
        let (workload, control) = symptom.work()?;
        let order = ProcessOrder::new(RevisionAim::Growth, revision, false);
        Some(ProcessOrder { whole, control, workload: Some(workload), ..order })
    }

    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply {
        let Some(symptom) = self.symptom.clone() else {
            let found = findings(seen).unwrap_or_default();
            if self.newer.is_none() {
                self.newer = Some(found);
                return JudgeReply::More;
            }
            self.older = found;
            return self.find_symptom();
        };
        if ask.revision == self.ill {
            match self.baseline.add(&symptom, seen) {
                Ok(()) => (self.failed, self.since) = (0, 0),
                Err(why) if self.failed + 1 >= self.cure.baseline_failures => {
                    return JudgeReply::Over(RevisionOutcome::IllFailed { why });
                }
                Err(_) => self.failed += 1,
            }
            return self.judge_open();
        }
        self.add_open(&symptom, seen)
    }

    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply {
        self.open = Some((revision, RevisionProcesses::default()));
        match self.symptom.clone() {
            // Reuse the healthy end's findings only for growth: its run may have ended before the crash.
            Some(symptom @ RevisionSymptom::Growth { .. })
                if revision.abs_diff(self.ill) == self.last && !again =>
            {
                let known = symptom.findings(if self.ill == 0 { self.newer() } else { &self.older });
                // Legs with the prompt cache cannot be compared with legs without it.
                if known.is_empty() {
                    JudgeReply::More
                } else {
                    self.add_open(&symptom, ProcessResult::Findings(known))
                }
            }
            _ => JudgeReply::More,
        }
    }

    fn describe_ends(&self, conclusion: &mut RevisionConclusion) {
        conclusion.newer = self.newer().to_vec();
        conclusion.older.clone_from(&self.older);
        if self.symptom.is_some() {
            conclusion.judged.push(self.judged(self.ill, RevisionStanding::Ill, &self.baseline));
        }
    }
}

impl WorkJudge {
    pub(super) fn new(rules: JudgingPolicies<'_>, last: usize) -> Self {
        Self {
            cure: rules.cure.clone(),
            crash: rules.crash.clone(),
            last,
            newer: None,
            older: Vec::new(),
            symptom: None,
            ill: 0,
            baseline: RevisionProcesses::default(),
            failed: 0,
            since: 0,
            open: None,
        }
    }

    fn newer(&self) -> &[LegFinding] {
        self.newer.as_deref().unwrap_or_default()
    }

    fn find_symptom(&mut self) -> JudgeReply {
        let (symptom, is_newer) =
            match RevisionSymptom::find_between(self.newer(), &self.older, self.cure.stops_share) {
                Ok(found) => found,
                Err(outcome) => return JudgeReply::Over(outcome),
            };
        let found = symptom.findings(if is_newer { self.newer() } else { &self.older });
        self.ill = if is_newer { self.last } else { 0 };
        if matches!(symptom, RevisionSymptom::Growth { .. }) {
            self.baseline.legs.push(TrialLeg::from_findings(&found));
        } else {
            // The crash that started the search does not count, only its repetitions.
            let crash = found.into_iter().find_map(|one| one.crash);
            self.baseline.runs = crash.map(|crash| crash.runs).unwrap_or_default();
        }
        self.symptom = Some(symptom.clone());
        JudgeReply::Differ { symptom, is_newer }
    }

    fn wants_baseline(&self) -> bool {
        let is_growth = matches!(self.symptom, Some(RevisionSymptom::Growth { .. }));
        if is_growth && self.baseline.legs.len() < self.cure.baseline_least {
            // The scatter between the ill end's processes is still unknown.
            return true;
        }
        let waits = self.open.as_ref().is_some_and(|(_, own)| !own.is_empty());
        waits && self.since > 0 || is_growth && self.since >= self.cure.baseline_every
    }

    fn add_open(&mut self, symptom: &RevisionSymptom, seen: ProcessResult) -> JudgeReply {
        self.since += 1;
        match self.open.as_mut().map(|(_, own)| own.add(symptom, seen)) {
            Some(Err(why)) => self.close_revision(RevisionStanding::Unknown { why }),
            _ => self.judge_open(),
        }
    }

    fn judge_open(&mut self) -> JudgeReply {
        let Some((_, own)) = self.open.as_ref().filter(|(_, own)| !own.is_empty()) else {
            return JudgeReply::More;
        };
        let (does, is_over) = match self.judgement(own) {
            None => {
                let does = crash::judge(&self.crash, &self.baseline.runs, &own.runs);
                (does, own.runs.len() >= self.crash.runs_most)
            }
            Some(_) if self.baseline.legs.len() < self.cure.baseline_least => return JudgeReply::More,
            Some(judged) => {
                let legs = u32::try_from(own.legs.len()).unwrap_or(u32::MAX);
                // A reported revision must have shown its result twice.
                let is_once = judged.does == SwitchEffect::Stops && legs < self.cure.legs_least;
                (if is_once { SwitchEffect::Undecided } else { judged.does }, legs >= self.cure.legs_most)
            }
        };
        let processes = own.legs.len() + own.runs.len();
        self.close_revision(match does {
            SwitchEffect::Stops => RevisionStanding::Healthy,
            SwitchEffect::Halves | SwitchEffect::Nothing => RevisionStanding::Ill,
            SwitchEffect::Undecided if !is_over => return JudgeReply::More,
            SwitchEffect::Undecided => {
                RevisionStanding::Unknown { why: format!("{processes} processes of it do not tell") }
            }
        })
    }

    /// Compares the revision's growth with that of the ill end; `None` in a search for a crash.
    fn judgement(&self, own: &RevisionProcesses) -> Option<SwitchJudgement> {
        let Some(RevisionSymptom::Growth { track, .. }) = self.symptom else { return None };
        let without = self.baseline.rates(track);
        let kept = without.len().saturating_sub(self.cure.baseline_kept);
        let judged = || sequential::judge(&self.cure, &without[kept..], &own.rates(track));
        (!own.legs.is_empty()).then(judged)
    }

    fn close_revision(&mut self, standing: RevisionStanding) -> JudgeReply {
        let Some((revision, own)) = self.open.take() else { return JudgeReply::More };
        JudgeReply::Judged(Box::new(self.judged(revision, standing, &own)))
    }

    fn judged(&self, revision: usize, standing: RevisionStanding, own: &RevisionProcesses) -> JudgedRevision {
        let (judgement, runs) = (self.judgement(own), own.runs.clone());
        JudgedRevision { judgement, runs, ..JudgedRevision::new(revision, standing, own.legs.len()) }
    }
}

fn findings(seen: ProcessResult) -> Result<Vec<LegFinding>, String> {
    match seen {
        ProcessResult::Findings(found) => Ok(found),
        ProcessResult::Visit(_) => Ok(Vec::new()),
        ProcessResult::Cannot(why) => Err(why),
    }
}
