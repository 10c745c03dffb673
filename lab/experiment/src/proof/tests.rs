//! Proofs of simulated builds that are known to be equal, slower, larger, or to answer differently.

use warden_policies::defaults::Strictness;

use super::*;
use warden_policies::sample::GpuIndex;
use warden_policies::world::SplitMix;

fn policy() -> ProofPolicy {
    warden_policies::defaults().proof.clone()
}

/// Approximately normal, from twelve uniform numbers.
fn normal(random: &mut SplitMix) -> f64 {
    (0..12).map(|_| random.unit()).sum::<f64>() - 6.0
}

/// Runs complete rounds of builds with these decoding times and this scatter of processes.
fn rounds(policy: &ProofPolicy, old: f64, new: f64, scatter: f64, random: &mut SplitMix) -> Rounds {
    let mut rounds = Rounds::new(policy);
    // The machine slows down all the time, which must not count against either build.
    let mut drift = 1.0;
    while let Next::Visit { side, .. } = rounds.next() {
        let base = if side == Side::Old { old } else { new };
        drift *= 1.002;
        let value = base * drift * (scatter * normal(random)).exp();
        rounds.observe(side, Visit { measured: vec![(Metric::Decode, value)], replies: Vec::new() });
    }
    rounds
}

fn shares(policy: &ProofPolicy, new: f64, scatter: f64) -> impl Fn(Ruling) -> usize {
    let rulings: Vec<Ruling> = (0..2000)
        .map(|seed| {
            let mut random = SplitMix::new(seed);
            rounds(policy, 0.01, 0.01 * new, scatter, &mut random).ratios()[0].ruling
        })
        .collect();
    move |wanted| rulings.iter().filter(|ruling| **ruling == wanted).count()
}

#[test]
fn equal_builds_are_said_to_be_worse_as_seldom_as_declared_and_much_slower_ones_are_found() {
    let policy = policy();
    for scatter in [0.005, 0.02, 0.06] {
        let at_limit = shares(&policy, 1.0 + policy.slower, scatter);
        assert!(at_limit(Ruling::Worse) <= 20, "{} of 2000 at the limit, {scatter}", at_limit(Ruling::Worse));
        assert!(at_limit(Ruling::Same) <= 100, "{} of 2000 pass, {scatter}", at_limit(Ruling::Same));
        let equal = shares(&policy, 1.0, scatter);
        assert!(equal(Ruling::Worse) <= 4, "{} equal ones of 2000, {scatter}", equal(Ruling::Worse));
        assert!(equal(Ruling::Better) <= 20, "{} of 2000 are better, {scatter}", equal(Ruling::Better));
    }
    let slower = shares(&policy, 1.15, 0.02);
    assert!(slower(Ruling::Worse) >= 1950, "{} of 2000 found", slower(Ruling::Worse));
    assert!(slower(Ruling::Same) + slower(Ruling::Better) <= 2);
    // "Not worse" is certain before "better" is, and suffices.
    let faster = shares(&policy, 0.85, 0.02);
    let passes = faster(Ruling::Better) + faster(Ruling::Same);
    assert!(passes >= 1950 && faster(Ruling::Better) > 100, "{passes} of 2000 pass");
    assert_eq!(faster(Ruling::Worse), 0);
}

#[test]
fn quiet_builds_are_told_after_the_fewest_rounds_and_no_build_takes_more_than_the_most() {
    let policy = policy();
    let of = |scatter| rounds(&policy, 0.01, 0.01, scatter, &mut SplitMix::new(3)).count();
    assert_eq!(of(0.0005), policy.rounds_least);
    assert_eq!(of(0.3), policy.rounds_most);
}

