//! Searches in simulated histories find the planted revision around broken builds, with the declared error
//! rate.

mod pace;
mod replies;

use super::*;
use crate::crash::{self, CrashRecurrence, CrashRun, WorkloadCrash};
use crate::proof::{BuildMetric, BuildReply, BuildVisit};
use crate::{GrowthEnd, LegEnd, LegSpeed, SeriesFinding, Workload};
use warden_policies::growth::{GrowthVerdict, IntervalEstimate};
use warden_policies::sample::{MemoryKind, WorkDone};
use warden_policies::world::SplitMix;

const KIB: f64 = 1024.0;

fn rules() -> JudgingPolicies<'static> {
    let all = warden_policies::defaults();
    JudgingPolicies { cure: &all.diagnose.cure, crash: &all.diagnose.crash, proof: &all.proof }
}

/// Equal questions get equal answers, and a search resumed from its results ends with the same conclusion.
fn run(
    aim: RevisionAim,
    last: usize,
    process: &mut dyn FnMut(ProcessOrder) -> ProcessResult,
) -> RevisionConclusion {
    let mut search = RevisionSearch::new(rules(), aim, last);
    let mut told: Vec<(ProcessOrder, ProcessResult)> = Vec::new();
    let found = loop {
        let ask = match search.next() {
            RevisionStep::Done(conclusion) => break conclusion,
            RevisionStep::Run(ask) => ask,
        };
        assert_eq!(search.next(), RevisionStep::Run(ask), "asking twice changes nothing");
        let seen = process(ask);
        search.observe(ask, seen.clone());
        told.push((ask, seen));
        assert!(told.len() < 2000, "it does not end");
    };
    let mut again = RevisionSearch::new(rules(), aim, last);
    for (ask, seen) in told {
        assert_eq!(again.next(), RevisionStep::Run(ask));
        again.observe(ask, seen);
    }
    assert_eq!(again.next(), RevisionStep::Done(found.clone()));
    found
}

struct Place {
    random: SplitMix,
    last: usize,
    at: usize,
    /// An eighth of the revisions; they do not build.
    broken: Vec<usize>,
}

impl Place {
    fn new(seed: u64) -> Self {
        let mut random = SplitMix::new(seed);
        let last = 1 + usize::try_from(random.below(400)).unwrap();
        let at = 1 + usize::try_from(random.below(last as u64)).unwrap();
        let mut broken: Vec<usize> = (1..last).filter(|_| random.below(8) == 0).collect();
        // Were the changed revision or its predecessor broken, the search could only find a range.
        broken.retain(|one| *one != at && *one + 1 != at);
        Self { random, last, at, broken }
    }
}

#[derive(Clone, Copy, Debug)]
enum Planted {
    /// Bytes per request from this revision on.
    Leak(f64),
    /// Bytes per request before this revision, and none from it on.
    Cure(f64),
    /// Probability that a request kills the server, from this revision on.
    Crash(f64),
}

struct History {
    random: SplitMix,
    last: usize,
    at: usize,
    planted: Planted,
    broken: Vec<usize>,
}

impl History {
    fn new(seed: u64, planted: Planted) -> Self {
        let Place { random, last, at, broken } = Place::new(seed);
        Self { random, last, at, planted, broken }
    }

    fn noise(&mut self) -> f64 {
        self.random.between(-1.0, 1.0)
    }

    fn process(&mut self, ask: ProcessOrder) -> ProcessResult {
        if self.broken.contains(&ask.revision) {
            return ProcessResult::Cannot("it does not build".to_owned());
        }
        let newer = ask.revision >= self.at;
        let rate = match self.planted {
            Planted::Leak(rate) if newer => rate * (1.0 + 0.2 * self.noise()),
            Planted::Cure(rate) if !newer => rate * (1.0 + 0.2 * self.noise()),
            _ => 2.0 * KIB * self.noise(),
        };
        let mut found = finding(rate);
        if let Planted::Crash(chance) = self.planted
            && newer
            && let Some(at) = self.dies(chance)
        {
            found.ended = LegEnd::Crashed { why: "signal 11".to_owned() };
            found.requests = at;
            let mut runs = Vec::new();
            let mut again = CrashRecurrence::Undecided;
            while ask.is_end && again == CrashRecurrence::Undecided {
                let died = self.dies(chance);
                runs.push(CrashRun { requests: died.unwrap_or(184), died: died.is_some() });
                again = crash::judge_recurrence(&warden_policies::defaults().diagnose.crash, &runs);
            }
            found.crash =
                Some(WorkloadCrash { at_request: at, why: String::new(), lines: Vec::new(), runs, again });
        }
        ProcessResult::Findings(vec![found])
    }

