//! Judges slowdowns. The slower end counts as ill; a revision either introduced the slowdown or removed it.
//!
//! ```text
//!  ends, alternating ── ratio of each figure, judged after each round like a proof ──> one is slower by the limit
//!
//!  a revision: rounds of three processes, its own between the ends    faster end ── two fifths ──────── slower end
//!     ln own - 0.6 ln faster - 0.4 ln slower, after each round ─────>     healthy      │      ill
//! ```
//!
//! The processes of a round run one after the other, so slow drift affects all of them. The scatter between
//! processes comes from all rounds so far, or from this revision's rounds if they scatter more. For the ends,
//! the error rate `proof.false_worse` is divided among the metrics and the looks (tests after a round). For
//! revisions, it is divided among all revisions that may have to be judged and the looks at each. A revision
//! that is too close to the limit after the last round cannot be judged.

use serde::{Deserialize, Serialize};

use super::super::proof::{BuildMetric, BuildVisit, MetricRatio, ProofPolicy, ProofRuling, ratio};
use super::super::student;
use super::conclusion::{
    JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionStanding, RevisionSymptom,
};
use super::{
    JudgeReply, JudgingPolicies, ProcessOrder, ProcessResult, RevisionAim, SymptomJudge, UNKNOWN_MOST,
};
use warden_policies::growth::{IntervalEstimate, stats};

const PACE_METRICS: [BuildMetric; 3] = [BuildMetric::Prefill, BuildMetric::Decode, BuildMetric::FirstToken];
/// Number of tests of the ends: each metric, in both directions.
const END_TESTS: f64 = 6.0;
/// Rounds before a revision is judged: a reported revision must have shown the slowdown twice.
const ROUNDS_LEAST: usize = 2;
/// Multiple of the rounds of a proof: a search needs builds, which cost more than extra processes.
const ROUNDS_FACTOR: usize = 2;
/// Share of the ends' difference above which a revision is ill. Below one half, so that the first of two
/// revisions that each cause half of the slowdown is found.
const ILL_SHARE: f64 = 0.4;
/// Deviations from the median above which a round is disturbed by something that outlasts a request.
const DISTURBED_DEVIATIONS: f64 = 5.0;
/// One round in this many may be left out as disturbed.
const ROUNDS_PER_DROPPED: usize = 4;

/// Speed of a revision compared with the ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RevisionPace {
    /// Metric that was timed.
    pub metric: BuildMetric,
    /// Number of rounds.
    pub rounds: usize,
    /// Median seconds over the revision's processes.
    pub seconds: f64,
    /// Position on the scale from the faster end (0) to the slower end (1), with the test's interval.
    pub share: Option<IntervalEstimate>,
}

/// Share at which a round scatters least, so the best one to recognise disturbed rounds.
const MIDDLE_SHARE: f64 = 0.5;

/// Seconds of the faster end, of the revision, and of the slower end.
type PaceRound = [f64; 3];
const GOOD: usize = 0;
const OWN: usize = 1;
const BAD: usize = 2;

/// The two ends of which one is slower.
#[derive(Debug)]
struct EndsDiffer {
    metric: BuildMetric,
    /// Index of the faster end, and (`bad`) of the slower end.
    good: usize,
    bad: usize,
    /// Seconds of the faster end, and (`bad_seconds`) of the slower end, in undisturbed rounds.
    good_seconds: Vec<f64>,
    bad_seconds: Vec<f64>,
    /// Logarithm of the slower end's seconds divided by the faster end's, for each round so far.
    spans: Vec<f64>,
}

#[derive(Debug)]
struct TimedRevision {
    revision: usize,
    rounds: Vec<PaceRound>,
    /// Seconds measured so far in the incomplete round.
    taken: [Option<f64>; 3],
    processes: usize,
}

