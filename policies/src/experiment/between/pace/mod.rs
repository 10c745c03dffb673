//! Revisions that are slower than others. What is looked for is the slower end: a revision brought the slowdown or ended it.
//!
//! ```text
//!  ends, by turns ── ratio of each figure, judged after each round as a proof judges it ──> one is slower by more than the limit
//!
//!  a revision: rounds of three processes, it between the ends           good ───── two fifths ──────────── bad
//!     ln own - 0.6 ln good - 0.4 ln bad, judged after each round ──>          healthy    │        ill
//! ```
//!
//! The three of a round ran one behind the other, so what changes over minutes changes all of them. How much processes scatter is known from
//! all rounds so far, or from those of the revision, if they scatter more. The declared chance of a mistake, `proof.false_worse`, is divided
//! among the figures and the looks at the ends, and then once more among the revisions that a search has to judge, those that it cannot tell
//! included, and the looks at each. There is one limit, however sure one can be: with two of them the same revision would be on one
//! side or the other by chance. One that is still too close to it after the last round cannot be told.

mod rounds;

use serde::{Deserialize, Serialize};

use self::rounds::{Round, Scatter, Test, robust, undisturbed};
use super::super::proof::{self, Metric, ProofPolicy, Ratio, Ruling, Visit};
use super::conclusion::{Conclusion, Judged, Outcome, Standing, Symptom};
use super::judge::{Ends, Heard, Judge};
use super::places::UNKNOWN_MOST;
use super::{Aim, Ask, Rules, Seen};
use crate::growth::{Interval, stats};

/// What counts.
const METRICS: [Metric; 3] = [Metric::Prefill, Metric::Decode, Metric::FirstToken];
/// Tests of the ends: each of these, in both directions.
const TESTS: f64 = 6.0;
/// Rounds before a revision is judged. What is named has to have happened twice.
const LEAST: usize = 2;
/// Rounds, by those of a proof: a search takes builds, which are dearer than some more processes.
const LONGER: usize = 2;
/// Who has a larger part of the difference than this is ill. Below a half, so that of two revisions that share it the first one is found.
const PART: f64 = 0.4;

/// How fast a revision is beside the ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// What was timed.
    pub metric: Metric,
    /// Rounds of three.
    pub rounds: usize,
    /// Seconds: the median of its processes.
    pub seconds: f64,
    /// Its place between the faster end, 0, and the slower one, 1, with the ends of the interval that the test uses.
    pub share: Option<Interval>,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Good,
    Own,
    Bad,
}

/// A revision that is being judged.
#[derive(Clone, Debug)]
struct Open {
    revision: usize,
    rounds: Vec<Round>,
    /// What the round so far gave.
    taken: Vec<(Turn, f64)>,
    processes: usize,
}

impl Open {
    /// The first round begins with the revision, because it may have to be built, and then one would be measured in another hour. After that
    /// it is between the ends, so that a machine that becomes slower wrongs nobody.
    fn turn(&self) -> Turn {
        let order = match self.rounds.len() {
            0 => [Turn::Own, Turn::Good, Turn::Bad],
            round if round % 2 == 1 => [Turn::Bad, Turn::Own, Turn::Good],
            _ => [Turn::Good, Turn::Own, Turn::Bad],
        };
        order[self.taken.len().min(2)]
    }

    /// Takes one more, which may be the last one of a round.
    fn take(&mut self, seconds: f64) {
        self.taken.push((self.turn(), seconds));
        let of = |turn| self.taken.iter().find(|(own, _)| *own == turn).map(|(_, seconds)| *seconds);
        if let (Some(good), Some(own), Some(bad)) = (of(Turn::Good), of(Turn::Own), of(Turn::Bad)) {
            self.rounds.push(Round { good, own, bad });
            self.taken.clear();
        }
    }
}

