//! Suspects, trials and refusals, and their durations.

use proptest::prelude::*;

use super::*;

const A: RequestFingerprint = RequestFingerprint(1);
const B: RequestFingerprint = RequestFingerprint(2);
const G: GenerationId = GenerationId(1);
const H: GenerationId = GenerationId(2);
const MINUTE: Duration = Duration::from_secs(60);

fn policy() -> QuarantinePolicy {
    QuarantinePolicy {
        refuse_for: MINUTE * 60,
        suspect_for: MINUTE * 10,
        alone_wait: MINUTE,
        alone_for: MINUTE,
        lingers_for: MINUTE * 3 / 2,
        known: 8,
    }
}

fn among(others: u32) -> ServerDeath {
    ServerDeath { others, hung: Duration::ZERO, proves: true }
}

fn at(minutes: u32) -> Duration {
    MINUTE * minutes
}

/// A quarantine after a server died with `A` in flight.
fn suspected() -> RequestQuarantine {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    known.record_death(G, among(0), at(0));
    known
}

#[test]
fn a_death_makes_suspects_of_all_in_flight_and_refuses_nobody() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    known.record_break(G, B, at(0));
    assert!(!known.is_settled(G));
    let found = known.record_death(G, among(3), at(0));
    assert_eq!((found.suspects, found.refused), (vec![A, B], None));
    assert!(known.is_settled(G) && !known.was_killed_by_request(G));
    assert_eq!(known.standing(A, at(1)), RequestStanding::Suspect);
    assert_eq!(known.standing(RequestFingerprint(9), at(1)), RequestStanding::Clear);
    // A request whose broken connection is noticed late is a suspect, too.
    assert!(known.record_break(G, RequestFingerprint(3), at(1)));
    assert_eq!(known.standing(RequestFingerprint(3), at(1)), RequestStanding::Suspect);
    assert_eq!(known.standing(A, at(11)), RequestStanding::Clear, "forgotten");
}

#[test]
fn who_kills_a_server_alone_is_refused_for_a_time() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    known.record_break(G, B, at(0));
    known.record_death(G, among(0), at(0));
    known.begin_trial(H, A);
    let found = known.record_death(H, among(0), at(1));
    assert_eq!((found.suspects, found.refused), (vec![], Some(A)));
    assert!(known.was_killed_by_request(H) && !known.was_killed_by_request(G));
    assert_eq!(known.standing(A, at(2)), RequestStanding::Refused { left: at(59) });
    assert_eq!(known.standing(B, at(2)), RequestStanding::Suspect, "for another's deed nobody is refused");
    known.count_refusal(A);
    let list = known.list(at(2));
    assert_eq!(
        (list[0].fingerprint, list[0].refused, list[0].deaths, list[0].refusals, list[0].left_s),
        (A, true, 2, 1, 59 * 60)
    );
    assert_eq!((list[1].fingerprint, list[1].refused), (B, false));
    assert_eq!(known.counts(), (1, 1));
    assert_eq!(known.standing(A, at(61)), RequestStanding::Clear);
}

#[test]
fn a_death_in_company_refuses_nobody_although_one_was_on_trial() {
    for late in [false, true] {
        let mut known = RequestQuarantine::new(policy());
        known.record_break(G, A, at(0));
        known.record_death(G, among(0), at(0));
        known.begin_trial(H, A);
        if !late {
            known.record_break(H, B, at(1));
        }
        assert_eq!(known.record_death(H, among(u32::from(late)), at(1)).refused, None);
        assert_eq!(known.standing(A, at(1)), RequestStanding::Suspect);
    }
}

#[test]
fn who_is_answered_is_forgiven_and_who_leaves_is_tried_again() {
    let mut known = suspected();
    known.begin_trial(H, A);
    known.end_trial(H);
    assert_eq!(known.record_death(H, among(0), at(0)).refused, None, "it had left");
    known.begin_trial(GenerationId(3), A);
    known.record_survival(GenerationId(3), A);
    assert!(known.is_empty());
}

#[test]
fn a_break_on_trial_is_judged_when_the_end_is_known() {
    let mut known = suspected();
    known.begin_trial(H, A);
    known.record_break(H, A, at(0));
    // The lease ends before the process is known to have died.
    known.end_trial(H);
    assert_eq!(known.record_death(H, among(0), at(0)).refused, Some(A));
    assert!(!known.record_break(H, B, at(0)), "who felled it is known");
}

#[test]
fn whose_client_left_a_moment_ago_is_in_flight_at_a_death() {
    let mut known = RequestQuarantine::new(policy());
    known.record_abandoned(G, A, at(0));
    known.record_abandoned(H, B, at(0));
    let found = known.record_death(G, among(0), at(1));
    assert_eq!((found.suspects, found.refused), (vec![A], None), "of this server, and nobody is on trial");
    assert_eq!(known.record_death(H, among(0), at(2)), DeathResult::default(), "that was long ago");
    assert!(known.record_abandoned(G, B, at(2)), "the death is known sooner than that its client left");
    // A server that hung for two minutes had worked on no other request meanwhile.
    let hangs = GenerationId(3);
    known.record_abandoned(hangs, RequestFingerprint(3), at(0));
    let found = known.record_death(hangs, ServerDeath { hung: MINUTE * 2, ..among(0) }, at(3));
    assert_eq!(found.suspects, [RequestFingerprint(3)]);
    known.record_abandoned(GenerationId(4), RequestFingerprint(4), at(3));
    known.record_stop(GenerationId(4));
    assert_eq!(known.standing(RequestFingerprint(4), at(3)), RequestStanding::Clear);
}

