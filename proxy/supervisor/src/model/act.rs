//! Carries out the effects that the life-cycle machine returns.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use warden_policies::lifecycle::{BackendPhase, LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::{GenerationId, GpuIndex, Reason};

use super::context::FleetContext;
use super::environment::TaskEnvironment;
use super::experience::ModelExperience;
use super::message::{TaskMail, TaskOutbox};
use super::replacement::ReplacementTracker;
use super::room::ModelRoom;
use super::unit::{LiveGeneration, ProcessUnit, UnitId, process_recipe};
use super::{HelperReport, ModelTask, TaskMessage};
use crate::clock;
use crate::error::SpawnError;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::ward::ProcessEnd;
use crate::memory::fleet_memory::ReturnedMemory;
use crate::process::directories::SOCKET_PATH_LIMIT;
use crate::process::endpoint::{ListenAddress, choose_endpoint, listen_flags};
use crate::process::failure::OomEvidence;
use crate::process::group::ProcessExit;
use crate::process::slot_files::SlotFiles;
use crate::process::{BackendProcess, LineSink, reclaim_file, report_file};
use crate::spec::{ServerCommand, SpawnRequest, WatchConfig};
use crate::view::event::EventKind;
use crate::worker_threads::{WorkKind, run_job};

const SLOT_DIR_TIMEOUT: Duration = Duration::from_secs(5);

impl ModelTask {
    pub(super) fn step_machine(&mut self, id: UnitId, event: LifecycleEvent) {
        let now = self.env.context.now();
        let policy = self.env.spec.lifecycle;
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

    pub(super) fn step_all(&mut self, events: Vec<(UnitId, LifecycleEvent)>) {
        for (id, event) in events {
            self.step_machine(id, event);
        }
    }

    pub(super) fn carry_out_effect(&mut self, id: UnitId, effect: LifecycleEffect) {
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

impl ProcessUnit {
    /// Starts a helper that creates a process.
    fn spawn(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        room: &ModelRoom,
        experience: &ModelExperience,
    ) {
        let generation = env.context.next_generation();
        let socket = env.context.socket_path(&env.spec.name, generation);
        let (endpoint, failed) = match choose_endpoint(env.spec.run.socket, env.spec.facts, &socket) {
            Ok(endpoint) => (endpoint, None),
            Err(error) => (ListenAddress::Unix(socket.clone()), Some(error)),
        };
        let cell = Arc::new(GenerationCell::new(generation, endpoint.clone(), env.spec.facts));
        let recipe = process_recipe(&env.spec);
        let mut request = recipe.request.clone();
        request.command.args.extend(listen_flags(&endpoint));
        report_file::announce_report(&mut request.command, &socket, recipe.memory_report);
        reclaim_file::announce_reclaim(&mut request.command, &socket, recipe.reclaim);
        let mut live = experience.new_generation(env, Arc::clone(&cell), recipe, socket.clone());
        live.child.started_with = Some(request.command.clone());
        let slot_files = live.warm.files.clone();
        self.live = Some(Box::new(live));
        let gpus = room.replica_gpus(self.replica, &env.spec);
        let spawn = ProcessSpawn {
            context: Arc::clone(&env.context),
            outbox: mail.outbox.clone(),
            sink: mail.line_sink(generation, &request.command, &env.logs),
            watch: env.watch,
            needed: env.spec.command.clone(),
            cell,
            request,
            socket,
            endpoint,
            failed,
            gpus,
            slot_files,
        };
        mail.spawn_helper(generation, async move { HelperReport::Spawned(spawn.run().await) });
    }
}

impl TaskMail {
    /// Starts a helper that waits for the end of a process, and then until its memory is free again. The
    /// next start does not wait for that memory.
    pub(super) fn await_exit(
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
