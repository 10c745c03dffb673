//! Handles the reports of helper tasks. A report about a generation that no unit has is ignored, but a
//! process that nobody owns is killed.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::lifecycle::{BackendPhase, EndCause, LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, Reason};

use super::spread::apply_all_settings;
use super::timers;
use super::unit::{PendingSignal, ProcessUnit, UnitId, UnitRole};
use super::warm::unpack::WarmingResult;
use super::{HelperReport, ModelTask, TaskMessage};
use crate::clock;
use crate::error::{FailureKind, SpawnError};
use crate::memory::fleet_memory::ReturnedMemory;
use crate::process::failure::{self, OomEvidence, StartEnd, StartLateness};
use crate::process::group::ProcessExit;
use crate::process::standstill::until_stalled;
use crate::process::{
    BackendProcess, ProbeResult, SampleOptions, ServerProps, discreet, reclaim_file, report_file,
};
use crate::view::event::EventKind;

impl ModelTask {
    pub(super) fn take_report(&mut self, generation: GenerationId, report: HelperReport) {
        let Some(id) =
            self.units.iter().find(|unit| unit.generation() == Some(generation)).map(|unit| unit.id)
        else {
            match report {
                HelperReport::MemoryReturned(returned) => self.note_returned_memory(generation, &returned),
                // No unit owns the process any more: kill and reap it.
                HelperReport::Spawned(Ok(process)) => {
                    process.kill();
                    self.await_exit(generation, process);
                }
                HelperReport::Spawned(Err(_)) => self.context.fleet_memory.remove_generation(generation),
                HelperReport::Exited(..) => self.dying.push(generation),
                _ => {}
            }
            return;
        };
        match report {
            HelperReport::Spawned(Ok(process)) => self.note_spawned(id, generation, process),
            HelperReport::Spawned(Err(error)) => self.note_spawn_failure(id, generation, &error),
            HelperReport::Probed { sent, health, props, vram, unset, warmed } => {
                for message in unset {
                    self.log_event(Some(generation), EventKind::SettingLost { message });
                }
                self.note_probe(id, sent, health, props, vram, warmed);
            }
            HelperReport::Packed(parcel) => self.note_packed(id, generation, *parcel),
            HelperReport::Warmed(warmth) => self.note_gate_warmed(generation, *warmth),
            HelperReport::SettingsFailed(messages) => {
                for message in messages {
                    self.log_event(Some(generation), EventKind::SettingLost { message });
                }
            }
            HelperReport::MemoryLine(line, _pending) => self.note_memory_line(id, &line),
            HelperReport::CrashLogged(_pending) => self.note_alarm(id),
            HelperReport::Looked(sight) => {
                if let Some(unit) = self.unit_mut(id) {
                    unit.sight = Some(sight);
                }
            }
            HelperReport::Stalled(limit) => self.note_late_start(id, StartLateness::Stalled(limit)),
            HelperReport::Exited(exit, why) => self.note_exit(id, generation, exit, why),
            HelperReport::MemoryReturned(returned) => self.note_returned_memory(generation, &returned),
            HelperReport::Sampled { taken, sample } => self.note_sample(id, &taken, &sample),
            HelperReport::Reclaimed(answer) => self.note_reclaimed(id, &answer),
        }
    }

    fn note_spawned(&mut self, id: UnitId, generation: GenerationId, process: Arc<dyn BackendProcess>) {
        let Some(unit) = self.unit_mut(id) else { return };
        let replica = unit.replica;
        let starting = unit.phase() == BackendPhase::Starting;
        let Some(live) = &mut unit.live else { return };
        live.process = Some(Arc::clone(&process));
        // The cell was empty, because a generation has one process only.
        drop(live.cell.process.set(Arc::downgrade(&process)));
        let adopted = live.adopted.is_some();
        if !adopted {
            live.spawned = Instant::now();
        }
        match live.pending {
            Some(PendingSignal::Kill) => process.kill(),
            Some(PendingSignal::Terminate) => process.terminate(),
            None => {}
        }
        if starting {
            live.timers.probe = Some(Instant::now());
            self.watch_start(id, Arc::clone(&process));
        }
        let pid = process.pid();
        let event = if adopted {
            EventKind::TakenOver { pid, replica }
        } else {
            EventKind::Starting { pid, replica }
        };
        self.log_event(Some(generation), event);
        self.note_action();
        self.await_exit(generation, process);
    }

