//! Handles the reports of helper tasks. Reports about unknown generations are ignored, but a process without
//! a unit is killed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::GenerationId;
use warden_policies::lifecycle::{BackendPhase, EndCause, LifecycleEffect, LifecycleEvent, LifecycleTimer};

use crate::error::FailureKind;
use crate::memory::loading::LoadingReport;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{LiveGeneration, PendingSignal};
use crate::model::message::{HelperReport, TaskMail, TaskMessage};
use crate::model::unit::{ProcessUnit, UnitId, UnitList};
use crate::model::warm::stored::save::StoreReport;
use crate::process::failure::{self, StartEnd, StartLateness};
use crate::process::{BackendProcess, discreet, reclaim_file, report_file, until_stalled};
use crate::view::event::EventKind;

impl ModelTask {
    pub(crate) fn take_report(&mut self, generation: GenerationId, report: HelperReport) {
        self.note_late_report(generation, &report);
        let Some(id) = self.units.with_generation(generation).map(|unit| unit.id) else {
            match report {
                HelperReport::Spawned(Ok(process)) => {
                    process.kill();
                    self.mail.await_exit(&self.env, generation, None, process);
                }
                HelperReport::Spawned(Err(_)) => self.env.context.fleet_memory.remove_generation(generation),
                HelperReport::Exited(..) => self.life.dying.push(generation),
                _ => {}
            }
            return;
        };
        match report {
            HelperReport::Spawned(Ok(process)) => {
                if let Some(unit) = self.units.get_mut(id) {
                    unit.note_spawned(&self.env, &mut self.mail, process);
                }
                self.life.note_action();
            }
            HelperReport::Spawned(Err(error)) => {
                self.env.context.fleet_memory.remove_generation(generation);
                // Without a process, no memory is freed.
                self.replacements.note_after_exit(generation, &[]);
                self.note_end(id, generation, &StartEnd::NotSpawned(&error), "not created");
            }
            HelperReport::Probed(mut report) => {
                self.env.log_lost_settings(generation, std::mem::take(&mut report.unset));
                self.note_probe(id, report);
            }
            HelperReport::Packed(parcel) => {
                if let Some((phase, live)) = self.units.phase_and_live(id) {
                    self.experience.note_packed(&mut self.replacements, phase, live, *parcel);
                }
                self.life.note_action();
            }
            HelperReport::Stored(_, result) => self.note_stored(id, &result),
            HelperReport::Warmed(warmth) => {
                self.replacements.note_later(&self.env, generation, *warmth);
                self.units.note_warming_end(id);
            }
            HelperReport::SettingsFailed(messages) => self.env.log_lost_settings(generation, messages),
            HelperReport::MemoryLine(line, _pending) => {
                if let Some(live) = self.units.live_mut(id) {
                    live.memory.parse_line(&line);
                }
            }
            HelperReport::CrashLogged(_pending) => {
                let pause = self.env.spec.lifecycle.start_probe_interval;
                if let Some((phase, live)) = self.units.phase_and_live(id)
                    && live.note_alarm(phase, pause)
                {
                    self.carry_out_effect(id, LifecycleEffect::Arm(LifecycleTimer::Suspect));
                }
            }
            HelperReport::Looked(sight) => {
                if let Some(unit) = self.units.get_mut(id) {
                    unit.sight = Some(sight);
                }
            }
            HelperReport::Stalled(limit) => {
                if let Some((BackendPhase::Starting, live)) = self.units.phase_and_live(id) {
                    let event = live.note_late_start(StartLateness::Stalled(limit));
                    self.step_machine(id, event);
                }
            }
            HelperReport::Exited(exit, why) => {
                self.life.dying.push(generation);
                let timed_out = self.units.live(id).and_then(|live| live.start.timed_out);
                let end = timed_out.map_or(StartEnd::Exited(exit, why), StartEnd::TimedOut);
                self.note_end(id, generation, &end, &exit.to_string());
            }
            HelperReport::MemoryReturned(_) => {}
            HelperReport::Sampled { taken, sample } => self.note_sample(id, &taken, &sample),
            HelperReport::Reclaimed(answer) => self.note_reclaimed(id, &answer),
            HelperReport::AnswersProbed(finding, took) => self.note_answer_probe(id, finding, took),
        }
    }

