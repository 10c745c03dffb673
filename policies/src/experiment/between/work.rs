//! Revisions that grow or die under some work. Each is judged beside the ill end, by turns, by the tests that judge a switch:
//! [`sequential`] for growth, [`crash`] for deaths. A revision that leaves so little of it as a cure may leave is healthy; one that has more
//! is ill, so that the first revision with a part of it is found.

use super::super::crash::{self, CrashPolicy, Run};
use super::super::sequential::{self, CurePolicy, Does, Judgement};
use super::super::trial::Leg;
use super::super::{Ended, Finding};
use super::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use super::judge::{Ends, Heard, Judge};
use super::{Aim, Ask, Rules, Seen};
use crate::growth::Interval;

/// A revision that is being judged.
#[derive(Clone, Debug)]
struct Open {
    revision: usize,
    legs: Vec<Leg>,
    runs: Vec<Run>,
    judgement: Option<Judgement>,
}

/// See the module.
#[derive(Clone, Debug)]
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
    baseline: Vec<Leg>,
    runs: Vec<Run>,
    /// Those in a row that told nothing, and why the last one did not.
    failed: (u32, String),
    /// Processes of others since the last one of the ill end.
    since: u32,
    open: Option<Open>,
}

impl Judge for ByWork {
    fn end(&self) -> Ask {
        let revision = if self.newer.is_none() { self.last } else { 0 };
        Ask { revision, is_end: true, whole: false, control: false, workload: None, aim: Aim::Growth }
    }

    fn take_end(&mut self, _: Ask, seen: Seen) -> Ends {
        let found = findings(seen);
        if self.newer.is_none() {
            self.newer = Some(found);
            return Ends::More;
        }
        self.older = found;
        self.diagnose()
    }

    fn begin(&mut self, revision: usize, _: bool) {
        self.open = Some(Open { revision, legs: Vec::new(), runs: Vec::new(), judgement: None });
    }

    fn next(&self) -> Option<Ask> {
        if self.wants_baseline() {
            return Some(self.ask(self.ill));
        }
        self.open.as_ref().map(|open| self.ask(open.revision))
    }

    fn take(&mut self, ask: Ask, seen: Seen) -> Heard {
        if ask.revision == self.ill { self.take_baseline(seen) } else { self.take_own(ask.revision, seen) }
    }

    fn open(&self) -> Option<usize> {
        self.open.as_ref().map(|open| open.revision)
    }

    fn beside(&self) -> Vec<usize> {
        self.symptom.iter().map(|_| self.ill).collect()
    }

