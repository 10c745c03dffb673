//! Tests of symptoms, and of harmless states that resemble them.

use super::*;
use proptest::prelude::*;

fn health() -> HealthMonitor {
    HealthMonitor::new(&crate::defaults().health)
}

fn minutes(n: u64) -> Duration {
    Duration::from_secs(n * 60)
}

/// Observes a request that waits for an answer without streaming.
fn at(minute: u64) -> HealthObservation {
    HealthObservation { at: minutes(minute), awaited: WHOLE, ..HealthObservation::default() }
}

const WHOLE: AwaitedWork = AwaitedWork {
    begun: 0,
    prompts: 0,
    whole: 1,
    left: 0,
    prompt_tokens: 100,
    largest_prompt: 100,
    media: 0,
};

fn limit(seconds: u64, basis: LimitBasis) -> SilenceLimit {
    SilenceLimit { seconds: Duration::from_secs(seconds).as_secs_f64(), basis }
}

fn names(health: &HealthMonitor) -> Vec<Reason> {
    health.symptoms().iter().map(HealthSymptom::reason).collect()
}

#[test]
fn before_anything_was_measured_a_server_that_told_and_is_silent_has_a_long_time() {
    let mut health = health();
    health.observe(&HealthObservation { decodes: Some(7), ..at(0) });
    for minute in 1..15 {
        // The server reported its counter once, but no longer answers.
        health.observe(&at(minute));
        assert_eq!(health.symptoms(), [], "minute {minute}");
    }
    health.observe(&at(15));
    let unmeasured = limit(900, LimitBasis::Unmeasured);
    assert_eq!(health.symptoms(), [HealthSymptom::Wedged { seconds: 900, limit: unmeasured }]);
    health.observe(&HealthObservation { moves: 1, ..at(16) });
    assert_eq!(health.symptoms(), [], "it moves again");
}

#[test]
fn without_a_counter_a_long_answer_that_is_not_streamed_is_no_wedge() {
    let mut health = health();
    for minute in 0..60 {
        health.observe(&at(minute));
        assert_eq!(health.symptoms(), [], "minute {minute}");
    }
    health.observe(&at(60));
    let unseen = limit(3600, LimitBasis::Unseen);
    assert_eq!(health.symptoms(), [HealthSymptom::Wedged { seconds: 3600, limit: unseen }]);
}

#[test]
fn a_long_prefill_that_counts_decodes_and_an_idle_night_are_no_wedge() {
    let mut health = health();
    for minute in 0..60 {
        health.observe(&HealthObservation { decodes: Some(minute), ..at(minute) });
    }
    assert_eq!(health.symptoms(), []);
    for minute in 60..600 {
        health.observe(&HealthObservation {
            awaited: AwaitedWork::default(),
            decodes: Some(59),
            ..at(minute)
        });
    }
    health.observe(&HealthObservation { decodes: Some(59), ..at(600) });
    assert_eq!(health.symptoms(), [], "the request has only just come");
}

#[test]
fn a_machine_that_slept_with_a_request_in_flight_is_not_wedged_when_it_wakes() {
    let mut health = health();
    health.observe(&at(0));
    health.observe(&at(600));
    assert_eq!(health.symptoms(), []);
}

/// Repeats an observation every five seconds until a symptom; returns the symptom's time and limit.
fn until_wedged(
    health: &mut HealthMonitor,
    look: HealthObservation,
    from: u64,
    most: u64,
) -> Option<(u64, SilenceLimit)> {
    (from..from + most).step_by(5).find_map(|second| {
        health.observe(&HealthObservation { at: Duration::from_secs(second), ..look });
        health.symptoms().into_iter().find_map(|symptom| match symptom {
            HealthSymptom::Wedged { limit, .. } => Some((second - from, limit)),
            _ => None,
        })
    })
}

const STREAM: AwaitedWork =
    AwaitedWork { begun: 1, prompts: 0, whole: 0, left: 0, prompt_tokens: 0, largest_prompt: 0, media: 0 };

fn gaps(middle_ms: u64, most_ms: u64) -> TokenGaps {
    TokenGaps { middle: Duration::from_millis(middle_ms), most: Duration::from_millis(most_ms) }
}

#[test]
fn between_tokens_the_limit_follows_what_the_tokens_so_far_took_and_says_so() {
    for (most_ms, seconds) in [(50, 20), (2_000, 40)] {
        let look = HealthObservation {
            awaited: STREAM,
            moves: 40,
            gaps: Some(gaps(40, most_ms)),
            tells: true,
            ..HealthObservation::default()
        };
        let (found, limit) = until_wedged(&mut health(), look, 0, 600).unwrap();
        assert_eq!(found, seconds, "a gap of {most_ms} ms");
        let words = limit.to_string();
        assert!(
            words.contains(&format!("within {most_ms} ms")) && words.contains(&format!("{seconds} s")),
            "{words}"
        );
    }
}

