//! All models by name: the entry point of everything.

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
use warden_policies::quarantine::{Fingerprint, QuarantinePolicy, Standing};
use warden_policies::{GenerationId, ModelName, QuickMap, ServerFacts};

pub use self::canary::CanaryRoute;
use self::canary::{Canaries, with_canaries};
use self::handover::FleetWill;
use self::roster::{Handle, Roster};
use crate::clock;
use crate::error::{ControlError, Denied, FleetError, ResolveError};
use crate::lease::Lease;
use crate::lease::admit::{Size, Weighed};
use crate::lease::queue::coming::Coming;
use crate::lease::queue::{Leases, Refusal};
use crate::memory::loading::LoadingDesk;
use crate::memory::loading::loader::Loader;
use crate::model::context::{Context, Since};
use crate::model::{Control, Message, Model};
use crate::process::host::Host;
use crate::process::nursery::NurseryHandle;
use crate::process::{World, control_group, directories};
use crate::remote::Remote;
use crate::spec::{CanarySpec, Common, FleetConfig, RemoteSpec, SharedSpec, Watch};
use crate::state::StateWriter;
use crate::sync::lock;
use crate::view::FleetView;
use crate::view::event::{ApplyReport, EventKind, EventTail, Journal};
use crate::view::ledger::{Ledger, LedgerEntry};
use crate::view::log::{LogRing, LogTail};
use crate::view::pin_entry::PinView;
use crate::view::reclaim_entry::ReclaimEntry;
use crate::worker_threads::{WorkKind, run_job};

/// Digits of a fingerprint that are enough to name it.
const FINGERPRINT_SHOWN: usize = 8;

/// All models. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fleet {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    roster: ArcSwap<Roster>,
    tasks: TaskTracker,
    /// Ends the task that decides which models are loaded.
    loader_ends: CancellationToken,
    ending: AtomicBool,
    /// Instances before us that have something to do still.
    elders: watch::Sender<usize>,
    canaries: Canaries,
    /// What an instance before us left of models that are not there yet.
    will: std::sync::Mutex<Option<FleetWill>>,
    /// Models that somebody waits for in the instance before us.
    awaited: std::sync::Mutex<Vec<String>>,
    /// Held by whoever changes the roster.
    change: Mutex<Change>,
}

#[derive(Debug)]
struct Change {
    /// What is in place, with the canaries among its models.
    config: FleetConfig,
    /// What was configured.
    configured: FleetConfig,
    /// Builds that are tried, by their models.
    canaries: BTreeMap<ModelName, CanarySpec>,
    /// Tasks of removed models, which may still have processes.
    leaving: Vec<Arc<Handle>>,
}

impl Fleet {
    /// Makes the directories, opens the ledger and starts a task for each model. Preloading begins in the background.
    /// What an instance that was killed left in its control groups is ended before: it may hold memory that we count.
    ///
    /// # Errors
    ///
    /// A directory cannot be made or is somebody else's, the ledger cannot be opened, or names are taken twice.
    pub async fn start(config: FleetConfig, nursery: NurseryHandle) -> Result<Self, FleetError> {
        if let Err(error) = run_job(WorkKind::Kernel, control_group::end_abandoned).await {
            tracing::warn!(%error, "what a llama-warden that was killed left running was not looked for");
        }
        Self::start_in(config, Arc::new(Host::new(nursery))).await
    }

    /// The same with the processes of an instance before us. Nothing is decided about anything before [`Fleet::begin`].
    ///
    /// # Errors
    ///
    /// As [`Fleet::start`].
    pub async fn start_after(
        config: FleetConfig,
        nursery: NurseryHandle,
        will: FleetWill,
    ) -> Result<Self, FleetError> {
        Self::start_with(config, Arc::new(Host::new(nursery)), Some(will)).await
    }

    pub(crate) async fn start_in(config: FleetConfig, world: Arc<dyn World>) -> Result<Self, FleetError> {
        Self::start_with(config, world, None).await
    }