    /// Returns the request, of 184, at which the server dies.
    fn dies(&mut self, chance: f64) -> Option<u64> {
        (1..=184).find(|_| self.random.between(0.0, 1.0) < chance)
    }

    fn search(&mut self) -> RevisionConclusion {
        run(RevisionAim::Growth, self.last, &mut |ask| self.process(ask))
    }
}

fn finding(rate: f64) -> LegFinding {
    let per_request = IntervalEstimate { value: rate, low: rate - 3.0 * KIB, high: rate + 3.0 * KIB };
    let series = SeriesFinding {
        series: MemoryKind::Host,
        verdict: if rate > 20.0 * KIB { GrowthVerdict::Leaking } else { GrowthVerdict::Steady },
        per_request: Some(per_request),
        pooled_per_request: None,
        per_prompt_token: None,
        per_output_token: None,
        per_image: None,
        settles: GrowthEnd::Unknown,
        blame: None,
        first: 0,
        last: 0,
        peak: 0,
        sees: 1.0,
        graphs: None,
    };
    LegFinding {
        workload: Workload::SameImage,
        steps: 184,
        enough: 64,
        requests: 184,
        work: WorkDone::default(),
        series: vec![series],
        speed: LegSpeed::default(),
        ended: LegEnd::Complete,
        crash: None,
        control: false,
    }
}

#[test]
fn in_a_hundred_histories_the_revision_that_brought_the_growth_is_found_in_each() {
    for seed in 0..100 {
        let mut history = History::new(seed, Planted::Leak(400.0 * KIB));
        let found = history.search();
        assert_eq!(found.outcome, RevisionOutcome::Found { revision: history.at }, "seed {seed}: {found:#?}");
        assert_eq!(found.ill_is_newer, Some(true));
        assert!(found.legs < 160, "seed {seed}: {} processes", found.legs);
    }
}

#[test]
fn in_a_hundred_the_one_that_ended_it() {
    for seed in 100..200 {
        let mut history = History::new(seed, Planted::Cure(400.0 * KIB));
        let found = history.search();
        assert_eq!(found.outcome, RevisionOutcome::Found { revision: history.at }, "seed {seed}: {found:#?}");
        assert_eq!(found.ill_is_newer, Some(false));
    }
}

#[test]
fn in_a_hundred_the_one_that_brought_a_crash_that_comes_each_time() {
    for seed in 200..300 {
        let mut history = History::new(seed, Planted::Crash(0.04));
        let found = history.search();
        assert_eq!(found.outcome, RevisionOutcome::Found { revision: history.at }, "seed {seed}: {found:#?}");
    }
}

