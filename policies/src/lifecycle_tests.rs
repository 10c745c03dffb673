//! Examples and properties of the lifecycle.

use super::*;
use proptest::prelude::*;

const CRASH: LifecycleEvent = LifecycleEvent::Exited(EndCause::MayPass);
const HOPELESS: LifecycleEvent = LifecycleEvent::Exited(EndCause::NeedsChange);

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

fn run(machine: &mut LifecycleMachine, events: &[LifecycleEvent]) -> Vec<LifecycleEffect> {
    let mut last = Vec::new();
    for event in events {
        last = machine.step(*event, Duration::from_secs(1), &policy());
    }
    last
}

#[test]
fn a_request_starts_it_and_a_probe_opens_the_gate() {
    let mut machine = LifecycleMachine::new();
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Up]),
        [LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    );
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::ProbeReady]),
        [LifecycleEffect::Disarm, LifecycleEffect::OpenGate]
    );
    assert_eq!(machine.phase(), BackendPhase::Ready);
}

#[test]
fn a_recycle_drains_then_stops_then_starts_the_next_one() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, LifecycleEvent::ProbeReady]);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Recycle]),
        [LifecycleEffect::CloseGate, LifecycleEffect::Arm(LifecycleTimer::Drain)]
    );
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Drained]),
        [LifecycleEffect::Term, LifecycleEffect::Arm(LifecycleTimer::Grace)]
    );
    assert_eq!(
        run(&mut machine, &[CRASH]),
        [LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    );
    assert_eq!(machine.failures(), 0);
}

#[test]
fn a_drain_that_takes_too_long_is_cut_and_a_stop_that_does_too_is_killed() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, LifecycleEvent::ProbeReady, LifecycleEvent::Down]);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Timer(LifecycleTimer::Drain)]),
        [LifecycleEffect::Term, LifecycleEffect::Arm(LifecycleTimer::Grace)]
    );
    assert_eq!(run(&mut machine, &[LifecycleEvent::Timer(LifecycleTimer::Grace)])[0], LifecycleEffect::Kill);
    assert_eq!(run(&mut machine, &[CRASH]), [LifecycleEffect::Disarm]);
    assert_eq!(machine.phase(), BackendPhase::Idle);
}

#[test]
fn a_drain_that_is_given_up_opens_the_gate_of_the_same_process() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, LifecycleEvent::ProbeReady, LifecycleEvent::Recycle]);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Resume]),
        [LifecycleEffect::Disarm, LifecycleEffect::OpenGate]
    );
    assert_eq!(machine.phase(), BackendPhase::Ready);
    run(&mut machine, &[LifecycleEvent::Recycle, LifecycleEvent::Drained]);
    assert_eq!(run(&mut machine, &[LifecycleEvent::Resume]), [], "it was told to end");
}

#[test]
fn a_request_during_a_stop_is_served_by_the_next_generation() {
    let mut machine = LifecycleMachine::new();
    run(
        &mut machine,
        &[
            LifecycleEvent::Up,
            LifecycleEvent::ProbeReady,
            LifecycleEvent::Down,
            LifecycleEvent::Drained,
            LifecycleEvent::Up,
        ],
    );
    assert_eq!(
        run(&mut machine, &[CRASH]),
        [LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    );
}

#[test]
fn starts_that_fail_back_off_for_ever_and_the_fifth_in_ten_minutes_is_told_once() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up]);
    for failures in 1..1000 {
        let effects = run(&mut machine, &[CRASH]);
        let timer = LifecycleTimer::Backoff { failures, short: false };
        assert_eq!(effects.last(), Some(&LifecycleEffect::Arm(timer)));
        assert_eq!(effects.contains(&LifecycleEffect::Alarm), failures == 5, "{failures}");
        assert_eq!(run(&mut machine, &[LifecycleEvent::Timer(timer)]).last(), Some(&LifecycleEffect::Spawn));
    }
    assert!(machine.recent.len() <= 6, "what is remembered does not grow");
    assert_eq!(policy().pause(1000, false, 1.0), Duration::from_secs(60));
}

