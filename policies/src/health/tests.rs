//! What is a symptom, and what is not.

use super::*;
use proptest::prelude::*;

fn health() -> Health {
    Health::new(&crate::defaults().health)
}

fn minutes(n: u64) -> Duration {
    Duration::from_secs(n * 60)
}

fn at(minute: u64) -> Look {
    Look { at: minutes(minute), in_flight: 1, ..Look::default() }
}

fn names(health: &Health) -> Vec<Reason> {
    health.symptoms().iter().map(Symptom::reason).collect()
}

#[test]
fn work_in_flight_without_progress_for_long_is_a_wedge() {
    let mut health = health();
    health.observe(&Look { decodes: Some(7), ..at(0) });
    for minute in 1..15 {
        // It told its counter once, and does not even answer now.
        health.observe(&at(minute));
        assert_eq!(health.symptoms(), [], "minute {minute}");
    }
    health.observe(&at(15));
    assert_eq!(health.symptoms(), [Symptom::Wedged { seconds: 900 }]);
    health.observe(&Look { bytes_streamed: 1, ..at(16) });
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
    assert_eq!(health.symptoms(), [Symptom::Wedged { seconds: 3600 }]);
}

#[test]
fn a_long_prefill_that_counts_decodes_and_an_idle_night_are_no_wedge() {
    let mut health = health();
    for minute in 0..60 {
        health.observe(&Look { decodes: Some(minute), ..at(minute) });
    }
    assert_eq!(health.symptoms(), []);
    for minute in 60..600 {
        health.observe(&Look { in_flight: 0, decodes: Some(59), ..at(minute) });
    }
    health.observe(&Look { decodes: Some(59), ..at(600) });
    assert_eq!(health.symptoms(), [], "the request has only just come");
}

#[test]
fn a_machine_that_slept_with_a_request_in_flight_is_not_wedged_when_it_wakes() {
    let mut health = health();
    health.observe(&at(0));
    health.observe(&at(600));
    assert_eq!(health.symptoms(), []);
}

#[test]
fn errors_of_the_computation_in_a_row_are_a_symptom_and_a_success_ends_it() {
    let mut health = health();
    let errors = |compute_errors| Look { in_flight: 0, compute_errors, ..at(1) };
    health.observe(&errors(7));
    assert_eq!(health.symptoms(), []);
    health.observe(&errors(8));
    assert_eq!(health.symptoms(), [Symptom::ComputeErrors { in_a_row: 8 }]);
    assert_eq!(health.symptoms()[0].action(), Action::DrainNow);
    health.observe(&errors(0));
    assert_eq!(health.symptoms(), []);
}

#[test]
fn a_gpu_that_fell_off_the_bus_is_a_symptom_and_another_programs_fault_is_not() {
    let mut health = health();
    health.xid(GpuIndex(1), 31);
    assert_eq!(health.symptoms(), []);
    health.xid(GpuIndex(1), 79);
    health.xid(GpuIndex(1), 79);
    assert_eq!(health.symptoms(), [Symptom::DeviceFault { gpu: GpuIndex(1), xid: 79 }]);
    assert_eq!(health.symptoms()[0].series(), Some(Series::Vram(GpuIndex(1))));
}

/// Ten answers a minute, each at this speed.
fn answers(health: &mut Health, from: u64, to: u64, speed: f64, busy: u32) {
    for second in (from * 60..to * 60).step_by(6) {
        health.speed(Duration::from_secs(second), 100, 100.0 / speed, busy);
    }
}

#[test]
fn decoding_at_less_than_half_of_its_own_speed_for_half_an_hour_is_a_symptom() {
    let mut health = health();
    answers(&mut health, 0, 60, 40.0, 1);
    answers(&mut health, 60, 85, 15.0, 1);
    assert_eq!(health.symptoms(), [], "not for long enough");
    answers(&mut health, 85, 105, 15.0, 1);
    let [Symptom::SlowDecode { now, baseline }] = health.symptoms()[..] else { panic!("{health:?}") };
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
            health.speed(minutes(minute), 100, 100.0, 1);
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
        let mut look = Look::default();
        for (minutes_later, in_flight, by_bytes) in steps {
            look.at += minutes(minutes_later);
            look.in_flight = in_flight;
            if by_bytes { look.bytes_streamed += 1 } else { look.decodes = Some(look.decodes.unwrap_or(0) + 1) }
            health.observe(&look);
            prop_assert!(health.symptoms().is_empty());
        }
    }

    #[test]
    fn senseless_speeds_are_passed_over(tokens in 0u64..3, seconds in prop_oneof![Just(f64::NAN), Just(0.0), Just(-1.0), Just(f64::INFINITY)]) {
        let mut health = health();
        for minute in 0..200 {
            health.speed(minutes(minute), tokens, seconds, 1);
        }
        prop_assert!(health.symptoms().is_empty());
    }
}