    /// Handles reports that may also arrive after the end of the process.
    fn note_late_report(&mut self, generation: GenerationId, report: &HelperReport) {
        match report {
            HelperReport::MemoryReturned(returned) => {
                self.life.dying.retain(|known| *known != generation);
                self.env.context.fleet_memory.remove_generation(generation);
                self.replacements.note_after_exit(generation, &returned.gpus);
                self.replacements.pace.note_returned(&self.env, returned);
                self.life.note_action();
            }
            HelperReport::Stored(took, result) => self.env.log_stored(generation, *took, result),
            _ => {}
        }
    }

    fn note_stored(&mut self, id: UnitId, result: &Result<StoreReport, String>) {
        if let Some(unit) = self.units.get_mut(id) {
            self.experience.note_stored(&self.env, unit, result);
        }
        self.life.note_action();
    }

    /// Handles the end of a process, requested or not.
    fn note_end(&mut self, id: UnitId, generation: GenerationId, end: &StartEnd<'_>, exit: &str) {
        let running = self.env.leases.close_gate(generation);
        self.replacements.note_closed(generation, running);
        self.env.leases.remove_generation(generation);
        if let Some(live) = self.units.live(id) {
            live.store_growth(&self.env);
        }
        self.end_reclaim(id, None);
        let Some(unit) = self.units.get_mut(id) else { return };
        let live = unit.live.take();
        if let Some(live) = &live {
            live.remove();
        }
        self.replacements.note_gone(generation, running);
        self.life.note_action();
        let never_ready = live.is_some_and(|live| live.start.ready.is_none());
        let phase = unit.phase();
        let killed_by_request = self.env.leases.ward.was_killed_by_request(generation);
        let event = |cause| match end {
            // If a stop was requested during the spawn, it is complete now.
            StartEnd::NotSpawned(_) if phase != BackendPhase::Stopping => LifecycleEvent::SpawnFailed(cause),
            StartEnd::Exited(..) | StartEnd::TimedOut(_) if killed_by_request => {
                LifecycleEvent::KilledByRequest
            }
            _ => LifecycleEvent::Exited(cause),
        };
        let timed_out = matches!(end, StartEnd::TimedOut(_));
        if phase == BackendPhase::Stopping
            && !timed_out
            && let Some(store) = &self.experience.stored
        {
            // The process did not die while conversations were restored: we ended it.
            store.note_restored(unit.replica);
        }
        let is_kept = self.experience.kept_state.iter().any(|kept| kept.from == generation);
        if self.experience.stored.is_some()
            && !is_kept
            && self.replacements.replacement_of(generation).is_none()
        {
            // No process can get them any more, and they would hide the versions on disk.
            self.env.leases.turns.forget_generation(generation);
        }
        if never_ready {
            self.experience.note_warming_death(&self.env.leases, &self.replacements, unit.replica);
        }
        let mut after = unit.machine.clone();
        after.step(event(EndCause::MayPass), self.env.context.now(), &self.env.spec.lifecycle);
        let cause = if matches!(after.phase(), BackendPhase::Backoff | BackendPhase::Failed) {
            self.note_crash_end(id, generation, never_ready, end, after.failures())
        } else {
            unit.start_failures = 0;
            self.env.log_event(Some(generation), EventKind::Stopped { exit: exit.to_owned() });
            EndCause::MayPass
        };
        self.step_machine(id, event(cause));
    }

