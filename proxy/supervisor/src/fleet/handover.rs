//! Hands a fleet over to the next instance of the program, with its running processes.
//!
//! ```text
//!     this one:  serves ── freeze ── will ─────────────────── let go ── remaining leases ── disbanded
//!                                     │                         ^ │ counts, until all are zero
//!     the next:            starts ────┴── adopts, probes ── ready ┴── begins ── decides ...
//! ```
//!
//! Between freezing and letting go, no instance makes decisions; this instance still serves requests.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::{GenerationId, ModelName, WorkDone};

use super::roster::ModelHandle;
use super::{Fleet, FleetInner};
use crate::clock::monotonic_now;
use crate::error::LeaseDenied;
use crate::lease::Lease;
use crate::lease::queue::{GenerationCounts, PredecessorQueue};
use crate::lease::refused::ModelRefusal;
use crate::model::context::FleetStart;
use crate::model::message::{ModelWill, WillRecord};
use crate::model::{ControlMessage, TaskMessage};
use crate::process::heir::{HeirRecord, OpenGate, ProcessHeir};
use crate::process::settings::InheritedSetting;
use crate::sync::lock;

const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Everything that a fleet hands over to the next instance.
#[derive(Debug)]
pub struct FleetWill {
    record: FleetRecord,
    models: Vec<ModelWill>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct FleetRecord {
    /// Time from the machine's boot to the start of the first instance's fleet.
    began: Duration,
    generations: u64,
}

/// Serialized piece of a will, which may have files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WillPiece(WillPart);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WillPart {
    Fleet(FleetRecord),
    Model(Box<WillRecord>),
    /// Process of the model in the preceding piece, with its files.
    Process(Box<HeirRecord>),
}

impl FleetWill {
    /// Splits the will into pieces of at most three files.
    pub fn into_pieces(self) -> impl Iterator<Item = (WillPiece, Vec<OwnedFd>)> {
        let model = |will: ModelWill| {
            let heirs = will.heirs.into_iter();
            let heirs = heirs.map(|heir| (WillPart::Process(Box::new(heir.record)), heir.files));
            std::iter::once((WillPart::Model(Box::new(will.record)), Vec::new())).chain(heirs)
        };
        std::iter::once((WillPart::Fleet(self.record), Vec::new()))
            .chain(self.models.into_iter().flat_map(model))
            .map(|(piece, files)| (WillPiece(piece), files))
    }

    /// Returns `None` if pieces are missing.
    pub fn from_pieces(pieces: impl IntoIterator<Item = (WillPiece, Vec<OwnedFd>)>) -> Option<Self> {
        let mut pieces = pieces.into_iter();
        let (WillPiece(WillPart::Fleet(record)), _) = pieces.next()? else { return None };
        let mut models: Vec<ModelWill> = Vec::new();
        for (WillPiece(piece), files) in pieces {
            match piece {
                WillPart::Fleet(_) => return None,
                WillPart::Model(record) => models.push(ModelWill { record: *record, heirs: Vec::new() }),
                WillPart::Process(record) => {
                    models.last_mut()?.heirs.push(ProcessHeir { record: *record, files });
                }
            }
        }
        Some(Self { record, models })
    }

    /// Number of processes that are handed over.
    pub fn process_count(&self) -> usize {
        self.models.iter().map(|model| model.heirs.len()).sum()
    }

    pub(super) fn fleet_start(&self) -> FleetStart {
        let run = monotonic_now().saturating_sub(self.record.began);
        let now = Instant::now();
        FleetStart {
            epoch: now.checked_sub(run).unwrap_or(now),
            generations: self.record.generations,
            begun: tokio_util::sync::CancellationToken::new(),
        }
    }

    pub(super) fn take_model(&mut self, model: &str) -> Option<ModelWill> {
        let index = self.models.iter().position(|will| will.record.name == model)?;
        Some(self.models.swap_remove(index))
    }
}

/// Requests of another instance in a generation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RemoteCount {
    model: String,
    generation: GenerationId,
    in_flight: u32,
    /// True if the other instance may send new requests to the generation.
    #[serde(default)]
    open: bool,
    /// Work of the generation for the other instance.
    work: WorkDone,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ChangedSettings {
    model: String,
    /// Settings that were kept and are new to the next instance.
    #[serde(default)]
    settings: Vec<InheritedSetting>,
}

/// Work left in an instance that has released its processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RemainingWork {
    counts: Vec<RemoteCount>,
    /// Waiting requests by model, which need a process of the instance that makes the decisions.
    #[serde(default)]
    waiting: BTreeMap<String, usize>,
    /// Requests that had to wait so far, by model: the total shows a new request even if another one left.
    #[serde(default)]
    came: BTreeMap<String, u64>,
    /// Models in whose processes clients made settings, to be applied to all processes of the model.
    #[serde(default)]
    touched: Vec<ChangedSettings>,
    /// True while a still earlier instance reports its remaining work to this one.
    #[serde(default)]
    elders: bool,
}