/// The ends, once it is known how they differ.
#[derive(Clone, Copy, Debug)]
struct Known {
    metric: Metric,
    good: usize,
    bad: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct ByPace {
    proof: ProofPolicy,
    failures_most: u32,
    last: usize,
    /// Revisions that a search has to judge, those that cannot be told and those once more included.
    steps: f64,
    older: Vec<Visit>,
    newer: Vec<Visit>,
    known: Option<Known>,
    scatter: Scatter,
    /// How far the ends are apart in all rounds so far.
    spans: Vec<f64>,
    /// Visits of the ends beside a revision, in a row, that failed, and why the last one did.
    failed: (u32, String),
    /// Visits of the slower end, and what they took.
    bad: Vec<f64>,
    open: Option<Open>,
}

impl Judge for ByPace {
    fn end(&self) -> Ask {
        let (older, newer) = (self.older.len(), self.newer.len());
        let is_odd = !older.min(newer).is_multiple_of(2);
        // Which comes first changes with each round.
        let is_newer = older > newer || (older == newer && is_odd);
        Ask::visit(Aim::Slowdown, if is_newer { self.last } else { 0 }, true)
    }

    fn take_end(&mut self, ask: Ask, seen: Seen) -> Ends {
        let Seen::Visit(visit) = seen else { return Ends::More };
        if ask.revision == self.last {
            self.newer.push(visit);
        } else {
            self.older.push(visit);
        }
        let rounds = self.older.len();
        if rounds != self.newer.len() || rounds < self.proof.rounds_least {
            return Ends::More;
        }
        let (slower, faster) = (self.ratios(false), self.ratios(true));
        let worst = |all: &[Ratio]| {
            let low = |ratio: &Ratio| ratio.ratio.map_or(1.0, |ratio| ratio.low);
            let worse = all.iter().filter(|ratio| ratio.ruling == Ruling::Worse);
            worse.max_by(|one, other| low(one).total_cmp(&low(other))).map(|ratio| ratio.metric)
        };
        if let Some(metric) = worst(&slower) {
            return self.differ(metric, true);
        }
        let is_sure = slower.iter().chain(&faster).all(|ratio| ratio.ruling != Ruling::Unknown);
        if !is_sure && rounds < self.rounds_most() {
            return Ends::More;
        }
        if let Some(metric) = worst(&faster) {
            return self.differ(metric, false);
        }
        Ends::Over(if slower.is_empty() {
            let why = "neither its prompts nor its tokens could be timed".to_owned();
            let is_timed = |visit: &Visit| METRICS.into_iter().any(|metric| visit.of(metric).is_some());
            Outcome::EndFailed { newer: self.older.iter().any(is_timed), why }
        } else {
            Outcome::Alike { sure: is_sure }
        })
    }

    fn begin(&mut self, revision: usize, _: bool) {
        self.open = Some(Open { revision, rounds: Vec::new(), taken: Vec::new(), processes: 0 });
    }

    fn next(&self) -> Option<Ask> {
        let (known, open) = (self.known?, self.open.as_ref()?);
        let revision = match open.turn() {
            Turn::Good => known.good,
            Turn::Own => open.revision,
            Turn::Bad => known.bad,
        };
        Some(Ask::visit(Aim::Slowdown, revision, false))
    }

    fn take(&mut self, _: Ask, seen: Seen) -> Heard {
        let Some((known, open)) = self.known.zip(self.open.as_mut()) else { return Heard::More };
        let turn = open.turn();
        let seconds = match seen {
            Seen::Visit(visit) => visit.of(known.metric).ok_or_else(|| "it could not be timed".to_owned()),
            Seen::Cannot(why) => Err(why),
            Seen::Findings(_) => Err("it was not timed".to_owned()),
        };
        match (turn, seconds) {
            (Turn::Own, Err(why)) => self.close(Standing::Unknown { why }),
            (Turn::Good | Turn::Bad, Err(why)) => self.fail(turn, why),
            (_, Ok(seconds)) => {
                if turn == Turn::Own {
                    open.processes += 1;
                } else {
                    self.failed.0 = 0;
                }
                if turn == Turn::Bad {
                    self.bad.push(seconds);
                }
                open.take(seconds);
                if open.taken.is_empty() { self.look() } else { Heard::More }
            }
        }
    }