#[test]
fn a_process_that_had_served_is_followed_after_a_short_pause_however_often_it_dies() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up]);
    for failures in 1..100 {
        run(&mut machine, &[LifecycleEvent::ProbeReady]);
        let timer = LifecycleTimer::Backoff { failures, short: true };
        assert_eq!(run(&mut machine, &[CRASH]).last(), Some(&LifecycleEffect::Arm(timer)));
        assert!(policy().pause(failures, true, 1.0) <= Duration::from_secs(15));
        run(&mut machine, &[LifecycleEvent::Timer(timer)]);
    }
    // This failed start is the first consecutive one; earlier deaths of the running process do not count.
    let first = LifecycleTimer::Backoff { failures: 1, short: false };
    assert_eq!(run(&mut machine, &[CRASH]).last(), Some(&LifecycleEffect::Arm(first)));
}

#[test]
fn a_start_that_needs_a_change_waits_for_it_and_is_tried_now_and_then() {
    let mut machine = LifecycleMachine::new();
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Up, HOPELESS]).last(),
        Some(&LifecycleEffect::Arm(LifecycleTimer::Trial))
    );
    assert_eq!(machine.phase(), BackendPhase::Failed);
    assert_eq!(run(&mut machine, &[LifecycleEvent::Up]), []);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Changed]),
        [LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    );
    run(&mut machine, &[HOPELESS]);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Timer(LifecycleTimer::Trial)]).last(),
        Some(&LifecycleEffect::Spawn)
    );
    // A process that had served could start, so its exit needs no change.
    run(&mut machine, &[LifecycleEvent::ProbeReady, HOPELESS]);
    assert_eq!(machine.phase(), BackendPhase::Backoff);
}

#[test]
fn a_start_that_is_known_to_fail_waits_for_a_change_although_a_pause_had_begun() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, CRASH]);
    assert_eq!(machine.phase(), BackendPhase::Backoff);
    assert_eq!(run(&mut machine, &[LifecycleEvent::Stuck]), [LifecycleEffect::Arm(LifecycleTimer::Trial)]);
    assert_eq!(machine.phase(), BackendPhase::Failed);
    assert_eq!(
        run(&mut machine, &[LifecycleEvent::Changed]),
        [LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    );
}

#[test]
fn a_start_without_room_while_others_go_is_not_counted() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up]);
    for failures in 1..20 {
        let timer = LifecycleTimer::Backoff { failures, short: true };
        let effects = run(&mut machine, &[LifecycleEvent::Exited(EndCause::MemoryReturning)]);
        assert_eq!(effects, [LifecycleEffect::CloseGate, LifecycleEffect::Arm(timer)]);
        run(&mut machine, &[LifecycleEvent::Timer(timer)]);
    }
    assert_eq!((machine.failures(), machine.alarmed), (0, false));
}

#[test]
fn a_long_service_pays_off_old_failures() {
    let mut machine = LifecycleMachine::new();
    machine.step(LifecycleEvent::Up, Duration::ZERO, &policy());
    machine.step(CRASH, Duration::ZERO, &policy());
    machine.step(
        LifecycleEvent::Timer(LifecycleTimer::Backoff { failures: 1, short: false }),
        Duration::ZERO,
        &policy(),
    );
    machine.step(LifecycleEvent::ProbeReady, Duration::from_secs(2), &policy());
    machine.step(CRASH, Duration::from_secs(602), &policy());
    assert_eq!(machine.failures(), 1, "the crash just now, not the one before the long service");
}

#[test]
fn a_start_that_outlives_its_deadline_is_a_failure() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, LifecycleEvent::Timer(LifecycleTimer::Start)]);
    assert_eq!(
        run(&mut machine, &[CRASH])[1],
        LifecycleEffect::Arm(LifecycleTimer::Backoff { failures: 1, short: false })
    );
}

#[test]
fn lost_probes_close_the_gate_and_coming_back_opens_it() {
    let mut machine = LifecycleMachine::new();
    run(&mut machine, &[LifecycleEvent::Up, LifecycleEvent::ProbeReady]);
    assert_eq!(run(&mut machine, &[LifecycleEvent::ProbesLost])[0], LifecycleEffect::CloseGate);
    assert_eq!(run(&mut machine, &[LifecycleEvent::ProbesBack]).last(), Some(&LifecycleEffect::OpenGate));
    run(&mut machine, &[LifecycleEvent::ProbesLost, LifecycleEvent::Timer(LifecycleTimer::Suspect)]);
    assert_eq!(machine.phase(), BackendPhase::Draining);
}