impl RemainingWork {
    /// True if no request runs or waits, and none can arrive.
    pub fn is_done(&self) -> bool {
        !self.elders && self.waiting.is_empty() && self.counts.iter().all(|count| count.in_flight == 0)
    }
}

/// Slots that are kept occupied here for requests of a living other instance.
#[derive(Debug)]
pub struct SlotShares {
    fleet: Arc<FleetInner>,
    held: HashMap<GenerationId, (Vec<Lease>, WorkDone)>,
    /// Number of the last received setting, by model and route.
    set: HashMap<(String, String), u64>,
    /// Models with settings of the other instance. A new process has only the settings of its command.
    touched: HashSet<String>,
    known: Vec<Arc<ModelHandle>>,
}

/// Fleet that makes no decisions until this value is dropped.
#[derive(Debug)]
#[must_use = "dropped, the fleet decides again"]
pub struct FrozenFleet<'a>(Option<&'a FleetInner>);

impl FrozenFleet<'_> {
    /// Completes the handover: this fleet never decides again.
    pub fn complete_handover(mut self) {
        self.0 = None;
    }
}

impl Drop for FrozenFleet<'_> {
    fn drop(&mut self) {
        if let Some(fleet) = self.0 {
            fleet.send_all(|| ControlMessage::Thaw);
            fleet.ending.store(false, Ordering::SeqCst);
        }
    }
}

/// Handover between two instances of the program.
#[derive(Clone, Copy, Debug)]
pub struct FleetHandover<'a> {
    inner: &'a Arc<FleetInner>,
}

impl Fleet {
    /// Handover to the next instance, or from the previous one.
    pub fn handover(&self) -> FleetHandover<'_> {
        FleetHandover { inner: &self.inner }
    }
}

impl<'a> FleetHandover<'a> {
    /// Models of the other instance with running processes that are not configured here: no task would end
    /// these processes.
    pub fn unclaimed_models(self) -> Vec<String> {
        let will = lock(&self.inner.will);
        let left = will.iter().flat_map(|will| &will.models).filter(|model| !model.heirs.is_empty());
        left.map(|model| model.record.name.clone()).collect()
    }

    /// Stops decisions and returns the will, while requests continue. Waits until the deadline for running
    /// actions. Cancel safe: dropping the future lets the fleet decide again.
    ///
    /// # Errors
    ///
    /// The fleet is shutting down, or the named actions were still running at the deadline. The fleet
    /// continues as before.
    pub async fn prepare_handover(self, deadline: Instant) -> Result<(FleetWill, FrozenFleet<'a>), String> {
        let inner = self.inner;
        if inner.ending.swap(true, Ordering::SeqCst) {
            return Err("everything ends".to_owned());
        }
        let frozen = FrozenFleet(Some(self.inner));
        loop {
            let busy = match inner.freeze().await {
                Ok(models) => {
                    let began = monotonic_now().saturating_sub(inner.context.epoch.elapsed());
                    let record = FleetRecord { began, generations: inner.context.last_generation().0 };
                    return Ok((FleetWill { record, models }, frozen));
                }
                Err(busy) => busy,
            };
            inner.send_all(|| ControlMessage::Thaw);
            if Instant::now() >= deadline {
                return Err(busy);
            }
            tokio::time::sleep(BUSY_RETRY_INTERVAL).await;
        }
    }

    /// Leaves the processes to the next instance. Leases and waiting requests here continue.
    pub async fn release_processes(self) {
        self.inner.loader_ends.cancel();
        for handle in self.inner.own_models() {
            let (reply, done) = oneshot::channel();
            handle.send(ControlMessage::LetGo(reply));
            // Waiting fails only if the task has ended.
            let _gone = done.await;
        }
    }

