//! Sentences and properties about the lifecycle.

use super::*;
use proptest::prelude::*;

const POLICY: LifecyclePolicy = LifecyclePolicy {
    backoff: BackoffPolicy { first: Duration::from_secs(1), cap: Duration::from_secs(60) },
    breaker_failures: 5,
    breaker_window: Duration::from_secs(600),
    stable_after: Duration::from_secs(600),
};

fn run(machine: &mut Machine, events: &[Event]) -> Vec<Effect> {
    let mut last = Vec::new();
    for event in events {
        last = machine.step(*event, Duration::from_secs(1), &POLICY);
    }
    last
}

#[test]
fn a_request_starts_it_and_a_probe_opens_the_gate() {
    let mut machine = Machine::new();
    assert_eq!(run(&mut machine, &[Event::Up]), [Effect::Arm(Timer::Start), Effect::Spawn]);
    assert_eq!(run(&mut machine, &[Event::ProbeReady]), [Effect::Disarm, Effect::OpenGate]);
    assert_eq!(machine.phase(), Phase::Ready);
}

#[test]
fn a_recycle_drains_then_stops_then_starts_the_next_one() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady]);
    assert_eq!(run(&mut machine, &[Event::Recycle]), [Effect::CloseGate, Effect::Arm(Timer::Drain)]);
    assert_eq!(run(&mut machine, &[Event::Drained]), [Effect::Term, Effect::Arm(Timer::Grace)]);
    assert_eq!(run(&mut machine, &[Event::Exited]), [Effect::Arm(Timer::Start), Effect::Spawn]);
    assert_eq!(machine.failures(), 0);
}

#[test]
fn a_drain_that_takes_too_long_is_cut_and_a_stop_that_does_too_is_killed() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady, Event::Down]);
    assert_eq!(run(&mut machine, &[Event::Timer(Timer::Drain)]), [Effect::Term, Effect::Arm(Timer::Grace)]);
    assert_eq!(run(&mut machine, &[Event::Timer(Timer::Grace)])[0], Effect::Kill);
    assert_eq!(run(&mut machine, &[Event::Exited]), [Effect::Disarm]);
    assert_eq!(machine.phase(), Phase::Idle);
}

#[test]
fn a_request_during_a_stop_is_served_by_the_next_generation() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady, Event::Down, Event::Drained, Event::Up]);
    assert_eq!(run(&mut machine, &[Event::Exited]), [Effect::Arm(Timer::Start), Effect::Spawn]);
}

#[test]
fn crashes_back_off_and_the_fifth_in_ten_minutes_opens_the_breaker() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up]);
    for failures in 1..5 {
        let effects = run(&mut machine, &[Event::Exited]);
        assert_eq!(effects, [Effect::CloseGate, Effect::Arm(Timer::Backoff { failures })]);
        run(&mut machine, &[Event::Timer(Timer::Backoff { failures })]);
    }
    assert_eq!(run(&mut machine, &[Event::Exited]).last(), Some(&Effect::GiveUp));
    assert_eq!(run(&mut machine, &[Event::Up]), []);
    assert_eq!(machine.phase(), Phase::Failed);
    run(&mut machine, &[Event::Reset, Event::Up]);
    assert_eq!(machine.phase(), Phase::Starting);
}

#[test]
fn a_long_service_pays_off_old_failures() {
    let mut machine = Machine::new();
    machine.step(Event::Up, Duration::ZERO, &POLICY);
    machine.step(Event::Exited, Duration::ZERO, &POLICY);
    machine.step(Event::Timer(Timer::Backoff { failures: 1 }), Duration::ZERO, &POLICY);
    machine.step(Event::ProbeReady, Duration::from_secs(2), &POLICY);
    machine.step(Event::Exited, Duration::from_secs(602), &POLICY);
    assert_eq!(machine.failures(), 1, "the crash just now, not the one before the long service");
}

#[test]
fn a_start_that_outlives_its_deadline_is_a_failure() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::Timer(Timer::Start)]);
    assert_eq!(run(&mut machine, &[Event::Exited])[1], Effect::Arm(Timer::Backoff { failures: 1 }));
}

#[test]
fn lost_probes_close_the_gate_and_coming_back_opens_it() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady]);
    assert_eq!(run(&mut machine, &[Event::ProbesLost])[0], Effect::CloseGate);
    assert_eq!(run(&mut machine, &[Event::ProbesBack]).last(), Some(&Effect::OpenGate));
    run(&mut machine, &[Event::ProbesLost, Event::Timer(Timer::Suspect)]);
    assert_eq!(machine.phase(), Phase::Draining);
}

