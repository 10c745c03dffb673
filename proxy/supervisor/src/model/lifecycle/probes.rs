//! Sends probes to processes and handles their results.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::{
    BackendPhase, LifecycleEffect, LifecycleEvent, LifecyclePolicy, LifecycleTimer,
};

use crate::clock;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::experience::ModelExperience;
use crate::model::generation::{LiveGeneration, take_due};
use crate::model::lifecycle::spread::apply_all_settings;
use crate::model::message::{HelperReport, ProbeReport, TaskMail};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::{UnitId, UnitList, UnitRole};
use crate::model::warm::unpack::WarmingResult;
use crate::process::answer_probe::find_alteration;
use crate::process::failure::StartLateness;
use crate::process::{ProbeResult, SampleOptions, ServerProps};
use crate::view::event::EventKind;
use crate::view::log::LogRing;

/// Longest delay of a start by the fixed prompts. In a sequential replacement no process serves meanwhile.
const SUCCESSOR_TEST_LIMIT: Duration = Duration::from_secs(2);

impl ModelTask {
    pub(crate) fn note_probe(&mut self, id: UnitId, report: ProbeReport) {
        let ProbeReport { sent, mut health, props, vram, warmed, altered, .. } = report;
        if health == ProbeResult::SocketGone {
            let Some((phase, live)) = self.units.phase_and_live(id) else { return };
            if let Some(event) = live.note_removed_socket(&self.env, phase, sent) {
                return self.step_machine(id, event);
            }
            health = ProbeResult::Lost;
        }
        let timing = self.env.spec.lifecycle;
        let Some((phase, live)) = self.units.phase_and_live(id) else { return };
        if health == ProbeResult::Silent {
            // A server with one thread answers no probe while it works on a request. `HealthTracker` limits the
            // time of such a request.
            let is_busy = self.env.leases.in_flight(live.id) > 0;
            health = if is_busy { ProbeResult::Loading } else { ProbeResult::Lost };
        }
        live.probing.answered |= health.is_answer();
        if live.probing.last_probe != Some(sent) {
            return;
        }
        // Threads of a crashing process may still answer for a moment, so ignore probes sent in that time.
        let counts = live.probing.crash_logged_at.map(|since| clock::after(since, timing.crash_probe()));
        if health != ProbeResult::Lost && counts.is_some_and(|counts| sent < counts) {
            live.timers.probe = counts;
            return;
        }
        let now = Instant::now();
        match phase {
            BackendPhase::Starting if health == ProbeResult::Ready => {
                live.probing.lines_at_answer = live.probing.lines_at_probe;
                if self.replacements.rejects_successor(&self.env, &mut self.units, id, vram) {
                    self.step_machine(id, LifecycleEvent::Down);
                } else {
                    self.note_ready(id, &props.unwrap_or_default(), warmed);
                    self.note_successor_answers(id, altered);
                }
            }
            BackendPhase::Starting => {
                live.timers.probe = Some(clock::after_pause(now, timing.start_probe_interval));
            }
            BackendPhase::Draining => {
                let is_over = live.note_drain_probe(&timing, &self.env.logs, sent, health);
                if health != ProbeResult::Lost && std::mem::take(&mut live.probing.short_drain) {
                    // The process answers again, so its requests get the usual drain time.
                    self.carry_out_effect(id, LifecycleEffect::Arm(LifecycleTimer::Drain));
                } else if is_over {
                    self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
                }
            }
            BackendPhase::Ready | BackendPhase::Suspect
                if live.probing.doubted_at.is_some_and(|at| sent < at) =>
            {
                live.timers.probe = Some(now);
            }
            BackendPhase::Ready | BackendPhase::Suspect => {
                if let Some(event) = live.note_service_probe(&self.env, phase, sent, health) {
                    self.step_machine(id, event);
                }
            }
            _ => {}
        }
    }

