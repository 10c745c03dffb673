//! Bisects a line of revisions: finds the revision that introduced or removed a behaviour.
//!
//! ```text
//!  both ends ── only one leaks, dies, is slower or answers differently ──> the symptom; a revision with it is ill
//!     v
//!  the healthy end compared with the ill one ── it is ill, too ─────────> nothing to find
//!     v
//!  halfway between the last healthy and the first ill one ───────────────┐
//!     │ cannot be built, does not start, cannot be judged: its neighbour │
//!     ^──────────────────────────────────────────────────────────────────┘
//!     v neighbours, or nothing between them that can be judged
//!  both once more, by fresh processes ── as before ─────────────────────> found, or a range
//!                                     └─ not ───────────────────────────> unsteady
//! ```
//!
//! The order of revisions is the same for all symptoms; only the judge differs: `work` for growth and
//! crashes, `pace` for speed, `replies` for answers. The search finds the first revision that has a part of
//! the symptom, even if later revisions add more.
//!
//! The search runs nothing: the caller runs the process that [`RevisionSearch::next`] names, and passes the
//! result to [`RevisionSearch::observe`]. Equal results lead to equal steps, so a search can be resumed from
//! its results.

use std::collections::BTreeMap;

mod conclusion;
mod pace;
mod replies;
#[cfg(test)]
mod tests;
mod work;

pub use self::conclusion::{
    JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionStanding, RevisionSymptom,
};
pub use self::pace::RevisionPace;
pub use self::replies::{EndsDifference, RevisionAnswers};
use super::crash::CrashPolicy;
use super::proof::{BuildVisit, ProofPolicy};
use super::sequential::CurePolicy;
use super::{LegFinding, Workload};

/// Behaviour to search for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RevisionAim {
    /// Growth of memory or a crash, under workloads.
    #[default]
    Growth,
    /// Slower prompt evaluation, token generation or first token.
    Slowdown,
    /// Changed answers to the same questions.
    Answers,
}

impl RevisionAim {
    /// Returns true if the behaviour shows under workloads.
    pub const fn is_growth(&self) -> bool {
        matches!(self, Self::Growth)
    }
}

/// Policies by which revisions are judged.
#[derive(Clone, Copy, Debug)]
pub struct JudgingPolicies<'a> {
    /// Policy for growth. Its limit on consecutive failures applies to all symptoms.
    pub cure: &'a CurePolicy,
    /// Policy for crashes.
    pub crash: &'a CrashPolicy,
    /// Policy for speed and answers.
    pub proof: &'a ProofPolicy,
}

/// Next step of a search.
#[derive(Clone, Debug, PartialEq)]
pub enum RevisionStep {
    /// Run a fresh process of a revision.
    Run(ProcessOrder),
    /// The search is over.
    Done(RevisionConclusion),
}

/// Process to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProcessOrder {
    /// Index in the line of revisions.
    pub revision: usize,
    /// The revision is an end that is not judged yet: run all workloads, and repeat a crash.
    pub is_end: bool,
    /// Run all requests, even if the result is clear earlier.
    pub whole: bool,
    /// Run without the prompt cache.
    pub control: bool,
    /// The only workload to run; `None`: all workloads.
    pub workload: Option<Workload>,
    /// Behaviour to measure.
    #[serde(default, skip_serializing_if = "RevisionAim::is_growth")]
    pub aim: RevisionAim,
}

impl ProcessOrder {
    const fn new(aim: RevisionAim, revision: usize, is_end: bool) -> Self {
        Self { revision, is_end, whole: false, control: false, workload: None, aim }
    }
}

/// Result of a process.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessResult {
    /// Findings: one per workload, or two if the work was repeated without the prompt cache.
    Findings(Vec<LegFinding>),
    /// Timings and answers.
    Visit(BuildVisit),
    /// The revision cannot be built or does not start, for this reason.
    Cannot(String),
}

/// Judge of one kind of symptom: selects processes that show the difference between the ends, and compares a
/// revision with the ends.
trait SymptomJudge: std::fmt::Debug + Send {
    /// Returns the next process to run: of an end until the difference is known, then for the open revision.
    /// `None` if no revision is open.
    fn next(&self) -> Option<ProcessOrder>;

    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply;

    /// Begins to judge a revision, or judges it at once if its processes were already run as those of an end.
    /// With `again`, only new processes count.
    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply;

    fn is_whole(&self) -> bool {
        true
    }

    fn describe_ends(&self, conclusion: &mut RevisionConclusion);
}