    /// Starts a helper that reports a start without progress, as long as the process is starting.
    fn watch_start(&mut self, id: UnitId, process: Arc<dyn BackendProcess>) {
        let limit = self.spec.lifecycle.start_stall;
        let Some(live) = self.live_mut(id) else { return };
        let over = CancellationToken::new();
        live.start_watch = Some(over.clone().drop_guard());
        let (generation, outbox) = (live.id, self.outbox.clone());
        self.helpers.spawn(async move {
            let still = over.run_until_cancelled(until_stalled(&*process, limit)).await;
            if still.is_some() {
                outbox.send(TaskMessage::Report(generation, HelperReport::Stalled(limit)));
            }
        });
    }

    /// Handles a start that exceeded its time limit.
    pub(super) fn note_late_start(&mut self, id: UnitId, lateness: StartLateness) {
        let Some(unit) = self.unit_mut(id) else { return };
        if unit.phase() == BackendPhase::Starting
            && let Some(live) = &mut unit.live
        {
            live.timed_out = Some(lateness);
            self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Start));
        }
    }

    fn note_spawn_failure(&mut self, id: UnitId, generation: GenerationId, error: &SpawnError) {
        let never_ready = self.remove_generation(id, generation);
        self.context.fleet_memory.remove_generation(generation);
        // There was no process, so no memory will come back.
        self.replacements.note_after_exit(generation, &[]);
        // If a stop was requested meanwhile, the stop is complete.
        let stopping = self.unit(id).is_some_and(|unit| unit.phase() == BackendPhase::Stopping);
        let event = if stopping { LifecycleEvent::Exited } else { LifecycleEvent::SpawnFailed };
        self.note_end(id, generation, event, never_ready, &StartEnd::NotSpawned(error), "not created");
    }

    fn note_memory_line(&mut self, id: UnitId, line: &str) {
        if let Some(live) = self.live_mut(id) {
            live.memory.parse_line(line);
        }
    }

    /// Records how much memory came back from an ended process.
    fn note_returned_memory(&mut self, generation: GenerationId, returned: &ReturnedMemory) {
        self.dying.retain(|known| *known != generation);
        self.context.fleet_memory.remove_generation(generation);
        self.replacements.note_after_exit(generation, &returned.gpus);
        self.note_returned(returned);
        self.note_action();
    }

    fn note_exit(&mut self, id: UnitId, generation: GenerationId, exit: ProcessExit, why: OomEvidence) {
        self.dying.push(generation);
        let timed_out = self.live(id).and_then(|live| live.timed_out);
        let never_ready = self.remove_generation(id, generation);
        let end = timed_out.map_or(StartEnd::Exited(exit, why), StartEnd::TimedOut);
        let felled = self.leases.was_killed_by_request(generation);
        let event =
            |cause| if felled { LifecycleEvent::KilledByRequest } else { LifecycleEvent::Exited(cause) };
        self.note_end(id, generation, event, never_ready, &end, &exit.to_string());
    }

    /// Removes a dead generation from all state. Returns true if it was never ready.
    fn remove_generation(&mut self, id: UnitId, generation: GenerationId) -> bool {
        let running = self.leases.close_gate(generation);
        self.replacements.note_closed(generation, running);
        self.leases.remove_generation(generation);
        self.store_growth(id);
        self.end_reclaim(id, None);
        let never_ready = self.unit_mut(id).and_then(|unit| {
            let live = unit.live.take()?;
            live.cell.revoke();
            drop(std::fs::remove_file(&live.socket));
            report_file::remove_reports(&live.socket);
            reclaim_file::remove_reclaim_file(&live.socket);
            Some(live.ready.is_none())
        });
        self.replacements.note_gone(generation, running);
        self.note_action();
        never_ready == Some(true)
    }

    /// Stores the memory growth of an ended generation in the leak history.
    fn store_growth(&mut self, id: UnitId) {
        let Some(live) = self.live(id) else { return };
        let monitor = &live.memory.monitor;
        let (found, growth, key) = (monitor.priors(), monitor.growth().to_vec(), live.memory.key.clone());
        if !growth.is_empty() {
            let keep = self.watch.sensors.priors_kept;
            self.context.leak_history.learn_growth(&key, &self.spec.name, &found, &growth, keep);
        }
        self.store_held_memory(id);
    }

    /// Stores the memory that a generation held.
    pub(super) fn store_held_memory(&mut self, id: UnitId) {
        let Some(live) = self.live(id) else { return };
        let (held, key) = (live.memory.held_memory(), live.memory.key.clone());
        if !held.is_empty() {
            let keep = self.watch.sensors.priors_kept;
            self.context.leak_history.note_held(&key, &self.spec.name, &held, keep);
        }
    }

    /// Handles the end of a process. The life-cycle machine knows whether we requested the end; that
    /// decides which event is logged.
    fn note_end(
        &mut self,
        id: UnitId,
        generation: GenerationId,
        event: impl Fn(EndCause) -> LifecycleEvent,
        never_ready: bool,
        end: &StartEnd<'_>,
        exit: &str,
    ) {
        let now = self.context.now();
        let Some(replica) = self.unit(id).map(|unit| unit.replica) else { return };
        if never_ready {
            self.note_warming_death(replica);
        }
        let Some(unit) = self.unit(id) else { return };
        let mut after = unit.machine.clone();
        after.step(event(EndCause::MayPass), now, &self.spec.lifecycle);
        let mut cause = EndCause::MayPass;
        if matches!(after.phase(), BackendPhase::Backoff | BackendPhase::Failed) {
            // Remove secrets: events, the ledger and answers to clients show these lines.
            let lines = discreet::without_secrets(&self.logs.lines_of(generation));
            let refuses = never_ready && self.refuses_slot_files(&lines);
            let mut failure =
                failure::classify_end(end, &lines, self.watch.child.failure_lines, after.failures());
            let stuck = never_ready && self.note_start_death(end, &mut failure);
            cause = match failure.kind {
                // The slot directory prevented the start; the next process starts without one.
                _ if refuses => EndCause::MayPass,
                _ if stuck => EndCause::NeedsChange,
                kind if never_ready && kind.is_permanent() => EndCause::NeedsChange,
                FailureKind::OutOfMemory
                    if never_ready && self.context.fleet_memory.is_making_room(generation) =>
                {
                    EndCause::MemoryReturning
                }
                _ => EndCause::MayPass,
            };
            self.crashes += 1;
            if never_ready && cause != EndCause::MemoryReturning {
                self.report_short(failure.kind);
            }
            if let Some(unit) = self.unit_mut(id) {
                unit.failure = Some(failure.clone());
                unit.start_failures += u32::from(never_ready && cause != EndCause::MemoryReturning);
            }
            let outside = matches!(end, StartEnd::Exited(exit, _) if exit.is_from_outside());
            self.log_event(Some(generation), EventKind::Crashed { failure, outside });
        } else {
            if let Some(unit) = self.unit_mut(id) {
                unit.start_failures = 0;
            }
            self.log_event(Some(generation), EventKind::Stopped { exit: exit.to_owned() });
        }
        self.step_machine(id, event(cause));
    }

    /// Handles a logged crash by sending a probe at once. A crashed process usually ends within a second,
    /// but some builds start a debugger and wait for it for ever. The line may also be text sent by a
    /// client, and no crash.
    fn note_alarm(&mut self, id: UnitId) {
        let pause = self.spec.lifecycle.start_probe_interval;
        let Some(unit) = self.unit_mut(id) else { return };
        let phase = unit.phase();
        let Some(live) = &mut unit.live else { return };
        if live.crash_logged_at.is_some()
            || !matches!(phase, BackendPhase::Ready | BackendPhase::Suspect | BackendPhase::Draining)
        {
            return;
        }
        let now = Instant::now();
        live.crash_logged_at = Some(now);
        live.probes_lost = 0;
        // Do not rely on a probe under way: its answer may be older than the crash line. The pause prevents
        // repeated lines from causing a storm of probes.
        live.timers.probe =
            Some(live.last_probe.map_or(now, |asked| clock::after_pause(asked, pause).max(now)));
        if phase == BackendPhase::Suspect {
            self.carry_out_effect(id, LifecycleEffect::Arm(LifecycleTimer::Suspect));
        }
    }

    pub(super) fn fire_probe(&mut self, id: UnitId, now: Instant) {
        let timing = self.spec.lifecycle;
        let (gpu_age, limit) = (self.watch.sensors.gpu_age, self.watch.sensors.read_limit);
        let context = Arc::clone(&self.context);
        let history = &context.leak_history;
        let leases = Arc::clone(&self.leases);
        let heard = self.logs.line_count();
        let Some(unit) = self.unit_mut(id) else { return };
        let (starting, role) = (unit.phase() == BackendPhase::Starting, unit.role);
        let Some(live) = &mut unit.live else { return };
        if !timers::take_due(&mut live.timers.probe, now) {
            return;
        }
        let Some(process) = live.process.clone() else { return };
        live.last_probe = Some(now);
        let timeout = if live.crash_logged_at.is_some() || live.short_drain {
            timing.probe_timeout.min(timing.crash_probe())
        } else {
            timing.probe_timeout
        };
        let generation = live.id;
        live.lines_at_probe.0 = heard;
        live.progress_at_probe = live.cell.pulses.progress_count();
        // Read the VRAM of a successor: if it lost its GPU, we must know that before the old process ends.
        let reads =
            starting && role == UnitRole::Successor && history.best_offload(&live.memory.key).is_some();
        let unpacking = if starting { self.replacement_unpacking(id) } else { None };
        self.spawn_helper(generation, async move {
            let health = process.probe(timeout).await;
            let (mut props, mut vram, mut unset, mut warmed) = (None, None, Vec::new(), None);
            if health == ProbeResult::Ready && starting {
                props = Some(process.read_props(timeout).await);
                // Apply the settings before the gate opens: no request may reach a process without its
                // clients' settings.
                unset = apply_all_settings(process.as_ref(), &leases, timeout).await;
                if reads {
                    vram = process.sample(SampleOptions::brief(gpu_age, limit)).await.vram_held();
                }
                if let Some(unpacking) = unpacking {
                    let slots = props.as_ref().and_then(|props| props.slots);
                    warmed = unpacking.run(process.as_ref(), slots).await.map(Box::new);
                }
            }
            HelperReport::Probed { sent: now, health, props, vram, unset, warmed }
        });
    }

    /// Replaces a process whose socket was removed, by a cleaner of `/tmp` or with the directory at the end
    /// of a login session: running requests may end, but new ones cannot reach the process. A process that
    /// is still starting is ended. Returns true if the socket is gone.
    fn replace_unreachable(&mut self, id: UnitId, sent: Instant) -> bool {
        let in_start = |unit: &&ProcessUnit| unit.phase() == BackendPhase::Starting;
        if let Some(live) = self.unit(id).filter(in_start).and_then(|unit| unit.live.as_ref()) {
            // A process that has never answered may not have created its socket yet.
            let is_removed = live.answered && live.last_probe == Some(sent);
            if is_removed {
                self.note_late_start(id, StartLateness::SocketRemoved);
            }
            return is_removed;
        }
        let Some(unit) =
            self.unit(id).filter(|unit| matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Suspect))
        else {
            return false;
        };
        let Some(live) = unit.live.as_ref().filter(|live| live.last_probe == Some(sent)) else {
            return false;
        };
        let generation = live.id;
        let message = format!(
            "its socket {} was removed, so no request reaches it: it is started again",
            live.socket.display()
        );
        self.log_event(Some(generation), EventKind::Unwell { reason: Reason::Wedged, message });
        self.step_machine(id, LifecycleEvent::Recycle);
        true
    }

    fn note_probe(
        &mut self,
        id: UnitId,
        sent: Instant,
        health: ProbeResult,
        props: Option<ServerProps>,
        vram: Option<u64>,
        warmed: Option<Box<WarmingResult>>,
    ) {
        if health == ProbeResult::SocketGone && self.replace_unreachable(id, sent) {
            return;
        }
        let health = if health == ProbeResult::SocketGone { ProbeResult::Lost } else { health };
        if let Some(live) = self.live_mut(id).filter(|_| health.is_answer()) {
            live.answered = true;
        }
        let timing = self.spec.lifecycle;
        let crashed = health == ProbeResult::Lost && self.crash_line(id).is_some();
        let Some(unit) = self.unit_mut(id) else { return };
        let phase = unit.phase();
        let Some(live) = &mut unit.live else { return };
        let (now, generation) = (Instant::now(), live.id);
        if live.last_probe != Some(sent) {
            return;
        }
        // In a crashing process, threads that compute nothing still answer for a moment: ignore probes sent
        // before that moment is over.
        let counts = live.crash_logged_at.map(|since| clock::after(since, timing.crash_probe()));
        if health != ProbeResult::Lost && counts.is_some_and(|counts| sent < counts) {
            live.timers.probe = counts;
            return;
        }
        match phase {
            BackendPhase::Starting if health == ProbeResult::Ready => {
                live.lines_at_probe.1 = live.lines_at_probe.0;
                let turned_down = self.yields_to_old(id, vram);
                if !turned_down {
                    self.note_ready(id, props.unwrap_or_default(), warmed);
                }
            }
            BackendPhase::Starting => {
                live.timers.probe = Some(clock::after_pause(now, timing.start_probe_interval));
            }
            BackendPhase::Draining => self.note_drain_probe(id, sent, health),
            BackendPhase::Ready | BackendPhase::Suspect if live.doubted_at.is_some_and(|at| sent < at) => {
                live.timers.probe = Some(now);
            }
            BackendPhase::Ready | BackendPhase::Suspect => {
                // Requests wait while the process is doubted or has logged a crash, so probe faster.
                let hurries = health == ProbeResult::Lost
                    && (live.doubted_at.is_some() || live.crash_logged_at.is_some());
                let pause = if hurries { timing.start_probe_interval } else { timing.probe_interval };
                live.timers.probe = Some(clock::after_pause(now, pause));
                // Response bytes are a better sign of life than a probe, which may wait behind 1000
                // requests. But if the computing thread has crashed, other threads still send errors and
                // other answers, so only tokens count.
                let progressed = if crashed {
                    live.cell.pulses.progress_count() != live.progress_at_probe
                } else {
                    live.cell.progressed_since(sent)
                };
                if health != ProbeResult::Lost || progressed {
                    live.probes_lost = 0;
                    live.doubted_at = None;
                    // Restart the waiting time instead of forgetting the crash: the bytes may be older than
                    // the crash line.
                    live.crash_logged_at = live.crash_logged_at.map(|_| now);
                    if health != ProbeResult::Lost {
                        live.crash_logged_at = None;
                        live.lines_at_probe.1 = live.lines_at_probe.0;
                        self.leases.note_alive(generation);
                    }
                    if phase == BackendPhase::Suspect {
                        self.step_machine(id, LifecycleEvent::ProbesBack);
                    }
                } else {
                    live.note_lost(sent);
                    if phase == BackendPhase::Ready && live.probes_lost >= timing.probes_lost {
                        self.step_machine(id, LifecycleEvent::ProbesLost);
                    }
                }
            }
            _ => {}
        }
    }

    /// Handles a probe of a draining process. If neither probes nor running requests make progress, the
    /// drain is cut short; a process that has logged a crash gets less time.
    fn note_drain_probe(&mut self, id: UnitId, sent: Instant, health: ProbeResult) {
        let timing = self.spec.lifecycle;
        let Some(live) = self.live_mut(id) else { return };
        let now = Instant::now();
        let alarmed = live.crash_logged_at.is_some();
        let hurries = alarmed || live.short_drain;
        let pause = if hurries { timing.start_probe_interval } else { timing.probe_interval };
        live.timers.probe = Some(clock::after_pause(now, pause));
        if health != ProbeResult::Lost {
            live.crash_logged_at = None;
            live.lines_at_probe.1 = live.lines_at_probe.0;
            live.probes_lost = 0;
            if std::mem::take(&mut live.short_drain) {
                // The process is healthy again, so its requests get the usual drain time.
                self.carry_out_effect(id, LifecycleEffect::Arm(LifecycleTimer::Drain));
            }
            return;
        }
        let moved = live.cell.pulses.progress_count() != live.progress_at_probe
            || !alarmed && live.cell.progressed_since(sent);
        if moved {
            live.probes_lost = 0;
            live.crash_logged_at = live.crash_logged_at.map(|_| now);
            return;
        }
        live.note_lost(sent);
        let is_over = match live.crash_logged_at {
            Some(since) => {
                now >= clock::after(since, timing.crash_ends)
                    && live.probes_lost >= timing.probes_lost
                    && self.note_crash(id).is_some()
            }
            // The drain deadline has been shortened already.
            None if live.short_drain => false,
            None => {
                live.silent_for(timing.probes_lost).is_some_and(|silent| silent >= timing.suspect_timeout)
            }
        };
        if is_over {
            self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
        }
    }

    fn note_ready(&mut self, id: UnitId, props: ServerProps, warmed: Option<Box<WarmingResult>>) {
        let timing = self.spec.lifecycle;
        let command = self.spec.command.clone();
        let available = self.context.world.available_memory();
        let lines = self.generation(id).map(|generation| self.logs.lines_of(generation));
        let lines = lines.unwrap_or_default();
        let Some(unit) = self.unit_mut(id) else { return };
        unit.start_failures = 0;
        unit.failure = None;
        self.dead_starts.forget_deaths();
        let Some(unit) = self.unit_mut(id) else { return };
        let Some(live) = &mut unit.live else { return };
        let now = Instant::now();
        live.ready = Some(now);
        live.slots = props.slots;
        // The load time limits later starts, so exclude the time for warming.
        let warming = warmed.as_ref().map(|warmed| warmed.took).unwrap_or_default();
        let start = now.saturating_duration_since(live.spawned).saturating_sub(warming);
        let (start, adopted) = (live.adopted.unwrap_or(start), live.adopted.is_some());
        if !adopted {
            live.memory.note_ready(&command, &props, &lines, available);
        }
        live.health.note_ready(&command, &props, start);
        if let Some(tokens) = props.n_ctx {
            live.cell.pulses.set_context(tokens);
        }
        live.timers.probe = Some(clock::after_pause(now, timing.probe_interval));
        // Sample at once: the memory of a new process is the baseline when it is replaced.
        live.timers.sample = Some(now);
        let (start_ms, generation) = (clock::millis(start), live.id);
        let with = live.recipe.command().clone();
        if self.experience.note_ready(start, &props, with) {
            // Lift quarantines: requests that killed another build or command may be harmless to this one.
            self.leases.release_requests(None);
        }
        if let Some(warmed) = warmed {
            self.note_warmed(id, *warmed);
        }
        self.drop_used_state(id);
        // The gate (which lets leases be granted) opens in `step_machine`, before the event is published.
        self.step_machine(id, LifecycleEvent::ProbeReady);
        if !adopted {
            self.log_event(Some(generation), EventKind::Ready { start_ms, slots: props.slots });
        }
        self.judge_offload(id, false);
    }
}