#[test]
fn a_gpu_that_only_one_build_takes_counts_and_a_prompt_that_one_refuses_does_not() {
    use MemoryKind::{Host, Vram};
    use Metric::{AtLongest, AtReady};
    let (gib, second_gpu) = (f64::from(1 << 30), Vram(GpuIndex(1)));
    let rulings = |old: &[(Metric, f64)], new: &[(Metric, f64)]| {
        let mut rounds = Rounds::new(&policy());
        while let Next::Visit { side, .. } = rounds.next() {
            let measured = if side == Side::Old { old } else { new }.to_vec();
            rounds.observe(side, Visit { measured, replies: Vec::new() });
        }
        let told = rounds.ratios().into_iter().map(|ratio| (ratio.metric, ratio.ruling));
        (told.collect::<Vec<_>>(), rounds.count())
    };
    let (least, host) = (policy().rounds_least, (AtReady(Host), gib));
    let second = |bytes| [host, (AtReady(second_gpu), bytes)];
    let of = |ruling| (vec![(AtReady(Host), Ruling::Same), (AtReady(second_gpu), ruling)], least);
    assert_eq!(rulings(&[host], &second(gib)), of(Ruling::Worse));
    assert_eq!(rulings(&second(gib), &[host]), of(Ruling::Better));
    // Less than the slack is what a driver keeps for any program that queries a GPU.
    assert_eq!(rulings(&[host], &second(gib / 64.0)), of(Ruling::Same));
    // A context that the old build had there once has no effect.
    let mut rounds = Rounds::new(&policy());
    while let Next::Visit { side, .. } = rounds.next() {
        let once = side == Side::Old && rounds.count() == 1;
        let measured = match side {
            Side::New => second(10.0 * gib).to_vec(),
            Side::Old if once => second(gib / 14.0).to_vec(),
            Side::Old => vec![host],
        };
        rounds.observe(side, Visit { measured, replies: Vec::new() });
    }
    assert_eq!(rounds.ratios()[1].ruling, Ruling::Worse, "{:?}", rounds.ratios());
    let refused = rulings(&[host, (AtLongest(Host), gib)], &[host]);
    assert_eq!(refused.0, [(AtReady(Host), Ruling::Same)], "nobody knows what it would have held");
}

#[test]
fn who_comes_first_changes_and_answers_are_asked_for_in_two_rounds() {
    use Side::{New, Old};
    let mut rounds = Rounds::new(&policy());
    let mut order = Vec::new();
    for _ in 0..6 {
        let Next::Visit { side, asks } = rounds.next() else { panic!("{rounds:?}") };
        order.push((side, asks));
        rounds.observe(side, Visit::default());
    }
    assert_eq!(order, [(Old, true), (New, true), (New, true), (Old, true), (Old, false), (New, false)]);
}

#[test]
fn memory_may_be_more_by_the_slack_and_not_by_more() {
    let policy = policy();
    let ruling = |old: f64, new: f64| {
        let visit =
            |bytes| Visit { measured: vec![(Metric::AtReady(MemoryKind::Host), bytes)], replies: Vec::new() };
        let mut rounds = Rounds::new(&policy);
        while let Next::Visit { side, .. } = rounds.next() {
            rounds.observe(side, visit(if side == Side::Old { old } else { new }));
        }
        rounds.ratios()[0].ruling
    };
    let mib = 1024.0 * 1024.0;
    assert_eq!(ruling(100.0 * mib, 140.0 * mib), Ruling::Same, "40 MiB are within the slack");
    assert_eq!(ruling(100.0 * mib, 300.0 * mib), Ruling::Worse);
    assert_eq!(ruling(20_000.0 * mib, 20_800.0 * mib), Ruling::Same);
    assert_eq!(ruling(20_000.0 * mib, 24_000.0 * mib), Ruling::Worse);
    assert_eq!(ruling(20_000.0 * mib, 16_000.0 * mib), Ruling::Better);
}

fn reply(request: &str, tokens: &[(&str, &[(&str, f64)])]) -> Reply {
    let told = |(text, top): &(&str, &[(&str, f64)])| Token {
        text: (*text).to_owned(),
        top: top.iter().map(|(text, logprob)| ((*text).to_owned(), *logprob)).collect(),
    };
    Reply {
        request: request.to_owned(),
        text: tokens.iter().map(|token| token.0).collect(),
        tokens: tokens.iter().map(told).collect(),
        ..Reply::default()
    }
}

fn judged(old: &[Reply], new: &[Reply], again: &[Reply], strictness: Strictness) -> Answers {
    let policy = ProofPolicy { answers: strictness, ..policy() };
    answers::judge(&policy, old, new, Some(again))
}

