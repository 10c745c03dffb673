//! The fleet: all models by name. Entry point of the crate.

mod canary;
pub mod handover;
mod reload;
mod roster;
#[cfg(test)]
mod tests;
mod trial;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Mutex, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_policies::{GenerationId, ModelName};

pub use self::canary::CanaryRoute;
use self::canary::CanarySet;
use self::handover::FleetWill;
use self::reload::{RosterChange, check_config, with_absolute_paths};
use self::roster::{ModelHandle, ModelRoster};
use crate::clock;
use crate::error::{ControlError, FleetError, LeaseDenied, ResolveError};
use crate::lease::Lease;
use crate::lease::admit::{PromptFit, PromptSize};
use crate::lease::queue::ask::{NextProcess, PromptFacts};
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::memory::loading::LoadingDesk;
use crate::memory::loading::loader::ModelLoader;
use crate::model::context::{FleetContext, FleetRecords, FleetStart};
use crate::model::warm::stored::begin_general_sweep;
use crate::model::{ControlMessage, TaskMessage};
use crate::process::host::HostWorld;
use crate::process::nursery::NurseryHandle;
use crate::process::{ProcessWorld, control_group, directories};
use crate::spec::{CommonConfig, FleetConfig};
use crate::state::StateWriter;
use crate::view::entry::{PinView, ReclaimEntry};
use crate::view::event::{EventJournal, EventKind, EventTail};
use crate::view::ledger::{LedgerEntry, LedgerWriter};
use crate::view::log::LogTail;
use crate::view::publish::ViewPublisher;
use crate::view::{FleetView, ModelState};
use crate::worker_threads::{WorkKind, run_job};

const FINGERPRINT_DIGITS: usize = 8;

/// All models. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fleet {
    inner: Arc<FleetInner>,
}

#[derive(Debug)]
struct FleetInner {
    context: Arc<FleetContext>,
    roster: ArcSwap<ModelRoster>,
    tasks: TaskTracker,
    /// Ends the loader's task.
    loader_ends: CancellationToken,
    ending: AtomicBool,
    /// Number of earlier instances that still have work.
    predecessors: watch::Sender<usize>,
    canaries: CanarySet,
    /// Will of the previous instance, for models that do not exist here yet.
    will: std::sync::Mutex<Option<FleetWill>>,
    /// Models for which requests wait in the previous instance.
    awaited: std::sync::Mutex<Vec<String>>,
    /// Locked while the set of models changes.
    change: Mutex<RosterChange>,
}

impl Fleet {
    /// Ends processes of killed instances, creates the directories, opens the ledger, starts a task for each
    /// model, and begins preloading in the background.
    ///
    /// # Errors
    ///
    /// A directory cannot be created or belongs to another user, the ledger cannot be opened, or a name is
    /// used twice.
    pub async fn start(config: FleetConfig, nursery: NurseryHandle) -> Result<Self, FleetError> {
        if let Err(error) = run_job(WorkKind::Kernel, control_group::end_abandoned).await {
            tracing::warn!(%error, "did not search for processes left by a killed llama-warden");
        }
        let world = Arc::new(HostWorld::new(nursery));
        Ok(Self { inner: FleetInner::start(config, world, None).await? })
    }

    /// Starts with the processes of the previous instance. The fleet makes no decisions before
    /// [`handover::FleetHandover::begin_deciding`].
    ///
    /// # Errors
    ///
    /// As [`Fleet::start`].
    pub async fn start_after(
        config: FleetConfig,
        nursery: NurseryHandle,
        will: FleetWill,
    ) -> Result<Self, FleetError> {
        let world = Arc::new(HostWorld::new(nursery));
        Ok(Self { inner: FleetInner::start(config, world, Some(will)).await? })
    }