    fn note_ready(&mut self, id: UnitId, props: &ServerProps, warmed: Option<Box<WarmingResult>>) {
        let Some(generation) = self.units.generation(id) else { return };
        let command = &self.env.spec.command;
        let available = self.env.context.world.available_memory();
        let lines = self.env.logs.lines_of(generation);
        self.experience.dead_starts.forget_deaths();
        let Some(unit) = self.units.get_mut(id) else { return };
        // After a failed start, no conversations were restored, so nothing is known about them.
        let is_cold_retry = unit.start_failures > 0;
        unit.start_failures = 0;
        unit.failure = None;
        let Some(live) = &mut unit.live else { return };
        let now = Instant::now();
        live.start.ready = Some(now);
        live.start.slots = props.slots;
        // The load time limits later starts, so it excludes warming.
        let warming = warmed.as_ref().map(|warmed| warmed.took).unwrap_or_default();
        let own_start = now.saturating_duration_since(live.start.spawned).saturating_sub(warming);
        let start = live.start.adopted.unwrap_or(own_start);
        let is_adopted = live.start.adopted.is_some();
        if !is_adopted {
            let bounded = command.with_variables(&self.env.spec.start.cache_bounds);
            live.memory.note_ready(&bounded, props, &lines, available);
        }
        live.health.note_ready(command, props, start);
        if let Some(tokens) = props.n_ctx {
            live.cell.pulses.set_context(tokens);
        }
        live.timers.probe = Some(clock::after_pause(now, self.env.spec.lifecycle.probe_interval));
        // The first sample is the baseline for the memory policy.
        live.timers.sample = Some(now);
        self.replacements.pace.load_time = Some(start);
        if self.experience.note_ready(start, props, live.recipe.command().clone()) {
            // Requests that crashed another build or command may be harmless to this process.
            self.env.leases.ward.release(None);
        }
        if let Some(warmed) = warmed {
            let experience = &mut self.experience;
            self.replacements.note_warmed(&self.env, &mut self.mail, experience, live, *warmed);
        }
        if let Some(unit) = self.units.get(id)
            && unit.role == UnitRole::Current
        {
            self.experience.kept_state.retain(|kept| kept.replica != unit.replica);
        }
        if !is_cold_retry && let (Some(unit), Some(store)) = (self.units.get(id), &self.experience.stored) {
            store.note_restored(unit.replica);
        }
        // `step_machine` opens the gate before it publishes the event.
        self.step_machine(id, LifecycleEvent::ProbeReady);
        if !is_adopted {
            let start_ms = clock::millis(start);
            self.env.log_event(Some(generation), EventKind::Ready { start_ms, slots: props.slots });
        }
        self.life.judge_offload(&self.env, &mut self.units, id, false);
    }
}

impl TaskMail {
    /// Starts a helper that probes a process, if its probe is due.
    pub(crate) fn fire_probe(
        &mut self,
        env: &TaskEnvironment,
        units: &mut UnitList,
        replacements: &mut ReplacementTracker,
        experience: &ModelExperience,
        id: UnitId,
        now: Instant,
    ) {
        let timing = env.spec.lifecycle;
        let heard = env.logs.line_count();
        let Some(unit) = units.get_mut(id) else { return };
        let is_starting = unit.phase() == BackendPhase::Starting;
        let Some(live) = &mut unit.live else { return };
        if !take_due(&mut live.timers.probe, now) {
            return;
        }
        let Some(process) = live.child.process.clone() else { return };
        let probing = &mut live.probing;
        probing.last_probe = Some(now);
        let timeout = if probing.crash_logged_at.is_some() || probing.short_drain {
            timing.probe_timeout.min(timing.crash_probe())
        } else {
            timing.probe_timeout
        };
        probing.lines_at_probe = heard;
        probing.progress_at_probe = live.cell.pulses.progress_count();
        let generation = live.id;
        // A successor that lost its GPU must be found before the old process ends.
        let reads_vram = is_starting
            && unit.role == UnitRole::Successor
            && env.context.leak_history.best_offload(&live.memory.key).is_some();
        let reference = replacements.reference_answers(env, unit.replica, live.cell.kin.get());
        let unpacking = match units.get(id) {
            Some(unit) if is_starting => replacements.warming(env, units, experience, unit),
            _ => None,
        };
        let leases = Arc::clone(&env.leases);
        let sensors = env.watch.sensors;
        self.spawn_helper(generation, async move {
            let mut report = ProbeReport::new(now, process.probe(timeout).await);
            if report.health == ProbeResult::Ready && is_starting {
                let props = process.read_props(timeout).await;
                let slots = props.slots;
                report.props = Some(props);
                // Apply the settings before the gate opens, so that all requests find them.
                report.unset = apply_all_settings(process.as_ref(), &leases, timeout).await;
                if reads_vram {
                    let brief = SampleOptions::brief(sensors.gpu_age, sensors.read_limit);
                    report.vram = process.sample(brief).await.vram_held();
                }
                if let Some(reference) = reference {
                    let compared = find_alteration(process.as_ref(), &reference, None, timeout);
                    // Without a result in time, the process serves as any other.
                    let result = tokio::time::timeout(timeout.min(SUCCESSOR_TEST_LIMIT), compared).await;
                    report.altered = result.ok().flatten().flatten();
                }
                if let Some(unpacking) = unpacking {
                    report.warmed = unpacking.run(process.as_ref(), slots).await.map(Box::new);
                }
            }
            HelperReport::Probed(report)
        });
    }
}

impl LiveGeneration {
    /// Ends a process that is not ready in time.
    pub(crate) fn note_late_start(&mut self, lateness: StartLateness) -> LifecycleEvent {
        self.start.timed_out = Some(lateness);
        LifecycleEvent::Timer(LifecycleTimer::Start)
    }

