//! Ranges and build numbers.

use git2::Oid;

use super::Made;
use crate::git::{GitRepository, RelativeAge, RevisionInfo};

fn range(made: &Made, from: &str, to: &str, every: usize) -> crate::Result<Vec<RevisionInfo>> {
    GitRepository::open(made.path()).unwrap().range(from, to, every)
}

fn commits(found: &[RevisionInfo]) -> Vec<String> {
    found.iter().map(|revision| revision.commit.clone()).collect()
}

fn names(ids: &[Oid]) -> Vec<String> {
    ids.iter().map(Oid::to_string).collect()
}

#[test]
fn a_range_leaves_out_its_beginning_and_comes_oldest_first() {
    let made = Made::new();
    let line = made.line(6);
    made.tag("b3", line[2]);
    let found = range(&made, &line[1].to_string(), "main", 1).unwrap();
    assert_eq!(commits(&found), names(&line[2..]));
    let labels: Vec<_> = found.iter().map(|revision| revision.label.clone()).collect();
    let short = |index: usize| line[index].to_string()[..9].to_owned();
    assert_eq!(
        labels,
        ["b3".to_owned(), format!("b4-{}", short(3)), format!("b5-{}", short(4)), format!("b6-{}", short(5))]
    );
    assert_eq!(found[0].date, "2024-06-03");
    assert_eq!(found[3].build_number, Some(6));
}

#[test]
fn of_a_range_every_nth_is_taken_and_its_end_always() {
    let made = Made::new();
    let line = made.line(9);
    let found = range(&made, "b1", "b9", 3).unwrap();
    assert_eq!(commits(&found), names(&[line[3], line[6], line[8]]));
    assert_eq!(commits(&range(&made, "b1", "b9", 100).unwrap()), names(&[line[8]]));
    assert_eq!(range(&made, "b1", "b9", 0).unwrap().len(), 8);
}

#[test]
fn merges_are_counted_and_not_walked() {
    let made = Made::new();
    let main = made.line(3);
    let side_one = made.llama(&[], &[main[0]]);
    let side_two = made.llama(&[], &[side_one]);
    let merge = made.llama(&[], &[main[2], side_two]);
    let last = made.llama(&[], &[merge]);
    made.branch("main", last);
    let found = range(&made, "b2", "main", 1).unwrap();
    assert_eq!(commits(&found), names(&[main[2], merge, last]));
    let counts: Vec<_> = found.iter().map(|revision| revision.build_number).collect();
    // Three commits on the main line, two on the side branch, and the merge itself.
    assert_eq!(counts, [Some(3), Some(6), Some(7)]);
    // As in git, a start on a side branch excludes the commits that it shares with the main line.
    let found = range(&made, &side_one.to_string(), &main[2].to_string(), 1).unwrap();
    assert_eq!(commits(&found), names(&main[1..]));
}

#[test]
fn a_range_that_holds_nothing_is_refused() {
    let made = Made::new();
    made.line(4);
    for (from, to) in [("b3", "b2"), ("b3", "b3")] {
        let error = range(&made, from, to, 1).unwrap_err();
        assert!(error.to_string().contains("holds nothing"), "{error}");
        assert!(error.hint().unwrap().contains("A..B"));
    }
}

#[test]
fn where_history_is_cut_off_nothing_is_counted_and_no_range_is_made_up() {
    let made = Made::new();
    let line = made.line(5);
    made.tag("b1000", line[4]);
    std::fs::write(made.path().join("shallow"), format!("{}\n", line[2])).unwrap();
    let repository = GitRepository::open(made.path()).unwrap();
    assert!(!repository.is_complete());
    let found = repository.range(&line[2].to_string(), "main", 1).unwrap();
    let labels: Vec<_> = found.iter().map(|revision| revision.label.as_str()).collect();
    assert_eq!(labels, [&line[3].to_string()[..9], "b1000"]);
    let error = repository.range(&line[0].to_string(), "main", 1).unwrap_err();
    assert!(error.to_string().contains("does not reach"), "{error}");
    assert_eq!(repository.revision(&line[3].to_string()).unwrap().build_number, None);
    assert_eq!(repository.revision(&line[4].to_string()).unwrap().build_number, Some(1000));
}

#[test]
fn a_commit_is_older_by_its_place_in_the_history_and_without_one_by_its_time() {
    let made = Made::new();
    let main = made.line(3);
    let first = made.llama(&[], &[main[0]]);
    let side = made.llama(&[], &[first]);
    let merge = made.llama(&[], &[main[2], side]);
    made.branch("main", merge);
    let repository = GitRepository::open(made.path()).unwrap();
    let age = |one: Oid, beside: Oid| repository.age(&one.to_string(), &beside.to_string());
    assert_eq!(age(main[2], main[1]), Some(RelativeAge::Descendant));
    assert_eq!(age(main[1], main[2]), Some(RelativeAge::Ancestor));
    assert_eq!(age(main[1], main[1]), Some(RelativeAge::Ancestor));
    assert_eq!(age(side, merge), Some(RelativeAge::Ancestor), "it was merged");
    assert_eq!(age(main[1], side), Some(RelativeAge::Earlier));
    assert_eq!(age(side, main[1]), Some(RelativeAge::Later));
    assert_eq!(repository.age(&main[0].to_string(), &"1".repeat(40)), None);
}
