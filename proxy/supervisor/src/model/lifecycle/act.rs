//! Carries out the effects that the life-cycle machine returns.

use std::sync::Arc;

use warden_policies::lifecycle::{BackendPhase, LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, Reason};

use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::ward::ProcessEnd;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::LiveGeneration;
use crate::model::message::{HelperReport, TaskMail, TaskMessage};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::UnitId;
use crate::process::BackendProcess;
use crate::process::failure::OomEvidence;
use crate::process::group::ProcessExit;
use crate::view::event::EventKind;

impl ModelTask {
    pub(crate) fn step_machine(&mut self, id: UnitId, event: LifecycleEvent) {
        let now = self.env.context.now();
        let policy = self.env.spec.lifecycle;
        let asks = self.room.is_asking_to_stay();
        let Some(unit) = self.units.get_mut(id) else { return };
        let before = unit.machine.clone();
        if asks
            && matches!(event, LifecycleEvent::Exited(_) | LifecycleEvent::KilledByRequest)
            && before.restarts_when_ended()
        {
            // Do not let the life-cycle machine restart the process: this start needs the loader's answer.
            unit.machine.step(LifecycleEvent::Down, now, &policy);
        }
        let effects = unit.machine.step(event, now, &policy);
        let has_changed = unit.machine != before;
        let phase = unit.phase();
        if phase != before.phase() {
            // The phase has changed, so the start that waited for room is no longer due.
            unit.held_start = None;
        }
        if let Some(live) = &mut unit.live {
            if phase != before.phase() {
                live.enter_phase(phase, &policy);
            }
            if phase != BackendPhase::Starting {
                live.start.watch = None;
            }
            if matches!(phase, BackendPhase::Draining | BackendPhase::Stopping) {
                self.env.context.fleet_memory.note_leaving(live.id);
            }
        }
        if has_changed || !effects.is_empty() {
            self.life.note_action();
        }
        for effect in effects {
            self.carry_out_effect(id, effect);
        }
        if phase != before.phase()
            && let Some(unit) = self.units.get(id)
            && let Some(kind) = unit.phase_event(before.phase(), phase, &self.env.leases, &self.env.logs)
        {
            self.env.log_event(unit.generation(), kind);
        }
    }

    pub(crate) fn step_all(&mut self, events: Vec<(UnitId, LifecycleEvent)>) {
        for (id, event) in events {
            self.step_machine(id, event);
        }
    }

    pub(crate) fn carry_out_effect(&mut self, id: UnitId, effect: LifecycleEffect) {
        match effect {
            LifecycleEffect::Spawn => {
                self.experience.dead_starts.stop_search();
                if let Some(unit) = self.units.get_mut(id) {
                    unit.spawn(&self.env, &mut self.mail, &self.room, &self.experience);
                }
            }
            LifecycleEffect::OpenGate => {
                if let Some(unit) = self.units.get(id) {
                    self.replacements.open_gate(&self.env, unit);
                    self.life.note_action();
                }
            }
            LifecycleEffect::CloseGate => {
                if let Some(generation) = self.units.generation(id) {
                    let running = self.env.leases.close_gate(generation);
                    self.replacements.note_closed(generation, running);
                }
            }
            LifecycleEffect::Term | LifecycleEffect::Kill => {
                let Some(live) = self.units.live_mut(id) else { return };
                self.replacements.note_signal(&self.env, live);
                if effect == LifecycleEffect::Term { live.terminate() } else { live.kill() }
            }
            LifecycleEffect::Arm(timer) => {
                let Some(unit) = self.units.get_mut(id) else { return };
                let delay = unit.arm_timer(timer, &self.env.spec.lifecycle, &self.env.logs);
                if let LifecycleTimer::Backoff { failures, .. } = timer {
                    let delay_ms = clock::millis(delay);
                    self.env.log_event(None, EventKind::Backoff { delay_ms, failures });
                }
            }
            LifecycleEffect::Disarm => {
                if let Some(unit) = self.units.get_mut(id) {
                    unit.timer = None;
                    if let Some(live) = &mut unit.live {
                        live.probing.crashed_at = None;
                    }
                }
            }
            LifecycleEffect::Alarm => {
                let policy = self.env.spec.lifecycle;
                if let Some(failure) = self.units.get(id).and_then(|unit| unit.failure.clone()) {
                    let ends = policy.breaker_failures;
                    let within_s = policy.breaker_window.as_secs();
                    self.env.log_event(None, EventKind::CrashLoop { ends, within_s, failure });
                }
            }
        }
    }
}

impl ReplacementTracker {
    /// Records the requests that a signal interrupts. Call it before the signal, which revokes their leases:
    /// other threads return those at once.
    fn note_signal(&mut self, env: &TaskEnvironment, live: &LiveGeneration) {
        let running = env.leases.in_flight(live.id);
        self.note_stopped(live.id, running);
        // Without requests the process shows no symptom: use the recorded reason of its replacement.
        let recorded = || self.replaced_since(live.id, Reason::Wedged).filter(|_| running == 0);
        if let Some(hung) = live.hung_for().or_else(recorded) {
            live.cell.note_hung(hung);
        }
    }
}

impl TaskMail {
    /// Starts a helper that waits for the end of a process, and then until its memory is free again. The
    /// next start does not wait for that memory.
    pub(crate) fn await_exit(
        &mut self,
        env: &TaskEnvironment,
        generation: GenerationId,
        cell: Option<Arc<GenerationCell>>,
        process: Arc<dyn BackendProcess>,
    ) {
        /// Maximum number of readings of the freed memory. A reading is useless while another process starts.
        const MAX_RETURN_LOOKS: u32 = 5;
        let context = Arc::clone(&env.context);
        let sensors = env.watch.sensors;
        let outbox = self.outbox.clone();
        let leases = Arc::clone(&env.leases);
        self.spawn_helper(generation, async move {
            let exit = process.wait().await;
            let why = match exit {
                ProcessExit::Signal(libc::SIGKILL) => process.oom_evidence().await,
                _ => OomEvidence::Unknown,
            };
            if let Some(cell) = cell {
                // Report the end before memory is read: requests that may be sent again wait for the report.
                leases.note_ended(&cell, requests_end(&cell, exit, why));
            }
            context.fleet_memory.note_dead(generation);
            outbox.send(TaskMessage::Report(generation, HelperReport::Exited(exit, why)));
            let mut looks = 0;
            let returned = loop {
                let free = context.world.free_memory(sensors.read_limit).await;
                match context.fleet_memory.returned_memory(generation, &free) {
                    Some(returned) if looks > 0 || returned.is_complete() => break returned,
                    _ if looks == MAX_RETURN_LOOKS => break ReturnedMemory::default(),
                    _ => looks += 1,
                }
                tokio::time::sleep(sensors.return_wait).await;
            };
            HelperReport::MemoryReturned(returned)
        });
    }
}

/// Classifies the end of a process for the requests that it was serving.
fn requests_end(cell: &GenerationCell, exit: ProcessExit, why: OomEvidence) -> ProcessEnd {
    if cell.was_stopped() {
        // The supervisor ended the process. If the process hung, its requests may be the cause.
        return if cell.hung_for().is_some() { ProcessEnd::ByItself } else { ProcessEnd::Stopped };
    }
    match why {
        OomEvidence::Group | OomEvidence::Machine => ProcessEnd::OutOfMemory,
        OomEvidence::Unknown | OomEvidence::No if exit.is_self_inflicted() => ProcessEnd::ByItself,
        OomEvidence::Unknown | OomEvidence::No => ProcessEnd::Stopped,
    }
}