    fn open(&self) -> Option<usize> {
        self.open.as_ref().map(|open| open.revision)
    }

    fn beside(&self) -> Vec<usize> {
        self.known.iter().flat_map(|known| [known.good, known.bad]).collect()
    }

    fn is_whole(&self) -> bool {
        self.older.len() == self.newer.len() && self.open.as_ref().is_none_or(|open| open.taken.is_empty())
    }

    fn tell(&self, conclusion: &mut Conclusion) {
        if self.older.len().min(self.newer.len()) > 0 {
            conclusion.ratios = self.ratios(false);
        }
        let Some(Known { metric, bad, .. }) = self.known else { return };
        let pace = Pace {
            metric,
            rounds: self.bad.len(),
            seconds: stats::median(&mut self.bad.clone()).unwrap_or(0.0),
            share: Some(Interval { value: 1.0, low: 1.0, high: 1.0 }),
        };
        let judged = Judged::new(bad, Standing::Ill, self.bad.len());
        conclusion.judged.push(Judged { pace: Some(pace), ..judged });
    }
}

impl ByPace {
    pub(super) fn new(rules: Rules<'_>, last: usize) -> Self {
        let halvings = usize::try_from(usize::BITS - last.leading_zeros()).unwrap_or(0);
        // No more than there are, and both neighbours once more.
        let steps = (halvings + UNKNOWN_MOST).min(last.saturating_sub(1)) + 2;
        Self {
            proof: rules.proof.clone(),
            failures_most: rules.cure.baseline_failures,
            last,
            steps: f64::from(u32::try_from(steps).unwrap_or(u32::MAX)),
            older: Vec::new(),
            newer: Vec::new(),
            known: None,
            scatter: Scatter::default(),
            spans: Vec::new(),
            failed: (0, String::new()),
            bad: Vec::new(),
            open: None,
        }
    }

    /// Whether the newer end is slower than the older one; or `turned`, the older one than the newer.
    fn ratios(&self, turned: bool) -> Vec<Ratio> {
        let (rounds_most, false_worse) = (self.rounds_most(), self.proof.false_worse / TESTS);
        let policy = ProofPolicy { false_worse, rounds_most, ..self.proof.clone() };
        let rounds = self.older.len();
        let single = ProofPolicy { rounds_least: rounds, rounds_most: rounds, ..policy.clone() };
        let (one, other) = if turned { (&self.newer, &self.older) } else { (&self.older, &self.newer) };
        let each = METRICS.into_iter().map(|metric| {
            let (calm_one, calm_other) = self.undisturbed(metric, one, other);
            let mut calm = proof::ratios(&policy, &calm_one, &calm_other);
            // Processes that are fast or slow by chance look disturbed where they are few, and what is left of them scatters too little: so
            // all of them have to say it as well, as if it were the only look.
            let all = proof::ratios(&single, one, other);
            for ratio in calm.iter_mut().filter(|ratio| ratio.ruling == Ruling::Worse) {
                if !all.iter().any(|all| all.metric == metric && all.ruling == Ruling::Worse) {
                    ratio.ruling = Ruling::Unknown;
                }
            }
            calm
        });
        each.flatten().collect()
    }

    /// The rounds of the ends that say something of a figure, with nothing else in them.
    fn undisturbed(&self, metric: Metric, one: &[Visit], other: &[Visit]) -> (Vec<Visit>, Vec<Visit>) {
        let both = one.iter().zip(other);
        let pairs: Vec<(f64, f64)> =
            both.filter_map(|(one, other)| Some((one.of(metric)?, other.of(metric)?))).collect();
        let logs: Vec<f64> = pairs.iter().map(|(one, other)| (other / one).ln()).collect();
        let kept = undisturbed(&logs, robust(&logs, self.proof.least_noise));
        let pairs = pairs.into_iter().zip(kept).filter(|(_, kept)| *kept).map(|(pair, _)| pair);
        let visit = |value: f64| Visit { measured: vec![(metric, value)], replies: Vec::new() };
        pairs.map(|(one, other)| (visit(one), visit(other))).unzip()
    }

