//! Error rates of the judgement of answers.

use super::*;
use crate::world::SplitMix;

const REPEATING: AnswerSigns = AnswerSigns { repeating: Some(true), empty: Some(false), null: None };
const SOUND: AnswerSigns = AnswerSigns { repeating: Some(false), empty: Some(false), null: None };

/// Signs of an answer that is judged for one fault.
fn signs(fault: AnswerFault, has_fault: bool) -> AnswerSigns {
    let sign = |of| (of == fault).then_some(has_fault);
    AnswerSigns {
        repeating: sign(AnswerFault::Repeating),
        empty: sign(AnswerFault::Empty),
        null: sign(AnswerFault::Null),
    }
}

fn keys(key: u64) -> AnswerKeys {
    AnswerKeys { conversation: Some(key), request: Some(key) }
}

/// Returns true if a simulated history raises an alarm. Each `group` of conversations has the fault together.
fn alarms(fault: AnswerFault, seed: u64, share: f64, group: u32, answers: u32) -> bool {
    let mut random = SplitMix::new(seed);
    let (mut runs, mut history) = (AnswerRuns::default(), AnswerHistory::default());
    let mut conversation = 0;
    for _ in 0..answers / group {
        let has_fault = random.chance(share);
        for _ in 0..group {
            conversation += 1;
            runs.record_answer(signs(fault, has_fault), keys(conversation), &mut history);
            if runs.symptom(&history).is_some() {
                return true;
            }
        }
    }
    false
}

#[test]
fn healthy_histories_raise_no_alarm() {
    let mut seed = 0;
    for fault in AnswerFault::ALL {
        for (share, group) in
            [(0.0, 1), (0.001, 1), (0.01, 3), (0.05, 4), (0.1, 2), (0.3, 4), (0.6, 1), (0.9, 4), (0.01, 8)]
        {
            if f64::from(group) > fault.group_size() && fault == AnswerFault::Null {
                continue;
            }
            let found = (0..1000)
                .filter(|_| {
                    seed += 1;
                    alarms(fault, seed, share, group, 1400)
                })
                .count();
            println!(
                "{fault:?}: {share} have it, in groups of {group}: {found} alarms in 1,000 histories of 1,400 answers"
            );
            // Larger groups than the divisor allows for are found now and then.
            assert!(found <= if f64::from(group) > fault.group_size() { 10 } else { 0 });
        }
    }
}

#[test]
fn a_process_is_tested_after_a_few_faulty_answers_of_any_route() {
    let mut history = AnswerHistory::default();
    for (before, faulty, tested) in [(200, 0, 4), (30, 0, 6), (200, 60, 14), (4, 0, 0)] {
        let mut runs = AnswerRuns::default();
        history = AnswerHistory::default();
        for n in 0..before {
            runs.record_answer(signs(AnswerFault::Empty, n < faulty), keys(n), &mut history);
        }
        let first = (1_u32..=50).find(|_| {
            let unknown = AnswerKeys::default();
            runs.record_answer(signs(AnswerFault::Empty, true), unknown, &mut history);
            runs.is_unusual(&history)
        });
        println!("{faulty} of {before} answers were empty before: tested after {first:?}");
        assert_eq!(first.unwrap_or(0), tested);
    }
    assert_eq!(AnswerRuns::default().symptom(&history), None);
}

/// Returns after how many faulty answers a process is found.
fn found_after(fault: AnswerFault, before: u64, faulty: u64) -> Option<u32> {
    let (mut runs, mut history) = (AnswerRuns::default(), AnswerHistory::default());
    for n in 0..before {
        runs.record_answer(signs(fault, n < faulty), keys(n), &mut history);
    }
    (1_u32..=300).find(|n| {
        runs.record_answer(signs(fault, true), keys(1000 + u64::from(*n)), &mut history);
        runs.symptom(&history).is_some()
    })
}

#[test]
fn a_process_with_faulty_answers_only_is_found_after_a_few() {
    for (fault, before, faulty, found) in [
        (AnswerFault::Repeating, 20, 0, 49),
        (AnswerFault::Repeating, 200, 0, 22),
        (AnswerFault::Repeating, 200, 2, 26),
        (AnswerFault::Repeating, 200, 20, 48),
        (AnswerFault::Repeating, 200, 100, 192),
        (AnswerFault::Repeating, 2000, 0, 14),
        (AnswerFault::Repeating, 19, 0, 0),
        (AnswerFault::Empty, 200, 0, 22),
        (AnswerFault::Null, 20, 0, 13),
        (AnswerFault::Null, 200, 0, 8),
        (AnswerFault::Null, 19, 0, 0),
    ] {
        let first = found_after(fault, before, faulty);
        println!("{fault:?}: {faulty} of {before} answers had it before: found at answer {first:?}");
        assert_eq!(first.unwrap_or(0), found);
    }
}

#[test]
fn one_conversation_is_no_evidence_however_long_it_continues() {
    let (mut runs, mut history) = (AnswerRuns::default(), AnswerHistory::default());
    for n in 0..50 {
        runs.record_answer(SOUND, keys(n), &mut history);
    }
    for _ in 0..100 {
        runs.record_answer(REPEATING, keys(7), &mut history);
        runs.record_answer(REPEATING, AnswerKeys::default(), &mut history);
    }
    assert_eq!(runs.symptom(&history), None);
    assert!(runs.is_faulty() && runs.is_unusual(&history), "but a reason to test the process");
    runs.record_answer(SOUND, keys(8), &mut history);
    assert_eq!(history.0[0], AnswerCounts { judged: 52, faulty: 1 });
    assert_eq!(history.0[1], AnswerCounts { judged: 51, faulty: 0 }, "a repetition is no sound answer");
}

#[test]
fn answers_with_different_faults_are_no_evidence_that_the_process_is_sound() {
    let (mut runs, mut history) = (AnswerRuns::default(), AnswerHistory::default());
    for n in 0..200 {
        runs.record_answer(SOUND, keys(n), &mut history);
    }
    let empty = signs(AnswerFault::Empty, true);
    let found = (1_u64..100).find(|n| {
        let now = if n % 2 == 0 { REPEATING } else { empty };
        runs.record_answer(now, keys(1000 + n), &mut history);
        runs.symptom(&history).is_some()
    });
    assert_eq!(found, Some(43), "each of both runs has 22 conversations");
}