fn cause() -> impl Strategy<Value = EndCause> {
    prop_oneof![Just(EndCause::MayPass), Just(EndCause::NeedsChange), Just(EndCause::MemoryReturning)]
}

fn event() -> impl Strategy<Value = LifecycleEvent> {
    let then = prop_oneof![Just(AfterStop::Idle), Just(AfterStop::Restart)];
    prop_oneof![
        Just(LifecycleEvent::Up),
        Just(LifecycleEvent::Down),
        Just(LifecycleEvent::Recycle),
        then.prop_map(LifecycleEvent::KillNow),
        Just(LifecycleEvent::ProbeReady),
        Just(LifecycleEvent::ProbesLost),
        Just(LifecycleEvent::ProbesBack),
        Just(LifecycleEvent::Drained),
        Just(LifecycleEvent::Resume),
        cause().prop_map(LifecycleEvent::Exited),
        cause().prop_map(LifecycleEvent::SpawnFailed),
        Just(LifecycleEvent::KilledByRequest),
        Just(LifecycleEvent::Timer(LifecycleTimer::Start)),
        Just(LifecycleEvent::Timer(LifecycleTimer::Suspect)),
        Just(LifecycleEvent::Timer(LifecycleTimer::Drain)),
        Just(LifecycleEvent::Timer(LifecycleTimer::Grace)),
        (1u32..5, any::<bool>())
            .prop_map(|(failures, short)| LifecycleEvent::Timer(LifecycleTimer::Backoff { failures, short })),
        Just(LifecycleEvent::Timer(LifecycleTimer::Trial)),
        Just(LifecycleEvent::Changed),
        Just(LifecycleEvent::Stuck),
        Just(LifecycleEvent::Reset),
    ]
}

/// State outside the machine, as changed by its effects.
#[derive(Default)]
struct World {
    alive: bool,
    gate: bool,
    termed: bool,
    armed: Option<LifecycleTimer>,
}