    /// Ends all tasks after [`Self::release_processes`] and the last request. The processes continue.
    pub async fn disband(self) {
        self.inner.send_all(|| ControlMessage::Disband);
        let until = Instant::now();
        for handle in self.inner.roster.load().handles().filter(|handle| handle.is_remote) {
            handle.send(ControlMessage::Shutdown(until));
        }
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// After [`Self::release_processes`]: refuses new requests, unless a slot is free at once.
    pub fn close_queues(self) {
        let now = Instant::now();
        self.inner.send_all(|| ControlMessage::Shutdown(now));
    }

    /// Waits until all adopted processes answer. Returns false at the deadline.
    pub async fn has_adopted(self, deadline: Instant) -> bool {
        let mut views = self.inner.context.records.publisher.subscribe();
        loop {
            let view = views.borrow_and_update().clone();
            let mut backends = view.models.iter().flat_map(|model| &model.backends);
            if backends.all(|backend| backend.generation.is_none() || backend.phase == BackendPhase::Ready) {
                return true;
            }
            drop(view);
            let changed = tokio::time::timeout_at(deadline, views.changed()).await;
            if !matches!(changed, Ok(Ok(()))) {
                return false;
            }
        }
    }

    /// Begins to decide: the previous instance has released its processes.
    pub fn begin_deciding(self) {
        // The rest of the will belongs to models that are not configured.
        *lock(&self.inner.will) = None;
        self.inner.context.predecessor.begun.cancel();
        self.inner.send_all(|| ControlMessage::Begin);
    }

    /// Remaining work of this and earlier instances, to report to the owner of the processes.
    pub fn remaining_work(self) -> RemainingWork {
        let elders = *self.inner.predecessors.borrow() > 0;
        let mut remains = RemainingWork { elders, ..RemainingWork::default() };
        for handle in self.inner.own_models() {
            let leases = &handle.leases;
            let model = leases.name().to_string();
            // Read the waiting requests first: a request that gets a lease meanwhile is counted twice, but
            // never missed.
            let waiting = leases.waiting();
            if waiting > 0 {
                remains.waiting.insert(model.clone(), waiting);
                remains.came.insert(model.clone(), leases.with_state(|queue| queue.queued_total()));
            }
            if !leases.settings.are_untouched() {
                let settings = leases.settings.unspread();
                remains.touched.push(ChangedSettings { model: model.clone(), settings });
            }
            let counts = leases.with_state(|queue| queue.generation_counts());
            for GenerationCounts { generation, in_flight, work, open } in counts {
                remains.counts.push(RemoteCount { model: model.clone(), generation, in_flight, open, work });
            }
        }
        remains
    }

    /// Waits until no earlier instance has work left.
    pub async fn predecessors_ended(self) {
        let mut elders = self.inner.predecessors.subscribe();
        // Waiting cannot fail, because `self` holds a sender.
        drop(elders.wait_for(|elders| *elders == 0).await);
    }

    /// Open gates to report to the previous instance, which may have to repeat requests.
    pub fn open_gates(self) -> Vec<OpenGate> {
        let view = self.inner.context.records.publisher.view();
        let slots = |generation| {
            let mut backends = view.models.iter().flat_map(|model| &model.backends);
            backends.find(|backend| backend.generation == Some(generation)).and_then(|backend| backend.slots)
        };
        let mut gates = Vec::new();
        for handle in self.inner.own_models() {
            for cell in handle.leases.with_state(|queue| queue.open_cells()) {
                let Some(endpoint) = cell.address.endpoint() else { continue };
                gates.push(OpenGate {
                    model: handle.leases.name().to_string(),
                    generation: cell.id,
                    endpoint: endpoint.clone(),
                    facts: cell.facts(),
                    slots: slots(cell.id)
                        .or_else(|| handle.leases.with_state(|queue| queue.slot_limit(cell.id))),
                    kin: cell.kin.get().copied(),
                    touched: !handle.leases.settings.are_untouched(),
                });
            }
        }
        gates.sort_by_key(|gate| gate.generation);
        gates
    }

    /// Resolves when [`Self::open_gates`] may have changed, because a model has applied the next instance's
    /// gates.
    pub async fn gates_followed(self) {
        self.inner.context.predecessor.followed.notified().await;
    }

    /// Recent refusals to report to the previous instance for its waiting requests.
    pub fn recent_refusals(self) -> Vec<ModelRefusal> {
        let context = &self.inner.context;
        let of_ours = self.inner.own_models().into_iter().filter_map(|handle| {
            let denied = handle.leases.with_state(|queue| queue.predecessor_refusal())?;
            ModelRefusal::now(handle.leases.name().as_str(), &denied)
        });
        // Models that no task of this instance serves are refused too.
        let roster = self.inner.roster.load();
        let is_ours = |model: &String| {
            roster.get(&ModelName::new(model.as_str())).is_some_and(|handle| !handle.is_remote)
        };
        let awaited = lock(&self.inner.awaited).clone();
        let of_others = awaited.iter().filter(|model| !is_ours(model));
        let of_others = of_others.filter_map(|model| ModelRefusal::now(model, &LeaseDenied::Removed));
        for refused in of_ours.chain(of_others) {
            context.predecessor.refused.note(refused);
        }
        context.predecessor.refused.all()
    }

    /// After [`Self::release_processes`]: applies gates and refusals of the next instance.
    pub fn follow_gates(self, gates: &[OpenGate], refusals: &[ModelRefusal]) {
        for refused in refusals {
            // A still earlier instance needs the refusal too.
            self.inner.context.predecessor.refused.note(refused.clone());
        }
        for handle in self.inner.own_models() {
            let name = handle.leases.name().as_str();
            let of = gates.iter().filter(|gate| gate.model == name);
            let refused = refusals.iter().filter(|refused| refused.model == name);
            handle.send(ControlMessage::Gates(of.cloned().collect(), refused.cloned().collect()));
        }
    }

    /// Begins to occupy slots for requests of the previous instance.
    pub fn share_slots(self) -> SlotShares {
        self.inner.predecessors.send_modify(|elders| *elders += 1);
        SlotShares {
            fleet: Arc::clone(self.inner),
            held: HashMap::new(),
            set: HashMap::new(),
            touched: HashSet::new(),
            known: Vec::new(),
        }
    }
}

impl FleetInner {
    async fn freeze(&self) -> Result<Vec<ModelWill>, String> {
        let mut change = self.change.lock().await;
        change.leaving.retain(|handle| !handle.is_gone());
        if !change.canaries.is_empty() {
            return Err("another build is being tried (`llama-warden canary stop`)".to_owned());
        }
        if let Some(leaving) = change.leaving.first() {
            return Err(format!("the removed model `{}` is still stopping", leaving.leases.name()));
        }
        let mut wills = Vec::new();
        for handle in self.own_models() {
            let (reply, answer) = oneshot::channel();
            handle.send(ControlMessage::HandOver(reply));
            let ended = |_| format!("the model `{}` has ended", handle.leases.name());
            wills.push(answer.await.map_err(ended)??);
        }
        Ok(wills)
    }

