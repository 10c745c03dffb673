//! Examples and properties of the lifecycle.

use super::*;
use proptest::prelude::*;

const CRASH: Event = Event::Exited(Cause::MayPass);
const HOPELESS: Event = Event::Exited(Cause::NeedsChange);

fn policy() -> LifecyclePolicy {
    LifecyclePolicy {
        backoff_first: Duration::from_secs(1),
        backoff_cap: Duration::from_secs(60),
        crash_cap: Duration::from_secs(15),
        breaker_failures: 5,
        breaker_window: Duration::from_secs(600),
        stable_after: Duration::from_secs(600),
        ..crate::defaults().lifecycle
    }
}

fn run(machine: &mut Machine, events: &[Event]) -> Vec<Effect> {
    let mut last = Vec::new();
    for event in events {
        last = machine.step(*event, Duration::from_secs(1), &policy());
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
    assert_eq!(run(&mut machine, &[CRASH]), [Effect::Arm(Timer::Start), Effect::Spawn]);
    assert_eq!(machine.failures(), 0);
}

#[test]
fn a_drain_that_takes_too_long_is_cut_and_a_stop_that_does_too_is_killed() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady, Event::Down]);
    assert_eq!(run(&mut machine, &[Event::Timer(Timer::Drain)]), [Effect::Term, Effect::Arm(Timer::Grace)]);
    assert_eq!(run(&mut machine, &[Event::Timer(Timer::Grace)])[0], Effect::Kill);
    assert_eq!(run(&mut machine, &[CRASH]), [Effect::Disarm]);
    assert_eq!(machine.phase(), Phase::Idle);
}

#[test]
fn a_drain_that_is_given_up_opens_the_gate_of_the_same_process() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady, Event::Recycle]);
    assert_eq!(run(&mut machine, &[Event::Resume]), [Effect::Disarm, Effect::OpenGate]);
    assert_eq!(machine.phase(), Phase::Ready);
    run(&mut machine, &[Event::Recycle, Event::Drained]);
    assert_eq!(run(&mut machine, &[Event::Resume]), [], "it was told to end");
}

#[test]
fn a_request_during_a_stop_is_served_by_the_next_generation() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::ProbeReady, Event::Down, Event::Drained, Event::Up]);
    assert_eq!(run(&mut machine, &[CRASH]), [Effect::Arm(Timer::Start), Effect::Spawn]);
}

#[test]
fn starts_that_fail_back_off_for_ever_and_the_fifth_in_ten_minutes_is_told_once() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up]);
    for failures in 1..1000 {
        let effects = run(&mut machine, &[CRASH]);
        let timer = Timer::Backoff { failures, short: false };
        assert_eq!(effects.last(), Some(&Effect::Arm(timer)));
        assert_eq!(effects.contains(&Effect::Alarm), failures == 5, "{failures}");
        assert_eq!(run(&mut machine, &[Event::Timer(timer)]).last(), Some(&Effect::Spawn));
    }
    assert!(machine.recent.len() <= 6, "what is remembered does not grow");
    assert_eq!(policy().pause(1000, false, 1.0), Duration::from_secs(60));
}

#[test]
fn a_process_that_had_served_is_followed_after_a_short_pause_however_often_it_dies() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up]);
    for failures in 1..100 {
        run(&mut machine, &[Event::ProbeReady]);
        let timer = Timer::Backoff { failures, short: true };
        assert_eq!(run(&mut machine, &[CRASH]).last(), Some(&Effect::Arm(timer)));
        assert!(policy().pause(failures, true, 1.0) <= Duration::from_secs(15));
        run(&mut machine, &[Event::Timer(timer)]);
    }
    // A failed start now is the first consecutive one; earlier deaths of the running process do not count.
    let first = Timer::Backoff { failures: 1, short: false };
    assert_eq!(run(&mut machine, &[CRASH]).last(), Some(&Effect::Arm(first)));
}