#[test]
fn tokens_that_give_no_event_are_no_wedge_where_the_server_says_that_it_computes_or_cannot_be_asked() {
    // A tool call of some minutes gives no events, but changes the slot mark.
    let mut asked = health();
    let look = HealthObservation {
        awaited: STREAM,
        moves: 40,
        gaps: Some(gaps(100, 200)),
        tells: true,
        ..HealthObservation::default()
    };
    for second in (0..600).step_by(5) {
        let slots = Some(SlotActivity { busy: 1, mark: second });
        asked.observe(&HealthObservation { at: Duration::from_secs(second), slots, ..look });
        assert_eq!(asked.symptoms(), [], "second {second}");
    }
    // For a server that does not report its progress, the limit is the time of a long tool call.
    let untold = HealthObservation { tells: false, ..look };
    let (found, limit) = until_wedged(&mut health(), untold, 0, 3600).unwrap();
    assert_eq!((found, limit.basis), (410, LimitBasis::Silent { token_ms: 100.0, tokens: 4096 }));
}

#[test]
fn while_a_first_token_is_awaited_the_limit_follows_the_prompt_and_the_measured_speed() {
    let waits = |tokens: u64| AwaitedWork {
        begun: 1,
        prompts: 1,
        prompt_tokens: tokens,
        largest_prompt: tokens,
        ..AwaitedWork::default()
    };
    let look = |tokens, tells| HealthObservation {
        awaited: waits(tokens),
        gaps: Some(gaps(20, 40)),
        tells,
        ..HealthObservation::default()
    };
    // A slow processor: 50 tokens per second.
    let slow = || {
        let mut health = health();
        health.record_prompt(1000, 1000, 20_000.0);
        health
    };
    let (all, limit) = until_wedged(&mut slow(), look(32_768, false), 0, 100_000).unwrap();
    assert!((10_000..20_000).contains(&all), "{all} {limit}");
    let (step, limit) = until_wedged(&mut slow(), look(32_768, true), 0, 100_000).unwrap();
    assert!((600..1000).contains(&step), "{step} {limit}");
    assert!(limit.to_string().contains("2048 tokens of prompt"), "{limit}");
    // A GPU: 3,000 tokens per second.
    let fast = || {
        let mut health = health();
        health.record_prompt(2000, 2000, 666.0);
        health
    };
    assert_eq!(until_wedged(&mut fast(), look(32_768, true), 0, 1000).unwrap().0, 60);
    // A cached prompt says nothing about the prompt speed.
    let mut cached = slow();
    for _ in 0..3 {
        cached.record_prompt(1, 100_000, 30.0);
    }
    assert!(until_wedged(&mut cached, look(32_768, true), 0, 100_000).unwrap().0 >= 600);
}

#[test]
fn an_image_a_sleep_and_a_first_request_have_their_time() {
    let image = AwaitedWork {
        prompts: 1,
        prompt_tokens: 100,
        largest_prompt: 100,
        media: 2,
        ..AwaitedWork::default()
    };
    let look = HealthObservation { awaited: image, tells: true, ..HealthObservation::default() };
    let mut measured = health();
    measured.record_prompt(100, 100, 100.0);
    assert_eq!(until_wedged(&mut measured.clone(), look, 0, 4000).unwrap().0, 360);
    let wakes = HealthObservation { wake: Duration::from_secs(100), ..look };
    assert_eq!(until_wedged(&mut measured, wakes, 0, 4000).unwrap().0, 460);
    assert_eq!(until_wedged(&mut health(), look, 0, 4000).unwrap().0, 1200, "nothing was measured yet");
}

#[test]
fn time_in_which_it_was_stopped_or_paged_is_not_held_against_it() {
    let look = HealthObservation {
        awaited: STREAM,
        gaps: Some(gaps(20, 40)),
        tells: true,
        ..HealthObservation::default()
    };
    let mut stopped = health();
    assert_eq!(until_wedged(&mut stopped, HealthObservation { hindered: true, ..look }, 0, 7200), None);
    let (found, _) = until_wedged(&mut stopped, look, 7200, 600).unwrap();
    assert_eq!(found, 15, "it is on its own again, and silent since");
}

#[test]
fn a_server_whose_loop_turns_with_nothing_to_do_waits_for_somebody_else() {
    let look = HealthObservation {
        awaited: STREAM,
        gaps: Some(gaps(20, 40)),
        tells: true,
        ..HealthObservation::default()
    };
    let idle = HealthObservation { slots: Some(SlotActivity { busy: 0, mark: 7 }), ..look };
    assert_eq!(until_wedged(&mut health(), idle, 0, 7200), None);
    // The server answers queries and is busy, but makes no progress.
    let stuck = HealthObservation { slots: Some(SlotActivity { busy: 1, mark: 7 }), ..look };
    let (found, limit) = until_wedged(&mut health(), stuck, 0, 7200).unwrap();
    assert_eq!((found, limit.basis), (900, LimitBasis::Unmoved));
}

