//! What may be asked for next, and how many rounds of builds a search takes if several revisions are built at a time. That it asks for the
//! same needs no test: it is never told what was built.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// What a search costs that begins builds only when one is missing, and then makes so many at a time.
struct Searched {
    /// How often builds were begun.
    rounds: usize,
    builds: usize,
}

fn searched(seed: u64, planted: Planted, at_a_time: usize) -> Searched {
    let mut history = History::new(seed, planted);
    let mut search = Search::new(rules(), Aim::Growth, history.last);
    let (mut made, mut rounds) = (BTreeSet::new(), 0);
    loop {
        let ask = match search.next() {
            Step::Done(_) => return Searched { rounds, builds: made.len() },
            Step::Run(ask) => ask,
        };
        if !made.contains(&ask.revision) {
            let Ahead { certain, likely, .. } = search.ahead(16);
            let missing = certain.into_iter().chain(likely).filter(|at| !made.contains(at));
            let batch: Vec<usize> = missing.take(at_a_time).collect();
            assert_eq!(batch.first(), Some(&ask.revision));
            made.extend(batch);
            rounds += 1;
        }
        search.observe(ask, history.process(ask));
    }
}

#[test]
fn how_often_builds_are_waited_for_in_three_hundred_histories() {
    let mut rounds = [0, 0, 0];
    for seed in 0..300 {
        let planted = match seed / 100 {
            0 => Planted::Leak(400.0 * KIB),
            1 => Planted::Cure(400.0 * KIB),
            _ => Planted::Crash(0.04),
        };
        let one = searched(seed, planted, 1);
        assert_eq!(one.rounds, one.builds, "seed {seed}");
        rounds[0] += one.rounds;
        for (at, several) in [(1, 3), (2, 7)] {
            let other = searched(seed, planted, several);
            assert!(other.rounds <= one.rounds && other.builds <= other.rounds * several, "seed {seed}");
            rounds[at] += other.rounds;
        }
    }
    // What docs/diagnose.md says.
    insta::assert_snapshot!(format!(
        "rounds of builds: {} with one at a time, {} with three, {} with seven",
        rounds[0], rounds[1], rounds[2]
    ));
}

/// What is certain, what is likely, and what is left if the first of it cannot be run.
fn ahead(certain: &[usize], likely: &[usize], otherwise: &[usize]) -> Ahead {
    Ahead { certain: certain.to_vec(), likely: likely.to_vec(), otherwise: otherwise.to_vec() }
}

#[test]
fn both_ends_come_first_then_the_middle_then_halfway_from_there() {
    let search = Search::new(rules(), Aim::Growth, 16);
    assert_eq!(search.ahead(0), ahead(&[16, 0], &[], &[]));
    assert_eq!(search.ahead(3), ahead(&[16, 0], &[8, 12, 4], &[]), "nothing is left without an end");
    assert_eq!(search.ahead(7).likely[3..], [14, 10, 6, 2]);
    // Two neighbours have nothing between them.
    assert_eq!(Search::new(rules(), Aim::Slowdown, 1).ahead(9), ahead(&[0, 1], &[], &[]));
}

#[test]
fn what_lies_in_the_larger_part_is_likelier_and_what_is_over_needs_nothing() {
    let mut history = History::new(12, Planted::Leak(400.0 * KIB));
    (history.last, history.at, history.broken) = (100, 90, vec![50]);
    let mut search = Search::new(rules(), Aim::Growth, history.last);
    let mut at = BTreeMap::new();
    while let Step::Run(ask) = search.next() {
        at.entry(ask.revision).or_insert_with(|| search.ahead(2));
        let seen = history.process(ask);
        search.observe(ask, seen);
    }
    assert_eq!(at[&50], ahead(&[50, 100], &[75, 25], &[49, 100, 74, 24]));
    // It does not build: the one before it is judged, beside the ill end. Two of them would be a block, beyond which is looked then.
    assert_eq!(at[&49], ahead(&[49, 100], &[74, 24], &[75, 100, 24, 62]));
    assert_eq!(search.ahead(9), Ahead::default());
}