#[test]
fn a_start_that_needs_a_change_waits_for_it_and_is_tried_now_and_then() {
    let mut machine = Machine::new();
    assert_eq!(run(&mut machine, &[Event::Up, HOPELESS]).last(), Some(&Effect::Arm(Timer::Trial)));
    assert_eq!(machine.phase(), Phase::Failed);
    assert_eq!(run(&mut machine, &[Event::Up]), []);
    assert_eq!(run(&mut machine, &[Event::Changed]), [Effect::Arm(Timer::Start), Effect::Spawn]);
    run(&mut machine, &[HOPELESS]);
    assert_eq!(run(&mut machine, &[Event::Timer(Timer::Trial)]).last(), Some(&Effect::Spawn));
    // A process that had served could start, so its end needs no change.
    run(&mut machine, &[Event::ProbeReady, HOPELESS]);
    assert_eq!(machine.phase(), Phase::Backoff);
}

#[test]
fn a_start_that_is_known_to_fail_waits_for_a_change_although_a_pause_had_begun() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, CRASH]);
    assert_eq!(machine.phase(), Phase::Backoff);
    assert_eq!(run(&mut machine, &[Event::Stuck]), [Effect::Arm(Timer::Trial)]);
    assert_eq!(machine.phase(), Phase::Failed);
    assert_eq!(run(&mut machine, &[Event::Changed]), [Effect::Arm(Timer::Start), Effect::Spawn]);
}

#[test]
fn a_start_without_room_while_others_go_is_not_counted() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up]);
    for failures in 1..20 {
        let timer = Timer::Backoff { failures, short: true };
        let effects = run(&mut machine, &[Event::Exited(Cause::Crowded)]);
        assert_eq!(effects, [Effect::CloseGate, Effect::Arm(timer)]);
        run(&mut machine, &[Event::Timer(timer)]);
    }
    assert_eq!((machine.failures(), machine.alarmed), (0, false));
}

#[test]
fn a_long_service_pays_off_old_failures() {
    let mut machine = Machine::new();
    machine.step(Event::Up, Duration::ZERO, &policy());
    machine.step(CRASH, Duration::ZERO, &policy());
    machine.step(Event::Timer(Timer::Backoff { failures: 1, short: false }), Duration::ZERO, &policy());
    machine.step(Event::ProbeReady, Duration::from_secs(2), &policy());
    machine.step(CRASH, Duration::from_secs(602), &policy());
    assert_eq!(machine.failures(), 1, "the crash just now, not the one before the long service");
}

#[test]
fn a_start_that_outlives_its_deadline_is_a_failure() {
    let mut machine = Machine::new();
    run(&mut machine, &[Event::Up, Event::Timer(Timer::Start)]);
    assert_eq!(run(&mut machine, &[CRASH])[1], Effect::Arm(Timer::Backoff { failures: 1, short: false }));
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

fn cause() -> impl Strategy<Value = Cause> {
    prop_oneof![Just(Cause::MayPass), Just(Cause::NeedsChange), Just(Cause::Crowded)]
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
        Just(Event::Resume),
        cause().prop_map(Event::Exited),
        cause().prop_map(Event::SpawnFailed),
        Just(Event::Felled),
        Just(Event::Timer(Timer::Start)),
        Just(Event::Timer(Timer::Suspect)),
        Just(Event::Timer(Timer::Drain)),
        Just(Event::Timer(Timer::Grace)),
        (1u32..5, any::<bool>())
            .prop_map(|(failures, short)| Event::Timer(Timer::Backoff { failures, short })),
        Just(Event::Timer(Timer::Trial)),
        Just(Event::Changed),
        Just(Event::Stuck),
        Just(Event::Reset),
    ]
}

