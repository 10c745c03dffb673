//! The fleet: all models by name. Entry point of the crate.

mod beat;
mod canary;
pub mod handover;
mod loaded;
mod roster;
mod trial;

use std::collections::BTreeMap;
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
use warden_policies::quarantine::{QuarantinePolicy, RequestFingerprint, RequestStanding};
use warden_policies::{GenerationId, ModelName, QuickMap, ServerFacts};

pub use self::canary::CanaryRoute;
use self::canary::{CanarySet, with_canaries};
use self::handover::FleetWill;
use self::roster::{ModelHandle, ModelRoster};
use crate::clock;
use crate::error::{ControlError, FleetError, LeaseDenied, ResolveError};
use crate::lease::Lease;
use crate::lease::admit::{PromptFit, PromptSize};
use crate::lease::queue::ask::NextProcess;
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::memory::loading::LoadingDesk;
use crate::memory::loading::loader::ModelLoader;
use crate::model::context::{FleetContext, FleetStart};
use crate::model::{ControlMessage, ModelTask, TaskMessage};
use crate::process::host::HostWorld;
use crate::process::nursery::NurseryHandle;
use crate::process::{ProcessWorld, control_group, directories};
use crate::remote::RemoteTask;
use crate::spec::{CanarySpec, CommonConfig, FleetConfig, RemoteSpec, SharedSpec, WatchConfig};
use crate::state::StateWriter;
use crate::sync::lock;
use crate::view::FleetView;
use crate::view::entry::{PinView, ReclaimEntry};
use crate::view::event::{ApplyReport, EventJournal, EventKind, EventTail};
use crate::view::ledger::{LedgerEntry, LedgerWriter};
use crate::view::log::{LogRing, LogTail};
use crate::worker_threads::{WorkKind, run_job};

/// Number of leading digits of a fingerprint that are shown.
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

#[derive(Debug)]
struct RosterChange {
    /// Present configuration, in which the canaries are models, too.
    config: FleetConfig,
    /// Present configuration as given, without canaries.
    configured: FleetConfig,
    /// Running canaries by model.
    canaries: BTreeMap<ModelName, CanarySpec>,
    /// Removed models, which may still have processes.
    leaving: Vec<Arc<ModelHandle>>,
}

impl Fleet {
    /// Ends processes that killed instances left in control groups, because their memory would count. Then
    /// creates the directories, opens the ledger, starts a task for each model, and begins preloading in
    /// the background.
    ///
    /// # Errors
    ///
    /// A directory cannot be created or belongs to another user, the ledger cannot be opened, or a name is
    /// used twice.
    pub async fn start(config: FleetConfig, nursery: NurseryHandle) -> Result<Self, FleetError> {
        if let Err(error) = run_job(WorkKind::Kernel, control_group::end_abandoned).await {
            tracing::warn!(%error, "did not search for processes left by a killed llama-warden");
        }
        Self::start_in(config, Arc::new(HostWorld::new(nursery))).await
    }

    /// Starts with the processes of the previous instance. Nothing is decided before
    /// [`Fleet::begin_deciding`].
    ///
    /// # Errors
    ///
    /// As [`Fleet::start`].
    pub async fn start_after(
        config: FleetConfig,
        nursery: NurseryHandle,
        will: FleetWill,
    ) -> Result<Self, FleetError> {
        Self::start_with(config, Arc::new(HostWorld::new(nursery)), Some(will)).await
    }

    pub(crate) async fn start_in(
        config: FleetConfig,
        world: Arc<dyn ProcessWorld>,
    ) -> Result<Self, FleetError> {
        Self::start_with(config, world, None).await
    }