    fn differ(&mut self, metric: Metric, is_newer: bool) -> Ends {
        let (good, bad) = if is_newer { (0, self.last) } else { (self.last, 0) };
        self.known = Some(Known { metric, good, bad });
        let (fast, slow) = self.undisturbed(metric, &self.older, &self.newer);
        let (fast, slow) = if is_newer { (fast, slow) } else { (slow, fast) };
        let seconds =
            |visits: &[Visit]| visits.iter().filter_map(|visit| visit.of(metric)).collect::<Vec<_>>();
        let (mut fast, slow) = (seconds(&fast), seconds(&slow));
        self.spans = fast.iter().zip(&slow).map(|(fast, slow)| (slow / fast).ln()).collect();
        // A difference of two processes varies twice as much as one.
        self.scatter = self.scatter.with(&self.spans, 2.0);
        self.bad = slow;
        let seconds = stats::median(&mut fast).unwrap_or(0.0);
        let share = Some(Interval { value: 0.0, low: 0.0, high: 0.0 });
        let pace = Pace { metric, rounds: fast.len(), seconds, share };
        let healthy = Judged { pace: Some(pace), ..Judged::new(good, Standing::Healthy, fast.len()) };
        Ends::Differ {
            symptom: Symptom::Slowdown { metric },
            is_newer,
            healthy: Heard::Stands(Box::new(healthy)),
        }
    }

    /// An end could not be timed.
    fn fail(&mut self, turn: Turn, why: String) -> Heard {
        self.failed = (self.failed.0 + 1, why);
        if self.failed.0 < self.failures_most {
            return Heard::More;
        }
        let why = self.failed.1.clone();
        let good = self.known.map_or(0, |known| known.good);
        Heard::Over(if turn == Turn::Bad {
            Outcome::IllFailed { why }
        } else {
            Outcome::EndFailed { newer: good == self.last, why }
        })
    }

    /// A round is over: is it known now on which side the revision is?
    fn look(&mut self) -> Heard {
        let Some(open) = self.open.as_ref().filter(|open| open.rounds.len() >= LEAST) else {
            return Heard::More;
        };
        let (rounds, most) = (open.rounds.len(), self.rounds_most());
        let (test, chance) = (self.test(open), self.chance());
        let standing = if test.below(PART) <= chance {
            Standing::Healthy
        } else if test.above(PART) <= chance {
            Standing::Ill
        } else if rounds >= most {
            let why = format!("{rounds} rounds do not tell to which end it belongs");
            Standing::Unknown { why }
        } else {
            return Heard::More;
        };
        self.close(standing)
    }

    fn rounds_most(&self) -> usize {
        self.proof.rounds_most.saturating_mul(LONGER).max(LEAST)
    }

    /// Of a mistake, at each look at each revision.
    fn chance(&self) -> f64 {
        let looks = u32::try_from(self.rounds_most() - LEAST + 1).unwrap_or(u32::MAX);
        self.proof.false_worse / f64::from(looks) / self.steps
    }

    fn test(&self, open: &Open) -> Test {
        Test::of(&open.rounds, self.scatter, self.proof.least_noise)
    }

    fn close(&mut self, standing: Standing) -> Heard {
        let Some(open) = self.open.take() else { return Heard::More };
        let test = self.test(&open);
        let pace = self.known.filter(|_| !open.rounds.is_empty()).map(|known| {
            let mut all: Vec<f64> = open.rounds.iter().map(|round| round.own).collect();
            let (rounds, seconds) = (all.len(), stats::median(&mut all).unwrap_or(0.0));
            Pace { metric: known.metric, rounds, seconds, share: test.share(&self.spans, self.chance()) }
        });
        self.scatter = test.pooled;
        self.spans.extend(test.spans);
        let judged = Judged::new(open.revision, standing, open.processes);
        Heard::Stands(Box::new(Judged { pace, ..judged }))
    }
}