#[test]
fn leaving_its_trial_saves_nobody_and_nobody_is_refused_for_one_that_left_before() {
    let mut known = suspected();
    known.begin_trial(H, A);
    known.record_abandoned(H, A, at(1));
    known.end_trial(H);
    assert_eq!(known.lingering_time(H, A, at(1)), None, "itself");
    assert_eq!(known.lingering_time(H, B, at(1)), Some(MINUTE * 3 / 2));
    assert_eq!(known.record_death(H, among(0), at(1)).refused, Some(A));
    known.release(None);
    let next = GenerationId(3);
    known.record_break(G, A, at(1));
    known.record_abandoned(next, B, at(1));
    known.begin_trial(next, A);
    let found = known.record_death(next, among(0), at(1));
    assert_eq!((found.suspects, found.refused), (vec![A, B], None));
    let late = GenerationId(4);
    known.begin_trial(late, A);
    known.record_abandoned(late, A, at(1));
    known.end_trial(late);
    assert_eq!(
        known.record_death(late, among(0), at(3)),
        DeathResult::default(),
        "the server had done with it"
    );
}

#[test]
fn who_meets_death_again_and_again_waits_longer_to_be_alone() {
    let mut known = RequestQuarantine::new(policy());
    assert_eq!((known.alone_wait(A), known.alone_time(A)), (MINUTE, MINUTE));
    for (generation, minutes) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 32), (7, 32)] {
        known.record_break(GenerationId(generation), A, at(0));
        known.record_death(GenerationId(generation), among(3), at(0));
        assert_eq!((known.alone_wait(A), known.alone_time(A)), (MINUTE * minutes, MINUTE * minutes.min(4)));
    }
}

#[test]
fn a_trial_whose_server_lives_on_is_over() {
    let mut known = suspected();
    known.begin_trial(H, A);
    known.record_break(H, A, at(0));
    known.end_trial(H);
    known.record_alive(H);
    assert_eq!(known.trial(H), None);
    assert_eq!(
        known.record_death(H, among(0), at(1)),
        DeathResult::default(),
        "it had nothing to do with that"
    );
}

#[test]
fn a_request_that_was_sent_to_two_servers_is_judged_by_each() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    known.record_break(H, A, at(0));
    assert!(!known.is_settled(G) && !known.is_settled(H));
    known.record_alive(H);
    assert!(!known.is_settled(G) && known.is_settled(H));
    assert_eq!(known.record_death(G, among(0), at(0)).suspects, [A]);
}

#[test]
fn a_death_for_lack_of_memory_makes_suspects_and_refuses_nobody() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    let short = ServerDeath { proves: false, ..among(0) };
    assert_eq!(known.record_death(G, short, at(0)).suspects, [A]);
    known.begin_trial(H, A);
    assert_eq!(known.record_death(H, short, at(0)), DeathResult { suspects: vec![A], refused: None });
    assert!(!known.was_killed_by_request(H));
}

#[test]
fn what_lives_or_was_stopped_makes_no_suspects() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    assert_eq!(known.standing(A, at(0)), RequestStanding::Suspect, "as long as it is not known");
    known.record_alive(G);
    assert!(known.is_settled(G) && known.is_empty());
    known.record_break(G, A, at(0));
    known.record_stop(G);
    assert!(known.is_settled(G) && known.is_empty());
    assert!(!known.record_break(G, B, at(0)) && known.is_empty());
}

#[test]
fn released_ones_are_clear_and_without_a_time_nothing_is_known() {
    let mut known = RequestQuarantine::new(policy());
    known.record_break(G, A, at(0));
    known.record_break(G, B, at(0));
    known.record_death(G, among(0), at(0));
    assert_eq!(known.release(Some(&B.to_string())), 1);
    assert_eq!(known.standing(B, at(0)), RequestStanding::Clear);
    assert_eq!(known.release(None), 1);
    known.set_policy(QuarantinePolicy { refuse_for: Duration::ZERO, ..policy() });
    known.record_break(H, A, at(0));
    assert!(known.is_empty() && known.record_death(H, among(0), at(0)) == DeathResult::default());
}

#[test]
fn a_fingerprint_is_written_and_read_as_hexadecimal() {
    let print = RequestFingerprint(0xabc);
    let json = serde_json::to_string(&print).unwrap();
    assert_eq!(json, format!("\"{print}\""));
    assert_eq!(serde_json::from_str::<RequestFingerprint>(&json).unwrap(), print);
}

proptest! {
    /// For any order of events, the state stays bounded, and a request is refused only if it was on trial at
    /// a death without other requests.
    #[test]
    fn nobody_is_refused_without_a_death_alone(steps in prop::collection::vec((0..8_u8, 0..4_u64, 0..12_u128), 1..200)) {
        let mut known = RequestQuarantine::new(policy());
        let mut may = std::collections::BTreeSet::new();
        for (minute, (what, generation, request)) in (0_u32..).zip(steps) {
            let (now, generation, request) = (at(minute / 10), GenerationId(generation), RequestFingerprint(request));
            match what {
                0 | 1 => drop(known.record_break(generation, request, now)),
                2 => {
                    let others = u32::from(request.0 % 2 == 0);
                    let trial = known.trial(generation);
                    let found = known.record_death(generation, among(others), now);
                    if others == 0 { may.extend(trial); }
                    prop_assert!(found.refused.is_none_or(|refused| others == 0 && trial == Some(refused)));
                }
                3 => known.record_stop(generation),
                4 => known.begin_trial(generation, request),
                5 => known.record_survival(generation, request),
                6 => drop(known.record_abandoned(generation, request, now)),
                _ => known.record_alive(generation),
            }
            let list = known.list(now);
            prop_assert!(list.len() <= policy().known);
            prop_assert!(list.iter().all(|one| !one.refused || may.contains(&one.fingerprint)));
        }
    }
}
