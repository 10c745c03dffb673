//! Canaries: trials of another build of llama-server next to a model's own. A canary is a model of its own
//! in the fleet, with the settings of the model that it tries but another binary. So it has processes,
//! leases, memory, health and events like any model, but clients cannot request it by name.
//!
//! ```text
//!     start ── no room ──────────────────────────────> refused, with numbers
//!      │   its process starts ── it does not come up ──> worse
//!      v
//!     running: `trial` gets each request, death, symptom and memory verdict
//!      │   sure, or out of time; an operator; a reload; another model needs the room; shutdown
//!      v
//!     ended: clients use the model's own build alone; the canary drains; ledger, event, `status`
//! ```
//!
//! Lock order: take the lock of `RosterChange` before any lock of this file. The trial's lock is held
//! briefly, and no lock is taken while it is held.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::Instant;
use warden_policies::canary::{CanaryTrial, CanaryVerdict, TrialExchange};
use warden_policies::dispatch::LeaseKind;
use warden_policies::world::SplitMix;
use warden_policies::{GenerationId, ModelName, QuickMap};

use super::{Fleet, RosterChange};
use crate::clock;
use crate::error::{CanaryError, ResolveError};
use crate::lease::Lease;
use crate::spec::{CanarySpec, FleetConfig, ModelSpec, SharedSpec};
use crate::sync::lock;
use crate::view::entry::{CanaryEntry, CanaryKind, CanaryState, CanaryView};
use crate::view::event::EventKind;

/// Suffix that makes a canary's name from the name of its model.
const CANARY_SUFFIX: &str = "@canary";

/// Name of a model's canary.
pub(super) fn canary_name(model: &ModelName) -> ModelName {
    ModelName::new(format!("{model}{CANARY_SUFFIX}"))
}

/// Running canaries, and the last canary of each model.
#[derive(Debug, Default)]
pub(super) struct CanarySet {
    /// True if any canary runs; checked first, so that requests cost no lookup while none runs.
    any: AtomicBool,
    running: ArcSwap<QuickMap<ModelName, Arc<RunningCanary>>>,
    past: Mutex<BTreeMap<ModelName, CanaryView>>,
    /// Counter for seeds, so that each canary gets other conversations.
    seeds: AtomicU64,
}

/// Stage of a canary, for tasks that wait for one. A canary never returns to an earlier stage.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CanaryStage {
    /// The canary waits for room in memory.
    Waits,
    /// The canary's process was created.
    Starts,
    /// The canary's process has been ready.
    Runs,
    Ended(Box<CanaryView>),
}

/// A running canary.
#[derive(Debug)]
pub(super) struct RunningCanary {
    pub(super) model: ModelName,
    pub(super) name: ModelName,
    pub(super) spec: CanarySpec,
    seed: u64,
    /// Newest generation of the fleet before the canary's first process.
    pub(super) after: GenerationId,
    began: Instant,
    began_at: String,
    pub(super) trial: Mutex<CanaryTrial>,
    pub(super) stage: watch::Sender<CanaryStage>,
    /// Wakes the canary's task after a result of a request was recorded.
    pub(super) recorded: tokio::sync::Notify,
}

