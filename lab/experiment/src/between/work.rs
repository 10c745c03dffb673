//! Judges revisions that grow or die under some work. Each alternates with the ill end and is tested like a
//! switch: [`sequential`] for growth, [`crash`] for crashes. A revision with as little growth as a cure may
//! leave is healthy; one with more is ill, so the first revision with a part of the symptom is found.

use super::super::crash::{self, CrashPolicy, Run};
use super::super::sequential::{self, CurePolicy, Does, Judgement};
use super::super::trial::{Leg, Track};
use super::super::{Ended, Finding};
use super::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use super::judge::{Heard, Judge};
use super::{Aim, Ask, Rules, Seen};
use warden_policies::growth::Interval;

/// Processes of a revision: legs in a search for growth, runs in a search for a crash.
#[derive(Clone, Debug, Default)]
struct RevisionProcesses {
    legs: Vec<Leg>,
    runs: Vec<Run>,
}

impl RevisionProcesses {
    /// Adds a process; the error is the reason why it shows nothing.
    fn add(&mut self, symptom: &Symptom, seen: Seen) -> Result<(), String> {
        let found = findings(seen)?;
        let died = found.iter().find_map(|finding| match &finding.ended {
            Ended::Crashed { why } | Ended::Killed { why } | Ended::Failed { why } => Some(why.clone()),
            _ => None,
        });
        match (symptom, died) {
            (Symptom::Crash { .. }, died) => {
                let run = found.iter().find_map(Finding::survived);
                let run = run.ok_or_else(|| died.unwrap_or_else(|| "its work was cut short".to_owned()))?;
                self.runs.push(run);
            }
            (_, Some(why)) => return Err(why),
            (_, None) => self.legs.push(Leg::of(&found)),
        }
        Ok(())
    }

    fn are_none(&self) -> bool {
        self.legs.is_empty() && self.runs.is_empty()
    }

    fn rates(&self, track: Track) -> Vec<Interval> {
        self.legs.iter().filter_map(|leg| leg.of_track(track).map(|(rate, _)| rate)).collect()
    }
}

/// Judge for growth and crashes.
#[derive(Debug)]
pub(super) struct ByWork {
    cure: CurePolicy,
    crash: CrashPolicy,
    last: usize,
    /// Findings on the ends; the newer one is measured first.
    newer: Option<Vec<Finding>>,
    older: Vec<Finding>,
    symptom: Option<Symptom>,
    /// End with the symptom.
    ill: usize,
    /// Processes of the ill end.
    baseline: RevisionProcesses,
    /// Consecutive processes of the ill end without a result.
    failed: u32,
    /// Processes of other revisions since the last one of the ill end.
    since: u32,
    /// Revision being judged.
    open: Option<(usize, RevisionProcesses)>,
}

impl Judge for ByWork {
    fn next(&self) -> Option<Ask> {
        let Some(symptom) = &self.symptom else {
            let revision = if self.newer.is_none() { self.last } else { 0 };
            let (whole, control, workload) = (false, false, None);
            return Some(Ask { revision, is_end: true, whole, control, workload, aim: Aim::Growth });
        };
        let open = self.open.as_ref().map(|(revision, _)| *revision);
        let revision = if self.wants_baseline() { self.ill } else { open? };
        let whole = matches!(symptom, Symptom::Crash { .. });
        let (workload, control) = symptom.work()?;
        Some(Ask { revision, is_end: false, whole, control, workload: Some(workload), aim: Aim::Growth })
    }

    fn take(&mut self, ask: Ask, seen: Seen) -> Heard {
        let Some(symptom) = self.symptom.clone() else {
            let found = findings(seen).unwrap_or_default();
            if self.newer.is_none() {
                self.newer = Some(found);
                return Heard::More;
            }
            self.older = found;
            return self.diagnose();
        };
        if ask.revision == self.ill {
            match self.baseline.add(&symptom, seen) {
                Ok(()) => (self.failed, self.since) = (0, 0),
                Err(why) if self.failed + 1 >= self.cure.baseline_failures => {
                    return Heard::Over(Outcome::IllFailed { why });
                }
                Err(_) => self.failed += 1,
            }
            return self.look();
        }
        self.take_open(&symptom, seen)
    }

    fn begin(&mut self, revision: usize, again: bool) -> Heard {
        self.open = Some((revision, RevisionProcesses::default()));
        match self.symptom.clone() {
            // A survivor counts by its requests, but an experiment ends early, so its finding cannot show
            // the absence of a crash.
            Some(symptom @ Symptom::Growth { .. }) if revision.abs_diff(self.ill) == self.last && !again => {
                let known = symptom.findings(if self.ill == 0 { self.newer() } else { &self.older });
                // Legs with the prompt cache do not compare with legs without.
                if known.is_empty() { Heard::More } else { self.take_open(&symptom, Seen::Findings(known)) }
            }
            _ => Heard::More,
        }
    }

