//! Carries out the effects that the life-cycle machine returns.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::health::HealthSymptom;
use warden_policies::lifecycle::{BackendPhase, LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, GpuIndex, Reason};

use super::context::FleetContext;
use super::health::HealthTracker;
use super::message::TaskOutbox;
use super::unit::{LiveGeneration, UnitId, UnitRole, process_recipe};
use super::{HelperReport, ModelTask, TaskMessage};
use crate::clock;
use crate::error::SpawnError;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::ward::ProcessEnd;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::memory::leak_history;
use crate::memory::recording::SampleRecorder;
use crate::memory::tracker::MemoryTracker;
use crate::process::directories::SOCKET_PATH_LIMIT;
use crate::process::endpoint::{ListenAddress, choose_endpoint, listen_flags};
use crate::process::failure::{self, OomEvidence};
use crate::process::group::ProcessExit;
use crate::process::slot_files::SlotFiles;
use crate::process::{BackendProcess, LineSink, reclaim_file, report_file};
use crate::spec::{ServerCommand, SpawnRequest, WatchConfig};
use crate::sync::lock;
use crate::view::event::EventKind;
use crate::worker_threads::{WorkKind, run_job};

const SLOT_DIR_TIMEOUT: Duration = Duration::from_secs(5);

impl ModelTask {
    pub(super) fn step_machine(&mut self, id: UnitId, event: LifecycleEvent) {
        let now = self.context.now();
        let policy = self.spec.lifecycle;
        let asks = self.room.is_asking_to_stay();
        let Some(unit) = self.units.get_mut(id) else { return };
        let before = unit.machine.clone();
        if asks
            && matches!(event, LifecycleEvent::Exited(_) | LifecycleEvent::KilledByRequest)
            && before.restarts_when_ended()
        {
            // Do not let the machine restart by itself: a start after this end needs the loader's answer.
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
                self.context.fleet_memory.note_leaving(live.id);
            }
        }
        if has_changed || !effects.is_empty() {
            self.life.note_action();
        }
        for effect in effects {
            self.carry_out_effect(id, effect);
        }
        if phase != before.phase() {
            self.log_phase_change(id, before.phase(), phase);
        }
    }

    fn log_phase_change(&mut self, id: UnitId, before: BackendPhase, phase: BackendPhase) {
        let Some(unit) = self.units.get(id) else { return };
        let generation = unit.generation();
        match (before, phase) {
            (_, BackendPhase::Suspect) => {
                let refused = unit.live.as_ref().is_some_and(|live| live.probing.doubted_at.is_some());
                let crash = self.crash_line(id);
                self.log_event(generation, EventKind::Suspect { refused, crash });
            }
            (BackendPhase::Suspect, BackendPhase::Ready) => self.log_event(generation, EventKind::Recovered),
            (_, BackendPhase::Draining) => {
                let in_flight = generation.map_or(0, |generation| self.leases.in_flight(generation));
                self.log_event(generation, EventKind::Draining { in_flight });
            }
            (_, BackendPhase::Failed) => {
                if let Some(failure) = unit.failure.clone() {
                    self.log_event(None, EventKind::Failed { failure });
                }
            }
            _ => {}
        }
    }

    pub(super) fn carry_out_effect(&mut self, id: UnitId, effect: LifecycleEffect) {
        match effect {
            LifecycleEffect::Spawn => self.spawn_process(id),
            LifecycleEffect::OpenGate => self.open_gate(id),
            LifecycleEffect::CloseGate => {
                if let Some(generation) = self.units.generation(id) {
                    let running = self.leases.close_gate(generation);
                    self.replacements.note_closed(generation, running);
                }
            }
            LifecycleEffect::Term => self.signal_process(id, LiveGeneration::terminate),
            LifecycleEffect::Kill => self.signal_process(id, LiveGeneration::kill),
            LifecycleEffect::Arm(timer) => self.arm_timer(id, timer),
            LifecycleEffect::Disarm => {
                if let Some(unit) = self.units.get_mut(id) {
                    unit.timer = None;
                    if let Some(live) = &mut unit.live {
                        live.probing.crashed_at = None;
                    }
                }
            }
            LifecycleEffect::Alarm => {
                let policy = self.spec.lifecycle;
                if let Some(failure) = self.units.get(id).and_then(|unit| unit.failure.clone()) {
                    let ends = policy.breaker_failures;
                    let within_s = policy.breaker_window.as_secs();
                    self.log_event(None, EventKind::CrashLoop { ends, within_s, failure });
                }
            }
        }
    }

    fn arm_timer(&mut self, id: UnitId, timer: LifecycleTimer) {
        let timing = self.spec.lifecycle;
        let after = match timer {
            LifecycleTimer::Start => timing.start_timeout,
            LifecycleTimer::Suspect => match self.note_crash(id) {
                Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.suspect_timeout),
                None => timing.suspect_timeout,
            },
            // The drain deadline is shorter for a crashed or silent process.
            LifecycleTimer::Drain => self.longest_drain(id),
            LifecycleTimer::Grace if self.units.live(id).is_some_and(|live| live.child.short_grace) => {
                timing.kill_grace
            }
            LifecycleTimer::Grace => timing.stop_grace,
            LifecycleTimer::Backoff { failures, short } => {
                let delay = timing.pause(failures, short, rand::random());
                self.log_event(None, EventKind::Backoff { delay_ms: clock::millis(delay), failures });
                delay
            }
            LifecycleTimer::Trial => timing.recheck,
        };
        if let Some(unit) = self.units.get_mut(id) {
            unit.timer = Some((timer, clock::after(Instant::now(), after)));
        }
    }

    /// Crash line that the process has logged since it last answered a probe. An older line is ignored:
    /// it may be text that a client sent.
    pub(super) fn crash_line(&self, id: UnitId) -> Option<String> {
        let live = self.units.live(id)?;
        failure::crash_line(&self.logs.lines_since(live.id, live.probing.lines_at_answer))
    }

    /// Handles an unanswered probe. Returns the time of the crash if the process has logged one since its
    /// last answered probe.
    pub(super) fn note_crash(&mut self, id: UnitId) -> Option<Instant> {
        let has_line = self.crash_line(id).is_some();
        let live = self.units.live_mut(id)?;
        live.probing.crashed_at = has_line.then(|| live.probing.crash_logged_at.unwrap_or_else(Instant::now));
        live.probing.crashed_at
    }

    fn longest_drain(&mut self, id: UnitId) -> Duration {
        let timing = self.spec.lifecycle;
        let Some(live) = self.units.live_mut(id) else { return timing.drain_deadline };
        match live.probing.crashed_at {
            // After a crash, the process answers no more requests.
            Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.drain_deadline),
            // A process that was stopped by SIGSTOP may continue later.
            None if live.probing.silent_for(timing.probes_lost).is_some() => {
                live.probing.short_drain = true;
                timing.crash_ends.min(timing.drain_deadline)
            }
            None => timing.drain_deadline,
        }
    }

    fn signal_process(&mut self, id: UnitId, signal: impl FnOnce(&mut LiveGeneration)) {
        let Some(generation) = self.units.generation(id) else { return };
        // Count the requests before the signal: the signal revokes their leases, and other threads return
        // those at once.
        let running = self.leases.in_flight(generation);
        self.replacements.note_stopped(generation, running);
        let hung = self.hung_duration(id, running);
        let Some(live) = self.units.live_mut(id) else { return };
        if let Some(hung) = hung {
            live.cell.note_hung(hung);
        }
        signal(live);
    }

    /// Duration of the hang for which a process is ended. Its requests may be the cause.
    fn hung_duration(&self, id: UnitId, running: u32) -> Option<Duration> {
        let live = self.units.live(id)?;
        let silent = |symptom: &HealthSymptom| match symptom {
            HealthSymptom::Wedged { seconds, .. } => Some(Duration::from_secs(*seconds)),
            _ => None,
        };
        let crashed = live.probing.crashed_at.map(|since| since.elapsed());
        let now = crashed.or_else(|| live.health.symptoms().iter().find_map(silent));
        if now.is_none() && running == 0 {
            // Without requests the process shows no symptom: use the recorded reason of its replacement.
            return self.replacements.replaced_since(live.id, Reason::Wedged);
        }
        now
    }

    fn open_gate(&mut self, id: UnitId) {
        let Some(unit) = self.units.get(id) else { return };
        let Some(live) = &unit.live else { return };
        let limit = self.lease_limit(live.start.slots);
        let spawned = live.start.spawned;
        let start = live.start.ready.unwrap_or(spawned).saturating_duration_since(spawned);
        let opened = self.leases.open_gate(&live.cell, limit);
        if unit.role != UnitRole::Retiring
            && let Some((reason, passed)) =
                self.replacements.note_opened(unit.replica, live.id, &opened, start)
            && reason.is_policy()
        {
            let cooldown = &mut self.replacements.cooldown;
            cooldown.record_ready(self.context.now());
            if let Some(first) = passed {
                cooldown.record_replacement(&first, self.experience.load_time, &self.spec.recycle);
            }
        }
        self.life.note_action();
    }

    pub(super) fn lease_limit(&self, slots: Option<u32>) -> u32 {
        self.spec.max_in_flight.or(slots).unwrap_or(self.spec.lifecycle.unknown_slots)
    }

    fn spawn_process(&mut self, id: UnitId) {
        self.experience.dead_starts.stop_search();
        let generation = self.context.next_generation();
        let socket = self.context.socket_path(&self.spec.name, generation);
        let (endpoint, failed) = match choose_endpoint(self.spec.run.socket, self.spec.facts, &socket) {
            Ok(endpoint) => (endpoint, None),
            Err(error) => (ListenAddress::Unix(socket.clone()), Some(error)),
        };
        let cell = Arc::new(GenerationCell::new(generation, endpoint.clone(), self.spec.facts));
        let recipe = process_recipe(&self.spec);
        let memory = self.new_tracker(generation, recipe.command());
        let health = HealthTracker::new(&lock(&self.context.common), recipe.command());
        let mut request = recipe.request.clone();
        request.command.args.extend(listen_flags(&endpoint));
        report_file::announce_report(&mut request.command, &socket, recipe.memory_report);
        reclaim_file::announce_reclaim(&mut request.command, &socket, recipe.reclaim);
        let mut live =
            LiveGeneration::new(generation, socket.clone(), Arc::clone(&cell), recipe, memory, health);
        let slot_files = self.experience.slot_files(&self.spec, &socket);
        live.warm.files.clone_from(&slot_files);
        live.child.started_with = Some(request.command.clone());
        let Some(unit) = self.units.get_mut(id) else { return };
        unit.live = Some(Box::new(live));
        let gpus = self.room.replica_gpus(unit.replica, &self.spec);
        let spawn = ProcessSpawn {
            context: Arc::clone(&self.context),
            outbox: self.mail.outbox.clone(),
            sink: self.mail.line_sink(generation, &request.command, &self.logs),
            watch: self.watch,
            needed: self.spec.command.clone(),
            cell,
            request,
            socket,
            endpoint,
            failed,
            gpus,
            slot_files,
        };
        self.mail.spawn_helper(generation, async move { HelperReport::Spawned(spawn.run().await) });
    }

    pub(super) fn new_tracker(&self, generation: GenerationId, command: &ServerCommand) -> MemoryTracker {
        let context = &self.context;
        let key = leak_history::process_key(command);
        let common = lock(&context.common).clone();
        let prices = self.experience.prices(&key);
        let measured = context.leak_history.measurements(&key);
        let leaks = context.leak_history.leaks_of(&key);
        let mut memory = MemoryTracker::new(&common, leaks, key, command);
        memory.set_measurements(measured);
        for price in prices {
            memory.cost.set_price(*price);
        }
        if self.spec.run.record {
            let limit = self.watch.sensors.trace_bytes.0;
            let name = &self.spec.name;
            let recorder = SampleRecorder::begin(&context.state, &context.traces, name, generation, limit);
            memory.recorder = Some(recorder);
        }
        memory
    }

    /// Starts a helper that waits for the end of a process, and then until its memory is free again. The
    /// next start does not wait for that memory.
    pub(super) fn await_exit(&mut self, generation: GenerationId, process: Arc<dyn BackendProcess>) {
        /// Maximum number of readings of the freed memory. A reading is useless while another process starts.
        const MAX_RETURN_LOOKS: u32 = 5;
        let context = Arc::clone(&self.context);
        let sensors = self.watch.sensors;
        let outbox = self.mail.outbox.clone();
        let live = self.units.lives().find(|live| live.id == generation);
        let cell = live.map(|live| Arc::clone(&live.cell));
        let leases = Arc::clone(&self.leases);
        self.mail.spawn_helper(generation, async move {
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

    pub(super) fn exit_patience(&self) -> Duration {
        self.spec.lifecycle.stop_grace.saturating_mul(2)
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

/// Input of the helper task that creates a process.
struct ProcessSpawn {
    context: Arc<FleetContext>,
    outbox: TaskOutbox,
    sink: LineSink,
    watch: WatchConfig,
    needed: ServerCommand,
    cell: Arc<GenerationCell>,
    request: SpawnRequest,
    socket: PathBuf,
    endpoint: ListenAddress,
    failed: Option<io::Error>,
    gpus: Vec<GpuIndex>,
    slot_files: Option<Arc<SlotFiles>>,
}

impl ProcessSpawn {
    async fn run(mut self) -> Result<Arc<dyn BackendProcess>, SpawnError> {
        let world = Arc::clone(&self.context.world);
        // Check just before the start, so that no later change is missed.
        let sight = world.check_needs(self.needed, None).await;
        if let Some(kin) = sight.kin {
            let _first = self.cell.kin.set(kin);
        }
        self.outbox.send(TaskMessage::Report(self.cell.id, HelperReport::Looked(sight)));
        if let Some(source) = self.failed.or_else(|| socket_path_error(&self.socket)) {
            return Err(SpawnError::Exec { binary: self.request.command.binary, source });
        }
        let limit = self.watch.sensors.read_limit;
        if !self.gpus.is_empty()
            && let Some(only) = world.gpu_restriction(self.gpus, limit).await
        {
            self.request.command.env.push(only);
        }
        // Remove files left by an earlier supervisor with the same PID that was killed.
        drop(std::fs::remove_file(&self.socket));
        report_file::remove_reports(&self.socket);
        if let Some(files) = self.slot_files {
            prepare_slot_files(files, &mut self.request.command, &self.cell).await;
        }
        self.context.fleet_memory.add_generation(self.cell.id, &world.free_memory(limit).await);
        let longest = self.watch.child.log_line_bytes;
        world.spawn(self.request, self.socket, self.endpoint, longest, self.sink).await
    }
}

fn socket_path_error(socket: &Path) -> Option<io::Error> {
    let length = socket.as_os_str().len();
    (length > SOCKET_PATH_LIMIT).then(|| {
        io::Error::other(format!(
            "the socket path {} has {length} bytes, more than a Unix socket's path may have \
             ({SOCKET_PATH_LIMIT}): choose a shorter runtime_dir",
            socket.display()
        ))
    })
}

/// Prepares the slot directory on a worker thread: leftover slot files are large, and disks may hang.
async fn prepare_slot_files(files: Arc<SlotFiles>, command: &mut ServerCommand, cell: &GenerationCell) {
    let mut announced = command.clone();
    let announcing = run_job(WorkKind::ModelFiles, move || (files.announce(&mut announced), announced));
    match tokio::time::timeout(SLOT_DIR_TIMEOUT, announcing).await {
        Ok(Ok((Ok(is_ours), announced))) => {
            *command = announced;
            cell.saves_for_us.store(is_ours, Ordering::Relaxed);
        }
        // Start without saving slots: nothing would remove the slot files after a SIGKILL.
        Ok(Ok((Err(error), _))) => {
            tracing::warn!(%error, "cannot prepare the directory for slots: slots are not saved");
        }
        Ok(Err(error)) => tracing::warn!(%error, "slots are not saved"),
        Err(_) => tracing::warn!("the directory for slots does not answer"),
    }
}