    /// Finds a model by name or alias; with `any_name`, by any text. Without a name, returns the only model.
    ///
    /// # Errors
    ///
    /// No model has that name, or a name is needed.
    pub fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        self.inner.roster.load().resolve(name)
    }

    /// True if every name means the only model.
    pub fn takes_any_name(&self) -> bool {
        self.inner.roster.load().takes_any_name()
    }

    /// Waits for the right to send one request to the model, and starts the model if necessary. With
    /// enforced admission, a prompt that does not fit into memory waits or is refused.
    ///
    /// Requests of one kind are served in order of arrival. Cancel safe: dropping the future leaves the
    /// queue or returns the lease.
    ///
    /// # Errors
    ///
    /// The queue is full, the request has waited for the maximum time, the model does not start or was
    /// removed, the prompt does not fit into memory, or the fleet is shutting down.
    pub async fn lease_for(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        prompt: PromptFacts,
    ) -> Result<Lease, LeaseDenied> {
        self.inner.model_leases(model)?.lease(kind, prompt).await
    }

    /// Waits for another lease after the generation of the first one died, even in a full queue.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::lease_for`], except for a full queue.
    pub async fn lease_again(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        prompt: PromptFacts,
    ) -> Result<Lease, LeaseDenied> {
        self.inner.model_leases(model)?.lease_again(kind, prompt).await
    }

    /// Returns a lease without loading the model. Waits for a process that is starting or being replaced.
    /// `None`: the model is neither loaded nor being loaded.
    ///
    /// # Errors
    ///
    /// As [`Self::lease_for`].
    pub async fn lease_loaded(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        prompt: PromptFacts,
    ) -> Result<Option<Lease>, LeaseDenied> {
        /// Interval for checking whether a process serves.
        const LOADED_POLL_INTERVAL: Duration = Duration::from_millis(50);
        loop {
            let leases = self.inner.model_leases(model)?;
            if leases.any_open() {
                if kind == LeaseKind::Slot {
                    return leases.lease(kind, prompt).await.map(Some);
                }
                // A queued request would start a process.
                if let Some(lease) = leases.lease_now(kind, prompt.tokens) {
                    return Ok(Some(lease));
                }
            }
            if !self.inner.is_coming(model) {
                return Ok(None);
            }
            tokio::time::sleep(LOADED_POLL_INTERVAL).await;
        }
    }

    /// Checks whether a prompt of this size would fit into memory now. The result only shows whether an exact
    /// count of the tokens is worthwhile.
    pub fn weigh_prompt(&self, model: &ModelName, size: PromptSize) -> PromptFit {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(PromptFit::NotChecked, |handle| handle.leases.weigh_prompt(size))
    }

    /// Returns true if requests to the model need a conversation key.
    pub fn needs_conversation_key(&self, model: &ModelName) -> bool {
        self.inner.roster.load().get(model).is_some_and(|handle| handle.leases.needs_conversation_key())
    }

    /// Returns true if the latest judged answer of a model has a fault.
    pub fn has_faulty_answers(&self, model: &ModelName) -> bool {
        self.inner.roster.load().get(model).is_some_and(|handle| handle.leases.answers.is_faulty())
    }

    /// Estimates for the next process of a model that has none.
    pub fn next_process(&self, model: &ModelName) -> Option<NextProcess> {
        self.inner.roster.load().get(model)?.leases.with_state(|queue| queue.next_process())
    }

    /// True if a request for the model would be refused at once.
    pub fn refuses_requests(&self, model: &ModelName) -> bool {
        let roster = self.inner.roster.load();
        let is_shut =
            roster.get(model).is_none_or(|handle| handle.leases.with_state(|queue| queue.refuses_requests()));
        is_shut || self.inner.context.loading.refuses(model)
    }

    /// True if the model is loaded or could be loaded without unloading another one, as far as known.
    pub fn has_room(&self, model: &ModelName) -> bool {
        self.inner.context.loading.has_room(model)
    }

    /// Quarantine status of a request.
    pub fn request_standing(&self, model: &ModelName, request: RequestFingerprint) -> RequestStanding {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(RequestStanding::Clear, |handle| handle.leases.ward.standing(request))
    }

    /// Records that the quarantine refused a request.
    pub fn note_refusal(&self, model: &ModelName, request: RequestFingerprint) {
        if let Some(handle) = self.inner.roster.load().get(model) {
            handle.leases.ward.note_refusal(request);
        }
    }

    /// Clears suspected and refused requests of the model `which`, or those whose fingerprint begins with
    /// `which`, or all. Returns their number.
    ///
    /// # Errors
    ///
    /// `which` matches no model and no known request.
    pub fn release_requests(&self, which: Option<&str>) -> Result<usize, ResolveError> {
        let roster = self.inner.roster.load();
        let Some(which) = which else {
            return Ok(roster.handles().map(|handle| handle.leases.ward.release(None)).sum());
        };
        // With `any_name`, a text that matches a fingerprint is a fingerprint.
        let named = roster.resolve(Some(which));
        if let Some(handle) = named.ok().and_then(|model| roster.get(&model))
            && (handle.leases.name().as_str() == which || !roster.takes_any_name())
        {
            return Ok(handle.leases.ward.release(None));
        }
        let begin = which.to_ascii_lowercase();
        if begin.len() >= FINGERPRINT_DIGITS && begin.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(roster.handles().map(|handle| handle.leases.ward.release(Some(&begin))).sum());
        }
        Err(ResolveError::Unknown { name: which.to_owned(), known: roster.own_names() })
    }

    /// Logs an operator's action on a request, in which the model's task takes no part.
    pub fn log_request_action(
        &self,
        model: Option<&ModelName>,
        generation: Option<GenerationId>,
        kind: EventKind,
    ) {
        self.inner.context.records.journal.record(model, generation, kind);
    }

    /// Last published view, with the present request counts.
    pub fn view(&self) -> Arc<FleetView> {
        let mut view = FleetView::clone(&self.inner.context.records.publisher.view());
        let roster = self.inner.roster.load();
        for model in view.models.iter_mut().chain(&mut view.canaries) {
            let Some(handle) = roster.get(&model.name) else { continue };
            let waiting = handle.leases.waiting();
            let quarantine = handle.leases.ward.view();
            let canary = self.inner.canaries.view(&model.name).map(Box::new);
            let is_current = model.backends.is_empty()
                && (model.waiting, &model.quarantine, &model.canary) == (waiting, &quarantine, &canary);
            // Share the view of an idle model with the published one. This code runs for each request, and
            // copying 1,000 models would cost more than the request.
            if is_current {
                continue;
            }
            let model = Arc::make_mut(model);
            (model.waiting, model.quarantine, model.canary) = (waiting, quarantine, canary);
            for backend in &mut model.backends {
                let Some(generation) = backend.generation else { continue };
                backend.in_flight = handle.leases.in_flight(generation);
                let cell = handle.leases.with_state(|queue| queue.table.cell(generation));
                backend.work = cell.map_or(backend.work, |cell| cell.work());
            }
        }
        Arc::new(view)
    }

    /// Receiver for new views of the fleet.
    pub fn subscribe(&self) -> watch::Receiver<Arc<FleetView>> {
        self.inner.context.records.publisher.subscribe()
    }

    /// Replaces every process of a model, one after another, and resets failures and the cooldown. Resolves
    /// when the new processes serve and the old ones are gone. A replacement under way counts if its new
    /// process is created after this call. `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// There is no such model, its new process does not start, or another command ended the restart.
    pub async fn restart_by(&self, model: &str, by: Option<&str>) -> Result<Vec<LedgerEntry>, ControlError> {
        let handle = self.inner.operator_target(model, "restart", by)?;
        let done = handle.command(|reply| ControlMessage::Restart(by.map(Arc::from), reply)).await;
        self.inner.wait_for_ledger().await;
        done
    }

    /// Drains and stops a model. Resolves when its processes are gone. The next request starts it again.
    /// `by`: operator, for the events.
    ///
    /// # Errors
    ///
    /// There is no such model, or the fleet is shutting down.
    pub async fn drain_by(&self, model: &str, by: Option<&str>) -> Result<(), ControlError> {
        self.inner.operator_target(model, "drain", by)?.command(ControlMessage::Drain).await
    }

    /// Like [`Self::drain_by`], but does not wait until the processes are gone.
    ///
    /// # Errors
    ///
    /// There is no such model.
    pub fn unload(&self, model: &str, by: &str) -> Result<(), ControlError> {
        let (reply, _) = oneshot::channel();
        self.inner.operator_target(model, "unload", Some(by))?.send(ControlMessage::Drain(reply));
        Ok(())
    }

    /// Asks the serving processes of a model to give memory back. Resolves when each one has answered and was
    /// read again, or its time is over. `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// There is no such model, it has no serving process that can be asked, or the fleet is shutting down.
    pub async fn reclaim_by(&self, model: &str, by: Option<&str>) -> Result<Vec<ReclaimEntry>, ControlError> {
        let handle = self.inner.operator_target(model, "reclaim", by)?;
        let done = handle.command(|reply| ControlMessage::Reclaim(by.map(Arc::from), reply)).await;
        self.inner.wait_for_ledger().await;
        done
    }

    /// Pins or unpins a model, whatever its configuration. A pinned model is never unloaded for another one.
    /// `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// There is no such model, the model cannot be pinned, or the fleet is shutting down.
    pub async fn pin(&self, model: &str, pinned: bool, by: &str) -> Result<PinView, ControlError> {
        let handle = self.inner.handle(model)?;
        let done = handle.command(|reply| ControlMessage::Pin(pinned, by.into(), reply)).await;
        self.inner.wait_for_ledger().await;
        done
    }

    /// Writer of the state directory.
    pub fn state_writer(&self) -> &StateWriter {
        &self.inner.context.records.state
    }

    /// Logs an operator's action outside of the fleet.
    pub fn log_operator_action(&self, model: Option<&ModelName>, action: &str, by: &str) {
        self.inner.log_operator_action(model, action, by);
    }

    /// Shuts down. Requests run until the deadline, and queued ones may still begin. Then processes get
    /// SIGTERM, and SIGKILL after the grace period. All children are reaped when this returns.
    pub async fn shutdown(&self, deadline: Duration) {
        let until = clock::after(Instant::now(), deadline);
        let inner = &self.inner;
        inner.ending.store(true, Ordering::SeqCst);
        // Wait for a running change of the models, so that no model starts afterwards.
        let mut change = inner.change.lock().await;
        inner.conclude_all_canaries(&mut change);
        let roster = inner.roster.load_full();
        for handle in roster.handles().chain(roster.canaries()).chain(&change.leaving) {
            handle.leases.set_refusal(Some(QueueRefusal::ShuttingDown));
            handle.send(ControlMessage::Shutdown(until));
        }
        inner.loader_ends.cancel();
        inner.tasks.close();
        drop(change);
        inner.tasks.wait().await;
    }

    /// Sends a watchdog question to the loader's task. `None` if that task no longer has to run.
    pub fn check_loader(&self) -> Option<oneshot::Receiver<()>> {
        (!self.inner.loader_ends.is_cancelled()).then(|| self.inner.context.loading.check_loader())
    }

    /// Sends a watchdog question to the tasks of all models and canaries. A receiver fails if its task has
    /// ended, as it may after the removal of its model.
    pub fn check_tasks(&self) -> Vec<(ModelName, oneshot::Receiver<()>)> {
        let roster = self.inner.roster.load();
        let handles = roster.handles().chain(roster.canaries());
        let asked = handles.map(|handle| {
            let (question, answer) = oneshot::channel();
            // If the task has ended, the question is dropped and the receiver fails.
            handle.sender.send(TaskMessage::Beat(question));
            (handle.leases.name().clone(), answer)
        });
        asked.collect()
    }

    /// Past and new output of a model's processes; `None` if there is no such model.
    pub fn logs(&self, model: &str) -> Option<LogTail> {
        Some(self.inner.handle(model).ok()?.logs.tail())
    }

    /// Past and new events.
    pub fn events(&self) -> EventTail {
        self.inner.context.records.journal.tail()
    }

    /// Number of the last event, or 0.
    pub fn last_event(&self) -> u64 {
        self.inner.context.records.journal.last_number()
    }

    /// Path of the ledger.
    pub fn ledger_path(&self) -> &Path {
        self.inner.context.records.ledger.path()
    }
}