    fn describe_ends(&self, conclusion: &mut Conclusion) {
        conclusion.newer = self.newer().to_vec();
        conclusion.older.clone_from(&self.older);
        if self.symptom.is_some() {
            conclusion.judged.push(self.judged(self.ill, Standing::Ill, &self.baseline));
        }
    }
}

impl ByWork {
    pub(super) fn new(rules: Rules<'_>, last: usize) -> Self {
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

    fn newer(&self) -> &[Finding] {
        self.newer.as_deref().unwrap_or_default()
    }

    /// Finds the symptom once both ends are known.
    fn diagnose(&mut self) -> Heard {
        let (symptom, is_newer) = match Symptom::between(self.newer(), &self.older, self.cure.stops_share) {
            Ok(found) => found,
            Err(outcome) => return Heard::Over(outcome),
        };
        let found = symptom.findings(if is_newer { self.newer() } else { &self.older });
        self.ill = if is_newer { self.last } else { 0 };
        if matches!(symptom, Symptom::Growth { .. }) {
            self.baseline.legs.push(Leg::of(&found));
        } else {
            // Excludes the crash that started the search: it is no repetition.
            let crash = found.into_iter().find_map(|one| one.crash);
            self.baseline.runs = crash.map(|crash| crash.runs).unwrap_or_default();
        }
        self.symptom = Some(symptom.clone());
        Heard::Differ { symptom, is_newer }
    }

    fn wants_baseline(&self) -> bool {
        let is_growth = matches!(self.symptom, Some(Symptom::Growth { .. }));
        if is_growth && self.baseline.legs.len() < self.cure.baseline_least {
            // Nothing can be judged before the scatter between processes is known.
            return true;
        }
        let waits = self.open.as_ref().is_some_and(|(_, own)| !own.are_none());
        waits && self.since > 0 || is_growth && self.since >= self.cure.baseline_every
    }

    /// Adds a process of the open revision.
    fn take_open(&mut self, symptom: &Symptom, seen: Seen) -> Heard {
        self.since += 1;
        match self.open.as_mut().map(|(_, own)| own.add(symptom, seen)) {
            Some(Err(why)) => self.close(Standing::Unknown { why }),
            _ => self.look(),
        }
    }

    /// Judges the open revision by all its processes.
    fn look(&mut self) -> Heard {
        let Some((_, own)) = self.open.as_ref().filter(|(_, own)| !own.are_none()) else {
            return Heard::More;
        };
        let (does, is_over) = match self.judgement(own) {
            None => {
                let does = crash::judge(&self.crash, &self.baseline.runs, &own.runs);
                (does, own.runs.len() >= self.crash.runs_most)
            }
            Some(_) if self.baseline.legs.len() < self.cure.baseline_least => return Heard::More,
            Some(judged) => {
                let legs = u32::try_from(own.legs.len()).unwrap_or(u32::MAX);
                // A reported revision must have been seen twice.
                let is_once = judged.does == Does::Stops && legs < self.cure.legs_least;
                (if is_once { Does::Undecided } else { judged.does }, legs >= self.cure.legs_most)
            }
        };
        let processes = own.legs.len() + own.runs.len();
        self.close(match does {
            Does::Stops => Standing::Healthy,
            Does::Halves | Does::Nothing => Standing::Ill,
            Does::Undecided if !is_over => return Heard::More,
            Does::Undecided => Standing::Unknown { why: format!("{processes} processes of it do not tell") },
        })
    }

    /// Compares its growth with that of the ill end; `None` in a search for a crash, or without a finished
    /// process.
    fn judgement(&self, own: &RevisionProcesses) -> Option<Judgement> {
        let Some(Symptom::Growth { track, .. }) = self.symptom else { return None };
        let without = self.baseline.rates(track);
        let kept = without.len().saturating_sub(self.cure.baseline_kept);
        let judged = || sequential::judge(&self.cure, &without[kept..], &own.rates(track));
        (!own.legs.is_empty()).then(judged)
    }

    fn close(&mut self, standing: Standing) -> Heard {
        let Some((revision, own)) = self.open.take() else { return Heard::More };
        Heard::Stands(Box::new(self.judged(revision, standing, &own)))
    }

    fn judged(&self, revision: usize, standing: Standing, own: &RevisionProcesses) -> Judged {
        let (judgement, runs) = (self.judgement(own), own.runs.clone());
        Judged { judgement, runs, ..Judged::new(revision, standing, own.legs.len()) }
    }
}

/// Returns the findings of a process, or the reason why there are none.
fn findings(seen: Seen) -> Result<Vec<Finding>, String> {
    match seen {
        Seen::Findings(found) => Ok(found),
        Seen::Visit(_) => Ok(Vec::new()),
        Seen::Cannot(why) => Err(why),
    }
}