impl RunningCanary {
    fn new(model: ModelName, spec: CanarySpec, seed: u64, after: GenerationId) -> Self {
        let trial = CanaryTrial::new(spec.numbers);
        Self {
            name: canary_name(&model),
            model,
            spec,
            seed,
            after,
            began: Instant::now(),
            began_at: clock::wall_time(),
            trial: Mutex::new(trial),
            stage: watch::Sender::new(CanaryStage::Waits),
            recorded: tokio::sync::Notify::new(),
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Sets a later stage. Does nothing if the canary has reached that stage already.
    pub(super) fn advance_to(&self, now: CanaryStage) {
        let rank = |stage: &CanaryStage| match stage {
            CanaryStage::Waits => 0,
            CanaryStage::Starts => 1,
            CanaryStage::Runs => 2,
            CanaryStage::Ended(_) => 3,
        };
        self.stage.send_if_modified(|stage| {
            let is_later = rank(&now) > rank(stage);
            if is_later {
                *stage = now;
            }
            is_later
        });
    }

    fn show(&self, state: CanaryState, verdict: CanaryVerdict) -> CanaryView {
        let ended = state == CanaryState::Ended;
        CanaryView {
            model: self.model.clone(),
            name: self.name.clone(),
            state,
            binary: self.spec.binary.clone(),
            build: self.spec.build.clone(),
            share: Some(self.spec.share),
            began_at: self.began_at.clone(),
            seconds: self.elapsed().as_secs_f64(),
            ended_at: ended.then(clock::wall_time),
            verdict,
            report: lock(&self.trial).report(),
        }
    }

    /// View of the canary as it is now.
    fn view(&self) -> CanaryView {
        match &*self.stage.borrow() {
            CanaryStage::Ended(view) => return (**view).clone(),
            CanaryStage::Waits | CanaryStage::Starts => {
                return self.show(CanaryState::Starting, CanaryVerdict::undecided("its process starts"));
            }
            CanaryStage::Runs => {}
        }
        let (verdict, _) = lock(&self.trial).judge(self.elapsed());
        self.show(CanaryState::Running, verdict)
    }
}

/// Rule for routing a model's requests to its canary.
#[derive(Clone, Debug, PartialEq)]
pub struct CanaryRoute {
    /// Name of the canary, by which leases are requested.
    pub name: ModelName,
    /// Share of conversations that the canary answers.
    pub share: f64,
    /// Seed for choosing conversations, different for each canary.
    pub seed: u64,
    /// Time to wait for the beginning of the canary's answer before the model's own build is used.
    pub patience: Duration,
}

impl CanaryRoute {
    /// True if the canary answers this conversation. The result is the same for each turn of the
    /// conversation.
    pub fn takes_conversation(&self, conversation: u64) -> bool {
        // Mix the bits, because the hash may not be uniformly distributed.
        SplitMix::new(conversation ^ self.seed).chance(self.share)
    }
}

impl Fleet {
    /// Running canary of a model, if any; costs one atomic load while the fleet has none. Also `None` while
    /// clients have changed settings in the model's own processes, because the canary's processes lack
    /// those settings.
    pub fn canary(&self, model: &ModelName) -> Option<CanaryRoute> {
        let running = self.running_canary(model)?;
        if !self.model_leases(model).ok()?.settings.are_untouched() {
            return None;
        }
        let patience = lock(&running.trial).patience();
        Some(CanaryRoute {
            name: running.name.clone(),
            share: running.spec.share,
            seed: running.seed,
            patience,
        })
    }

    fn running_canary(&self, model: &ModelName) -> Option<Arc<RunningCanary>> {
        let canaries = &self.inner.canaries;
        if !canaries.any.load(Ordering::Relaxed) {
            return None;
        }
        canaries.running.load().get(model).cloned()
    }

    /// Records the end of a request to a model that has a canary, no matter which build answered. Without
    /// effect if the model has none.
    pub fn note_exchange(&self, model: &ModelName, exchange: &TrialExchange) {
        if let Some(running) = self.running_canary(model)
            && *running.stage.borrow() == CanaryStage::Runs
        {
            lock(&running.trial).record_exchange(exchange);
            running.recorded.notify_one();
        }
    }

    /// Returns a lease if one is available at once. Never waits in the queue, and never causes the model to
    /// be loaded.
    pub fn lease_now(&self, model: &ModelName, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        self.model_leases(model).ok()?.lease_now(kind, tokens)
    }

    /// Starts a trial of another build next to a model's own. Resolves when the canary's process is being
    /// started.
    ///
    /// # Errors
    ///
    /// There is no such model, the model is remote or already has a canary, the binary is missing, memory
    /// does not suffice next to the loaded models, the share is invalid, or the fleet is shutting down.
    pub async fn start_canary(&self, model: &str, spec: CanarySpec) -> Result<CanaryView, CanaryError> {
        let fleet = self.clone();
        let model = self.inner.roster.load().resolve(Some(model))?;
        // Run in a separate task, so that the start is completed even if the caller leaves.
        let task = self.inner.tasks.spawn(async move { fleet.begin_canary(model, spec).await });
        let running = task.await.unwrap_or(Err(CanaryError::ShuttingDown))?;
        let mut stage = running.stage.subscribe();
        let begun = stage.wait_for(|stage| *stage != CanaryStage::Waits).await.map(|stage| stage.clone());
        match begun {
            Ok(CanaryStage::Ended(view)) => Err(CanaryError::DidNotBegin {
                model: running.model.clone(),
                because: view.verdict.words().join("; "),
            }),
            _ => Ok(running.view()),
        }
    }

    async fn begin_canary(
        &self,
        model: ModelName,
        spec: CanarySpec,
    ) -> Result<Arc<RunningCanary>, CanaryError> {
        let most = spec.numbers.share_most;
        let share = spec.share;
        if !(share > 0.0 && share <= most) {
            return Err(CanaryError::Share { share, most });
        }
        check_binary(&spec.binary)?;
        let inner = &self.inner;
        let mut change = inner.change.lock().await;
        if inner.ending.load(Ordering::SeqCst) {
            return Err(CanaryError::ShuttingDown);
        }
        let configured = |spec: &&SharedSpec| spec.name == model;
        if change.configured.models.iter().find(configured).is_none() {
            let known = change.configured.remotes.iter().any(|remote| remote.name == model);
            return Err(if known {
                CanaryError::Remote(model)
            } else {
                let known = change.configured.models.iter().map(|spec| spec.name.to_string()).collect();
                CanaryError::Unknown(ResolveError::Unknown { name: model.to_string(), known })
            });
        }
        if change.canaries.contains_key(&model) {
            return Err(CanaryError::Exists(model));
        }
        let mut with = change.canaries.clone();
        with.insert(model.clone(), spec.clone());
        super::check_config(&with_canaries(&change.configured, &with))?;
        change.canaries = with;
        let seed = inner.canaries.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let running =
            Arc::new(RunningCanary::new(model.clone(), spec, seed, inner.context.last_generation()));
        let binary = running.spec.binary.clone();
        // Begin to watch before the canary's task exists, so that no event is missed.
        let watching = self.clone().watch_canary(Arc::clone(&running));
        inner.tasks.spawn(watching);
        inner.canaries.insert(&running);
        inner.context.journal.record(
            Some(&model),
            None,
            EventKind::CanaryBegan { binary, share: Some(share) },
        );
        let configured = change.configured.clone();
        Box::pin(self.put_in_place(&mut change, configured)).await;
        Ok(running)
    }

    /// Ends the canary of a model. Resolves when the canary gets no new requests; running ones are still
    /// answered.
    ///
    /// # Errors
    ///
    /// There is no such model, or the model has no canary.
    pub async fn stop_canary(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        let running = self.running_canary(&model).ok_or(CanaryError::None(model))?;
        let (verdict, _) = lock(&running.trial).judge(running.elapsed());
        let verdict = match verdict {
            CanaryVerdict::Undecided { mut missing } => {
                missing.insert(0, "it was stopped by an operator".to_owned());
                CanaryVerdict::Undecided { missing }
            }
            decided => decided,
        };
        self.end_canary(&running, verdict).await;
        let ended = running.stage.borrow().clone();
        match ended {
            CanaryStage::Ended(view) => Ok(*view),
            // Unreachable: the canary was ended above.
            _ => Ok(running.view()),
        }
    }

    /// View of a model's canary: the running one, or else the last one.
    ///
    /// # Errors
    ///
    /// There is no such model, or the model had no canary in this run of the program.
    pub fn canary_view(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        self.inner.canaries.view(&model).ok_or(CanaryError::None(model))
    }

    /// Ends a canary. If several callers try, only the first one ends it.
    pub(super) async fn end_canary(&self, running: &Arc<RunningCanary>, verdict: CanaryVerdict) {
        let mut change = self.inner.change.lock().await;
        let is_its = change.canaries.contains_key(&running.model) && self.conclude_canary(running, verdict);
        if is_its {
            change.canaries.remove(&running.model);
            let configured = change.configured.clone();
            Box::pin(self.put_in_place(&mut change, configured)).await;
        }
    }

    /// Stops sending new requests to a canary, and stores its result. Returns false if that was done before.
    pub(super) fn conclude_canary(&self, running: &Arc<RunningCanary>, verdict: CanaryVerdict) -> bool {
        let canaries = &self.inner.canaries;
        if !canaries.remove(running) {
            return false;
        }
        let view = running.show(CanaryState::Ended, verdict);
        lock(&canaries.past).insert(running.model.clone(), view.clone());
        let context = &self.inner.context;
        let (kind, id, at) = (CanaryKind::Canary, context.ledger.next_number(), clock::wall_time());
        let entry = CanaryEntry { kind, id, at, canary: view.clone() };
        context.ledger.append(&entry);
        let entry = Box::new(entry);
        context.journal.record(Some(&running.model), None, EventKind::CanaryEnded { entry });
        running.stage.send_replace(CanaryStage::Ended(Box::new(view)));
        true
    }

    /// Ends all canaries at shutdown.
    pub(super) fn conclude_all_canaries(&self, change: &mut RosterChange) {
        change.canaries.clear();
        for running in self.inner.canaries.all_running() {
            self.conclude_canary(&running, CanaryVerdict::undecided("llama-warden was stopped"));
        }
    }

    /// Ends canaries that are not possible with a new configuration.
    pub(super) fn keep_canaries(&self, change: &mut RosterChange, new: &FleetConfig) {
        for running in self.inner.canaries.all_running() {
            let of = |config: &FleetConfig| {
                config.models.iter().find(|spec| spec.name == running.model).map(|spec| spec.command.clone())
            };
            let is_taken = new.models.iter().any(|spec| spec.name == running.name)
                || new.remotes.iter().any(|remote| remote.name == running.name);
            let why = match (of(&change.configured), of(new)) {
                _ if is_taken => "a model of its name was configured",
                (_, None) => "its model was removed from the configuration",
                (before, now) if before != now => "its model's own command was changed by a reload",
                _ => continue,
            };
            change.canaries.remove(&running.model);
            self.conclude_canary(&running, CanaryVerdict::undecided(why));
        }
    }
}

impl CanarySet {
    fn insert(&self, running: &Arc<RunningCanary>) {
        self.running.rcu(|map| {
            let mut map = QuickMap::clone(map);
            map.insert(running.model.clone(), Arc::clone(running));
            map
        });
        self.any.store(true, Ordering::Relaxed);
    }

    fn remove(&self, running: &Arc<RunningCanary>) -> bool {
        let is_it = |map: &QuickMap<ModelName, Arc<RunningCanary>>| {
            map.get(&running.model).is_some_and(|known| Arc::ptr_eq(known, running))
        };
        let before = self.running.rcu(|map| {
            let mut map = QuickMap::clone(map);
            if is_it(&map) {
                map.remove(&running.model);
            }
            map
        });
        self.any.store(!self.running.load().is_empty(), Ordering::Relaxed);
        is_it(&before)
    }

    fn all_running(&self) -> Vec<Arc<RunningCanary>> {
        self.running.load().values().cloned().collect()
    }

    /// View of a model's canary: the running one, or else the last one.
    pub(super) fn view(&self, model: &ModelName) -> Option<CanaryView> {
        let running = self.running.load().get(model).cloned();
        running.map(|running| running.view()).or_else(|| lock(&self.past).get(model).cloned())
    }

    /// Drops canaries of removed models.
    pub(super) fn retain_configured(&self, config: &FleetConfig) {
        lock(&self.past).retain(|model, _| config.models.iter().any(|spec| spec.name == *model));
    }
}

/// Configuration with the canaries appended to its models.
pub(super) fn with_canaries(
    configured: &FleetConfig,
    canaries: &BTreeMap<ModelName, CanarySpec>,
) -> FleetConfig {
    let mut config = configured.clone();
    for (model, canary) in canaries {
        let base = configured.models.iter().find(|spec| spec.name == *model);
        config.models.extend(base.map(|base| SharedSpec::new(canary_spec(base, canary), canary.facts)));
    }
    config
}

/// Settings of a canary: those of its model, except for names, room in memory, and the binary.
fn canary_spec(base: &ModelSpec, canary: &CanarySpec) -> ModelSpec {
    let mut spec = base.clone();
    spec.name = canary_name(&base.name);
    spec.aliases.clear();
    spec.canary_of = Some(base.name.clone());
    spec.command.binary.clone_from(&canary.binary);
    (spec.run.replicas, spec.run.preload, spec.run.pin) = (1, true, false);
    // Do not carry conversations over: after the canary they return to the model's own build.
    spec.run.warm = warden_policies::modes::WarmMode::Off;
    (spec.ttl, spec.fallback) = (None, None);
    spec.loading.guest = true;
    (spec.loading.pin, spec.loading.ttl) = (false, None);
    spec.loading.companions.clear();
    if let Some(needs) = &mut spec.loading.needs {
        // The mapped model file is in memory already, because the model's own process maps it.
        needs.mapped = 0;
    }
    spec
}

fn check_binary(binary: &Path) -> Result<(), CanaryError> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = || binary.to_owned();
    let facts = std::fs::metadata(binary).map_err(|source| CanaryError::NoBinary { path: path(), source })?;
    if !facts.is_file() || facts.permissions().mode() & 0o111 == 0 {
        return Err(CanaryError::NotABinary(path()));
    }
    Ok(())
}