    async fn start_with(
        config: FleetConfig,
        world: Arc<dyn ProcessWorld>,
        will: Option<FleetWill>,
    ) -> Result<Self, FleetError> {
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
        let context = FleetContext::new(world, journal, ledger, state, &config, loading, common, since);
        let empty = FleetConfig { models: Vec::new(), remotes: Vec::new(), ..config.clone() };
        let fleet = Self {
            inner: Arc::new(FleetInner {
                context: Arc::new(context),
                roster: ArcSwap::from_pointee(ModelRoster::default()),
                tasks: TaskTracker::new(),
                loader_ends: CancellationToken::new(),
                ending: AtomicBool::new(false),
                predecessors: watch::Sender::new(0),
                canaries: CanarySet::default(),
                will: std::sync::Mutex::new(will),
                awaited: std::sync::Mutex::default(),
                change: Mutex::new(RosterChange {
                    config: empty.clone(),
                    configured: empty,
                    canaries: BTreeMap::new(),
                    leaving: Vec::new(),
                }),
            }),
        };
        let ends = fleet.inner.loader_ends.clone();
        fleet.inner.tasks.spawn(async move {
            tokio::select! {
                () = begun.cancelled() => loader.run(ends).await,
                () = ends.cancelled() => {}
            }
        });
        Box::pin(fleet.take_over(config)).await?;
        Ok(fleet)
    }