    /// Handles an end that the supervisor did not request. Returns the cause for the next start.
    fn note_crash_end(
        &mut self,
        id: UnitId,
        generation: GenerationId,
        never_ready: bool,
        end: &StartEnd<'_>,
        failures: u32,
    ) -> EndCause {
        // Events, the ledger and answers to clients show these lines, so remove secrets.
        let lines = discreet::without_secrets(&self.env.logs.lines_of(generation));
        let refuses = never_ready && self.experience.note_slot_refusal(&self.env.spec, &lines);
        let mut failure = failure::classify_end(
            &self.env.spec.command.kind,
            end,
            &lines,
            self.env.watch.child.failure_lines,
            failures,
        );
        let stuck = never_ready && self.experience.dead_starts.note_death(&self.env, end, &mut failure);
        let cause = match failure.kind {
            // The next process starts without the slot directory that prevented this start.
            _ if refuses => EndCause::MayPass,
            _ if stuck => EndCause::NeedsChange,
            kind if never_ready && kind.is_permanent() => EndCause::NeedsChange,
            FailureKind::OutOfMemory
                if never_ready && self.env.context.fleet_memory.is_making_room(generation) =>
            {
                EndCause::MemoryReturning
            }
            _ => EndCause::MayPass,
        };
        self.life.crashes += 1;
        let has_failed_start = never_ready && cause != EndCause::MemoryReturning;
        if has_failed_start && failure.kind == FailureKind::OutOfMemory {
            self.room.report(LoadingReport::StartShort);
        }
        if let Some(unit) = self.units.get_mut(id) {
            unit.failure = Some(failure.clone());
            unit.start_failures += u32::from(has_failed_start);
        }
        let outside = matches!(end, StartEnd::Exited(exit, _) if exit.is_from_outside());
        self.env.log_event(Some(generation), EventKind::Crashed { failure, outside });
        cause
    }
}

impl UnitList {
    fn note_warming_end(&mut self, id: UnitId) {
        if let Some(live) = self.live_mut(id) {
            live.warm.is_behind = false;
        }
    }
}

impl ProcessUnit {
    fn note_spawned(&mut self, env: &TaskEnvironment, mail: &mut TaskMail, process: Arc<dyn BackendProcess>) {
        let replica = self.replica;
        let is_starting = self.phase() == BackendPhase::Starting;
        let Some(live) = &mut self.live else { return };
        live.child.process = Some(Arc::clone(&process));
        // A generation has one process only, so the cell was empty.
        drop(live.cell.process.set(Arc::downgrade(&process)));
        let is_adopted = live.start.adopted.is_some();
        if !is_adopted {
            live.start.spawned = Instant::now();
        }
        match live.child.pending {
            Some(PendingSignal::Kill) => process.kill(),
            Some(PendingSignal::Terminate) => process.terminate(),
            None => {}
        }
        if is_starting {
            live.timers.probe = Some(Instant::now());
            live.watch_start(mail, Arc::clone(&process), env.spec.lifecycle.start_stall);
        }
        let cell = Arc::clone(&live.cell);
        let pid = process.pid();
        let event = if is_adopted {
            EventKind::TakenOver { pid, replica }
        } else {
            EventKind::Starting { pid, replica }
        };
        env.log_event(Some(live.id), event);
        mail.await_exit(env, live.id, Some(cell), process);
    }
}

impl LiveGeneration {
    /// Takes the leases from a process that has ended, and removes its files.
    fn remove(&self) {
        self.cell.revoke();
        let socket = &self.child.socket;
        drop(std::fs::remove_file(socket));
        report_file::remove_reports(socket);
        reclaim_file::remove_reclaim_file(socket);
    }

    fn store_growth(&self, env: &TaskEnvironment) {
        let monitor = &self.memory.monitor;
        if !monitor.growth().is_empty() {
            let keep = env.watch.sensors.priors_kept;
            env.context.leak_history.learn_growth(
                &self.memory.key,
                &env.spec.name,
                &monitor.priors(),
                monitor.growth(),
                keep,
            );
        }
        self.store_held_memory(env);
    }

    pub(crate) fn store_held_memory(&self, env: &TaskEnvironment) {
        let held = self.memory.held_memory();
        if !held.is_empty() {
            let keep = env.watch.sensors.priors_kept;
            env.context.leak_history.note_held(&self.memory.key, &env.spec.name, &held, keep);
        }
    }

    /// Starts a helper that reports if the start makes no progress for this time.
    fn watch_start(&mut self, mail: &mut TaskMail, process: Arc<dyn BackendProcess>, limit: Duration) {
        let over = CancellationToken::new();
        self.start.watch = Some(over.clone().drop_guard());
        let generation = self.id;
        let outbox = mail.outbox.clone();
        mail.helpers.spawn(async move {
            let still = over.run_until_cancelled(until_stalled(&*process, limit)).await;
            if still.is_some() {
                outbox.send(TaskMessage::Report(generation, HelperReport::Stalled(limit)));
            }
        });
    }
}
