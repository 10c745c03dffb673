//! Suspects, lone trials, refusals: what is held against whom, and for how long.

use proptest::prelude::*;

use super::*;

const A: Fingerprint = Fingerprint(1);
const B: Fingerprint = Fingerprint(2);
const G: GenerationId = GenerationId(1);
const H: GenerationId = GenerationId(2);
const MINUTE: Duration = Duration::from_secs(60);

fn policy() -> QuarantinePolicy {
    QuarantinePolicy {
        refuse_for: MINUTE * 60,
        suspect_for: MINUTE * 10,
        alone_wait: MINUTE,
        alone_for: MINUTE,
        known: 8,
    }
}

fn at(minutes: u32) -> Duration {
    MINUTE * minutes
}

#[test]
fn a_death_makes_suspects_of_all_in_flight_and_refuses_nobody() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    known.broke(G, B, at(0));
    assert!(!known.is_settled(G));
    let found = known.died(G, 3, at(0));
    assert_eq!((found.suspects, found.refused), (vec![A, B], None));
    assert!(known.is_settled(G) && !known.was_felled(G));
    assert_eq!(known.standing(A, at(1)), Standing::Suspect);
    assert_eq!(known.standing(Fingerprint(9), at(1)), Standing::Clear);
    // Whose break is noticed late is one, too.
    assert!(known.broke(G, Fingerprint(3), at(1)));
    assert_eq!(known.standing(Fingerprint(3), at(1)), Standing::Suspect);
    assert_eq!(known.standing(A, at(11)), Standing::Clear, "forgotten");
}

#[test]
fn who_kills_a_server_alone_is_refused_for_a_time() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    known.broke(G, B, at(0));
    known.died(G, 0, at(0));
    known.begin_trial(H, A);
    let found = known.died(H, 0, at(1));
    assert_eq!((found.suspects, found.refused), (vec![], Some(A)));
    assert!(known.was_felled(H) && !known.was_felled(G));
    assert_eq!(known.standing(A, at(2)), Standing::Refused { left: at(59) });
    assert_eq!(known.standing(B, at(2)), Standing::Suspect, "for another's deed nobody is refused");
    known.note_refusal(A);
    let list = known.list(at(2));
    assert_eq!(
        (list[0].fingerprint, list[0].refused, list[0].deaths, list[0].refusals, list[0].left_s),
        (A, true, 2, 1, 59 * 60)
    );
    assert_eq!((list[1].fingerprint, list[1].refused), (B, false));
    assert_eq!(known.counts(), (1, 1));
    assert_eq!(known.standing(A, at(61)), Standing::Clear);
}

#[test]
fn a_death_in_company_refuses_nobody_although_one_was_on_trial() {
    for late in [false, true] {
        let mut known = Quarantine::new(policy());
        known.broke(G, A, at(0));
        known.died(G, 0, at(0));
        known.begin_trial(H, A);
        if !late {
            known.broke(H, B, at(1));
        }
        assert_eq!(known.died(H, u32::from(late), at(1)).refused, None);
        assert_eq!(known.standing(A, at(1)), Standing::Suspect);
    }
}

#[test]
fn who_is_answered_is_forgiven_and_who_leaves_is_tried_again() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    known.died(G, 0, at(0));
    known.begin_trial(H, A);
    known.end_trial(H);
    assert_eq!(known.died(H, 0, at(0)).refused, None, "it had left");
    known.begin_trial(GenerationId(3), A);
    known.survived(GenerationId(3), A);
    assert!(known.is_empty());
}

#[test]
fn a_break_on_trial_is_judged_when_the_end_is_known() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    known.died(G, 0, at(0));
    known.begin_trial(H, A);
    known.broke(H, A, at(0));
    // Its lease is back before the process is known to be gone.
    known.end_trial(H);
    assert_eq!(known.died(H, 0, at(0)).refused, Some(A));
    assert!(!known.broke(H, B, at(0)), "who felled it is known");
}

#[test]
fn what_lives_or_was_stopped_makes_no_suspects() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    assert_eq!(known.standing(A, at(0)), Standing::Suspect, "as long as it is not known");
    known.lives(G);
    assert!(known.is_settled(G) && known.is_empty());
    known.broke(G, A, at(0));
    known.stopped(G);
    assert!(known.is_settled(G) && known.is_empty());
    assert!(!known.broke(G, B, at(0)) && known.is_empty());
}

#[test]
fn released_ones_are_clear_and_without_a_time_nothing_is_known() {
    let mut known = Quarantine::new(policy());
    known.broke(G, A, at(0));
    known.broke(G, B, at(0));
    known.died(G, 0, at(0));
    assert_eq!(known.release(Some(&B.to_string())), 1);
    assert_eq!(known.standing(B, at(0)), Standing::Clear);
    assert_eq!(known.release(None), 1);
    known.set(QuarantinePolicy { refuse_for: Duration::ZERO, ..policy() });
    known.broke(H, A, at(0));
    assert!(known.is_empty() && known.died(H, 0, at(0)) == Found::default());
}

#[test]
fn a_fingerprint_is_written_and_read_as_hexadecimal() {
    let print = Fingerprint(0xabc);
    let json = serde_json::to_string(&print).unwrap();
    assert_eq!(json, format!("\"{print}\""));
    assert_eq!(serde_json::from_str::<Fingerprint>(&json).unwrap(), print);
}

proptest! {
    /// However deaths, breaks, trials and answers meet: it stays bounded, and refused is only who was on trial
    /// at a death without company.
    #[test]
    fn nobody_is_refused_without_a_death_alone(steps in prop::collection::vec((0..7_u8, 0..4_u64, 0..12_u128), 1..200)) {
        let mut known = Quarantine::new(policy());
        let mut may = std::collections::BTreeSet::new();
        for (minute, (what, generation, request)) in (0_u32..).zip(steps) {
            let (now, generation, request) = (at(minute / 10), GenerationId(generation), Fingerprint(request));
            match what {
                0 | 1 => drop(known.broke(generation, request, now)),
                2 => {
                    let others = u32::from(request.0 % 2 == 0);
                    let trial = known.trial(generation);
                    let found = known.died(generation, others, now);
                    if others == 0 { may.extend(trial); }
                    prop_assert!(found.refused.is_none_or(|refused| others == 0 && trial == Some(refused)));
                }
                3 => known.stopped(generation),
                4 => known.begin_trial(generation, request),
                5 => known.survived(generation, request),
                _ => known.lives(generation),
            }
            let list = known.list(now);
            prop_assert!(list.len() <= policy().known);
            prop_assert!(list.iter().all(|one| !one.refused || may.contains(&one.fingerprint)));
        }
    }
}
