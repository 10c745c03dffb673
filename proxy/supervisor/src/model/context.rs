//! What all models of a fleet share: the outside world, the journal, the ledger, the picture, the generation counter, who
//! may replace a process now, and what is known of all their processes together.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::share::{Arbiter, Reach, ReplacementSlot, ReplacementSlotId};
use warden_policies::{GenerationId, GpuIndex, MemoryKind, ModelName};

use crate::error::Denied;
use crate::lease::refused::{Refusals, Refused};
use crate::memory::fleet_memory::FleetMemory;
use crate::memory::leak_history::LeakHistory;
use crate::memory::loading::LoadingDesk;
use crate::process::{World, socket_name};
use crate::spec::{Common, FleetConfig};
use crate::state::StateWriter;
use crate::sync::lock;
use crate::view::event::Journal;
use crate::view::ledger::Ledger;
use crate::view::publish::Publisher;

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) world: Arc<dyn World>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) ledger: Ledger,
    /// Where all that is kept is written.
    pub(crate) state: StateWriter,
    pub(crate) publisher: Publisher,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) traces: PathBuf,
    pub(crate) fleet_memory: FleetMemory,
    pub(crate) leak_history: LeakHistory,
    /// Where models tell what they want and hold.
    pub(crate) loading: Arc<LoadingDesk>,
    /// What all models share of the configuration.
    pub(crate) common: Arc<Mutex<Common>>,
    /// Memory that did not come back when a process had ended, in words, by GPU.
    pub(crate) leaks: Mutex<BTreeMap<GpuIndex, String>>,
    arbiter: Mutex<Arbiter>,
    pub(crate) epoch: Instant,
    /// Cancelled once we own what an instance before us may have left.
    pub(crate) begun: CancellationToken,
    generations: AtomicU64,
    /// Models that were removed and still have processes.
    pub(crate) leaving: AtomicUsize,
    /// Wakes whoever tells the instance before us where requests go: we have let go, and follow the gates of the next one.
    pub(crate) followed: Notify,
    /// What that one is told of callers who were turned away.
    pub(crate) refused: Refusals,
}

/// Where it goes on.
#[derive(Debug)]
pub(crate) struct Since {
    /// When the fleet began.
    pub(crate) epoch: Instant,
    /// The last generation made.
    pub(crate) generations: u64,
    pub(crate) begun: CancellationToken,
}

impl Since {
    /// At the beginning.
    pub(crate) fn now() -> Self {
        let begun = CancellationToken::new();
        begun.cancel();
        Self { epoch: Instant::now(), generations: 0, begun }
    }
}

/// The right to replace a process now. Dropping it lets the next one go.
#[derive(Debug)]
pub(crate) struct Permit {
    context: Arc<Context>,
    slot: ReplacementSlotId,
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.context.arbiter).release(self.slot);
    }
}

impl Context {
    #[expect(clippy::too_many_arguments, reason = "each is another thing, and it is called in one place")]
    pub(crate) fn new(
        world: Arc<dyn World>,
        journal: Arc<Journal>,
        ledger: Ledger,
        state: StateWriter,
        config: &FleetConfig,
        loading: Arc<LoadingDesk>,
        common: Arc<Mutex<Common>>,
        since: Since,
    ) -> Self {
        Self {
            world,
            journal,
            ledger,
            publisher: Publisher::default(),
            runtime_dir: config.runtime_dir.clone(),
            traces: config.state_dir.join("traces"),
            fleet_memory: FleetMemory::default(),
            leak_history: LeakHistory::open(&config.state_dir, Some(state.clone())),
            state,
            loading,
            common,
            leaks: Mutex::default(),
            arbiter: Mutex::new(Arbiter::new()),
            epoch: since.epoch,
            begun: since.begun,
            followed: Notify::new(),
            refused: Refusals::default(),
            generations: AtomicU64::new(since.generations),
            leaving: AtomicUsize::new(0),
        }
    }

    /// Callers of a model are turned away. Those who wait in the instance before us are its callers, too.
    pub(crate) fn turn_away_before_us(&self, model: &ModelName, denied: &Denied) {
        if let Some(refused) = Refused::now(model.as_str(), denied) {
            self.refused.note(refused);
            self.followed.notify_one();
        }
    }

    /// The right to replace a replica that uses these GPUs; `None` while another replacement of the model or on one of
    /// the GPUs is under way.
    pub(crate) fn permit(
        self: &Arc<Self>,
        model: &ModelName,
        replica: u32,
        gpus: &[GpuIndex],
        reach: Reach,
    ) -> Option<Permit> {
        match lock(&self.arbiter).request(model, replica, gpus, reach) {
            ReplacementSlot::Granted(slot) => Some(Permit { context: Arc::clone(self), slot }),
            ReplacementSlot::Wait { .. } => None,
        }
    }

    /// The right to replace a replica at once, whoever is at it. Others wait for its end.
    pub(crate) fn claim(self: &Arc<Self>, model: &ModelName, replica: u32, gpus: &[GpuIndex]) -> Permit {
        let slot = lock(&self.arbiter).claim(model, replica, gpus);
        Permit { context: Arc::clone(self), slot }
    }

    /// Whether a backend may be ended because this memory is almost gone: one at a time.
    pub(crate) fn may_end(&self, series: MemoryKind) -> bool {
        lock(&self.arbiter).may_end(series, self.now(), warden_policies::defaults().levels.kill_pause)
    }

    /// Time since the fleet started: the clock of all policies.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn next_generation(&self) -> GenerationId {
        GenerationId(self.generations.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The last generation made: every later one has a greater number.
    pub(crate) fn last_generation(&self) -> GenerationId {
        GenerationId(self.generations.load(Ordering::Relaxed))
    }

    pub(crate) fn socket(&self, model: &ModelName, generation: GenerationId) -> PathBuf {
        socket_name::socket(&self.runtime_dir, model, generation)
    }
}