impl FleetInner {
    async fn start(
        config: FleetConfig,
        world: Arc<dyn ProcessWorld>,
        will: Option<FleetWill>,
    ) -> Result<Arc<Self>, FleetError> {
        let config = with_absolute_paths(config);
        check_config(&config)?;
        directories::prepare_runtime(&config.runtime_dir)?;
        let state = StateWriter::start().map_err(FleetError::NoThread)?;
        let ledger = LedgerWriter::open(&config.state_dir, state.clone())
            .map_err(|(path, source)| FleetError::StateDir { path, source })?;
        let journal = Arc::new(EventJournal::new(config.watch.child.events_kept));
        let (loading, told) = LoadingDesk::new();
        let common = Arc::new(std::sync::Mutex::new(CommonConfig::from(&config)));
        let loader = ModelLoader::new(
            Arc::clone(&world),
            Arc::clone(&journal),
            Arc::clone(&loading),
            Arc::clone(&common),
            told,
            config.watch.sensors.read_limit,
        );
        let since = will.as_ref().map_or_else(FleetStart::now, FleetWill::fleet_start);
        let begun = since.begun.clone();
        let records = FleetRecords { journal, ledger, state, publisher: ViewPublisher::default() };
        let context = FleetContext::new(world, records, &config, loading, common, since);
        if will.is_none() {
            let modes = config.models.iter().map(|spec| (&spec.name, spec.run.warm));
            begin_general_sweep(&context.paths.conversations, modes);
        }
        let empty = FleetConfig { models: Vec::new(), remotes: Vec::new(), ..config.clone() };
        let inner = Arc::new(Self {
            context: Arc::new(context),
            roster: ArcSwap::from_pointee(ModelRoster::default()),
            tasks: TaskTracker::new(),
            loader_ends: CancellationToken::new(),
            ending: AtomicBool::new(false),
            predecessors: watch::Sender::new(0),
            canaries: CanarySet::default(),
            will: std::sync::Mutex::new(will),
            awaited: std::sync::Mutex::default(),
            change: Mutex::new(RosterChange::new(empty)),
        });
        let ends = inner.loader_ends.clone();
        inner.tasks.spawn(async move {
            tokio::select! {
                () = begun.cancelled() => loader.run(ends).await,
                () = ends.cancelled() => {}
            }
        });
        Box::pin(inner.take_over(config)).await?;
        Ok(inner)
    }