    fn tell(&self, conclusion: &mut Conclusion) {
        conclusion.newer = self.newer.clone().unwrap_or_default();
        conclusion.older.clone_from(&self.older);
        conclusion.judged.extend(self.ill_end());
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
            baseline: Vec::new(),
            runs: Vec::new(),
            failed: (0, String::new()),
            since: 0,
            open: None,
        }
    }

    fn ask(&self, revision: usize) -> Ask {
        let whole = matches!(self.symptom, Some(Symptom::Crash { .. }));
        let work = self.symptom.as_ref().and_then(Symptom::work);
        let (workload, control) = (work.map(|work| work.0), work.is_some_and(|work| work.1));
        Ask { revision, is_end: false, whole, control, workload, aim: Aim::Growth }
    }

    /// Both ends are known: what differs?
    fn diagnose(&mut self) -> Ends {
        let seen_newer = self.newer.as_deref().unwrap_or_default();
        let (symptom, newer) = match Symptom::between(seen_newer, &self.older, self.cure.stops_share) {
            Ok(found) => found,
            Err(outcome) => return Ends::Over(outcome),
        };
        let (ill, healthy) = if newer { (self.last, 0) } else { (0, self.last) };
        let older = self.older.as_slice();
        let (found, other) = if newer { (seen_newer, older) } else { (older, seen_newer) };
        let (found, other) = (symptom.findings(found), symptom.findings(other));
        self.ill = ill;
        let is_growth = matches!(symptom, Symptom::Growth { .. });
        if is_growth {
            self.baseline.push(Leg::of(&found));
        } else {
            // What made somebody look is no repetition.
            self.runs = found
                .iter()
                .find_map(|one| one.crash.as_ref())
                .map(|crash| crash.runs.clone())
                .unwrap_or_default();
        }
        self.symptom = Some(symptom.clone());
        self.begin(healthy, false);
        // A survivor counts by its requests, and an experiment ends early; and what had a cache says nothing of what has none.
        let is_told = is_growth && !other.is_empty();
        let heard = if is_told { self.take_own(healthy, Seen::Findings(other)) } else { Heard::More };
        Ends::Differ { symptom, is_newer: newer, healthy: heard }
    }

    fn wants_baseline(&self) -> bool {
        let growth = matches!(self.symptom, Some(Symptom::Growth { .. }));
        let open = self.open.as_ref();
        if growth && self.baseline.len() < self.cure.baseline_least {
            // Without knowing how much processes differ nothing is said of any.
            return true;
        }
        let waits = open.is_some_and(|open| !open.legs.is_empty() || !open.runs.is_empty());
        waits && self.since > 0 || growth && self.since >= self.cure.baseline_every
    }

    fn take_baseline(&mut self, seen: Seen) -> Heard {
        let why = match seen {
            Seen::Cannot(why) => Some(why),
            seen => self.take_ill(&findings(seen)).err(),
        };
        match why {
            None => (self.failed.0, self.since) = (0, 0),
            Some(why) => self.failed = (self.failed.0 + 1, why),
        }
        if self.failed.0 >= self.cure.baseline_failures {
            return Heard::Over(Outcome::IllFailed { why: self.failed.1.clone() });
        }
        self.look()
    }

    /// One more process of the ill end.
    fn take_ill(&mut self, found: &[Finding]) -> Result<(), String> {
        match self.symptom {
            Some(Symptom::Crash { .. }) => self.runs.push(run_of(found).ok_or_else(|| told_nothing(found))?),
            _ if died(found).is_some() => return Err(told_nothing(found)),
            _ => self.baseline.push(Leg::of(found)),
        }
        Ok(())
    }

    fn take_own(&mut self, revision: usize, seen: Seen) -> Heard {
        self.since += 1;
        let is_crash = matches!(self.symptom, Some(Symptom::Crash { .. }));
        let Some(open) = self.open.as_mut().filter(|open| open.revision == revision) else {
            return Heard::More;
        };
        let found = match seen {
            Seen::Cannot(why) => return self.close(Standing::Unknown { why }),
            seen => findings(seen),
        };
        if is_crash {
            match run_of(&found) {
                Some(run) => open.runs.push(run),
                None => return self.close(Standing::Unknown { why: told_nothing(&found) }),
            }
        } else {
            if let Some(why) = died(&found) {
                return self.close(Standing::Unknown { why });
            }
            open.legs.push(Leg::of(&found));
        }
        self.look()
    }

    /// Judges what is open by all that is known.
    fn look(&mut self) -> Heard {
        let (Some(symptom), Some(open)) = (self.symptom.clone(), self.open.as_mut()) else {
            return Heard::More;
        };
        let (does, over) = match symptom {
            Symptom::Crash { .. } if open.runs.is_empty() => return Heard::More,
            Symptom::Crash { .. } => {
                let does = crash::judge(&self.crash, &self.runs, &open.runs);
                (does, open.runs.len() >= self.crash.runs_most)
            }
            Symptom::Growth { .. } if self.baseline.len() < self.cure.baseline_least => return Heard::More,
            Symptom::Growth { track, .. } => {
                let rates = |legs: &[Leg]| -> Vec<Interval> {
                    legs.iter().filter_map(|leg| leg.of_track(track).map(|(rate, _)| rate)).collect()
                };
                let kept = self.baseline.len().saturating_sub(self.cure.baseline_kept);
                let judged =
                    sequential::judge(&self.cure, &rates(&self.baseline[kept..]), &rates(&open.legs));
                open.judgement = Some(judged);
                let legs = u32::try_from(open.legs.len()).unwrap_or(u32::MAX);
                // What is named has to have happened twice.
                let few = judged.does == Does::Stops && legs < self.cure.legs_least;
                (if few { Does::Undecided } else { judged.does }, legs >= self.cure.legs_most)
            }
            // Others judge those.
            Symptom::Slowdown { .. } | Symptom::Answers { .. } => return Heard::More,
        };
        if does == Does::Undecided && !over {
            return Heard::More;
        }
        let processes = open.legs.len() + open.runs.len();
        self.close(match does {
            Does::Stops => Standing::Healthy,
            Does::Halves | Does::Nothing => Standing::Ill,
            Does::Undecided => Standing::Unknown { why: format!("{processes} processes of it do not tell") },
        })
    }

    fn close(&mut self, standing: Standing) -> Heard {
        let Some(Open { revision, legs, runs, judgement }) = self.open.take() else { return Heard::More };
        let judged = Judged { judgement, runs, ..Judged::new(revision, standing, legs.len()) };
        Heard::Stands(Box::new(judged))
    }

    /// The end that has the symptom, as it was measured.
    fn ill_end(&self) -> Option<Judged> {
        let symptom = self.symptom.as_ref()?;
        let legs = self.baseline.len();
        let judgement = match symptom {
            Symptom::Growth { track, .. } => {
                let rates: Vec<Interval> = self
                    .baseline
                    .iter()
                    .filter_map(|leg| leg.of_track(*track).map(|(rate, _)| rate))
                    .collect();
                Some(sequential::judge(&self.cure, &rates, &rates))
            }
            _ => None,
        };
        let runs = self.runs.clone();
        Some(Judged { judgement, runs, ..Judged::new(self.ill, Standing::Ill, legs) })
    }
}

/// What a process did under its work. Who was visited did none.
fn findings(seen: Seen) -> Vec<Finding> {
    match seen {
        Seen::Findings(found) => found,
        Seen::Visit(_) | Seen::Cannot(_) => Vec::new(),
    }
}

fn run_of(found: &[Finding]) -> Option<Run> {
    found.iter().find_map(Finding::survived)
}

/// How a process ended that should not have.
fn died(found: &[Finding]) -> Option<String> {
    found.iter().find_map(|finding| match &finding.ended {
        Ended::Crashed { why } | Ended::Killed { why } | Ended::Failed { why } => Some(why.clone()),
        _ => None,
    })
}

fn told_nothing(found: &[Finding]) -> String {
    died(found).unwrap_or_else(|| "its work was cut short".to_owned())
}
