//! Proofs of simulated builds that are known to be equal, slower, larger, or to answer differently.

use warden_policies::defaults::Strictness;

use super::*;
use warden_policies::sample::{GpuIndex, MemoryKind};
use warden_policies::world::SplitMix;

fn policy() -> ProofPolicy {
    warden_policies::defaults().proof.clone()
}

/// Returns an approximately normal number, the sum of twelve uniform ones.
fn normal(random: &mut SplitMix) -> f64 {
    (0..12).map(|_| random.unit()).sum::<f64>() - 6.0
}

/// Runs complete rounds of builds with these decoding times.
fn rounds(policy: &ProofPolicy, old: f64, new: f64, scatter: f64, random: &mut SplitMix) -> ProofRounds {
    let mut rounds = ProofRounds::new(policy);
    // A machine that slows down must not count against either build.
    let mut drift = 1.0;
    while let BuildProofStep::Visit { side, .. } = rounds.next() {
        let base = if side == BuildSide::Old { old } else { new };
        drift *= 1.002;
        let value = base * drift * (scatter * normal(random)).exp();
        rounds
            .observe(side, BuildVisit { measured: vec![(BuildMetric::Decode, value)], replies: Vec::new() });
    }
    rounds
}

fn shares(policy: &ProofPolicy, new: f64, scatter: f64) -> impl Fn(ProofRuling) -> usize {
    let rulings: Vec<ProofRuling> = (0..2000)
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
        assert!(
            at_limit(ProofRuling::Worse) <= 20,
            "{} of 2000 at the limit, {scatter}",
            at_limit(ProofRuling::Worse)
        );
        assert!(
            at_limit(ProofRuling::Same) <= 100,
            "{} of 2000 pass, {scatter}",
            at_limit(ProofRuling::Same)
        );
        let equal = shares(&policy, 1.0, scatter);
        assert!(
            equal(ProofRuling::Worse) <= 4,
            "{} equal ones of 2000, {scatter}",
            equal(ProofRuling::Worse)
        );
        assert!(
            equal(ProofRuling::Better) <= 20,
            "{} of 2000 are better, {scatter}",
            equal(ProofRuling::Better)
        );
    }
    let slower = shares(&policy, 1.15, 0.02);
    assert!(slower(ProofRuling::Worse) >= 1950, "{} of 2000 found", slower(ProofRuling::Worse));
    assert!(slower(ProofRuling::Same) + slower(ProofRuling::Better) <= 2);
    // Fewer rounds prove "not worse" than "better", so both pass.
    let faster = shares(&policy, 0.85, 0.02);
    let passes = faster(ProofRuling::Better) + faster(ProofRuling::Same);
    assert!(passes >= 1950 && faster(ProofRuling::Better) > 100, "{passes} of 2000 pass");
    assert_eq!(faster(ProofRuling::Worse), 0);
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
    use BuildMetric::{AtLongest, AtReady};
    use MemoryKind::{Host, Vram};
    let (gib, second_gpu) = (f64::from(1 << 30), Vram(GpuIndex(1)));
    let rulings = |old: &[(BuildMetric, f64)], new: &[(BuildMetric, f64)]| {
        let mut rounds = ProofRounds::new(&policy());
        while let BuildProofStep::Visit { side, .. } = rounds.next() {
            let measured = if side == BuildSide::Old { old } else { new }.to_vec();
            rounds.observe(side, BuildVisit { measured, replies: Vec::new() });
        }
        let told = rounds.ratios().into_iter().map(|ratio| (ratio.metric, ratio.ruling));
        (told.collect::<Vec<_>>(), rounds.count())
    };
    let (least, host) = (policy().rounds_least, (AtReady(Host), gib));
    let second = |bytes| [host, (AtReady(second_gpu), bytes)];
    let of = |ruling| (vec![(AtReady(Host), ProofRuling::Same), (AtReady(second_gpu), ruling)], least);
    assert_eq!(rulings(&[host], &second(gib)), of(ProofRuling::Worse));
    assert_eq!(rulings(&second(gib), &[host]), of(ProofRuling::Better));
    // A driver keeps less than the slack for any program that queries a GPU.
    assert_eq!(rulings(&[host], &second(gib / 64.0)), of(ProofRuling::Same));
    // Memory that the old build held in a single round has no effect.
    let mut rounds = ProofRounds::new(&policy());
    while let BuildProofStep::Visit { side, .. } = rounds.next() {
        let once = side == BuildSide::Old && rounds.count() == 1;
        let measured = match side {
            BuildSide::New => second(10.0 * gib).to_vec(),
            BuildSide::Old if once => second(gib / 14.0).to_vec(),
            BuildSide::Old => vec![host],
        };
        rounds.observe(side, BuildVisit { measured, replies: Vec::new() });
    }
    assert_eq!(rounds.ratios()[1].ruling, ProofRuling::Worse, "{:?}", rounds.ratios());
    let refused = rulings(&[host, (AtLongest(Host), gib)], &[host]);
    assert_eq!(refused.0, [(AtReady(Host), ProofRuling::Same)], "nobody knows what it would have held");
}