#[derive(Debug)]
enum JudgeReply {
    /// More processes are needed.
    More,
    /// Only one end has the symptom: the newer one if `is_newer`.
    Differ { symptom: RevisionSymptom, is_newer: bool },
    /// The judgement of the revision is complete.
    Judged(Box<JudgedRevision>),
    /// The search is over.
    Over(RevisionOutcome),
}

/// Bisection of a line of revisions.
#[derive(Debug)]
pub struct RevisionSearch {
    aim: RevisionAim,
    judge: Box<dyn SymptomJudge>,
    places: KnownRevisions,
    symptom: Option<RevisionSymptom>,
    judged: Vec<JudgedRevision>,
    legs: usize,
    /// Set when the bisection is done: revisions to be judged a second time, the next one last.
    again: Option<Vec<usize>>,
    over: Option<RevisionOutcome>,
}

impl RevisionSearch {
    /// Creates a search among the revisions 0 (oldest) to `last`, which are at least two.
    pub fn new(rules: JudgingPolicies<'_>, aim: RevisionAim, last: usize) -> Self {
        let last = last.max(1);
        let judge: Box<dyn SymptomJudge> = match aim {
            RevisionAim::Growth => Box::new(work::WorkJudge::new(rules, last)),
            RevisionAim::Slowdown => Box::new(pace::PaceJudge::new(rules, last)),
            RevisionAim::Answers => Box::new(replies::RepliesJudge::new(rules, last)),
        };
        Self {
            aim,
            judge,
            places: KnownRevisions::new(last),
            symptom: None,
            judged: Vec::new(),
            legs: 0,
            again: None,
            over: None,
        }
    }

    /// Returns the next step; repeated calls without a new result return the same step.
    #[expect(
        clippy::should_implement_trait,
        reason = "it does not end in None, and asking twice changes nothing"
    )]
    pub fn next(&mut self) -> RevisionStep {
        loop {
            if let Some(outcome) = &self.over {
                return RevisionStep::Done(self.conclude(outcome.clone()));
            }
            if let Some(ask) = self.judge.next() {
                return RevisionStep::Run(ask);
            }
            self.advance();
        }
    }

    /// Adds the result of a process.
    pub fn observe(&mut self, ask: ProcessOrder, seen: ProcessResult) {
        self.legs += 1;
        let heard = match seen {
            _ if self.over.is_some() => return,
            ProcessResult::Cannot(why) if self.symptom.is_none() => {
                JudgeReply::Over(RevisionOutcome::EndFailed { newer: ask.revision == self.places.last, why })
            }
            seen => self.judge.add_result(ask, seen),
        };
        self.handle_reply(heard);
    }

    fn handle_reply(&mut self, heard: JudgeReply) {
        match heard {
            JudgeReply::More => {}
            JudgeReply::Over(outcome) => self.over = Some(outcome),
            JudgeReply::Differ { symptom, is_newer } => {
                self.places.set_ill_end(is_newer);
                self.symptom = Some(symptom);
                self.begin(self.places.healthy());
            }
            JudgeReply::Judged(judged) => {
                let (revision, standing) = (judged.revision, judged.standing.clone());
                let again = self.again.is_some();
                self.judged.push(JudgedRevision { again, ..*judged });
                if !again {
                    self.places.set(revision, standing);
                } else if self.places.standing(revision) != Some(&standing) {
                    self.over = Some(RevisionOutcome::Unsteady { revision });
                }
            }
        }
    }

    fn begin(&mut self, revision: usize) {
        let heard = self.judge.begin(revision, self.again.is_some());
        self.handle_reply(heard);
    }

    /// Returns true if only the older end has the symptom; false while the ends are not known.
    pub const fn only_older_is_ill(&self) -> bool {
        self.symptom.is_some() && self.places.ill == 0
    }

    /// Returns true if every round that was begun is complete. A resumed search repeats incomplete rounds,
    /// because the processes of a round must run one after the other.
    pub fn is_whole(&self) -> bool {
        self.judge.is_whole()
    }

    /// Returns the conclusion that can be drawn now.
    pub fn interrupt(&self) -> RevisionConclusion {
        self.conclude(self.over.clone().unwrap_or(RevisionOutcome::Interrupted))
    }

    /// Returns the number of revisions that may still be the cause; `None` until the ends are known to
    /// differ.
    pub fn candidates_left(&self) -> Option<usize> {
        let (healthy, ill) = self.places.bounds()?;
        Some(healthy.abs_diff(ill))
    }

    fn advance(&mut self) {
        let Some((healthy, ill)) = self.places.bounds() else {
            let healthy_end = self.places.healthy();
            self.over = Some(match self.places.standing(healthy_end) {
                Some(RevisionStanding::Unknown { why }) => {
                    RevisionOutcome::EndFailed { newer: healthy_end == self.places.last, why: why.clone() }
                }
                _ => RevisionOutcome::BothIll,
            });
            return;
        };
        if let Some(queue) = &mut self.again {
            let (before, last) = (healthy.min(ill), healthy.max(ill));
            match queue.pop() {
                Some(revision) => self.begin(revision),
                None if last - before == 1 => self.over = Some(RevisionOutcome::Found { revision: last }),
                None => self.over = Some(RevisionOutcome::Among { first: before + 1, last }),
            }
        } else if let Some(revision) = self.places.next() {
            self.begin(revision);
        } else {
            self.again = Some([ill, healthy].into_iter().filter(|at| *at != self.places.ill).collect());
        }
    }

    fn conclude(&self, outcome: RevisionOutcome) -> RevisionConclusion {
        let mut conclusion = RevisionConclusion {
            outcome,
            aim: self.aim,
            symptom: self.symptom.clone(),
            ill_is_newer: self.symptom.as_ref().map(|_| self.places.ill == self.places.last),
            bounds: self.places.bounds(),
            judged: self.judged.clone(),
            newer: Vec::new(),
            older: Vec::new(),
            ratios: Vec::new(),
            differences: Vec::new(),
            legs: self.legs,
        };
        self.judge.describe_ends(&mut conclusion);
        conclusion
    }
}

