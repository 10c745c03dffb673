//! Searches for slowdowns in simulated histories with scatter, drift and disturbed processes.

use super::*;

#[derive(Clone, Copy, Debug)]
struct Noise {
    scatter: f64,
    drift: f64,
    /// One in this many processes is disturbed, by a tenth to a third.
    disturbed: u64,
}

/// As measured on a dedicated GPU.
const QUIET: Noise = Noise { scatter: 0.01, drift: 0.002, disturbed: 0 };
/// As on a desktop with other programs.
const BUSY: Noise = Noise { scatter: 0.02, drift: 0.004, disturbed: 50 };

struct Speeds {
    place: Place,
    /// Revisions that change the time, each with the factor relative to its predecessor.
    steps: Vec<(usize, f64)>,
    noise: Noise,
    machine: f64,
}

impl Speeds {
    fn new(seed: u64, factor: f64, noise: Noise) -> Self {
        let place = Place::new(seed);
        let steps = vec![(place.at, factor)];
        Self { place, steps, noise, machine: 1.0 }
    }

    fn process(&mut self, ask: ProcessOrder) -> ProcessResult {
        assert_eq!(ask.aim, RevisionAim::Slowdown);
        if self.place.broken.contains(&ask.revision) {
            return ProcessResult::Cannot("it does not build".to_owned());
        }
        let random = &mut self.place.random;
        let mut normal = || (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
        self.machine *= (self.noise.drift * normal()).exp();
        let own: f64 = self.steps.iter().filter(|(at, _)| ask.revision >= *at).map(|(_, by)| by).product();
        let (decode, prefill) = (self.noise.scatter * normal(), self.noise.scatter * normal());
        let is_disturbed = self.noise.disturbed > 0 && random.below(self.noise.disturbed) == 0;
        let by = if is_disturbed { random.between(1.1, 1.33) } else { 1.0 };
        let all = self.machine * by;
        let measured = vec![
            (BuildMetric::Prefill, 0.0005 * all * prefill.exp()),
            (BuildMetric::Decode, 0.02 * own * all * decode.exp()),
        ];
        ProcessResult::Visit(BuildVisit { measured, replies: Vec::new() })
    }

    fn search(&mut self) -> RevisionConclusion {
        run(RevisionAim::Slowdown, self.place.last, &mut |ask| self.process(ask))
    }
}

/// Returns the number of searches, of a hundred, that find the right revision, and the mean number of
/// processes. All other searches must find none.
fn named(first: u64, factor: f64, noise: Noise) -> (usize, usize) {
    let (mut right, mut legs) = (0, 0);
    for seed in first..first + 100 {
        let mut history = Speeds::new(seed, factor, noise);
        let found = history.search();
        legs += found.legs;
        match &found.outcome {
            RevisionOutcome::Found { revision } => {
                assert_eq!(*revision, history.place.at, "seed {seed}: {found:#?}");
                assert_eq!(found.ill_is_newer, Some(factor > 1.0), "seed {seed}");
                right += 1;
            }
            RevisionOutcome::Among { first, last } => {
                assert!((*first..=*last).contains(&history.place.at), "seed {seed}: {found:#?}");
            }
            RevisionOutcome::Unsteady { .. } | RevisionOutcome::Alike { sure: false } => {}
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    (right, legs / 100)
}

#[test]
fn the_revision_that_made_it_slower_is_named() {
    for (first, factor, noise, least, most) in [
        (0, 1.15, QUIET, 100, 90),
        (100, 1.15, BUSY, 88, 200),
        (200, 1.10, QUIET, 100, 115),
        (300, 1.5, BUSY, 98, 100),
    ] {
        let (right, legs) = named(first, factor, noise);
        assert!(right >= least && legs <= most, "{factor}, {noise:?}: {right} of 100, {legs} processes");
    }
}

#[test]
fn and_the_one_that_made_it_faster() {
    for (first, factor, noise, least) in [(400, 1.0 / 1.15, QUIET, 100), (500, 1.0 / 1.3, BUSY, 98)] {
        let (right, legs) = named(first, factor, noise);
        assert!(right >= least, "{factor}, {noise:?}: {right} of 100, {legs} processes");
    }
}

#[test]
fn ends_that_are_equally_fast_are_told_to_be_and_seldom_anything_else() {
    let (mut sure, mut wrong) = (0, 0);
    for seed in 1000..2000 {
        match Speeds::new(seed, 1.0, BUSY).search().outcome {
            RevisionOutcome::Alike { sure: true } => sure += 1,
            RevisionOutcome::Alike { sure: false } => {}
            _ => wrong += 1,
        }
    }
    assert!(wrong <= 2 && sure >= 900, "{sure} of 1000 sure, {wrong} wrong");
}

#[test]
fn of_two_revisions_that_share_a_slowdown_one_is_named_and_never_another() {
    let mut first = 0;
    for seed in 800..850 {
        let mut history = Speeds::new(seed, 1.1, QUIET);
        (history.place.last, history.place.broken) = (200, Vec::new());
        history.steps = vec![(70, 1.1), (150, 1.1)];
        match history.search().outcome {
            RevisionOutcome::Found { revision: 70 } => first += 1,
            RevisionOutcome::Found { revision: 150 }
            | RevisionOutcome::Among { .. }
            | RevisionOutcome::Unsteady { .. } => {}
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(first >= 45, "the first one in {first} of 50");
}

#[test]
fn what_cannot_be_timed_is_told() {
    let nothing = run(RevisionAim::Slowdown, 9, &mut |_| ProcessResult::Visit(BuildVisit::default()));
    let RevisionOutcome::EndFailed { newer: false, why } = nothing.outcome else { panic!("{nothing:?}") };
    assert!(why.contains("timed"), "{why}");
    for (newer, silent) in [(false, 0), (true, 9)] {
        let mut history = Speeds::new(3, 1.3, QUIET);
        (history.place.last, history.place.broken) = (9, Vec::new());
        let told = run(RevisionAim::Slowdown, 9, &mut |ask| {
            if ask.revision == silent {
                ProcessResult::Visit(BuildVisit::default())
            } else {
                history.process(ask)
            }
        });
        let RevisionOutcome::EndFailed { newer: blamed, .. } = told.outcome else { panic!("{told:?}") };
        assert_eq!(blamed, newer, "the one that could be timed is not to blame");
    }
    let mut history = Speeds::new(1, 1.3, QUIET);
    (history.place.last, history.place.at) = (64, 50);
    (history.steps, history.place.broken) = (vec![(50, 1.3)], (40..64).collect());
    assert_eq!(history.search().outcome, RevisionOutcome::Among { first: 40, last: 64 });
}

#[test]
fn an_end_that_is_gone_ends_the_search_and_once_is_no_matter() {
    let mut history = Speeds::new(2, 1.3, QUIET);
    (history.place.last, history.place.at, history.place.broken) = (16, 9, Vec::new());
    history.steps = vec![(9, 1.3)];
    for (fails, ends) in [(2, false), (3, true)] {
        let mut left = fails;
        let told = run(RevisionAim::Slowdown, 16, &mut |ask| {
            if !ask.is_end && ask.revision == 16 && left > 0 {
                left -= 1;
                return ProcessResult::Cannot("it did not start".to_owned());
            }
            history.process(ask)
        });
        assert_eq!(matches!(told.outcome, RevisionOutcome::IllFailed { .. }), ends, "{:?}", told.outcome);
    }
}

#[test]
fn a_revision_with_a_part_of_it_is_not_on_one_side_now_and_on_the_other_then() {
    // Counts the verdicts of many independent judgements.
    let mut told = Vec::new();
    for (noise, part) in [0.2, 0.3, 0.4, 0.45, 0.6].into_iter().flat_map(|part| [(QUIET, part), (BUSY, part)])
    {
        let (mut healthy, mut ill) = (0, 0);
        for seed in 0..200 {
            // The middle revision is judged first.
            let mut history = Speeds::new(seed, 1.15, noise);
            (history.place.last, history.place.broken) = (4, Vec::new());
            history.steps = vec![(2, 1.15_f64.powf(part)), (4, 1.15_f64.powf(1.0 - part))];
            let found = history.search();
            match found.judged.iter().find(|one| one.revision == 2).map(|one| &one.standing) {
                Some(RevisionStanding::Healthy) => healthy += 1,
                Some(RevisionStanding::Ill) => ill += 1,
                _ => {}
            }
        }
        told.push((part, noise, healthy, ill));
    }
    // Up to one in a hundred searches may be wrong.
    for (part, noise, healthy, ill) in told {
        let wrong = if part < 0.4 { ill } else { healthy };
        assert!(wrong <= 2, "{part}, {noise:?}: {healthy} healthy, {ill} ill");
        assert!(healthy.min(ill) <= 2, "{part}, {noise:?}: {healthy} healthy, {ill} ill");
    }
}

#[test]
fn ends_with_processes_of_two_speeds_are_not_called_different() {
    let mut wrong = 0;
    for seed in 3000..4000 {
        let mut history = Speeds::new(seed, 1.0, QUIET);
        let mut random = SplitMix::new(seed);
        let found = run(RevisionAim::Slowdown, history.place.last, &mut |ask| {
            let mut seen = history.process(ask);
            if let ProcessResult::Visit(visit) = &mut seen
                && random.below(5) == 0
            {
                visit.measured.iter_mut().for_each(|(_, seconds)| *seconds *= 1.2);
            }
            seen
        });
        wrong += usize::from(!matches!(
            found.outcome,
            RevisionOutcome::Alike { .. } | RevisionOutcome::EndFailed { .. }
        ));
    }
    assert!(wrong <= 4, "{wrong} of 1000");
}