#[test]
fn a_near_tie_that_falls_the_other_way_is_near_and_another_opinion_is_not() {
    let old = [reply("a", &[("x", &[("x", -0.7), ("y", -0.71)]), ("z", &[("z", -0.1)])])];
    let near = [reply("a", &[("y", &[("y", -0.69), ("x", -0.72)]), ("q", &[("q", -0.3)])])];
    let far = [reply("a", &[("y", &[("y", -0.1), ("x", -2.7)]), ("q", &[("q", -0.3)])])];
    let told = judged(&old, &near, &old, Strictness::Near);
    assert_eq!((told.ruling, told.equal, told.differences.len()), (Ruling::Same, 0, 1));
    assert_eq!((told.differences[0].shared, told.agreement), (0, Some(0.0)));
    assert!(told.distance.is_some_and(|distance| (0.01..0.03).contains(&distance)), "{told:?}");
    assert_eq!(judged(&old, &near, &old, Strictness::Equal).ruling, Ruling::Worse);
    assert_eq!(judged(&old, &far, &old, Strictness::Near).ruling, Ruling::Worse);
    assert_eq!(judged(&old, &far, &old, Strictness::Any).ruling, Ruling::Same);
    assert_eq!(judged(&old, &old, &old, Strictness::Equal).ruling, Ruling::Same);
}

#[test]
fn equal_words_out_of_another_opinion_are_told() {
    let old = [reply("a", &[("x", &[("x", -0.1), ("y", -3.0)])])];
    let new = [reply("a", &[("x", &[("x", -1.1), ("y", -1.2)])])];
    let told = judged(&old, &new, &old, Strictness::Near);
    assert_eq!((told.equal, told.ruling), (1, Ruling::Worse), "{told:?}");
}

#[test]
fn an_answer_that_is_cut_short_or_names_other_tokens_is_no_near_one() {
    let token = |text: &'static str| (text, &[("x", -0.1), ("y", -5.0)][..]);
    let old = [reply("a", &[token("x"), token("x"), token("x")])];
    let short = [reply("a", &[token("x")])];
    assert_eq!(judged(&old, &short, &old, Strictness::Near).ruling, Ruling::Worse, "cut short");
    let lost = [Reply { text: String::new(), ..old[0].clone() }];
    assert_eq!(judged(&old, &lost, &old, Strictness::Near).ruling, Ruling::Worse, "its text is lost");
    let other = [reply("a", &[("z", &[("z", -0.1), ("y", -5.1)]), token("x"), token("x")])];
    assert_eq!(judged(&old, &other, &old, Strictness::Near).ruling, Ruling::Worse, "sure of something else");
}

#[test]
fn what_the_old_build_does_not_say_twice_is_held_against_nobody() {
    let old = [reply("a", &[("x", &[("x", -0.7), ("y", -0.9)])])];
    let other = [reply("a", &[("y", &[("y", -0.7), ("x", -1.3)])])];
    let told = judged(&old, &other, &other, Strictness::Near);
    assert_eq!((told.unsteady, told.differences.len(), told.ruling), (1, 0, Ruling::Same));
}

#[test]
fn a_refusal_is_worse_and_an_answer_more_is_not() {
    let refused = Reply { refused: Some("no".to_owned()), ..reply("a", &[]) };
    let answered = [reply("a", &[("x", &[])])];
    let says_no = std::slice::from_ref(&refused);
    assert_eq!(judged(&answered, says_no, &answered, Strictness::Any).ruling, Ruling::Worse);
    assert_eq!(judged(says_no, &answered, says_no, Strictness::Near).ruling, Ruling::Same);
    let neither = judged(says_no, says_no, says_no, Strictness::Near);
    assert_eq!((neither.asked, neither.ruling), (0, Ruling::Unknown), "nothing was compared");
}

#[test]
fn texts_without_probabilities_are_equal_or_different() {
    let text =
        |text: &str| [Reply { request: "tokenize".to_owned(), text: text.to_owned(), ..Reply::default() }];
    assert_eq!(judged(&text("1 2"), &text("1 2"), &text("1 2"), Strictness::Near).ruling, Ruling::Same);
    assert_eq!(judged(&text("1 2"), &text("1 3"), &text("1 2"), Strictness::Near).ruling, Ruling::Worse);
}