#[test]
fn who_comes_first_changes_and_answers_are_asked_for_in_two_rounds() {
    use BuildSide::{New, Old};
    let mut rounds = ProofRounds::new(&policy());
    let mut order = Vec::new();
    for _ in 0..6 {
        let BuildProofStep::Visit { side, asks } = rounds.next() else { panic!("{rounds:?}") };
        order.push((side, asks));
        rounds.observe(side, BuildVisit::default());
    }
    assert_eq!(order, [(Old, true), (New, true), (New, true), (Old, true), (Old, false), (New, false)]);
}

#[test]
fn memory_may_be_more_by_the_slack_and_not_by_more() {
    let policy = policy();
    let ruling = |old: f64, new: f64| {
        let visit = |bytes| BuildVisit {
            measured: vec![(BuildMetric::AtReady(MemoryKind::Host), bytes)],
            replies: Vec::new(),
        };
        let mut rounds = ProofRounds::new(&policy);
        while let BuildProofStep::Visit { side, .. } = rounds.next() {
            rounds.observe(side, visit(if side == BuildSide::Old { old } else { new }));
        }
        rounds.ratios()[0].ruling
    };
    let mib = 1024.0 * 1024.0;
    assert_eq!(ruling(100.0 * mib, 140.0 * mib), ProofRuling::Same, "40 MiB are within the slack");
    assert_eq!(ruling(100.0 * mib, 300.0 * mib), ProofRuling::Worse);
    assert_eq!(ruling(20_000.0 * mib, 20_800.0 * mib), ProofRuling::Same);
    assert_eq!(ruling(20_000.0 * mib, 24_000.0 * mib), ProofRuling::Worse);
    assert_eq!(ruling(20_000.0 * mib, 16_000.0 * mib), ProofRuling::Better);
}

fn reply(request: &str, tokens: &[(&str, &[(&str, f64)])]) -> BuildReply {
    let told = |(text, top): &(&str, &[(&str, f64)])| ReplyToken {
        text: (*text).to_owned(),
        top: top.iter().map(|(text, logprob)| ((*text).to_owned(), *logprob)).collect(),
    };
    BuildReply {
        request: request.to_owned(),
        text: tokens.iter().map(|token| token.0).collect(),
        tokens: tokens.iter().map(told).collect(),
        ..BuildReply::default()
    }
}

fn judged(
    old: &[BuildReply],
    new: &[BuildReply],
    again: &[BuildReply],
    strictness: Strictness,
) -> AnswerComparison {
    let policy = ProofPolicy { answers: strictness, ..policy() };
    answers::judge(&policy, old, new, Some(again))
}

#[test]
fn a_near_tie_that_falls_the_other_way_is_near_and_another_opinion_is_not() {
    let old = [reply("a", &[("x", &[("x", -0.7), ("y", -0.71)]), ("z", &[("z", -0.1)])])];
    let near = [reply("a", &[("y", &[("y", -0.69), ("x", -0.72)]), ("q", &[("q", -0.3)])])];
    let far = [reply("a", &[("y", &[("y", -0.1), ("x", -2.7)]), ("q", &[("q", -0.3)])])];
    let told = judged(&old, &near, &old, Strictness::Near);
    assert_eq!((told.ruling, told.equal, told.differences.len()), (ProofRuling::Same, 0, 1));
    assert_eq!((told.differences[0].shared, told.agreement), (0, Some(0.0)));
    assert!(told.distance.is_some_and(|distance| (0.01..0.03).contains(&distance)), "{told:?}");
    assert_eq!(judged(&old, &near, &old, Strictness::Equal).ruling, ProofRuling::Worse);
    assert_eq!(judged(&old, &far, &old, Strictness::Near).ruling, ProofRuling::Worse);
    assert_eq!(judged(&old, &far, &old, Strictness::Any).ruling, ProofRuling::Same);
    assert_eq!(judged(&old, &old, &old, Strictness::Equal).ruling, ProofRuling::Same);
}