/// Revisions between two judged ones that may fail to build or run before the search ends: each costs a
/// build.
const UNKNOWN_MOST: usize = 16;

#[derive(Clone, Debug)]
struct KnownRevisions {
    /// Index of the newer end; the older end has index 0.
    last: usize,
    ill: usize,
    known: BTreeMap<usize, RevisionStanding>,
}

impl KnownRevisions {
    const fn new(last: usize) -> Self {
        Self { last, ill: 0, known: BTreeMap::new() }
    }

    const fn healthy(&self) -> usize {
        self.last - self.ill
    }

    fn set_ill_end(&mut self, is_newer: bool) {
        self.ill = if is_newer { self.last } else { 0 };
        self.set(self.ill, RevisionStanding::Ill);
    }

    fn set(&mut self, revision: usize, standing: RevisionStanding) {
        self.known.insert(revision, standing);
    }

    fn standing(&self, revision: usize) -> Option<&RevisionStanding> {
        self.known.get(&revision)
    }

    /// Returns the closest healthy and ill revision; the change lies between them.
    fn bounds(&self) -> Option<(usize, usize)> {
        let away = |at: &usize| at.abs_diff(self.healthy());
        let all = |wanted: RevisionStanding| {
            self.known.iter().filter(move |(_, standing)| **standing == wanted).map(|(at, _)| *at)
        };
        let healthy = all(RevisionStanding::Healthy).max_by_key(away)?;
        // Ignore an ill revision before a healthy one: a later revision removed its cause.
        let ill = all(RevisionStanding::Ill).filter(|at| away(at) > away(&healthy)).min_by_key(away)?;
        Some((healthy, ill))
    }

    fn next(&self) -> Option<usize> {
        let (healthy, ill) = self.bounds()?;
        let (low, high) = (healthy.min(ill), healthy.max(ill));
        let unknown: Vec<usize> = (low + 1..high).filter(|at| self.known.contains_key(at)).collect();
        next_between(low, high, &unknown).filter(|_| unknown.len() < UNKNOWN_MOST)
    }
}

/// Chooses the next revision between two known ones. Several revisions that cannot be judged form a block:
/// search first outside it, then inside.
fn next_between(low: usize, high: usize, unknown: &[usize]) -> Option<usize> {
    let middle = low.midpoint(high);
    // The middle of the widest gap that contains a revision.
    let within = |gaps: &[(usize, usize)]| {
        let open = gaps.iter().filter(|(from, to)| to - from > 1);
        open.max_by_key(|(from, to)| to - from).map(|(from, to)| from.midpoint(*to))
    };
    match unknown {
        [] => Some(middle).filter(|at| *at > low),
        [one] => (low + 1..high).filter(|at| at != one).min_by_key(|at| (at.abs_diff(middle), *at)),
        [first, .., last] => within(&[(low, *first), (*last, high)])
            .or_else(|| within(&unknown.windows(2).map(|pair| (pair[0], pair[1])).collect::<Vec<_>>())),
    }
}