    /// Finds the model that a client's name means: its name, an alias, or, with `any_name`, any text.
    /// Without a name, returns the only model.
    ///
    /// # Errors
    ///
    /// No model has that name, or no name was given and there is not exactly one model.
    pub fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        self.inner.roster.load().resolve(name)
    }

    /// True if every name means the only model.
    pub fn takes_any_name(&self) -> bool {
        self.inner.roster.load().takes_any_name()
    }

    /// Waits for the right to send one request to the model. Starts the model if necessary.
    ///
    /// Requests of one kind are served in order of arrival. Dropping the future leaves the queue, or
    /// returns the lease if it was granted meanwhile.
    ///
    /// # Errors
    ///
    /// The queue is full, the request has waited for the maximum time, the model does not start or was
    /// removed, or the fleet is shutting down.
    pub async fn lease(&self, model: &ModelName, kind: LeaseKind) -> Result<Lease, LeaseDenied> {
        self.lease_for(model, kind, None).await
    }

    /// Waits for a lease like [`Self::lease`], for a prompt with this many tokens. If admission is
    /// enforced, a lease is granted only where the prompt fits into memory; otherwise the request waits or
    /// is refused. If admission only warns, the warning is logged.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::lease`], or the prompt does not fit into memory.
    pub async fn lease_for(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, LeaseDenied> {
        self.model_leases(model)?.lease(kind, tokens).await
    }

    /// Waits for another lease like [`Self::lease_for`], after the generation of the first one died. The
    /// request is accepted even if the queue is full.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::lease_for`], except for a full queue.
    pub async fn lease_again(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, LeaseDenied> {
        self.model_leases(model)?.lease_again(kind, tokens).await
    }

    fn model_leases(&self, model: &ModelName) -> Result<Arc<LeaseQueue>, LeaseDenied> {
        let leases = self.inner.roster.load().get(model).map(|handle| Arc::clone(&handle.leases));
        leases.ok_or(LeaseDenied::Removed)
    }

    /// Checks whether a prompt of this size would fit into memory now. Use the result only to decide
    /// whether an exact count of its tokens is worthwhile.
    pub fn weigh_prompt(&self, model: &ModelName, size: PromptSize) -> PromptFit {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(PromptFit::NotChecked, |handle| handle.leases.weigh_prompt(size))
    }

    /// Estimates for the next process of a model; `None` if a process serves, or there is no such model.
    pub fn next_process(&self, model: &ModelName) -> Option<NextProcess> {
        self.inner.roster.load().get(model)?.leases.next_process()
    }

    /// True if a request for a model would be refused at once.
    pub fn refuses_requests(&self, model: &ModelName) -> bool {
        let roster = self.inner.roster.load();
        let is_shut = roster.get(model).is_none_or(|handle| handle.leases.refuses_requests());
        is_shut || self.inner.context.loading.refuses(model)
    }

    /// True if, as far as known, a model is loaded or could be loaded without unloading another one.
    pub fn has_room(&self, model: &ModelName) -> bool {
        self.inner.context.loading.has_room(model)
    }

    /// Status of a request in the quarantine of a model.
    pub fn request_standing(&self, model: &ModelName, request: RequestFingerprint) -> RequestStanding {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(RequestStanding::Clear, |handle| handle.leases.request_standing(request))
    }

    /// Records that the quarantine of a model refused a request.
    pub fn note_refusal(&self, model: &ModelName, request: RequestFingerprint) {
        if let Some(handle) = self.inner.roster.load().get(model) {
            handle.leases.note_refusal(request);
        }
    }

    /// Clears suspected and refused requests: those of the model that `which` names, or those whose
    /// fingerprint begins with `which`; all if `None`. Returns their number.
    ///
    /// # Errors
    ///
    /// `which` matches no model and no known request.
    pub fn release_requests(&self, which: Option<&str>) -> Result<usize, ResolveError> {
        let roster = self.inner.roster.load();
        let Some(which) = which else {
            return Ok(roster.handles().map(|handle| handle.leases.release_requests(None)).sum());
        };
        // If every name means the only model, treat a text that matches a fingerprint as a fingerprint.
        let named = roster.resolve(Some(which));
        let is_model = named.as_ref().is_ok_and(|model| {
            let handle = roster.get(model);
            handle.is_some() && (model.as_str() == which || !roster.takes_any_name())
        });
        if is_model {
            return named
                .map(|model| roster.get(&model).map_or(0, |handle| handle.leases.release_requests(None)));
        }
        let begin = which.to_ascii_lowercase();
        let is_print =
            begin.len() >= FINGERPRINT_DIGITS && begin.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_print {
            return Ok(roster.handles().map(|handle| handle.leases.release_requests(Some(&begin))).sum());
        }
        let known = roster.handles().map(|handle| handle.leases.name().to_string()).collect();
        Err(ResolveError::Unknown { name: which.to_owned(), known })
    }

    /// Logs an operator's action on a request. The model's task takes no part in such an action.
    pub fn log_request_action(
        &self,
        model: Option<&ModelName>,
        generation: Option<GenerationId>,
        kind: EventKind,
    ) {
        self.inner.context.journal.record(model, generation, kind);
    }

    /// Last published view of the fleet, with the request counts of this moment.
    pub fn view(&self) -> Arc<FleetView> {
        let mut view = FleetView::clone(&self.inner.context.publisher.view());
        let roster = self.inner.roster.load();
        for model in view.models.iter_mut().chain(&mut view.canaries) {
            let Some(handle) = roster.get(&model.name) else { continue };
            let waiting = handle.leases.waiting();
            let quarantine = handle.leases.quarantine_view();
            let canary = self.inner.canaries.view(&model.name).map(Box::new);
            let is_current = model.backends.is_empty()
                && (model.waiting, &model.quarantine, &model.canary) == (waiting, &quarantine, &canary);
            // Share the view of an idle model with the published one: this runs for each request, and
            // copying 1,000 models would cost more than the request.
            if is_current {
                continue;
            }
            let model = Arc::make_mut(model);
            (model.waiting, model.quarantine, model.canary) = (waiting, quarantine, canary);
            for backend in &mut model.backends {
                let Some(generation) = backend.generation else { continue };
                backend.in_flight = handle.leases.in_flight(generation);
                backend.work = handle.leases.work(generation).unwrap_or(backend.work);
            }
        }
        Arc::new(view)
    }

    /// Returns a receiver for new views of the fleet.
    pub fn subscribe(&self) -> watch::Receiver<Arc<FleetView>> {
        self.inner.context.publisher.subscribe()
    }

    /// Replaces every process of a model, one after another. Resolves when the new processes serve and the
    /// old ones are gone. Resets a failed start, pauses after failures and the cooldown. If a replacement
    /// is under way and its new process is created after this call, that replacement counts.
    ///
    /// # Errors
    ///
    /// There is no such model, its new process does not start, or another command ended the restart.
    pub async fn restart(&self, model: &str) -> Result<Vec<LedgerEntry>, ControlError> {
        self.restart_by(model, None).await
    }

    /// Replaces every process like [`Self::restart`]. `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::restart`].
    pub async fn restart_by(&self, model: &str, by: Option<&str>) -> Result<Vec<LedgerEntry>, ControlError> {
        let handle = self.operator_target(model, "restart", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(ControlMessage::Restart(by.map(Arc::from), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.wait_for_ledger().await;
        done
    }

    /// Drains and stops a model; resolves when its processes are gone. The next request starts the model
    /// again.
    ///
    /// # Errors
    ///
    /// There is no such model, or the fleet is shutting down.
    pub async fn drain(&self, model: &str) -> Result<(), ControlError> {
        self.drain_by(model, None).await
    }

    /// Drains and stops a model like [`Self::drain`]. `by`: operator, for the events.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::drain`].
    pub async fn drain_by(&self, model: &str, by: Option<&str>) -> Result<(), ControlError> {
        let handle = self.operator_target(model, "drain", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(ControlMessage::Drain(reply));
        answer.await.unwrap_or(Err(ControlError::ShuttingDown))
    }

    /// Asks the processes of a model to give memory back; they serve meanwhile. Resolves when each process
    /// has answered and its memory was read again, or its time is over.
    ///
    /// # Errors
    ///
    /// There is no such model, it has no serving process that can be asked, or the fleet is shutting down.
    pub async fn reclaim(&self, model: &str) -> Result<Vec<ReclaimEntry>, ControlError> {
        self.reclaim_by(model, None).await
    }

    /// Asks for memory like [`Self::reclaim`]. `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::reclaim`].
    pub async fn reclaim_by(&self, model: &str, by: Option<&str>) -> Result<Vec<ReclaimEntry>, ControlError> {
        let handle = self.operator_target(model, "reclaim", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(ControlMessage::Reclaim(by.map(Arc::from), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.wait_for_ledger().await;
        done
    }

    /// Pins or unpins a model; overrides the configuration until the next call or the end of the program. A
    /// pinned model is never unloaded for another one. `by`: operator, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// There is no such model, the model cannot be pinned, or the fleet is shutting down.
    pub async fn pin(&self, model: &str, pinned: bool, by: &str) -> Result<PinView, ControlError> {
        let handle = self.handle(model)?;
        let (reply, answer) = oneshot::channel();
        handle.send(ControlMessage::Pin(pinned, by.into(), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.wait_for_ledger().await;
        done
    }

    /// Waits until queued entries are written to the ledger, but not for long, because the disk may hang.
    pub(super) async fn wait_for_ledger(&self) {
        const LEDGER_WAIT: Duration = Duration::from_millis(250);
        self.inner.context.state.wait_written(LEDGER_WAIT).await;
    }

    /// Writer of the state directory.
    pub fn state_writer(&self) -> &StateWriter {
        &self.inner.context.state
    }

    /// Finds a model for an operator's action, and logs the action if the operator is known.
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

    /// Logs an operator's action that does not go through the fleet.
    pub fn log_operator_action(&self, model: Option<&ModelName>, action: &str, by: &str) {
        let kind = EventKind::Asked { action: action.to_owned(), by: by.to_owned() };
        self.inner.context.journal.record(model, None, kind);
    }

    fn handle(&self, name: &str) -> Result<Arc<ModelHandle>, ControlError> {
        let roster = self.inner.roster.load();
        // An operator's command may name a canary, too.
        if let Some(canary) = roster.canary(name) {
            return Ok(Arc::clone(canary));
        }
        let model = roster.resolve(Some(name))?;
        roster.get(&model).cloned().ok_or(ControlError::ShuttingDown)
    }

    /// Applies a new configuration. Processes are replaced only if their model's command changed; other
    /// settings change without a replacement. If any part of the configuration is invalid, nothing changes.
    ///
    /// # Errors
    ///
    /// A name or alias is used twice, a socket path would be too long, or the fleet is shutting down.
    /// Nothing has changed then.
    pub async fn apply(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        self.apply_with(config, ApplyReport::default()).await
    }

    /// Applies a configuration like [`Self::apply`]. `known`: changes outside of the fleet, to be added to
    /// the report.
    ///
    /// # Errors
    ///
    /// Those of [`Self::apply`].
    pub async fn apply_with(
        &self,
        config: FleetConfig,
        known: ApplyReport,
    ) -> Result<ApplyReport, FleetError> {
        let config = with_absolute_paths(config);
        check_config(&config)?;
        let fleet = self.clone();
        // Run in a separate task, so that all of the configuration is applied even if the caller leaves.
        let task = self.inner.tasks.spawn(async move {
            let mut report = fleet.take_over(config).await?;
            // For users, a model has also changed if only settings outside of the fleet did, such as
            // request rules.
            let of_others = |name: &ModelName| known.updated.contains(name);
            let (updated, unchanged) = std::mem::take(&mut report.unchanged).into_iter().partition(of_others);
            let updated: Vec<ModelName> = updated;
            report.updated.extend(updated);
            report.unchanged = unchanged;
            report.changed.extend(known.changed);
            report.needs_restart.extend(known.needs_restart);
            fleet.inner.context.journal.record(
                None,
                None,
                EventKind::ConfigApplied { report: report.clone() },
            );
            Ok(report)
        });
        task.await.unwrap_or(Err(FleetError::ShuttingDown))
    }

    /// Stores facts that were measured about a model's binary. Leases see the facts at once, and no process
    /// is replaced. Without effect if the model runs another binary meanwhile, or was removed.
    pub async fn learn_facts(&self, model: &ModelName, binary: &Path, facts: ServerFacts) {
        let mut change = self.inner.change.lock().await;
        let RosterChange { config, configured, .. } = &mut *change;
        let runs_it = |spec: &&mut SharedSpec| spec.name == *model && spec.command.binary == binary;
        for spec in config.models.iter_mut().chain(&mut configured.models).filter(runs_it) {
            spec.facts = facts;
        }
        // Include removed models: leases on their processes may still be held.
        let roster = self.inner.roster.load_full();
        for handle in roster.handles().chain(roster.canaries()).chain(&change.leaving) {
            if handle.leases.name() == model {
                handle.send(ControlMessage::LearnFacts(binary.to_owned(), facts));
            }
        }
    }

    async fn take_over(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        let inner = &self.inner;
        let mut change = inner.change.lock().await;
        if inner.ending.load(Ordering::SeqCst) {
            return Err(FleetError::ShuttingDown);
        }
        self.keep_canaries(&mut change, &config);
        inner.canaries.retain_configured(&config);
        // Box the future, because it is rarely run and large, and would make the caller's future large.
        Ok(Box::pin(self.put_in_place(&mut change, config)).await)
    }

    /// Adds, changes and removes models until they are those of a configuration plus the present canaries.
    async fn put_in_place(&self, change: &mut RosterChange, configured: FleetConfig) -> ApplyReport {
        let inner = &self.inner;
        let config = with_canaries(&configured, &change.canaries);
        let mut report = ApplyReport::default();
        for (name, changed) in [
            ("runtime_dir", config.runtime_dir != change.config.runtime_dir),
            ("state_dir", config.state_dir != change.config.state_dir),
            ("events_kept", config.watch.child.events_kept != change.config.watch.child.events_kept),
            ("log_lines", config.watch.child.log_lines != change.config.watch.child.log_lines),
        ] {
            if changed {
                report.needs_restart.push(name.to_owned());
            }
        }
        *lock(&inner.context.common) = CommonConfig::from(&config);
        let old = inner.roster.load_full();
        let before = |name: &ModelName| change.config.models.iter().find(|spec| spec.name == *name).cloned();
        let mut handles = Vec::with_capacity(config.models.len() + config.remotes.len());
        let mut canaries = QuickMap::default();
        let shown = roster::configured_names(&config).map(|(name, _)| name.clone()).collect();
        let tried = config.models.iter().filter(|spec| spec.canary_of.is_some());
        inner.context.publisher.set_order(shown, tried.map(|spec| spec.name.clone()).collect());
        // Pause publication only at the first start: then no step below waits for a model, so the pause is
        // short.
        let is_first = old.handles().next().is_none();
        if is_first {
            inner.context.publisher.set_paused(true);
        }
        let gone: Vec<_> =
            old.handles().chain(old.canaries()).filter(|handle| !handle.stays_in(&config)).cloned().collect();
        for handle in &gone {
            if !handle.is_remote {
                inner.context.leaving.fetch_add(1, Ordering::SeqCst);
            }
            // Tell removed models first, so that they free memory for new ones.
            handle.send(ControlMessage::Remove);
        }
        for spec in &config.models {
            let (name, known) = (spec.name.clone(), old.get(&spec.name).filter(|handle| !handle.is_remote));
            let handle =
                known.cloned().unwrap_or_else(|| self.launch_model(spec, config.watch, !gone.is_empty()));
            if spec.canary_of.is_some() {
                if before(&name).is_some_and(|before| before != *spec) {
                    handle.apply(spec, config.watch).await;
                }
                canaries.insert(name, handle);
                continue;
            }
            match before(&name) {
                None => report.added.push(name),
                Some(before) if before == *spec => {
                    if config.watch != change.config.watch {
                        handle.apply(spec, config.watch).await;
                    }
                    report.unchanged.push(name);
                }
                Some(_) if handle.apply(spec, config.watch).await => report.restarted.push(name),
                Some(_) => report.updated.push(name),
            }
            handles.push(handle);
        }
        for spec in &config.remotes {
            let (name, known) = (spec.name.clone(), old.get(&spec.name).filter(|handle| handle.is_remote));
            let before = change.config.remotes.iter().find(|before| before.name == name);
            let handle = known.cloned().unwrap_or_else(|| self.launch_remote(spec));
            match before {
                None => report.added.push(name),
                Some(before) if before == spec => report.unchanged.push(name),
                Some(_) if handle.point_remote(spec).await => report.restarted.push(name),
                Some(_) => report.updated.push(name),
            }
            handles.push(handle);
        }
        if is_first {
            inner.context.publisher.set_paused(false);
        }
        // Store the new set of models first, so that clients of removed models hear that the model is
        // unknown.
        inner.roster.store(Arc::new(ModelRoster::new(&config, handles, canaries)));
        for handle in gone {
            // Refuse requests here and not in the model's task, so that none is accepted after this call.
            handle.leases.set_refusal(Some(QueueRefusal::Removed));
            handle.leases.refuse_waiting(&LeaseDenied::Removed);
            if old.canary(handle.leases.name().as_str()).is_none() {
                report.removed.push(handle.leases.name().clone());
            }
            change.leaving.push(handle);
        }
        change.leaving.retain(|handle| !handle.is_gone());
        // Keep the old values of settings that need a restart, so that the next reload reports them again.
        let (runtime_dir, state_dir) = (change.config.runtime_dir.clone(), change.config.state_dir.clone());
        change.config = FleetConfig { runtime_dir, state_dir, ..config };
        change.configured = configured;
        report
    }

    /// Starts the task of a model. `after_others`: the first process waits until removed models have ended.
    fn launch_model(&self, spec: &SharedSpec, watch: WatchConfig, after_others: bool) -> Arc<ModelHandle> {
        let context = &self.inner.context;
        let journal = Arc::clone(&context.journal);
        let leases = Arc::new(LeaseQueue::new(spec.name.clone(), journal, spec.queue.depth, spec.queue.wait));
        leases.set_admission(spec.admission.mode, spec.admission.policy.clone());
        leases.set_quarantine(spec.quarantine);
        leases.set_canary(spec.canary_of.is_some());
        let logs = Arc::new(LogRing::new(spec.name.clone(), watch.child.log_lines));
        let will = lock(&self.inner.will).as_mut().and_then(|will| will.take_model(spec.name.as_str()));
        let (mut model, sender) = ModelTask::new(
            Arc::clone(context),
            Arc::clone(&leases),
            Arc::clone(&logs),
            spec.clone(),
            watch,
            will,
        );
        if after_others {
            model.wait_for_room();
        }
        self.inner.tasks.spawn(Box::new(model).run());
        Arc::new(ModelHandle { leases, logs, sender, is_remote: false })
    }

    /// Starts the task of a remote model.
    fn launch_remote(&self, spec: &RemoteSpec) -> Arc<ModelHandle> {
        let context = &self.inner.context;
        let journal = Arc::clone(&context.journal);
        let leases = Arc::new(LeaseQueue::new(spec.name.clone(), journal, spec.queue.depth, spec.queue.wait));
        // Switch the quarantine off: a remote model has no process that a request could kill.
        leases.set_quarantine(QuarantinePolicy {
            refuse_for: Duration::ZERO,
            ..warden_policies::defaults().quarantine
        });
        // Make a log of minimum size: a remote endpoint has no output to log.
        let logs = Arc::new(LogRing::new(spec.name.clone(), 0));
        let (remote, sender) = RemoteTask::new(Arc::clone(context), Arc::clone(&leases), spec.clone());
        self.inner.tasks.spawn(Box::new(remote).run());
        Arc::new(ModelHandle { leases, logs, sender, is_remote: true })
    }

    /// Shuts down: grants no new leases, except to queued requests that a backend can take before the
    /// deadline. Requests run until the deadline; then processes get SIGTERM, and SIGKILL after the grace
    /// period. All children are reaped when this returns.
    pub async fn shutdown(&self, deadline: Duration) {
        let until = clock::after(Instant::now(), deadline);
        let inner = &self.inner;
        inner.ending.store(true, Ordering::SeqCst);
        // Wait for a change of the set of models that is under way, so that no model starts afterwards.
        let mut change = inner.change.lock().await;
        self.conclude_all_canaries(&mut change);
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

    /// Past output of a model's processes, and a receiver for new lines; `None` if there is no such model.
    pub fn logs(&self, model: &str) -> Option<LogTail> {
        Some(self.handle(model).ok()?.logs.tail())
    }

    /// Past events, and a receiver for new ones.
    pub fn events(&self) -> EventTail {
        self.inner.context.journal.tail()
    }

    /// Number of the last event; 0 before the first event.
    pub fn last_event(&self) -> u64 {
        self.inner.context.journal.last_number()
    }

    /// Path of the ledger.
    pub fn ledger_path(&self) -> &Path {
        self.inner.context.ledger.path()
    }
}

/// Makes the path of the runtime directory absolute, because children have other working directories.
fn with_absolute_paths(mut config: FleetConfig) -> FleetConfig {
    if let Ok(path) = std::path::absolute(&config.runtime_dir) {
        config.runtime_dir = path;
    }
    config
}

/// Checks a configuration as far as possible without looking at the machine.
fn check_config(config: &FleetConfig) -> Result<(), FleetError> {
    if let Some(spec) = config.models.iter().find(|spec| spec.run.replicas == 0) {
        return Err(FleetError::NoReplicas(spec.name.clone()));
    }
    roster::check_names(config)?;
    directories::check_sockets(config)
}

impl ModelHandle {
    fn send(&self, control: ControlMessage) {
        // Sending fails only if the task has ended, and then nothing needs to be told.
        self.sender.send(TaskMessage::Control(control));
    }

    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    /// True if the model is also in this configuration. A local and a remote model with the same name are
    /// different.
    fn stays_in(&self, config: &FleetConfig) -> bool {
        let name = self.leases.name();
        if self.is_remote {
            config.remotes.iter().any(|spec| spec.name == *name)
        } else {
            config.models.iter().any(|spec| spec.name == *name)
        }
    }

    async fn point_remote(&self, spec: &RemoteSpec) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(ControlMessage::PointRemote(Box::new(spec.clone()), reply));
        answer.await.unwrap_or(false)
    }

    async fn apply(&self, spec: &SharedSpec, watch: WatchConfig) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(ControlMessage::Apply(spec.clone(), Box::new(watch), reply));
        answer.await.unwrap_or(false)
    }
}