#[test]
fn equal_words_out_of_another_opinion_are_told() {
    let old = [reply("a", &[("x", &[("x", -0.1), ("y", -3.0)])])];
    let new = [reply("a", &[("x", &[("x", -1.1), ("y", -1.2)])])];
    let told = judged(&old, &new, &old, Strictness::Near);
    assert_eq!((told.equal, told.ruling), (1, ProofRuling::Worse), "{told:?}");
}

#[test]
fn an_answer_that_is_cut_short_or_names_other_tokens_is_no_near_one() {
    let token = |text: &'static str| (text, &[("x", -0.1), ("y", -5.0)][..]);
    let old = [reply("a", &[token("x"), token("x"), token("x")])];
    let short = [reply("a", &[token("x")])];
    assert_eq!(judged(&old, &short, &old, Strictness::Near).ruling, ProofRuling::Worse, "cut short");
    let lost = [BuildReply { text: String::new(), ..old[0].clone() }];
    assert_eq!(judged(&old, &lost, &old, Strictness::Near).ruling, ProofRuling::Worse, "its text is lost");
    let other = [reply("a", &[("z", &[("z", -0.1), ("y", -5.1)]), token("x"), token("x")])];
    assert_eq!(
        judged(&old, &other, &old, Strictness::Near).ruling,
        ProofRuling::Worse,
        "sure of something else"
    );
}

#[test]
fn what_the_old_build_does_not_say_twice_is_held_against_nobody() {
    let old = [reply("a", &[("x", &[("x", -0.7), ("y", -0.9)])])];
    let other = [reply("a", &[("y", &[("y", -0.7), ("x", -1.3)])])];
    let told = judged(&old, &other, &other, Strictness::Near);
    assert_eq!((told.unsteady, told.differences.len(), told.ruling), (1, 0, ProofRuling::Same));
}

#[test]
fn a_refusal_is_worse_and_an_answer_more_is_not() {
    let refused = BuildReply { refused: Some("no".to_owned()), ..reply("a", &[]) };
    let answered = [reply("a", &[("x", &[])])];
    let says_no = std::slice::from_ref(&refused);
    assert_eq!(judged(&answered, says_no, &answered, Strictness::Any).ruling, ProofRuling::Worse);
    assert_eq!(judged(says_no, &answered, says_no, Strictness::Near).ruling, ProofRuling::Same);
    let neither = judged(says_no, says_no, says_no, Strictness::Near);
    assert_eq!((neither.asked, neither.ruling), (0, ProofRuling::Unknown), "nothing was compared");
}

#[test]
fn texts_without_probabilities_are_equal_or_different() {
    let text = |text: &str| {
        [BuildReply { request: "tokenize".to_owned(), text: text.to_owned(), ..BuildReply::default() }]
    };
    assert_eq!(judged(&text("1 2"), &text("1 2"), &text("1 2"), Strictness::Near).ruling, ProofRuling::Same);
    assert_eq!(judged(&text("1 2"), &text("1 3"), &text("1 2"), Strictness::Near).ruling, ProofRuling::Worse);
}

#[test]
fn embeddings_are_compared_by_their_angle() {
    let vector = |numbers: &[f64]| {
        [BuildReply { request: "e".to_owned(), vector: numbers.to_vec(), ..BuildReply::default() }]
    };
    let ruling = |new: &[f64]| {
        let told = judged(&vector(&[1.0, 0.0]), &vector(new), &vector(&[1.0, 0.0]), Strictness::Near);
        (told.equal, told.ruling)
    };
    assert_eq!(ruling(&[1.0, 0.0]), (1, ProofRuling::Same));
    assert_eq!(ruling(&[2.0, 0.001]), (0, ProofRuling::Same), "length says nothing");
    assert_eq!(ruling(&[0.7, 0.7]), (0, ProofRuling::Worse));
    assert_eq!(ruling(&[1.0, 0.0, 0.0]), (0, ProofRuling::Worse), "of another space");
}