/// The world outside of the machine, as changed by its effects.
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
            // Facts about the world are reported only while they are true.
            match event {
                Event::Exited(_) | Event::Felled | Event::SpawnFailed(_) if !world.alive => continue,
                Event::Timer(timer) => match (timer, world.armed) {
                    (Timer::Backoff { .. }, Some(Timer::Backoff { .. })) => {}
                    (a, Some(b)) if a == b => {}
                    _ => continue,
                },
                _ => {}
            }
            let before = machine.phase();
            if matches!(event, Event::Exited(_) | Event::Felled | Event::SpawnFailed(_)) {
                world.alive = false;
                world.termed = false;
            }
            let may_kill = matches!(event, Event::KillNow(_) | Event::Timer(Timer::Grace | Timer::Start));
            for effect in machine.step(event, Duration::from_secs(now), &policy()) {
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
                    Effect::Disarm => world.armed = None,
                    Effect::Alarm => {}
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
                    let armed = matches!(world.armed, Some(Timer::Backoff { failures: 1.., .. }));
                    prop_assert!(armed, "no backoff timer");
                }
                Phase::Failed => prop_assert_eq!(world.armed, Some(Timer::Trial)),
                Phase::Idle | Phase::Ready => prop_assert_eq!(world.armed, None),
            }
            if matches!(event, Event::Exited(_)) && matches!(before, Phase::Ready | Phase::Suspect) {
                prop_assert_eq!(phase, Phase::Backoff, "what had served is tried again");
            }
            if phase == Phase::Failed && before != Phase::Failed {
                let told = matches!(
                    event,
                    Event::Exited(Cause::NeedsChange) | Event::SpawnFailed(Cause::NeedsChange) | Event::Stuck
                );
                prop_assert!(told, "{:?} made it wait for a change", event);
            }
        }
    }

    #[test]
    fn draining_and_stopping_end_whatever_the_backend_does(
        prefix in proptest::collection::vec(event(), 0..50)
    ) {
        let mut machine = Machine::new();
        for event in prefix {
            machine.step(event, Duration::from_secs(1), &policy());
        }
        machine.step(Event::Down, Duration::from_secs(1), &policy());
        // A backend that ignores everything but SIGKILL: only timers expire, then it is gone.
        for event in [Event::Timer(Timer::Drain), Event::Timer(Timer::Grace), CRASH] {
            machine.step(event, Duration::from_secs(2), &policy());
        }
        prop_assert!(matches!(machine.phase(), Phase::Idle | Phase::Failed), "{}", machine.phase());
    }

    /// Without any action, timers expire, and once starts succeed again the backend serves.
    #[test]
    fn whatever_happened_a_wanted_backend_comes_back_by_itself(
        events in proptest::collection::vec((event(), 0u64..120), 0..200)
    ) {
        let mut machine = Machine::new();
        let (mut now, mut armed, mut alive) = (0, None, false);
        let take = |effects: Vec<Effect>, alive: &mut bool, armed: &mut Option<Timer>| {
            for effect in effects {
                match effect {
                    Effect::Arm(timer) => *armed = Some(timer),
                    Effect::Disarm => *armed = None,
                    Effect::Spawn => *alive = true,
                    _ => {}
                }
            }
        };
        for (event, seconds) in events {
            now += seconds;
            let ends = matches!(event, Event::Exited(_) | Event::Felled | Event::SpawnFailed(_));
            if ends && !alive || matches!(event, Event::Timer(timer) if Some(timer) != armed) {
                continue;
            }
            alive &= !ends;
            take(machine.step(event, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        }
        take(machine.step(Event::Up, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        for _ in 0..8 {
            let event = match machine.phase() {
                Phase::Ready => break,
                Phase::Starting | Phase::Suspect => Event::ProbeReady,
                Phase::Stopping => { alive = false; Event::Exited(Cause::MayPass) }
                // Not wanted when its process ended, because no request came since: the owner asks again.
                Phase::Idle => Event::Up,
                _ => Event::Timer(armed.unwrap()),
            };
            take(machine.step(event, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        }
        prop_assert_eq!(machine.phase(), Phase::Ready);
    }
}