    fn model_leases(&self, model: &ModelName) -> Result<Arc<LeaseQueue>, LeaseDenied> {
        let leases = self.roster.load().get(model).map(|handle| Arc::clone(&handle.leases));
        leases.ok_or(LeaseDenied::Removed)
    }

    /// Finds a model for an operator's action, and logs the action of a known operator.
    fn operator_target(
        &self,
        model: &str,
        action: &str,
        by: Option<&str>,
    ) -> Result<Arc<ModelHandle>, ControlError> {
        let handle = self.handle(model)?;
        if let Some(by) = by {
            self.log_operator_action(Some(handle.leases.name()), action, by);
        }
        Ok(handle)
    }

    fn log_operator_action(&self, model: Option<&ModelName>, action: &str, by: &str) {
        let kind = EventKind::Asked { action: action.to_owned(), by: by.to_owned() };
        self.context.records.journal.record(model, None, kind);
    }

    /// Waits briefly until queued ledger entries are written: the disk may hang.
    async fn wait_for_ledger(&self) {
        const LEDGER_WAIT: Duration = Duration::from_millis(250);
        self.context.records.state.wait_written(LEDGER_WAIT).await;
    }

    fn handle(&self, name: &str) -> Result<Arc<ModelHandle>, ControlError> {
        let roster = self.roster.load();
        // An operator may name a canary too.
        if let Some(canary) = roster.canary(name) {
            return Ok(Arc::clone(canary));
        }
        let model = roster.resolve(Some(name))?;
        roster.get(&model).cloned().ok_or(ControlError::ShuttingDown)
    }

    /// True if a process of the model serves, or will serve without a further request.
    fn is_coming(&self, model: &ModelName) -> bool {
        let view = self.context.records.publisher.view();
        let shown = view.models.iter().find(|shown| shown.name == *model);
        shown.is_some_and(|shown| {
            matches!(shown.state, ModelState::Loaded | ModelState::Loading | ModelState::Draining)
        })
    }
}