#[test]
fn a_crash_that_comes_seldom_is_found_or_the_search_says_that_it_is_not_sure() {
    let mut right = 0;
    for seed in 300..400 {
        // Every fourth process survives.
        let mut history = History::new(seed, Planted::Crash(0.0075));
        match history.search().outcome {
            RevisionOutcome::Found { revision } => {
                assert_eq!(revision, history.at, "seed {seed}");
                right += 1;
            }
            RevisionOutcome::Unsteady { .. }
            | RevisionOutcome::Among { .. }
            | RevisionOutcome::NeitherIll { .. }
            | RevisionOutcome::NotAgain
            | RevisionOutcome::EndFailed { .. } => {}
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(right >= 50, "{right} of 100");
}

#[test]
fn what_cannot_be_told_around_it_leaves_a_range() {
    let mut history = History::new(7, Planted::Leak(400.0 * KIB));
    (history.last, history.at, history.broken) = (40, 20, (15..=22).collect());
    assert_eq!(history.search().outcome, RevisionOutcome::Among { first: 15, last: 23 });
    // One revision in the broken range builds.
    history.broken.retain(|one| *one != 18);
    assert_eq!(history.search().outcome, RevisionOutcome::Among { first: 19, last: 23 });
    (history.last, history.at, history.broken) = (800, 390, (250..=560).collect());
    let found = history.search();
    assert_eq!(
        found.outcome,
        RevisionOutcome::Among { first: 250, last: 561 },
        "and not each of them is built"
    );
    assert!(found.judged.len() < 40, "{}", found.judged.len());
}

#[test]
fn ends_that_are_alike_are_told() {
    let mut both = History::new(8, Planted::Leak(400.0 * KIB));
    both.at = 0;
    assert_eq!(both.search().outcome, RevisionOutcome::BothIll);
    let mut neither = History::new(9, Planted::Leak(400.0 * KIB));
    neither.at = neither.last + 1;
    assert_eq!(neither.search().outcome, RevisionOutcome::NeitherIll { short: false, suspected: false });
    let mut broken = History::new(10, Planted::Leak(400.0 * KIB));
    broken.broken = vec![0];
    let RevisionOutcome::EndFailed { newer: false, why } = broken.search().outcome else { panic!() };
    assert_eq!(why, "it does not build");
}

#[test]
fn it_may_be_broken_off_at_any_time_and_says_what_is_left() {
    let mut history = History::new(11, Planted::Leak(400.0 * KIB));
    (history.last, history.at, history.broken) = (64, 50, Vec::new());
    let mut search = RevisionSearch::new(rules(), RevisionAim::Growth, history.last);
    assert_eq!((search.interrupt().outcome, search.candidates_left()), (RevisionOutcome::Interrupted, None));
    let mut before = usize::MAX;
    while let RevisionStep::Run(ask) = search.next() {
        let seen = history.process(ask);
        search.observe(ask, seen);
        if let Some(left) = search.candidates_left() {
            assert!(left <= before && left >= 1);
            before = left;
        }
    }
    assert_eq!(before, 1);
}

#[test]
fn more_of_the_same_growth_is_a_symptom_too() {
    let mut search = RevisionSearch::new(rules(), RevisionAim::Growth, 40);
    let mut random = SplitMix::new(5);
    let found = loop {
        match search.next() {
            RevisionStep::Done(conclusion) => break conclusion,
            RevisionStep::Run(ask) => {
                let rate = if ask.revision >= 17 { 400.0 } else { 40.0 };
                let seen = ProcessResult::Findings(vec![finding(rate * KIB * random.between(0.9, 1.1))]);
                search.observe(ask, seen);
            }
        }
    };
    assert_eq!(found.outcome, RevisionOutcome::Found { revision: 17 }, "{found:#?}");
}

#[test]
fn a_crash_that_did_not_come_again_hides_no_leak_and_other_work_says_nothing_of_this_one() {
    let mut search = RevisionSearch::new(rules(), RevisionAim::Growth, 2);
    let once = WorkloadCrash {
        at_request: 3,
        why: String::new(),
        lines: Vec::new(),
        runs: Vec::new(),
        again: CrashRecurrence::NotAgain,
    };
    let died = LegFinding { workload: Workload::ShortText, crash: Some(once), ..finding(0.0) };
    let failed = LegEnd::Failed { why: "no embeddings".to_owned() };
    let other = LegFinding { workload: Workload::Embeddings, ended: failed, ..finding(0.0) };
    let found = loop {
        match search.next() {
            RevisionStep::Done(conclusion) => break conclusion,
            RevisionStep::Run(ask) => {
                let own = finding(if ask.revision >= 1 { 400.0 * KIB } else { 0.0 });
                let all = if ask.is_end { vec![died.clone(), other.clone(), own] } else { vec![own] };
                search.observe(ask, ProcessResult::Findings(all));
            }
        }
    };
    assert_eq!(found.outcome, RevisionOutcome::Found { revision: 1 }, "{found:#?}");
}

#[test]
fn what_was_told_of_growth_is_read_as_before_and_a_visit_as_it_was_told() {
    let before = r#"{"revision":3,"is_end":true,"whole":false,"control":false,"workload":null}"#;
    let ask: ProcessOrder = serde_json::from_str(before).unwrap();
    assert_eq!(ask.aim, RevisionAim::Growth);
    assert_eq!(serde_json::to_string(&ask).unwrap(), before);
    let ask = ProcessOrder { aim: RevisionAim::Answers, ..ask };
    let reply =
        BuildReply { request: "text 1".to_owned(), refused: Some("no".to_owned()), ..BuildReply::default() };
    let visit = BuildVisit { measured: vec![(BuildMetric::Decode, 0.25)], replies: vec![reply] };
    let told = serde_json::to_string(&(ask, ProcessResult::Visit(visit.clone()))).unwrap();
    let (asked, seen): (ProcessOrder, ProcessResult) = serde_json::from_str(&told).unwrap();
    assert_eq!((asked, seen), (ask, ProcessResult::Visit(visit)));
}