proptest! {
    #[test]
    fn the_invariants_hold_over_all_event_sequences(
        events in proptest::collection::vec((event(), 0u64..120), 1..300)
    ) {
        let mut machine = LifecycleMachine::new();
        let mut world = World::default();
        let mut now = 0;
        for (event, seconds) in events {
            now += seconds;
            // Report events only while they can happen.
            match event {
                LifecycleEvent::Exited(_) | LifecycleEvent::KilledByRequest | LifecycleEvent::SpawnFailed(_) if !world.alive => continue,
                LifecycleEvent::Timer(timer) => match (timer, world.armed) {
                    (LifecycleTimer::Backoff { .. }, Some(LifecycleTimer::Backoff { .. })) => {}
                    (a, Some(b)) if a == b => {}
                    _ => continue,
                },
                _ => {}
            }
            let before = machine.phase();
            if matches!(event, LifecycleEvent::Exited(_) | LifecycleEvent::KilledByRequest | LifecycleEvent::SpawnFailed(_)) {
                world.alive = false;
                world.termed = false;
            }
            let may_kill = matches!(event, LifecycleEvent::KillNow(_) | LifecycleEvent::Timer(LifecycleTimer::Grace | LifecycleTimer::Start));
            for effect in machine.step(event, Duration::from_secs(now), &policy()) {
                match effect {
                    LifecycleEffect::Spawn => { prop_assert!(!world.alive, "two children"); world.alive = true; }
                    LifecycleEffect::OpenGate => world.gate = true,
                    LifecycleEffect::CloseGate => world.gate = false,
                    LifecycleEffect::Term => {
                        prop_assert!(world.alive && !world.termed, "TERM twice, or to nobody");
                        world.termed = true;
                    }
                    LifecycleEffect::Kill => prop_assert!(world.alive && may_kill, "KILL without cause"),
                    LifecycleEffect::Arm(timer) => world.armed = Some(timer),
                    LifecycleEffect::Disarm => world.armed = None,
                    LifecycleEffect::Alarm => {}
                }
            }
            let phase = machine.phase();
            prop_assert_eq!(world.gate, phase == BackendPhase::Ready, "gate {} in {}", world.gate, phase);
            prop_assert_eq!(world.alive, machine.has_process(), "child {} in {}", world.alive, phase);
            match phase {
                BackendPhase::Draining => prop_assert_eq!(world.armed, Some(LifecycleTimer::Drain)),
                BackendPhase::Stopping => prop_assert_eq!(world.armed, Some(LifecycleTimer::Grace)),
                BackendPhase::Starting => prop_assert_eq!(world.armed, Some(LifecycleTimer::Start)),
                BackendPhase::Suspect => prop_assert_eq!(world.armed, Some(LifecycleTimer::Suspect)),
                BackendPhase::Backoff => {
                    let armed = matches!(world.armed, Some(LifecycleTimer::Backoff { failures: 1.., .. }));
                    prop_assert!(armed, "no backoff timer");
                }
                BackendPhase::Failed => prop_assert_eq!(world.armed, Some(LifecycleTimer::Trial)),
                BackendPhase::Idle | BackendPhase::Ready => prop_assert_eq!(world.armed, None),
            }
            if matches!(event, LifecycleEvent::Exited(_)) && matches!(before, BackendPhase::Ready | BackendPhase::Suspect) {
                prop_assert_eq!(phase, BackendPhase::Backoff, "what had served is tried again");
            }
            if phase == BackendPhase::Failed && before != BackendPhase::Failed {
                let told = matches!(
                    event,
                    LifecycleEvent::Exited(EndCause::NeedsChange) | LifecycleEvent::SpawnFailed(EndCause::NeedsChange) | LifecycleEvent::Stuck
                );
                prop_assert!(told, "{:?} made it wait for a change", event);
            }
        }
    }

    #[test]
    fn draining_and_stopping_end_whatever_the_backend_does(
        prefix in proptest::collection::vec(event(), 0..50)
    ) {
        let mut machine = LifecycleMachine::new();
        for event in prefix {
            machine.step(event, Duration::from_secs(1), &policy());
        }
        machine.step(LifecycleEvent::Down, Duration::from_secs(1), &policy());
        // The backend ignores everything but SIGKILL: only timers expire until the process is gone.
        for event in [LifecycleEvent::Timer(LifecycleTimer::Drain), LifecycleEvent::Timer(LifecycleTimer::Grace), CRASH] {
            machine.step(event, Duration::from_secs(2), &policy());
        }
        prop_assert!(matches!(machine.phase(), BackendPhase::Idle | BackendPhase::Failed), "{}", machine.phase());
    }

    /// Timers and probes alone bring the backend back once starts succeed again.
    #[test]
    fn whatever_happened_a_wanted_backend_comes_back_by_itself(
        events in proptest::collection::vec((event(), 0u64..120), 0..200)
    ) {
        let mut machine = LifecycleMachine::new();
        let (mut now, mut armed, mut alive) = (0, None, false);
        let take = |effects: Vec<LifecycleEffect>, alive: &mut bool, armed: &mut Option<LifecycleTimer>| {
            for effect in effects {
                match effect {
                    LifecycleEffect::Arm(timer) => *armed = Some(timer),
                    LifecycleEffect::Disarm => *armed = None,
                    LifecycleEffect::Spawn => *alive = true,
                    _ => {}
                }
            }
        };
        for (event, seconds) in events {
            now += seconds;
            let ends = matches!(event, LifecycleEvent::Exited(_) | LifecycleEvent::KilledByRequest | LifecycleEvent::SpawnFailed(_));
            if ends && !alive || matches!(event, LifecycleEvent::Timer(timer) if Some(timer) != armed) {
                continue;
            }
            alive &= !ends;
            take(machine.step(event, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        }
        take(machine.step(LifecycleEvent::Up, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        for _ in 0..8 {
            let event = match machine.phase() {
                BackendPhase::Ready => break,
                BackendPhase::Starting | BackendPhase::Suspect => LifecycleEvent::ProbeReady,
                BackendPhase::Stopping => { alive = false; LifecycleEvent::Exited(EndCause::MayPass) }
                // No request came since the process ended: the owner sends `Up` again.
                BackendPhase::Idle => LifecycleEvent::Up,
                _ => LifecycleEvent::Timer(armed.unwrap()),
            };
            take(machine.step(event, Duration::from_secs(now), &policy()), &mut alive, &mut armed);
        }
        prop_assert_eq!(machine.phase(), BackendPhase::Ready);
    }
}