impl TimedRevision {
    /// Returns the next process of a round. The first round begins with the revision, because its build may
    /// take an hour and would separate the two ends. In later rounds the revision runs between the ends, so
    /// that a machine that slows down affects all three alike.
    fn next_process(&self) -> usize {
        let order = match self.rounds.len() {
            0 => [OWN, GOOD, BAD],
            round if round.is_multiple_of(2) => [GOOD, OWN, BAD],
            _ => [BAD, OWN, GOOD],
        };
        order.into_iter().find(|turn| self.taken[*turn].is_none()).unwrap_or(OWN)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct ProcessScatter {
    squares: f64,
    freedom: f64,
}

impl ProcessScatter {
    /// Adds values with `times` the variance of a single process.
    fn with_values(mut self, values: &[f64], times: f64) -> Self {
        let (_, variance, freedom) = mean_and_variance(values);
        self.squares += variance * freedom / times;
        self.freedom += freedom;
        self
    }

    fn variance(self) -> f64 {
        self.squares / self.freedom.max(1.0)
    }
}

#[derive(Debug)]
struct PaceTest {
    /// Mean logarithm of the revision's seconds divided by those at the limit.
    mean: f64,
    error: f64,
    spans: Vec<f64>,
    scatter: ProcessScatter,
}

#[derive(Debug)]
pub(super) struct PaceJudge {
    proof: ProofPolicy,
    failures_most: u32,
    last: usize,
    /// Judgements that a search may need, including repetitions and revisions that cannot be judged.
    steps: f64,
    older: Vec<BuildVisit>,
    newer: Vec<BuildVisit>,
    known: Option<EndsDiffer>,
    scatter: ProcessScatter,
    /// Consecutive failed processes of the ends while a revision is being judged.
    failed: u32,
    open: Option<TimedRevision>,
}

impl SymptomJudge for PaceJudge {
    fn next(&self) -> Option<ProcessOrder> {
        let Some(known) = &self.known else {
            let (older, newer) = (self.older.len(), self.newer.len());
            // The end that runs first alternates from round to round.
            let is_newer = older > newer || (older == newer && !older.is_multiple_of(2));
            let revision = if is_newer { self.last } else { 0 };
            return Some(ProcessOrder::new(RevisionAim::Slowdown, revision, true));
        };
        let open = self.open.as_ref()?;
        let revision = [known.good, open.revision, known.bad][open.next_process()];
        Some(ProcessOrder::new(RevisionAim::Slowdown, revision, false))
    }

    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply {
        let visit = match seen {
            ProcessResult::Visit(visit) => Ok(visit),
            ProcessResult::Cannot(why) => Err(why),
            ProcessResult::Findings(_) => Err("it was not timed".to_owned()),
        };
        let Some((known, open)) = self.known.as_mut().zip(self.open.as_mut()) else {
            if let Ok(visit) = visit {
                if ask.revision == self.last { &mut self.newer } else { &mut self.older }.push(visit);
            }
            return self.look_at_ends();
        };
        let seconds = visit
            .and_then(|visit| visit.value_of(known.metric).ok_or_else(|| "it could not be timed".to_owned()));
        let turn = open.next_process();
        match seconds {
            Err(why) if turn == OWN => return self.close_revision(RevisionStanding::Unknown { why }),
            Err(why) if self.failed + 1 >= self.failures_most => {
                let newer = known.good == self.last;
                return JudgeReply::Over(match turn {
                    BAD => RevisionOutcome::IllFailed { why },
                    _ => RevisionOutcome::EndFailed { newer, why },
                });
            }
            Err(_) => self.failed += 1,
            Ok(seconds) => {
                open.taken[turn] = Some(seconds);
                match turn {
                    OWN => open.processes += 1,
                    _ => self.failed = 0,
                }
                if turn == BAD {
                    known.bad_seconds.push(seconds);
                }
            }
        }
        let [Some(good), Some(own), Some(bad)] = open.taken else { return JudgeReply::More };
        open.rounds.push([good, own, bad]);
        open.taken = [None; 3];
        self.judge_open()
    }

    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply {
        if let Some(known) = self.known.as_ref().filter(|known| known.good == revision && !again) {
            return JudgeReply::Judged(Box::new(known.judge_end(false)));
        }
        self.open = Some(TimedRevision { revision, rounds: Vec::new(), taken: [None; 3], processes: 0 });
        JudgeReply::More
    }

    fn is_whole(&self) -> bool {
        self.older.len() == self.newer.len() && self.open.as_ref().is_none_or(|open| open.taken == [None; 3])
    }

    fn describe_ends(&self, conclusion: &mut RevisionConclusion) {
        if self.older.len().min(self.newer.len()) > 0 {
            conclusion.ratios = self.ratios(&self.older, &self.newer);
        }
        conclusion.judged.extend(self.known.as_ref().map(|known| known.judge_end(true)));
    }
}

impl EndsDiffer {
    fn judge_end(&self, is_bad: bool) -> JudgedRevision {
        let (revision, standing, part, seconds) = if is_bad {
            (self.bad, RevisionStanding::Ill, 1.0, &self.bad_seconds)
        } else {
            (self.good, RevisionStanding::Healthy, 0.0, &self.good_seconds)
        };
        let rounds = seconds.len();
        let seconds = stats::median(&mut seconds.clone()).unwrap_or(0.0);
        let share = Some(IntervalEstimate { value: part, low: part, high: part });
        let pace = Some(RevisionPace { metric: self.metric, rounds, seconds, share });
        JudgedRevision { pace, ..JudgedRevision::new(revision, standing, rounds) }
    }
}

impl PaceJudge {
    pub(super) fn new(rules: JudgingPolicies<'_>, last: usize) -> Self {
        let halvings = usize::try_from(usize::BITS - last.leading_zeros()).unwrap_or(0);
        // At most all revisions between the ends are judged, and both neighbours of the change a second time.
        let steps = (halvings + UNKNOWN_MOST).min(last.saturating_sub(1)) + 2;
        Self {
            proof: rules.proof.clone(),
            failures_most: rules.cure.baseline_failures,
            last,
            steps: stats::length_as_f64(steps),
            older: Vec::new(),
            newer: Vec::new(),
            known: None,
            scatter: ProcessScatter::default(),
            failed: 0,
            open: None,
        }
    }

    fn look_at_ends(&mut self) -> JudgeReply {
        let rounds = self.older.len();
        if rounds != self.newer.len() || rounds < self.proof.rounds_least {
            return JudgeReply::More;
        }
        let (slower, faster) = (self.ratios(&self.older, &self.newer), self.ratios(&self.newer, &self.older));
        let worst = |all: &[MetricRatio]| {
            let low = |ratio: &MetricRatio| ratio.ratio.map_or(1.0, |ratio| ratio.low);
            let worse = all.iter().filter(|ratio| ratio.ruling == ProofRuling::Worse);
            worse.max_by(|one, other| low(one).total_cmp(&low(other))).map(|ratio| ratio.metric)
        };
        if let Some(metric) = worst(&slower) {
            return self.record_difference(metric, true);
        }
        let is_sure = slower.iter().chain(&faster).all(|ratio| ratio.ruling != ProofRuling::Unknown);
        if !is_sure && rounds < self.rounds_most() {
            return JudgeReply::More;
        }
        if let Some(metric) = worst(&faster) {
            return self.record_difference(metric, false);
        }
        JudgeReply::Over(if slower.is_empty() {
            let why = "neither its prompts nor its tokens could be timed".to_owned();
            let is_timed =
                |visit: &BuildVisit| PACE_METRICS.into_iter().any(|metric| visit.value_of(metric).is_some());
            RevisionOutcome::EndFailed { newer: self.older.iter().any(is_timed), why }
        } else {
            RevisionOutcome::Alike { sure: is_sure }
        })
    }

    fn ratios(&self, one: &[BuildVisit], other: &[BuildVisit]) -> Vec<MetricRatio> {
        let (rounds_most, false_worse) = (self.rounds_most(), self.proof.false_worse / END_TESTS);
        let policy = ProofPolicy { false_worse, rounds_most, ..self.proof.clone() };
        let rounds = one.len();
        let single = ProofPolicy { rounds_least: rounds, rounds_most: rounds, ..policy.clone() };
        let compare = |metric: BuildMetric| {
            let rounds = ratio::pairs(metric, one, other);
            let mut calm = ratio::compare_pairs(&policy, metric, &self.undisturbed_rounds(&rounds))?;
            // With few rounds, processes that are fast or slow by chance look disturbed, and the others
            // scatter too little. Therefore all rounds together must show the slowdown too, at the error rate
            // of a single look.
            let all = ratio::compare_pairs(&single, metric, &rounds);
            if calm.ruling == ProofRuling::Worse && all.is_none_or(|all| all.ruling != ProofRuling::Worse) {
                calm.ruling = ProofRuling::Unknown;
            }
            Some(calm)
        };
        PACE_METRICS.into_iter().filter_map(compare).collect()
    }

    fn undisturbed_rounds(&self, rounds: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let all = log_ratios(rounds);
        let middle = stats::median(&mut all.clone()).unwrap_or(0.0);
        let mut distances: Vec<f64> = all.iter().map(|log| (log - middle).abs()).collect();
        // Estimates the standard deviation of a normal distribution from its median deviation.
        let deviation = 1.4826 * stats::median(&mut distances).unwrap_or(0.0);
        undisturbed(rounds, &all, deviation.max(self.proof.least_noise))
    }

    fn record_difference(&mut self, metric: BuildMetric, is_newer: bool) -> JudgeReply {
        let (good, bad) = if is_newer { (0, self.last) } else { (self.last, 0) };
        let (fast, slow) = if is_newer { (&self.older, &self.newer) } else { (&self.newer, &self.older) };
        let rounds = self.undisturbed_rounds(&ratio::pairs(metric, fast, slow));
        let spans = log_ratios(&rounds);
        // The difference of two processes has twice the variance of one.
        self.scatter = self.scatter.with_values(&spans, 2.0);
        let (good_seconds, bad_seconds) = rounds.into_iter().unzip();
        self.known = Some(EndsDiffer { metric, good, bad, good_seconds, bad_seconds, spans });
        JudgeReply::Differ { symptom: RevisionSymptom::Slowdown { metric }, is_newer }
    }

    fn judge_open(&mut self) -> JudgeReply {
        let Some(open) = self.open.as_ref().filter(|open| open.rounds.len() >= ROUNDS_LEAST) else {
            return JudgeReply::More;
        };
        let (rounds, test, chance) = (open.rounds.len(), self.test_revision(open), self.error_rate());
        let away = test.mean / test.error;
        let standing = if student::upper_tail(-away, test.scatter.freedom) <= chance {
            RevisionStanding::Healthy
        } else if student::upper_tail(away, test.scatter.freedom) <= chance {
            RevisionStanding::Ill
        } else if rounds >= self.rounds_most() {
            RevisionStanding::Unknown { why: format!("{rounds} rounds do not tell to which end it belongs") }
        } else {
            return JudgeReply::More;
        };
        self.close_revision(standing)
    }

    fn rounds_most(&self) -> usize {
        self.proof.rounds_most.saturating_mul(ROUNDS_FACTOR).max(ROUNDS_LEAST)
    }

    fn error_rate(&self) -> f64 {
        self.proof.false_worse / stats::length_as_f64(self.rounds_most() - ROUNDS_LEAST + 1) / self.steps
    }

    fn test_revision(&self, open: &TimedRevision) -> PaceTest {
        let least = self.proof.least_noise;
        let values = |rounds: &[PaceRound], share: f64| -> Vec<f64> {
            rounds.iter().map(|round| distance_from_share(round, share)).collect()
        };
        let deviation = (self.scatter.variance() * distance_variance(MIDDLE_SHARE)).sqrt().max(least);
        let kept = undisturbed(&open.rounds, &values(&open.rounds, MIDDLE_SHARE), deviation);
        let spans: Vec<f64> = kept.iter().map(|[good, _, bad]| (bad / good).ln()).collect();
        let scatter = self
            .scatter
            .with_values(&values(&kept, MIDDLE_SHARE), distance_variance(MIDDLE_SHARE))
            .with_values(&spans, 2.0);
        let (mean, own, freedom) = mean_and_variance(&values(&kept, ILL_SHARE));
        let variance = own.max(scatter.variance() * distance_variance(ILL_SHARE)).max(least.powi(2));
        PaceTest { mean, error: (variance / (freedom + 1.0)).sqrt(), spans, scatter }
    }

    fn close_revision(&mut self, standing: RevisionStanding) -> JudgeReply {
        let Some(open) = self.open.take() else { return JudgeReply::More };
        let (test, chance) = (self.test_revision(&open), self.error_rate());
        let judged = JudgedRevision::new(open.revision, standing, open.processes);
        let Some(known) = self.known.as_mut().filter(|_| !open.rounds.is_empty()) else {
            return JudgeReply::Judged(Box::new(judged));
        };
        known.spans.extend(test.spans);
        let span = mean_and_variance(&known.spans).0;
        let wide = student::quantile(chance, test.scatter.freedom) * test.error / span;
        let value = ILL_SHARE + test.mean / span;
        let share = (span > 0.0).then_some(IntervalEstimate { value, low: value - wide, high: value + wide });
        let mut all: Vec<f64> = open.rounds.iter().map(|round| round[OWN]).collect();
        let (rounds, seconds) = (all.len(), stats::median(&mut all).unwrap_or(0.0));
        self.scatter = test.scatter;
        let pace = Some(RevisionPace { metric: known.metric, rounds, seconds, share });
        JudgeReply::Judged(Box::new(JudgedRevision { pace, ..judged }))
    }
}

/// Returns the logarithm of the revision's seconds divided by those at `share` of the way from the faster to
/// the slower end.
fn distance_from_share(round: &PaceRound, share: f64) -> f64 {
    let [good, own, bad] = round.map(f64::ln);
    own - (1.0 - share) * good - share * bad
}

/// Variance of [`distance_from_share`] in variances of one process.
fn distance_variance(share: f64) -> f64 {
    1.0 + (1.0 - share).powi(2) + share.powi(2)
}

fn log_ratios(rounds: &[(f64, f64)]) -> Vec<f64> {
    rounds.iter().map(|(one, other)| (other / one).ln()).collect()
}

/// Returns the rounds with values near the median, or all if there are few.
fn undisturbed<T: Copy>(rounds: &[T], values: &[f64], deviation: f64) -> Vec<T> {
    let middle = stats::median(&mut values.to_vec()).unwrap_or(0.0);
    let distance = |at: &usize| (values[*at] - middle).abs();
    let mut far: Vec<usize> =
        (0..values.len()).filter(|at| distance(at) > DISTURBED_DEVIATIONS * deviation).collect();
    far.sort_by(|one, other| distance(other).total_cmp(&distance(one)));
    far.truncate(values.len() / ROUNDS_PER_DROPPED);
    (0..values.len()).filter(|at| !far.contains(at)).map(|at| rounds[at]).collect()
}

/// Returns the mean, the variance and its degrees of freedom.
fn mean_and_variance(values: &[f64]) -> (f64, f64, f64) {
    let all = stats::length_as_f64(values.len()).max(1.0);
    let mean = values.iter().sum::<f64>() / all;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    let freedom = all - 1.0;
    (mean, squares / freedom.max(1.0), freedom)
}