fn event() -> impl Strategy<Value = Event> {
    let then = prop_oneof![Just(Then::Idle), Just(Then::Restart)];
    prop_oneof![
        Just(Event::Up),
        Just(Event::Down),
        Just(Event::Recycle),
        then.prop_map(Event::KillNow),
        Just(Event::ProbeReady),
        Just(Event::ProbesLost),
        Just(Event::ProbesBack),
        Just(Event::Drained),
        Just(Event::Exited),
        Just(Event::SpawnFailed),
        Just(Event::Timer(Timer::Start)),
        Just(Event::Timer(Timer::Suspect)),
        Just(Event::Timer(Timer::Drain)),
        Just(Event::Timer(Timer::Grace)),
        (1u32..5).prop_map(|failures| Event::Timer(Timer::Backoff { failures })),
        Just(Event::Reset),
    ]
}

/// The world outside the machine: what the effects have made of it.
#[derive(Default)]
struct World {
    alive: bool,
    gate: bool,
    termed: bool,
    armed: Option<Timer>,
}

proptest! {
    #[test]
    fn the_invariants_hold_over_all_event_sequences(
        events in proptest::collection::vec((event(), 0u64..120), 1..300)
    ) {
        let mut machine = Machine::new();
        let mut world = World::default();
        let mut now = 0;
        for (event, seconds) in events {
            now += seconds;
            // Facts about the world come only while they are true.
            match event {
                Event::Exited | Event::SpawnFailed if !world.alive => continue,
                Event::Timer(timer) => match (timer, world.armed) {
                    (Timer::Backoff { .. }, Some(Timer::Backoff { .. })) => {}
                    (a, Some(b)) if a == b => {}
                    _ => continue,
                },
                _ => {}
            }
            let before = machine.phase();
            if matches!(event, Event::Exited | Event::SpawnFailed) {
                world.alive = false;
                world.termed = false;
            }
            let may_kill = matches!(event, Event::KillNow(_) | Event::Timer(Timer::Grace | Timer::Start));
            for effect in machine.step(event, Duration::from_secs(now), &POLICY) {
                match effect {
                    Effect::Spawn => { prop_assert!(!world.alive, "two children"); world.alive = true; }
                    Effect::OpenGate => world.gate = true,
                    Effect::CloseGate => world.gate = false,
                    Effect::Term => {
                        prop_assert!(world.alive && !world.termed, "TERM twice, or to nobody");
                        world.termed = true;
                    }
                    Effect::Kill => prop_assert!(world.alive && may_kill, "KILL without cause"),
                    Effect::Arm(timer) => world.armed = Some(timer),
                    Effect::Disarm | Effect::GiveUp => world.armed = None,
                }
            }
            let phase = machine.phase();
            prop_assert_eq!(world.gate, phase == Phase::Ready, "gate {} in {}", world.gate, phase);
            prop_assert_eq!(world.alive, machine.has_process(), "child {} in {}", world.alive, phase);
            match phase {
                Phase::Draining => prop_assert_eq!(world.armed, Some(Timer::Drain)),
                Phase::Stopping => prop_assert_eq!(world.armed, Some(Timer::Grace)),
                Phase::Starting => prop_assert_eq!(world.armed, Some(Timer::Start)),
                Phase::Suspect => prop_assert_eq!(world.armed, Some(Timer::Suspect)),
                Phase::Backoff => {
                    let armed = matches!(world.armed, Some(Timer::Backoff { failures: 1.. }));
                    prop_assert!(armed, "no backoff timer");
                }
                Phase::Idle | Phase::Ready | Phase::Failed => prop_assert_eq!(world.armed, None),
            }
            if matches!(event, Event::Exited) && matches!(before, Phase::Ready | Phase::Suspect) {
                prop_assert!(matches!(phase, Phase::Backoff | Phase::Failed), "an unexpected exit led to {}", phase);
            }
        }
    }

    #[test]
    fn draining_and_stopping_end_whatever_the_backend_does(
        prefix in proptest::collection::vec(event(), 0..50)
    ) {
        let mut machine = Machine::new();
        for event in prefix {
            machine.step(event, Duration::from_secs(1), &POLICY);
        }
        machine.step(Event::Down, Duration::from_secs(1), &POLICY);
        // A backend that ignores everything but SIGKILL: only timers run out, then it is gone.
        for event in [Event::Timer(Timer::Drain), Event::Timer(Timer::Grace), Event::Exited] {
            machine.step(event, Duration::from_secs(2), &POLICY);
        }
        prop_assert!(matches!(machine.phase(), Phase::Idle | Phase::Failed), "{}", machine.phase());
    }
}
