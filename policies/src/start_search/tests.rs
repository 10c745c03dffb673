//! Searches on servers that die, start, or fail for other reasons.

use std::time::Duration;

use super::*;

const SEGV: &str = "signal 11 (SIGSEGV)";

fn switch(item: &str, flag: &str) -> StartSwitch {
    let line = configuration_line("a", item, &[], None, flag, false);
    StartSwitch { item: item.to_owned(), args: vec![flag.to_owned()], line, ..StartSwitch::default() }
}

fn policy() -> StartSearchPolicy {
    crate::defaults().start_search
}

/// Runs a search; `server` returns the result of each start. Also returns the starts.
fn search(
    policy: StartSearchPolicy,
    deaths: u32,
    mut server: impl FnMut(Option<usize>, usize) -> StartAttempt,
) -> (StartFinding, Vec<Option<usize>>) {
    let switches = vec![switch("no-repack", "--no-repack"), switch("no-warmup", "--no-warmup")];
    let mut search = StartSearch::new(policy, switches, deaths, SEGV.to_owned());
    let mut starts = Vec::new();
    loop {
        match search.next_step(Duration::from_secs(starts.len() as u64)) {
            SearchStep::Done(finding) => return (finding, starts),
            SearchStep::Start(which) => {
                search.observe(which, server(which, starts.len()));
                starts.push(which);
            }
        }
        assert!(starts.len() < 100, "it has an end");
    }
}

fn dies() -> StartAttempt {
    StartAttempt::Died(SEGV.to_owned())
}

#[test]
fn switches_are_tried_one_by_one_and_the_one_that_starts_it_is_confirmed_by_a_death_without_it() {
    let (finding, starts) = search(policy(), 2, |which, _| match which {
        Some(1) => StartAttempt::Ready,
        _ => dies(),
    });
    assert_eq!(starts, [Some(0), Some(1), None]);
    assert_eq!(finding.switch().map(|switch| switch.item.as_str()), Some("no-warmup"));
    assert!(finding.is_lasting());
    insta::assert_snapshot!(finding.lines().join("\n"));
}

#[test]
fn a_death_has_to_come_again_before_any_switch_is_tried() {
    let (finding, starts) = search(policy(), 0, |_, _| dies());
    assert_eq!(starts, [None, None, Some(0), Some(1)]);
    assert_eq!(finding.outcome, StartOutcome::NoSwitch);
    let (finding, starts) = search(policy(), 1, |_, _| StartAttempt::Ready);
    assert_eq!((finding.outcome, starts.len()), (StartOutcome::NotEveryTime, 1));
}

#[test]
fn a_switch_with_which_it_starts_is_no_cure_if_it_starts_without_it_too() {
    let (finding, _) = search(policy(), 2, |which, at| match (which, at) {
        (None, _) | (Some(0), 0) => StartAttempt::Ready,
        _ => dies(),
    });
    assert_eq!(finding.outcome, StartOutcome::NotEveryTime);
    assert!(!finding.is_lasting());
}

#[test]
fn another_failure_says_nothing_of_a_switch_and_ends_the_search_as_configured() {
    let failed = || StartAttempt::Failed("memory ran out".to_owned());
    let (finding, starts) = search(policy(), 2, |which, _| match which {
        Some(0) => failed(),
        Some(1) => StartAttempt::Ready,
        _ => dies(),
    });
    assert_eq!((finding.switch().is_some(), starts.len()), (true, 3));
    let (finding, _) = search(policy(), 1, |_, _| failed());
    assert_eq!(finding.outcome, StartOutcome::Otherwise { why: "memory ran out".to_owned() });
}

#[test]
fn a_search_is_bounded_in_starts_and_in_time() {
    let (finding, starts) = search(StartSearchPolicy { starts: 1, ..policy() }, 2, |_, _| dies());
    assert_eq!((finding.outcome, starts.len()), (StartOutcome::GivenUp, 1));
    let brief = StartSearchPolicy { time: Duration::from_secs(2), ..policy() };
    let (finding, starts) = search(brief, 0, |_, _| dies());
    assert_eq!((finding.outcome, starts.len()), (StartOutcome::GivenUp, 2));
}

#[test]
fn every_outcome_is_told_with_what_to_do() {
    let finding = |outcome| StartFinding { outcome, deaths: 2, death: SEGV.to_owned(), tried: Vec::new() };
    let mut all: Vec<String> = [
        StartOutcome::Found { switch: Box::new(switch("no-repack", "--no-repack")) },
        StartOutcome::NoSwitch,
        StartOutcome::NotEveryTime,
        StartOutcome::Otherwise { why: "memory ran out".to_owned() },
        StartOutcome::GivenUp,
    ]
    .into_iter()
    .map(|outcome| finding(outcome).advice())
    .collect();
    let tried = TriedSwitch { words: "--no-repack".to_owned(), started: false, how: SEGV.to_owned() };
    all.push(StartFinding { tried: vec![tried], ..finding(StartOutcome::NoSwitch) }.advice());
    let configured = ["cache-ram=64".to_owned()];
    for (overruled, typed) in [(None, false), (Some("-fa on"), false), (None, true), (Some("-fa on"), true)] {
        all.push(configuration_line(
            "org/a b",
            "no-flash-attention",
            &configured,
            overruled,
            "-fa off",
            typed,
        ));
    }
    insta::assert_snapshot!(all.join("\n"));
}
