//! Revisions that grow or die under some work. Each is compared with the ill end, by turns, by the tests that judge a switch:
//! [`sequential`] for growth, [`crash`] for deaths. A revision that leaves so little of it as a cure may leave is healthy; one that has more
//! is ill, so that the first revision with a part of it is found.

use super::super::crash::{self, CrashPolicy, Run};
use super::super::sequential::{self, CurePolicy, Does, Judgement};
use super::super::trial::{Leg, Track};
use super::super::{Ended, Finding};
use super::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use super::judge::{Heard, Judge};
use super::{Aim, Ask, Rules, Seen};
use warden_policies::growth::Interval;

/// What the processes of a revision did: legs where growth is looked for, runs where a crash is.
#[derive(Clone, Debug, Default)]
struct RevisionProcesses {
    legs: Vec<Leg>,
    runs: Vec<Run>,
}

impl RevisionProcesses {
    /// Takes in one more; an error says why it shows nothing.
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

/// See the module.
#[derive(Debug)]
pub(super) struct ByWork {
    cure: CurePolicy,
    crash: CrashPolicy,
    last: usize,
    /// What the ends did; the newer one comes first.
    newer: Option<Vec<Finding>>,
    older: Vec<Finding>,
    symptom: Option<Symptom>,
    /// The end that has it.
    ill: usize,
    /// Its processes.
    baseline: RevisionProcesses,
    /// Processes of it in a row that showed nothing.
    failed: u32,
    /// Processes of others since the last one of the ill end.
    since: u32,
    /// The revision that is being judged.
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
            // A survivor counts by its requests, and an experiment ends early: it says nothing of a crash.
            Some(symptom @ Symptom::Growth { .. }) if revision.abs_diff(self.ill) == self.last && !again => {
                let known = symptom.findings(if self.ill == 0 { self.newer() } else { &self.older });
                // None: what had a cache says nothing of what has none.
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

    /// Both ends are known: what differs?
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
            // Without the crash that made the search begin: it is no repetition.
            let crash = found.into_iter().find_map(|one| one.crash);
            self.baseline.runs = crash.map(|crash| crash.runs).unwrap_or_default();
        }
        self.symptom = Some(symptom.clone());
        Heard::Differ { symptom, is_newer }
    }

    fn wants_baseline(&self) -> bool {
        let is_growth = matches!(self.symptom, Some(Symptom::Growth { .. }));
        if is_growth && self.baseline.legs.len() < self.cure.baseline_least {
            // Without knowing how much processes differ nothing is said of any.
            return true;
        }
        let waits = self.open.as_ref().is_some_and(|(_, own)| !own.are_none());
        waits && self.since > 0 || is_growth && self.since >= self.cure.baseline_every
    }

    /// One more process of the revision that is being judged.
    fn take_open(&mut self, symptom: &Symptom, seen: Seen) -> Heard {
        self.since += 1;
        match self.open.as_mut().map(|(_, own)| own.add(symptom, seen)) {
            Some(Err(why)) => self.close(Standing::Unknown { why }),
            _ => self.look(),
        }
    }

    /// Judges the revision by all that is known.
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
                // What is named has to have happened twice.
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

    /// Its growth compared with that of the ill end; `None` where a crash is looked for, and without a process that worked.
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

/// What a process did under its work; an error says why there is none.
fn findings(seen: Seen) -> Result<Vec<Finding>, String> {
    match seen {
        Seen::Findings(found) => Ok(found),
        Seen::Visit(_) => Ok(Vec::new()),
        Seen::Cannot(why) => Err(why),
    }
}