#[test]
fn embeddings_are_compared_by_their_angle() {
    let vector =
        |numbers: &[f64]| [Reply { request: "e".to_owned(), vector: numbers.to_vec(), ..Reply::default() }];
    let ruling = |new: &[f64]| {
        let told = judged(&vector(&[1.0, 0.0]), &vector(new), &vector(&[1.0, 0.0]), Strictness::Near);
        (told.equal, told.ruling)
    };
    assert_eq!(ruling(&[1.0, 0.0]), (1, Ruling::Same));
    assert_eq!(ruling(&[2.0, 0.001]), (0, Ruling::Same), "length says nothing");
    assert_eq!(ruling(&[0.7, 0.7]), (0, Ruling::Worse));
    assert_eq!(ruling(&[1.0, 0.0, 0.0]), (0, Ruling::Worse), "of another space");
}

#[test]
fn a_flag_in_use_and_a_route_that_are_gone_are_worse_and_others_are_told() {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let faces = |used: &str, routes: &str| {
        Faces::of((&words("--a --b -c"), &words("--b --d")), (&words("/x /y"), &words(routes)), &words(used))
    };
    let told = faces("--b", "/x /y /z");
    assert_eq!(
        (told.flags_gone.join(" "), told.flags_new.join(" ")),
        ("--a -c".to_owned(), "--d".to_owned())
    );
    assert_eq!((told.ruling(), told.routes_new.join(" ")), (Ruling::Same, "/z".to_owned()));
    assert_eq!(faces("-c", "/x /y").ruling(), Ruling::Worse);
    assert_eq!(faces("", "/x").ruling(), Ruling::Worse);
}

#[test]
fn a_new_build_that_fails_is_worse_and_an_old_one_that_fails_proves_nothing() {
    let verdict = |side| {
        let mut rounds = Rounds::new(&policy());
        rounds.failed(side, "it did not start".to_owned());
        assert_eq!(rounds.next(), Next::Done);
        Proof::of(&rounds, Faces::default(), None).verdict()
    };
    assert_eq!(verdict(Side::New), Ruling::Worse);
    assert_eq!(verdict(Side::Old), Ruling::Unknown);
    assert_eq!(Proof::of(&Rounds::new(&policy()), Faces::default(), None).verdict(), Ruling::Unknown);
    // Interrupted after the first round: unknown yet if the old build repeats itself.
    let mut rounds = Rounds::new(&policy());
    let text = |text: &str| Visit {
        replies: vec![Reply { request: "q".to_owned(), text: text.to_owned(), ..Reply::default() }],
        ..Visit::default()
    };
    rounds.observe(Side::Old, text("a"));
    rounds.observe(Side::New, text("b"));
    assert_eq!(Proof::of(&rounds, Faces::default(), None).verdict(), Ruling::Unknown);
}

#[test]
fn what_ends_a_leak_is_better_and_what_brings_one_is_worse() {
    use crate::between::{Aim, Conclusion, Outcome};
    let ruling = |outcome, ill_is_newer| {
        let conclusion = Conclusion {
            outcome,
            aim: Aim::Growth,
            symptom: None,
            ill_is_newer,
            bounds: None,
            judged: Vec::new(),
            newer: Vec::new(),
            older: Vec::new(),
            ratios: Vec::new(),
            differences: Vec::new(),
            legs: 0,
        };
        Growth::of(conclusion).ruling
    };
    let found = || Outcome::Found { revision: 1 };
    let fails = |newer| Outcome::EndFailed { newer, why: String::new() };
    assert_eq!(ruling(found(), Some(true)), Ruling::Worse);
    assert_eq!(ruling(found(), Some(false)), Ruling::Better);
    assert_eq!(ruling(Outcome::BothIll, None), Ruling::Same);
    assert_eq!(ruling(Outcome::NeitherIll { short: false, suspected: false }, None), Ruling::Same);
    assert_eq!(ruling(Outcome::NeitherIll { short: true, suspected: false }, None), Ruling::Unknown);
    assert_eq!((ruling(fails(true), None), ruling(fails(false), None)), (Ruling::Worse, Ruling::Unknown));
    assert_eq!(ruling(Outcome::Interrupted, Some(false)), Ruling::Better);
    assert_eq!(ruling(Outcome::Interrupted, Some(true)), Ruling::Unknown);
    assert_eq!(ruling(Outcome::Unsteady { revision: 1 }, Some(true)), Ruling::Unknown);
}
