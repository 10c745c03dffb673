//! State shared by the tasks of all models.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::health::HealthPolicy;
use warden_policies::share::{ReplacementArbiter, ReplacementReach, ReplacementSlot, ReplacementSlotId};
use warden_policies::{GenerationId, GpuIndex, MemoryKind, ModelName};

use crate::error::LeaseDenied;
use crate::lease::refused::{ModelRefusal, RecentRefusals};
use crate::memory::fleet_memory::FleetMemory;
use crate::memory::leak_history::LeakHistory;
use crate::memory::loading::LoadingDesk;
use crate::process::{ProcessWorld, directories};
use crate::spec::{CommonConfig, FleetConfig};
use crate::state::StateWriter;
use crate::sync::lock;
use crate::view::event::EventJournal;
use crate::view::ledger::LedgerWriter;
use crate::view::publish::ViewPublisher;

#[derive(Debug)]
pub(crate) struct FleetContext {
    pub(crate) world: Arc<dyn ProcessWorld>,
    pub(crate) records: FleetRecords,
    pub(crate) paths: FleetPaths,
    pub(crate) fleet_memory: FleetMemory,
    pub(crate) leak_history: LeakHistory,
    /// Channel to the loader, which decides which models are loaded.
    pub(crate) loading: Arc<LoadingDesk>,
    pub(crate) common: Arc<Mutex<CommonConfig>>,
    arbiter: Mutex<ReplacementArbiter>,
    pub(crate) epoch: Instant,
    pub(crate) predecessor: PreviousInstance,
    generations: AtomicU64,
    /// Number of removed models that still have processes.
    pub(crate) leaving: AtomicUsize,
}

/// What is shown and stored of all models.
#[derive(Debug)]
pub(crate) struct FleetRecords {
    pub(crate) journal: Arc<EventJournal>,
    pub(crate) ledger: LedgerWriter,
    pub(crate) state: StateWriter,
    pub(crate) publisher: ViewPublisher,
}

#[derive(Debug)]
pub(crate) struct FleetPaths {
    pub(crate) runtime_dir: PathBuf,
    pub(crate) traces: PathBuf,
    /// Conversations of models with `warm = "disk"`.
    pub(crate) conversations: PathBuf,
}

/// The previous instance of the program, which still serves its requests.
#[derive(Debug)]
pub(crate) struct PreviousInstance {
    /// Cancelled as soon as this instance may decide about the processes of the previous one.
    pub(crate) begun: CancellationToken,
    /// Wakes the task that reports open gates to the previous instance.
    pub(crate) followed: Notify,
    /// Refusals to report to the previous instance.
    pub(crate) refused: RecentRefusals,
}

#[derive(Debug)]
pub(crate) struct FleetStart {
    pub(crate) epoch: Instant,
    pub(crate) generations: u64,
    pub(crate) begun: CancellationToken,
}

impl FleetStart {
    pub(crate) fn now() -> Self {
        let begun = CancellationToken::new();
        begun.cancel();
        Self { epoch: Instant::now(), generations: 0, begun }
    }
}

/// Right to replace a process now; dropping it allows the next replacement.
#[derive(Debug)]
pub(crate) struct ReplacementPermit {
    context: Arc<FleetContext>,
    slot: ReplacementSlotId,
}

impl Drop for ReplacementPermit {
    fn drop(&mut self) {
        lock(&self.context.arbiter).release(self.slot);
    }
}

impl FleetContext {
    pub(crate) fn new(
        world: Arc<dyn ProcessWorld>,
        records: FleetRecords,
        config: &FleetConfig,
        loading: Arc<LoadingDesk>,
        common: Arc<Mutex<CommonConfig>>,
        since: FleetStart,
    ) -> Self {
        Self {
            world,
            paths: FleetPaths {
                runtime_dir: config.runtime_dir.clone(),
                traces: config.state_dir.join("traces"),
                conversations: config.state_dir.join("conversations"),
            },
            fleet_memory: FleetMemory::default(),
            leak_history: LeakHistory::open(&config.state_dir, Some(records.state.clone())),
            records,
            loading,
            common,
            arbiter: Mutex::new(ReplacementArbiter::new()),
            epoch: since.epoch,
            predecessor: PreviousInstance {
                begun: since.begun,
                followed: Notify::new(),
                refused: RecentRefusals::default(),
            },
            generations: AtomicU64::new(since.generations),
            leaving: AtomicUsize::new(0),
        }
    }

    /// Reports a refusal to the previous instance, which then refuses its waiting requests of that model.
    pub(crate) fn refuse_in_predecessor(&self, model: &ModelName, denied: &LeaseDenied) {
        if let Some(refused) = ModelRefusal::now(model.as_str(), denied) {
            self.predecessor.refused.note(refused);
            self.predecessor.followed.notify_one();
        }
    }

    /// Returns a permit, or `None` while another replacement of the model or on one of the GPUs is under way.
    pub(crate) fn replacement_permit(
        self: &Arc<Self>,
        model: &ModelName,
        replica: u32,
        gpus: &[GpuIndex],
        reach: ReplacementReach,
    ) -> Option<ReplacementPermit> {
        match lock(&self.arbiter).request(model, replica, gpus, reach) {
            ReplacementSlot::Granted(slot) => Some(ReplacementPermit { context: Arc::clone(self), slot }),
            ReplacementSlot::Wait { .. } => None,
        }
    }

    /// Returns a permit at once. Later replacements wait until it is dropped.
    pub(crate) fn claim_permit(
        self: &Arc<Self>,
        model: &ModelName,
        replica: u32,
        gpus: &[GpuIndex],
    ) -> ReplacementPermit {
        let slot = lock(&self.arbiter).claim(model, replica, gpus);
        ReplacementPermit { context: Arc::clone(self), slot }
    }

    /// False if a process was ended a moment ago because this memory was almost exhausted.
    pub(crate) fn may_end_backend(&self, series: MemoryKind) -> bool {
        lock(&self.arbiter).may_end(series, self.now(), warden_policies::defaults().levels.kill_pause)
    }

    pub(crate) fn health_policy(&self) -> HealthPolicy {
        lock(&self.common).health.clone()
    }

    /// Time since the fleet started; all policies use this clock.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn next_generation(&self) -> GenerationId {
        GenerationId(self.generations.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(crate) fn last_generation(&self) -> GenerationId {
        GenerationId(self.generations.load(Ordering::Relaxed))
    }

    pub(crate) fn socket_path(&self, model: &ModelName, generation: GenerationId) -> PathBuf {
        directories::socket_path(&self.paths.runtime_dir, model, generation)
    }
}