#[test]
fn a_flag_in_use_and_a_route_that_are_gone_are_worse_and_others_are_told() {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let faces = |used: &str, routes: &str| {
        InterfaceComparison::compare(
            (&words("--a --b -c"), &words("--b --d")),
            (&words("/x /y"), &words(routes)),
            &words(used),
        )
    };
    let told = faces("--b", "/x /y /z");
    assert_eq!(
        (told.flags_gone.join(" "), told.flags_new.join(" ")),
        ("--a -c".to_owned(), "--d".to_owned())
    );
    assert_eq!((told.ruling(), told.routes_new.join(" ")), (ProofRuling::Same, "/z".to_owned()));
    assert_eq!(faces("-c", "/x /y").ruling(), ProofRuling::Worse);
    assert_eq!(faces("", "/x").ruling(), ProofRuling::Worse);
}

#[test]
fn a_new_build_that_fails_is_worse_and_an_old_one_that_fails_proves_nothing() {
    let verdict = |side| {
        let mut rounds = ProofRounds::new(&policy());
        rounds.record_failure(side, "it did not start".to_owned());
        assert_eq!(rounds.next(), BuildProofStep::Done);
        BuildProof::from_rounds(&rounds, InterfaceComparison::default(), None).verdict()
    };
    assert_eq!(verdict(BuildSide::New), ProofRuling::Worse);
    assert_eq!(verdict(BuildSide::Old), ProofRuling::Unknown);
    assert_eq!(
        BuildProof::from_rounds(&ProofRounds::new(&policy()), InterfaceComparison::default(), None).verdict(),
        ProofRuling::Unknown
    );
    // Interrupted after one round, so it is unknown if the old build repeats itself.
    let mut rounds = ProofRounds::new(&policy());
    let text = |text: &str| BuildVisit {
        replies: vec![BuildReply { request: "q".to_owned(), text: text.to_owned(), ..BuildReply::default() }],
        ..BuildVisit::default()
    };
    rounds.observe(BuildSide::Old, text("a"));
    rounds.observe(BuildSide::New, text("b"));
    assert_eq!(
        BuildProof::from_rounds(&rounds, InterfaceComparison::default(), None).verdict(),
        ProofRuling::Unknown
    );
}

#[test]
fn what_ends_a_leak_is_better_and_what_brings_one_is_worse() {
    use crate::between::{RevisionAim, RevisionConclusion, RevisionOutcome};
    let ruling = |outcome, ill_is_newer| {
        let conclusion = RevisionConclusion {
            outcome,
            aim: RevisionAim::Growth,
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
        BuildGrowth::from_conclusion(conclusion).ruling
    };
    let found = || RevisionOutcome::Found { revision: 1 };
    let fails = |newer| RevisionOutcome::EndFailed { newer, why: String::new() };
    assert_eq!(ruling(found(), Some(true)), ProofRuling::Worse);
    assert_eq!(ruling(found(), Some(false)), ProofRuling::Better);
    assert_eq!(ruling(RevisionOutcome::BothIll, None), ProofRuling::Same);
    assert_eq!(
        ruling(RevisionOutcome::NeitherIll { short: false, suspected: false }, None),
        ProofRuling::Same
    );
    assert_eq!(
        ruling(RevisionOutcome::NeitherIll { short: true, suspected: false }, None),
        ProofRuling::Unknown
    );
    assert_eq!(
        (ruling(fails(true), None), ruling(fails(false), None)),
        (ProofRuling::Worse, ProofRuling::Unknown)
    );
    assert_eq!(ruling(RevisionOutcome::Interrupted, Some(false)), ProofRuling::Better);
    assert_eq!(ruling(RevisionOutcome::Interrupted, Some(true)), ProofRuling::Unknown);
    assert_eq!(ruling(RevisionOutcome::Unsteady { revision: 1 }, Some(true)), ProofRuling::Unknown);
}