    async fn start_with(
        config: FleetConfig,
        world: Arc<dyn World>,
        will: Option<FleetWill>,
    ) -> Result<Self, FleetError> {
        let config = absolute(config);
        check(&config)?;
        directories::prepare_runtime(&config.runtime_dir)?;
        let state = StateWriter::start().map_err(FleetError::NoThread)?;
        let ledger = Ledger::open(&config.state_dir, state.clone())
            .map_err(|(path, source)| FleetError::StateDir { path, source })?;
        let journal = Arc::new(Journal::new(config.watch.child.events_kept));
        let (loading, told) = LoadingDesk::new();
        let common = Arc::new(std::sync::Mutex::new(Common::from(&config)));
        let loader = Loader::new(
            Arc::clone(&world),
            Arc::clone(&journal),
            Arc::clone(&loading),
            Arc::clone(&common),
            told,
            config.watch.sensors.read_limit,
        );
        let since = will.as_ref().map_or_else(Since::now, FleetWill::since);
        let begun = since.begun.clone();
        let context = Context::new(world, journal, ledger, state, &config, loading, common, since);
        let empty = FleetConfig { models: Vec::new(), remotes: Vec::new(), ..config.clone() };
        let fleet = Self {
            inner: Arc::new(Inner {
                context: Arc::new(context),
                roster: ArcSwap::from_pointee(Roster::default()),
                tasks: TaskTracker::new(),
                loader_ends: CancellationToken::new(),
                ending: AtomicBool::new(false),
                elders: watch::Sender::new(0),
                canaries: Canaries::default(),
                will: std::sync::Mutex::new(will),
                awaited: std::sync::Mutex::default(),
                change: Mutex::new(Change {
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

    /// The model that a client's name means: a name, an alias, or with `any_name` anything. Without a name, the only model.
    ///
    /// # Errors
    ///
    /// No model has that name, or none was named and there are several.
    pub fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        self.inner.roster.load().resolve(name)
    }

    /// Whether every name means the only model.
    pub fn takes_any_name(&self) -> bool {
        self.inner.roster.load().takes_any_name()
    }

    /// Waits for the right to send one request to the model. Starts the model if need be.
    ///
    /// Callers of one kind are served in the order in which they came. Dropping the future gives up the place, or the
    /// lease if it was granted meanwhile.
    ///
    /// # Errors
    ///
    /// The queue is full or took too long, the model does not start, was removed, or everything ends.
    pub async fn lease(&self, model: &ModelName, kind: LeaseKind) -> Result<Lease, Denied> {
        self.lease_for(model, kind, None).await
    }

    /// The same for a prompt of so many tokens. Where the model's admission is enforced, it is granted only where it fits
    /// into memory, waits for that, or is refused; where it only warns, that is told.
    ///
    /// # Errors
    ///
    /// As [`Self::lease`], or the prompt does not fit into memory.
    pub async fn lease_for(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, Denied> {
        self.leases(model)?.lease(kind, tokens).await
    }

    /// The same for a request whose generation has died: it was let in once, so a full queue does not turn it away.
    ///
    /// # Errors
    ///
    /// As [`Self::lease_for`], but for a full queue.
    pub async fn lease_again(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Lease, Denied> {
        self.leases(model)?.lease_again(kind, tokens).await
    }

    fn leases(&self, model: &ModelName) -> Result<Arc<Leases>, Denied> {
        let leases = self.inner.roster.load().get(model).map(|handle| Arc::clone(&handle.leases));
        leases.ok_or(Denied::Removed)
    }

    /// Whether a prompt of this size would find room now. Decides nothing: it tells whether counting its tokens
    /// exactly is worth while.
    pub fn weigh(&self, model: &ModelName, size: Size) -> Weighed {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(Weighed::Unasked, |handle| handle.leases.weigh(size))
    }

    /// When a model will serve of which no process does; `None` if one does, or there is no such model.
    pub fn coming(&self, model: &ModelName) -> Option<Coming> {
        self.inner.roster.load().get(model)?.leases.coming()
    }

    /// Whether a request for a model would be refused at once now.
    pub fn refuses(&self, model: &ModelName) -> bool {
        let roster = self.inner.roster.load();
        let is_shut = roster.get(model).is_none_or(|handle| handle.leases.refuses());
        is_shut || self.inner.context.loading.refuses(model)
    }

    /// Whether a model is loaded, or could be without another one's leaving, by what is known of memory.
    pub fn has_room(&self, model: &ModelName) -> bool {
        self.inner.context.loading.has_room(model)
    }

    /// What is known against a request to a model.
    pub fn standing(&self, model: &ModelName, request: Fingerprint) -> Standing {
        let roster = self.inner.roster.load();
        roster.get(model).map_or(Standing::Clear, |handle| handle.leases.standing(request))
    }

    /// A request was refused because of what is known against it.
    pub fn note_refusal(&self, model: &ModelName, request: Fingerprint) {
        if let Some(handle) = self.inner.roster.load().get(model) {
            handle.leases.note_refusal(request);
        }
    }

    /// Releases requests that are suspected or refused: those of a model, those whose fingerprint begins so, or all.
    /// Returns how many.
    ///
    /// # Errors
    ///
    /// No model and no known request is meant by that.
    pub fn release_requests(&self, which: Option<&str>) -> Result<usize, ResolveError> {
        let roster = self.inner.roster.load();
        let Some(which) = which else {
            return Ok(roster.handles().map(|handle| handle.leases.release_requests(None)).sum());
        };
        // Where every name means the only model, one that is written like a fingerprint is one.
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
        let is_print = begin.len() >= FINGERPRINT_SHOWN && begin.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_print {
            return Ok(roster.handles().map(|handle| handle.leases.release_requests(Some(&begin))).sum());
        }
        let known = roster.handles().map(|handle| handle.leases.name().to_string()).collect();
        Err(ResolveError::Unknown { name: which.to_owned(), known })
    }

    /// Tells that an operator did something to a request, which is no business of a model's task.
    pub fn tell_of_request(
        &self,
        model: Option<&ModelName>,
        generation: Option<GenerationId>,
        kind: EventKind,
    ) {
        self.inner.context.journal.tell(model, generation, kind);
    }

    /// The fleet now: the last published picture, with the counts of this moment.
    pub fn view(&self) -> Arc<FleetView> {
        let mut view = FleetView::clone(&self.inner.context.publisher.view());
        let roster = self.inner.roster.load();
        for model in view.models.iter_mut().chain(&mut view.canaries) {
            let Some(handle) = roster.get(&model.name) else { continue };
            let waiting = handle.leases.waiting();
            let quarantine = handle.leases.quarantine();
            let canary = self.inner.canaries.view(&model.name).map(Box::new);
            let is_current = model.backends.is_empty()
                && (model.waiting, &model.quarantine, &model.canary) == (waiting, &quarantine, &canary);
            // The view of an idle model stays shared with the published one: each request reads the fleet, and a copy of
            // 1,000 models costs more than the request.
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

    /// The fleet at every change.
    pub fn subscribe(&self) -> watch::Receiver<Arc<FleetView>> {
        self.inner.context.publisher.subscribe()
    }

    /// Replaces every process of a model, one after another. Resolves when the new ones serve and the old ones are gone.
    /// Clears `failed`, the backoff and what holds the policy back. A replacement that is under way counts if its new
    /// process is made after this call.
    ///
    /// # Errors
    ///
    /// There is no such model, its new process does not start, or another command came in between.
    pub async fn restart(&self, model: &str) -> Result<Vec<LedgerEntry>, ControlError> {
        self.restart_by(model, None).await
    }

    /// The same; `by` is who asked for it, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// As [`Self::restart`].
    pub async fn restart_by(&self, model: &str, by: Option<&str>) -> Result<Vec<LedgerEntry>, ControlError> {
        let handle = self.asked(model, "restart", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(Control::Restart(by.map(Arc::from), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.kept_in_time().await;
        done
    }

    /// Drains and stops a model; resolves when its processes are gone. The next request starts it again.
    ///
    /// # Errors
    ///
    /// There is no such model, or everything ends.
    pub async fn drain(&self, model: &str) -> Result<(), ControlError> {
        self.drain_by(model, None).await
    }

    /// The same; `by` is who asked for it, for the events.
    ///
    /// # Errors
    ///
    /// As [`Self::drain`].
    pub async fn drain_by(&self, model: &str, by: Option<&str>) -> Result<(), ControlError> {
        let handle = self.asked(model, "drain", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(Control::Drain(reply));
        answer.await.unwrap_or(Err(ControlError::ShuttingDown))
    }

    /// Asks the processes of a model to give back what they hoard; resolves when each has answered and was read again, or
    /// was waited for in vain. They serve on.
    ///
    /// # Errors
    ///
    /// There is no such model, none of its processes serves or can be asked, or everything ends.
    pub async fn reclaim(&self, model: &str) -> Result<Vec<ReclaimEntry>, ControlError> {
        self.reclaim_by(model, None).await
    }

    /// The same; `by` is who asked for it, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// As [`Self::reclaim`].
    pub async fn reclaim_by(&self, model: &str, by: Option<&str>) -> Result<Vec<ReclaimEntry>, ControlError> {
        let handle = self.asked(model, "reclaim", by)?;
        let (reply, answer) = oneshot::channel();
        handle.send(Control::Reclaim(by.map(Arc::from), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.kept_in_time().await;
        done
    }

    /// Says that a model never leaves for another one, or that it may, whatever is configured: until it is said otherwise, or everything
    /// ends. `by` is who says so, for the ledger and the events.
    ///
    /// # Errors
    ///
    /// There is no such model, it is none that could be pinned, or everything ends.
    pub async fn pin(&self, model: &str, pinned: bool, by: &str) -> Result<PinView, ControlError> {
        let handle = self.handle(model)?;
        let (reply, answer) = oneshot::channel();
        handle.send(Control::Pin(pinned, by.into(), reply));
        let done = answer.await.unwrap_or(Err(ControlError::ShuttingDown));
        self.kept_in_time().await;
        done
    }

    /// What operators do is in the ledger when they are answered, unless its disk hangs.
    pub(super) async fn kept_in_time(&self) {
        const PATIENCE: Duration = Duration::from_millis(250);
        self.inner.context.state.written(PATIENCE).await;
    }

    /// Where all that is kept in the state directory is written.
    pub fn state_writer(&self) -> &StateWriter {
        &self.inner.context.state
    }

    /// Tells that somebody asks something of a model, if it is known who.
    fn asked(&self, model: &str, action: &str, by: Option<&str>) -> Result<Arc<Handle>, ControlError> {
        let handle = self.handle(model)?;
        if let Some(by) = by {
            self.note_asked(Some(handle.leases.name()), action, by);
        }
        Ok(handle)
    }

    /// Tells that somebody asks for something that the fleet is not asked for by name.
    pub fn note_asked(&self, model: Option<&ModelName>, action: &str, by: &str) {
        let kind = EventKind::Asked { action: action.to_owned(), by: by.to_owned() };
        self.inner.context.journal.tell(model, None, kind);
    }

    fn handle(&self, name: &str) -> Result<Arc<Handle>, ControlError> {
        let roster = self.inner.roster.load();
        // An operator may name a canary, too.
        if let Some(canary) = roster.canary(name) {
            return Ok(Arc::clone(canary));
        }
        let model = roster.resolve(Some(name))?;
        roster.get(&model).cloned().ok_or(ControlError::ShuttingDown)
    }

    /// Takes over a new configuration. Only models whose command changed get new processes; other settings apply in
    /// place. Nothing is taken over if anything in it is wrong.
    ///
    /// # Errors
    ///
    /// Names or aliases are taken twice, a socket would have too long a path, or everything ends. Nothing has changed then.
    pub async fn apply(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        self.apply_with(config, ApplyReport::default()).await
    }

    /// The same. `known`: what the caller knows to have changed outside of the fleet; it is a part of the report.
    ///
    /// # Errors
    ///
    /// Those of [`Self::apply`].
    pub async fn apply_with(
        &self,
        config: FleetConfig,
        known: ApplyReport,
    ) -> Result<ApplyReport, FleetError> {
        let config = absolute(config);
        check(&config)?;
        let fleet = self.clone();
        // In a task of its own: a caller that leaves must not leave half a configuration behind.
        let task = self.inner.tasks.spawn(async move {
            let mut report = fleet.take_over(config).await?;
            // Rules of requests and the like are not the fleet's, but the model has changed for whoever uses it.
            let of_others = |name: &ModelName| known.updated.contains(name);
            let (updated, unchanged) = std::mem::take(&mut report.unchanged).into_iter().partition(of_others);
            let updated: Vec<ModelName> = updated;
            report.updated.extend(updated);
            report.unchanged = unchanged;
            report.changed.extend(known.changed);
            report.needs_restart.extend(known.needs_restart);
            fleet.inner.context.journal.tell(None, None, EventKind::ConfigApplied { report: report.clone() });
            Ok(report)
        });
        task.await.unwrap_or(Err(FleetError::ShuttingDown))
    }

    /// So much is known now of the binary that a model runs: what was learned while it ran. Its processes go on, and their
    /// leases know it at once. Nothing happens if the model runs another binary by now, or is gone.
    pub async fn learn(&self, model: &ModelName, binary: &Path, facts: ServerFacts) {
        let mut change = self.inner.change.lock().await;
        let Change { config, configured, .. } = &mut *change;
        let runs_it = |spec: &&mut SharedSpec| spec.name == *model && spec.command.binary == binary;
        for spec in config.models.iter_mut().chain(&mut configured.models).filter(runs_it) {
            spec.facts = facts;
        }
        // Also one that leaves: its processes may still hold leases.
        let roster = self.inner.roster.load_full();
        for handle in roster.handles().chain(roster.canaries()).chain(&change.leaving) {
            if handle.leases.name() == model {
                handle.send(Control::Learn(binary.to_owned(), facts));
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
        inner.canaries.forget_others(&config);
        // Rare and large: not a part of the caller's future.
        Ok(Box::pin(self.put_in_place(&mut change, config)).await)
    }

    /// Makes the models those of a configuration and the canaries that there are.
    async fn put_in_place(&self, change: &mut Change, configured: FleetConfig) -> ApplyReport {
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
        *lock(&inner.context.common) = Common::from(&config);
        let old = inner.roster.load_full();
        let before = |name: &ModelName| change.config.models.iter().find(|spec| spec.name == *name).cloned();
        let mut handles = Vec::with_capacity(config.models.len() + config.remotes.len());
        let mut canaries = QuickMap::default();
        let shown = roster::names(&config).map(|(name, _)| name.clone()).collect();
        let tried = config.models.iter().filter(|spec| spec.canary_of.is_some());
        inner.context.publisher.set_order(shown, tried.map(|spec| spec.name.clone()).collect());
        // At the first start no step below waits for a model, so the pause is short.
        let is_first = old.handles().next().is_none();
        if is_first {
            inner.context.publisher.set_paused(true);
        }
        let gone: Vec<_> =
            old.handles().chain(old.canaries()).filter(|handle| !handle.is_in(&config)).cloned().collect();
        for handle in &gone {
            if !handle.is_remote {
                inner.context.leaving.fetch_add(1, Ordering::SeqCst);
            }
            // What goes makes room for what comes.
            handle.send(Control::Remove);
        }
        for spec in &config.models {
            let (name, known) = (spec.name.clone(), old.get(&spec.name).filter(|handle| !handle.is_remote));
            let handle = known.cloned().unwrap_or_else(|| self.launch(spec, config.watch, !gone.is_empty()));
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
            let handle = known.cloned().unwrap_or_else(|| self.point(spec));
            match before {
                None => report.added.push(name),
                Some(before) if before == spec => report.unchanged.push(name),
                Some(_) if handle.point(spec).await => report.restarted.push(name),
                Some(_) => report.updated.push(name),
            }
            handles.push(handle);
        }
        if is_first {
            inner.context.publisher.set_paused(false);
        }
        // Callers find the new roster before the old models refuse, so that they are told that the model is unknown.
        inner.roster.store(Arc::new(Roster::new(&config, handles, canaries)));
        for handle in gone {
            // Here and not by its task, so that nobody is let in after this call.
            handle.leases.refuse(Some(Refusal::Removed));
            handle.leases.dismiss(&Denied::Removed);
            if old.canary(handle.leases.name().as_str()).is_none() {
                report.removed.push(handle.leases.name().clone());
            }
            change.leaving.push(handle);
        }
        change.leaving.retain(|handle| !handle.is_gone());
        // What is not taken over stays to be told at the next reload.
        let (runtime_dir, state_dir) = (change.config.runtime_dir.clone(), change.config.state_dir.clone());
        change.config = FleetConfig { runtime_dir, state_dir, ..config };
        change.configured = configured;
        report
    }

    /// Starts the task of a model. With `after_others` its first process lets those of removed models go first.
    fn launch(&self, spec: &SharedSpec, watch: Watch, after_others: bool) -> Arc<Handle> {
        let context = &self.inner.context;
        let journal = Arc::clone(&context.journal);
        let leases = Arc::new(Leases::new(spec.name.clone(), journal, spec.queue.depth, spec.queue.wait));
        leases.set_admission(spec.admission.mode, spec.admission.policy.clone());
        leases.set_quarantine(spec.quarantine);
        leases.set_canary(spec.canary_of.is_some());
        let logs = Arc::new(LogRing::new(spec.name.clone(), watch.child.log_lines));
        let will = lock(&self.inner.will).as_mut().and_then(|will| will.take(spec.name.as_str()));
        let (mut model, sender) = Model::new(
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
        Arc::new(Handle { leases, logs, sender, is_remote: false })
    }

    /// Starts the task of a model that somebody else's endpoint serves.
    fn point(&self, spec: &RemoteSpec) -> Arc<Handle> {
        let context = &self.inner.context;
        let journal = Arc::clone(&context.journal);
        let leases = Arc::new(Leases::new(spec.name.clone(), journal, spec.queue.depth, spec.queue.wait));
        // No process of ours dies of what it is sent.
        leases.set_quarantine(QuarantinePolicy {
            refuse_for: Duration::ZERO,
            ..warden_policies::defaults().quarantine
        });
        // It says nothing that we could hear.
        let logs = Arc::new(LogRing::new(spec.name.clone(), 0));
        let (remote, sender) = Remote::new(Arc::clone(context), Arc::clone(&leases), spec.clone());
        self.inner.tasks.spawn(Box::new(remote).run());
        Arc::new(Handle { leases, logs, sender, is_remote: true })
    }

    /// Ends everything: no new leases, running ones (and queued ones that a backend can take) go on until the deadline,
    /// then TERM, the grace, KILL. All children are reaped when it returns.
    pub async fn shutdown(&self, deadline: Duration) {
        let until = clock::after(Instant::now(), deadline);
        let inner = &self.inner;
        inner.ending.store(true, Ordering::SeqCst);
        // Whoever changes the roster now is waited for, so that no model starts after we have looked.
        let mut change = inner.change.lock().await;
        self.conclude_all_canaries(&mut change);
        let roster = inner.roster.load_full();
        for handle in roster.handles().chain(roster.canaries()).chain(&change.leaving) {
            handle.leases.refuse(Some(Refusal::ShuttingDown));
            handle.send(Control::Shutdown(until));
        }
        inner.loader_ends.cancel();
        inner.tasks.close();
        drop(change);
        inner.tasks.wait().await;
    }

    /// The output of a model's processes; `None` if there is no such model.
    pub fn logs(&self, model: &str) -> Option<LogTail> {
        Some(self.handle(model).ok()?.logs.tail())
    }

    /// What happened and what will.
    pub fn events(&self) -> EventTail {
        self.inner.context.journal.tail()
    }

    /// The number of the last event; 0 before the first.
    pub fn last_event(&self) -> u64 {
        self.inner.context.journal.last()
    }

    /// Where the ledger is.
    pub fn ledger_path(&self) -> &Path {
        self.inner.context.ledger.path()
    }
}

/// With a runtime directory that means the same from wherever a child is started.
fn absolute(mut config: FleetConfig) -> FleetConfig {
    if let Ok(path) = std::path::absolute(&config.runtime_dir) {
        config.runtime_dir = path;
    }
    config
}

/// What can be wrong with a configuration, whatever the machine.
fn check(config: &FleetConfig) -> Result<(), FleetError> {
    if let Some(spec) = config.models.iter().find(|spec| spec.run.replicas == 0) {
        return Err(FleetError::NoReplicas(spec.name.clone()));
    }
    roster::check_names(config)?;
    directories::check_sockets(config)
}

impl Handle {
    fn send(&self, control: Control) {
        // Fails only when the task has ended; then there is nothing to be controlled.
        self.sender.send(Message::Control(control));
    }

    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether it stays under this configuration: what a process serves and what an endpoint serves are two models.
    fn is_in(&self, config: &FleetConfig) -> bool {
        let name = self.leases.name();
        if self.is_remote {
            config.remotes.iter().any(|spec| spec.name == *name)
        } else {
            config.models.iter().any(|spec| spec.name == *name)
        }
    }

    async fn point(&self, spec: &RemoteSpec) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(Control::Point(Box::new(spec.clone()), reply));
        answer.await.unwrap_or(false)
    }

    async fn apply(&self, spec: &SharedSpec, watch: Watch) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(Control::Apply(spec.clone(), Box::new(watch), reply));
        answer.await.unwrap_or(false)
    }
}