    /// Replaces a process whose socket was removed, by a cleaner of `/tmp` or at the end of a login session:
    /// new requests cannot reach it. A starting process is ended.
    fn note_removed_socket(
        &mut self,
        env: &TaskEnvironment,
        phase: BackendPhase,
        sent: Instant,
    ) -> Option<LifecycleEvent> {
        if self.probing.last_probe != Some(sent) {
            return None;
        }
        match phase {
            // A process that has never answered may not have created its socket yet.
            BackendPhase::Starting if self.probing.answered => {
                Some(self.note_late_start(StartLateness::SocketRemoved))
            }
            BackendPhase::Ready | BackendPhase::Suspect => {
                let message = format!(
                    "its socket {} was removed, so no request reaches it: it is started again",
                    self.child.socket.display()
                );
                env.log_event(Some(self.id), EventKind::Unwell { reason: Reason::Wedged, message });
                Some(LifecycleEvent::Recycle)
            }
            _ => None,
        }
    }

    /// Probes a process at once after a crash line. Most crashed processes end within a second, but some
    /// builds wait for a debugger for ever. The line may also be a client's text. Returns true if the process has
    /// less time left to answer.
    pub(crate) fn note_alarm(&mut self, phase: BackendPhase, pause: Duration) -> bool {
        if self.probing.crash_logged_at.is_some()
            || !matches!(phase, BackendPhase::Ready | BackendPhase::Suspect | BackendPhase::Draining)
        {
            return false;
        }
        let now = Instant::now();
        self.probing.crash_logged_at = Some(now);
        self.probing.probes_lost = 0;
        // The answer to a probe under way may be older than the crash line. The pause prevents many probes
        // after repeated lines.
        self.timers.probe =
            Some(self.probing.last_probe.map_or(now, |asked| clock::after_pause(asked, pause).max(now)));
        phase == BackendPhase::Suspect
    }

    /// Handles a probe of a serving process. Returns a change for the life-cycle machine.
    fn note_service_probe(
        &mut self,
        env: &TaskEnvironment,
        phase: BackendPhase,
        sent: Instant,
        health: ProbeResult,
    ) -> Option<LifecycleEvent> {
        let timing = &env.spec.lifecycle;
        let now = Instant::now();
        let is_lost = health == ProbeResult::Lost;
        let has_crashed = is_lost && self.crash_line(&env.logs).is_some();
        // Requests wait for this process, so probe more often.
        let probing = &mut self.probing;
        let hurries = is_lost && (probing.doubted_at.is_some() || probing.crash_logged_at.is_some());
        let pause = if hurries { timing.start_probe_interval } else { timing.probe_interval };
        self.timers.probe = Some(clock::after_pause(now, pause));
        // Response bytes are a better sign of life than a probe, which may wait behind 1000 requests. After a
        // crash of the computing thread, other threads still send errors, so only tokens count.
        let pulses = &self.cell.pulses;
        let has_progressed = if has_crashed {
            pulses.progress_count() != probing.progress_at_probe
        } else {
            pulses.received_since(sent)
        };
        if is_lost && !has_progressed {
            probing.note_lost(sent);
            let is_over = phase == BackendPhase::Ready && probing.probes_lost >= timing.probes_lost;
            return is_over.then_some(LifecycleEvent::ProbesLost);
        }
        probing.doubted_at = None;
        if is_lost {
            probing.note_progress(now);
        } else {
            probing.note_answer();
            env.leases.note_alive(self.id);
        }
        (phase == BackendPhase::Suspect).then_some(LifecycleEvent::ProbesBack)
    }

    /// Returns true to cut a drain short: neither probes nor running requests make progress.
    fn note_drain_probe(
        &mut self,
        timing: &LifecyclePolicy,
        logs: &LogRing,
        sent: Instant,
        health: ProbeResult,
    ) -> bool {
        let now = Instant::now();
        let probing = &mut self.probing;
        let is_alarmed = probing.crash_logged_at.is_some();
        let hurries = is_alarmed || probing.short_drain;
        let pause = if hurries { timing.start_probe_interval } else { timing.probe_interval };
        self.timers.probe = Some(clock::after_pause(now, pause));
        if health != ProbeResult::Lost {
            probing.note_answer();
            return false;
        }
        let pulses = &self.cell.pulses;
        if pulses.progress_count() != probing.progress_at_probe || !is_alarmed && pulses.received_since(sent)
        {
            probing.note_progress(now);
            return false;
        }
        probing.note_lost(sent);
        match probing.crash_logged_at {
            Some(since) => {
                now >= clock::after(since, timing.crash_ends)
                    && probing.probes_lost >= timing.probes_lost
                    && self.note_crash(logs).is_some()
            }
            None if probing.short_drain => false,
            None => {
                probing.silent_for(timing.probes_lost).is_some_and(|silent| silent >= timing.suspect_timeout)
            }
        }
    }
}