#[test]
fn who_owes_nothing_is_never_wedged() {
    // If no client reads, no events pass and the server owes no answer.
    let look = HealthObservation {
        awaited: AwaitedWork::default(),
        gaps: Some(gaps(20, 40)),
        tells: true,
        ..HealthObservation::default()
    };
    assert_eq!(until_wedged(&mut health(), look, 0, 100_000), None);
}

#[test]
fn errors_of_the_computation_in_a_row_are_a_symptom_and_a_success_ends_it() {
    let mut health = health();
    let errors =
        |compute_errors| HealthObservation { awaited: AwaitedWork::default(), compute_errors, ..at(1) };
    health.observe(&errors(7));
    assert_eq!(health.symptoms(), []);
    health.observe(&errors(8));
    assert_eq!(health.symptoms(), [HealthSymptom::ComputeErrors { in_a_row: 8 }]);
    assert_eq!(health.symptoms()[0].action(), RecycleAction::DrainNow);
    health.observe(&errors(0));
    assert_eq!(health.symptoms(), []);
}

#[test]
fn a_gpu_that_fell_off_the_bus_is_a_symptom_and_another_programs_fault_is_not() {
    let mut health = health();
    health.record_xid(GpuIndex(1), 31);
    assert_eq!(health.symptoms(), []);
    health.record_xid(GpuIndex(1), 79);
    health.record_xid(GpuIndex(1), 79);
    assert_eq!(health.symptoms(), [HealthSymptom::DeviceFault { gpu: GpuIndex(1), xid: 79 }]);
    assert_eq!(health.symptoms()[0].series(), Some(MemoryKind::Vram(GpuIndex(1))));
}

/// Records ten answers per minute at this speed.
fn answers(health: &mut HealthMonitor, from: u64, to: u64, speed: f64, busy: u32) {
    for second in (from * 60..to * 60).step_by(6) {
        health.record_speed(Duration::from_secs(second), 100, 100.0 / speed, busy);
    }
}

#[test]
fn decoding_at_less_than_half_of_its_own_speed_for_half_an_hour_is_a_symptom() {
    let mut health = health();
    answers(&mut health, 0, 60, 40.0, 1);
    answers(&mut health, 60, 85, 15.0, 1);
    assert_eq!(health.symptoms(), [], "not for long enough");
    answers(&mut health, 85, 105, 15.0, 1);
    let [HealthSymptom::SlowDecode { now, baseline }] = health.symptoms()[..] else { panic!("{health:?}") };
    assert!((now - 15.0).abs() < 1e-9 && (baseline - 40.0).abs() < 1e-9, "{now} {baseline}");
    answers(&mut health, 105, 120, 38.0, 1);
    assert_eq!(health.symptoms(), [], "it has recovered");
}

#[test]
fn more_slots_at_a_time_are_not_slowness() {
    let mut health = health();
    answers(&mut health, 0, 60, 40.0, 1);
    answers(&mut health, 60, 180, 12.0, 8);
    assert_eq!(names(&health), []);
}

#[test]
fn single_slow_answers_do_not_move_the_median() {
    let mut health = health();
    answers(&mut health, 0, 60, 40.0, 1);
    for minute in 60..180 {
        answers(&mut health, minute, minute + 1, 40.0, 1);
        for _ in 0..4 {
            health.record_speed(minutes(minute), 100, 100.0, 1);
        }
    }
    assert_eq!(names(&health), []);
}

proptest! {
    #[test]
    fn whatever_moves_now_and_then_is_never_wedged(
        steps in proptest::collection::vec((1u64..14, 0u32..4, any::<bool>()), 1..100)
    ) {
        let mut health = health();
        let mut look = HealthObservation::default();
        for (minutes_later, whole, by_events) in steps {
            look.at += minutes(minutes_later);
            look.awaited = AwaitedWork { whole, ..AwaitedWork::default() };
            if by_events { look.moves += 1 } else { look.decodes = Some(look.decodes.unwrap_or(0) + 1) }
            health.observe(&look);
            prop_assert!(health.symptoms().is_empty());
        }
    }

    #[test]
    fn senseless_speeds_are_passed_over(tokens in 0u64..3, seconds in prop_oneof![Just(f64::NAN), Just(0.0), Just(-1.0), Just(f64::INFINITY)]) {
        let mut health = health();
        for minute in 0..200 {
            health.record_speed(minutes(minute), tokens, seconds, 1);
        }
        prop_assert!(health.symptoms().is_empty());
    }
}
