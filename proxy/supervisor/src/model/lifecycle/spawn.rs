//! Creates the process of a unit.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use warden_policies::GpuIndex;

use crate::error::SpawnError;
use crate::lease::cell::GenerationCell;
use crate::model::context::FleetContext;
use crate::model::environment::TaskEnvironment;
use crate::model::experience::ModelExperience;
use crate::model::generation::process_recipe;
use crate::model::loading::room::ModelRoom;
use crate::model::message::{HelperReport, TaskMail, TaskMessage, TaskOutbox};
use crate::model::unit::ProcessUnit;
use crate::process::directories::SOCKET_PATH_LIMIT;
use crate::process::endpoint::{ListenAddress, choose_endpoint, set_endpoint};
use crate::process::slot_files::SlotFiles;
use crate::process::{BackendProcess, LineSink, reclaim_file, report_file};
use crate::spec::{ServerCommand, SpawnRequest, WatchConfig};
use crate::worker_threads::run_job;

const SLOT_DIR_TIMEOUT: Duration = Duration::from_secs(5);

impl ProcessUnit {
    /// Starts a helper that creates a process.
    pub(super) fn spawn(
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
        cell.replica.store(self.replica, Ordering::Relaxed);
        let recipe = process_recipe(&env.spec);
        let mut request = recipe.request.clone();
        set_endpoint(&mut request.command, &endpoint);
        request.command.env.extend(env.spec.start.cache_bounds.iter().cloned());
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
    let announcing = run_job(files.work_kind(), move || (files.announce(&mut announced), announced));
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