    /// Configured models except remote ones.
    fn own_models(&self) -> Vec<Arc<ModelHandle>> {
        let roster = self.roster.load();
        roster.handles().filter(|handle| !handle.is_remote).cloned().collect()
    }

    fn send_all(&self, control: impl Fn() -> ControlMessage) {
        for handle in self.own_models() {
            handle.sender.send(TaskMessage::Control(control()));
        }
    }
}

impl SlotShares {
    /// Applies remaining work that the other instance reports.
    pub fn update(&mut self, remains: &RemainingWork) {
        // Removed models may still have a process, so keep them.
        self.known.retain(|handle| !handle.is_gone());
        for handle in self.fleet.own_models() {
            if !self.known.iter().any(|known| Arc::ptr_eq(known, &handle)) {
                self.known.push(handle);
            }
        }
        for count in &remains.counts {
            let (leases, done) =
                self.held.entry(count.generation).or_insert_with(|| (Vec::new(), count.work));
            let wanted = usize::try_from(count.in_flight).unwrap_or(usize::MAX);
            leases.truncate(wanted);
            let cell_of =
                |handle: &ModelHandle| handle.leases.with_state(|queue| queue.table.cell(count.generation));
            let found = self.known.iter().find_map(|handle| Some((handle, cell_of(handle)?)));
            let Some((handle, cell)) = found else { continue };
            cell.add_work(count.work - *done);
            *done = count.work;
            while leases.len() < wanted {
                let Some(lease) = handle.leases.take_for_another(count.generation) else { break };
                leases.push(lease);
            }
        }
        for ChangedSettings { model, settings } in &remains.touched {
            let roster = self.fleet.roster.load();
            let own = roster.get(&ModelName::new(model.as_str())).filter(|handle| !handle.is_remote);
            let Some(leases) = own.map(|handle| &handle.leases) else { continue };
            if self.touched.insert(model.clone()) {
                leases.settings.note_touched();
            }
            for InheritedSetting { generation, number, path, body } in settings {
                // Apply each setting once: a client may change it here afterwards.
                let last = self.set.entry((model.clone(), path.clone())).or_default();
                if number > last {
                    *last = *number;
                    match body.clone() {
                        Some(body) => leases.note_setting(*generation, path, Bytes::from(body)),
                        None => leases.lose_setting(*generation, path),
                    }
                }
            }
        }
        self.held.retain(|generation, _| remains.counts.iter().any(|count| count.generation == *generation));
        // A draining process waits for the requests just counted, so this comes last.
        let roster = self.fleet.roster.load();
        for handle in &self.known {
            let name = handle.leases.name();
            let is_ours = roster.get(name).is_some_and(|own| Arc::ptr_eq(own, handle));
            let waiting = if is_ours { remains.waiting.get(name.as_str()).copied() } else { None };
            let came = if is_ours { remains.came.get(name.as_str()).copied() } else { None };
            let (waiting, came) = (waiting.unwrap_or_default(), came.unwrap_or_default());
            let open = remains.counts.iter().filter(|count| count.open).map(|count| count.generation);
            handle.leases.set_predecessor(PredecessorQueue::new(waiting, came, open.collect()));
        }
        *lock(&self.fleet.awaited) = remains.waiting.keys().cloned().collect();
    }
}

impl Drop for SlotShares {
    fn drop(&mut self) {
        self.update(&RemainingWork::default());
        self.fleet.predecessors.send_modify(|elders| *elders = elders.saturating_sub(1));
    }
}
