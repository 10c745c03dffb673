//! Canaries: trials of another build of llama-server next to a model's own. A canary is a model with its own
//! processes, leases and events and the settings of the model under trial. Clients cannot request it by name.
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
//! Lock order: take the lock of `RosterChange` before any lock of this file, and no lock while holding the
//! trial's lock.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::Instant;
use warden_policies::canary::{CanaryTrial, CanaryVerdict, TrialExchange};
use warden_policies::dispatch::LeaseKind;
use warden_policies::world::SplitMix;
use warden_policies::{GenerationId, ModelName, QuickMap};

use super::{Fleet, FleetInner, RosterChange};
use crate::clock;
use crate::error::{CanaryError, ResolveError};
use crate::lease::Lease;
use crate::spec::{CanarySpec, FleetConfig, ModelSpec, SharedSpec};
use crate::sync::lock;
use crate::view::entry::{CanaryEntry, CanaryKind, CanaryState, CanaryView};
use crate::view::event::EventKind;

const CANARY_SUFFIX: &str = "@canary";

pub(super) fn canary_name(model: &ModelName) -> ModelName {
    ModelName::new(format!("{model}{CANARY_SUFFIX}"))
}

#[derive(Debug, Default)]
pub(super) struct CanarySet {
    running: ArcSwap<QuickMap<ModelName, Arc<RunningCanary>>>,
    past: Mutex<BTreeMap<ModelName, CanaryView>>,
    /// Counter for seeds, so that each canary gets other conversations.
    seeds: AtomicU64,
}

/// Stage of a canary, which only advances.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CanaryStage {
    /// The canary waits for room in memory.
    Waits,
    Starts,
    /// The process has been ready.
    Runs,
    Ended(Box<CanaryView>),
}

#[derive(Debug)]
pub(super) struct RunningCanary {
    pub(super) model: ModelName,
    pub(super) name: ModelName,
    pub(super) spec: CanarySpec,
    seed: u64,
    /// Newest generation before the canary's first process.
    pub(super) after: GenerationId,
    began: Instant,
    began_at: String,
    pub(super) trial: Mutex<CanaryTrial>,
    pub(super) stage: watch::Sender<CanaryStage>,
    /// Wakes the canary's task after a recorded result.
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

    /// Does nothing if the canary has reached the stage already.
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
    /// Share of conversations for the canary.
    pub share: f64,
    /// Seed for choosing conversations, different for each canary.
    pub seed: u64,
    /// Time limit for the canary's answer to begin; after this time, the model's own build answers.
    pub patience: Duration,
}

impl CanaryRoute {
    /// True if the canary answers this conversation, for each of its turns.
    pub fn takes_conversation(&self, conversation: u64) -> bool {
        // The hash may not be uniformly distributed, so mix its bits.
        SplitMix::new(conversation ^ self.seed).chance(self.share)
    }
}

impl Fleet {
    /// Running canary of a model; cheap without canaries. Also `None` while clients have changed settings in
    /// the model's own processes, because the canary lacks them.
    pub fn canary(&self, model: &ModelName) -> Option<CanaryRoute> {
        let running = self.inner.running_canary(model)?;
        if !self.inner.model_leases(model).ok()?.settings.are_untouched() {
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

    /// Records the end of a request by either build. Does nothing for a model without a canary.
    pub fn note_exchange(&self, model: &ModelName, exchange: &TrialExchange) {
        if let Some(running) = self.inner.running_canary(model)
            && *running.stage.borrow() == CanaryStage::Runs
        {
            lock(&running.trial).record_exchange(exchange);
            running.recorded.notify_one();
        }
    }

    /// Returns a lease without waiting and without loading the model.
    pub fn lease_now(&self, model: &ModelName, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        self.inner.model_leases(model).ok()?.lease_now(kind, tokens)
    }

    /// Starts a canary. Resolves when the canary's process is being started.
    ///
    /// # Errors
    ///
    /// There is no such model, the model is remote or already has a canary, the binary is missing, memory
    /// does not suffice next to the loaded models, the share is invalid, or the fleet is shutting down.
    pub async fn start_canary(&self, model: &str, spec: CanarySpec) -> Result<CanaryView, CanaryError> {
        let inner = Arc::clone(&self.inner);
        let model = self.inner.roster.load().resolve(Some(model))?;
        // A separate task completes the start even if the caller leaves.
        let task = self.inner.tasks.spawn(async move { inner.begin_canary(model, spec).await });
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

    /// Ends the canary of a model. Resolves when it gets no new requests; running ones are still answered.
    ///
    /// # Errors
    ///
    /// There is no such model, or the model has no canary.
    pub async fn stop_canary(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        let running = self.inner.running_canary(&model).ok_or(CanaryError::None(model))?;
        let (verdict, _) = lock(&running.trial).judge(running.elapsed());
        let verdict = match verdict {
            CanaryVerdict::Undecided { mut missing } => {
                missing.insert(0, "it was stopped by an operator".to_owned());
                CanaryVerdict::Undecided { missing }
            }
            decided => decided,
        };
        self.inner.end_canary(&running, verdict).await;
        let ended = running.stage.borrow().clone();
        match ended {
            CanaryStage::Ended(view) => Ok(*view),
            // Unreachable: the canary was ended above.
            _ => Ok(running.view()),
        }
    }

    /// Running or last canary of a model.
    ///
    /// # Errors
    ///
    /// There is no such model, or the model had no canary in this run of the program.
    pub fn canary_view(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        self.inner.canaries.view(&model).ok_or(CanaryError::None(model))
    }
}

impl FleetInner {
    fn running_canary(&self, model: &ModelName) -> Option<Arc<RunningCanary>> {
        self.canaries.running.load().get(model).cloned()
    }

    async fn begin_canary(
        self: &Arc<Self>,
        model: ModelName,
        spec: CanarySpec,
    ) -> Result<Arc<RunningCanary>, CanaryError> {
        let most = spec.numbers.share_most;
        let share = spec.share;
        if !(share > 0.0 && share <= most) {
            return Err(CanaryError::Share { share, most });
        }
        check_binary(&spec.binary)?;
        let mut change = self.change.lock().await;
        if self.ending.load(Ordering::SeqCst) {
            return Err(CanaryError::ShuttingDown);
        }
        let configured = &change.configured;
        if let Some(spec) = configured.model(&model) {
            if !spec.command.kind.is_llama_server() {
                return Err(CanaryError::OtherProgram(model));
            }
        } else {
            if configured.remote(&model).is_some() {
                return Err(CanaryError::Remote(model));
            }
            let known = configured.models.iter().map(|spec| spec.name.to_string()).collect();
            return Err(ResolveError::Unknown { name: model.to_string(), known }.into());
        }
        if change.canaries.contains_key(&model) {
            return Err(CanaryError::Exists(model));
        }
        let mut with = change.canaries.clone();
        with.insert(model.clone(), spec.clone());
        super::check_config(&with_canaries(&change.configured, &with))?;
        change.canaries = with;
        let seed = self.canaries.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let running = Arc::new(RunningCanary::new(model.clone(), spec, seed, self.context.last_generation()));
        // Watch before the canary's task exists, so that no event is missed.
        self.tasks.spawn(Arc::clone(self).watch_canary(Arc::clone(&running)));
        self.canaries.insert(&running);
        let began = EventKind::CanaryBegan { binary: running.spec.binary.clone(), share: Some(share) };
        self.context.records.journal.record(Some(&model), None, began);
        let configured = change.configured.clone();
        Box::pin(self.put_in_place(&mut change, configured)).await;
        Ok(running)
    }

    /// Ends a canary, unless another caller has ended it.
    pub(super) async fn end_canary(&self, running: &Arc<RunningCanary>, verdict: CanaryVerdict) {
        let mut change = self.change.lock().await;
        if change.canaries.contains_key(&running.model) && self.conclude_canary(running, verdict) {
            change.canaries.remove(&running.model);
            let configured = change.configured.clone();
            Box::pin(self.put_in_place(&mut change, configured)).await;
        }
    }

    /// Sends no new requests to a canary, and stores its result. Returns false if it was concluded before.
    pub(super) fn conclude_canary(&self, running: &Arc<RunningCanary>, verdict: CanaryVerdict) -> bool {
        if !self.canaries.remove(running) {
            return false;
        }
        let view = running.show(CanaryState::Ended, verdict);
        lock(&self.canaries.past).insert(running.model.clone(), view.clone());
        let entry = CanaryEntry {
            kind: CanaryKind::Canary,
            id: self.context.records.ledger.next_number(),
            at: clock::wall_time(),
            canary: view.clone(),
        };
        self.context.records.ledger.append(&entry);
        let ended = EventKind::CanaryEnded { entry: Box::new(entry) };
        self.context.records.journal.record(Some(&running.model), None, ended);
        running.stage.send_replace(CanaryStage::Ended(Box::new(view)));
        true
    }

    pub(super) fn conclude_all_canaries(&self, change: &mut RosterChange) {
        change.canaries.clear();
        for running in self.canaries.all_running() {
            self.conclude_canary(&running, CanaryVerdict::undecided("llama-warden was stopped"));
        }
    }

    /// Ends canaries that a new configuration does not allow.
    pub(super) fn keep_canaries(&self, change: &mut RosterChange, new: &FleetConfig) {
        for running in self.canaries.all_running() {
            let before = change.configured.model(&running.model);
            let is_taken = new.model(&running.name).is_some() || new.remote(&running.name).is_some();
            let why = match new.model(&running.model) {
                _ if is_taken => "a model of its name was configured",
                None => "its model was removed from the configuration",
                Some(now) if before.is_none_or(|before| before.command != now.command) => {
                    "its model's own command was changed by a reload"
                }
                Some(_) => continue,
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
    }

    fn remove(&self, running: &Arc<RunningCanary>) -> bool {
        let before = self.running.rcu(|map| {
            let mut map = QuickMap::clone(map);
            map.retain(|_, known| !Arc::ptr_eq(known, running));
            map
        });
        before.get(&running.model).is_some_and(|known| Arc::ptr_eq(known, running))
    }

    fn all_running(&self) -> Vec<Arc<RunningCanary>> {
        self.running.load().values().cloned().collect()
    }

    pub(super) fn view(&self, model: &ModelName) -> Option<CanaryView> {
        let running = self.running.load().get(model).cloned();
        running.map(|running| running.view()).or_else(|| lock(&self.past).get(model).cloned())
    }

    pub(super) fn retain_configured(&self, config: &FleetConfig) {
        lock(&self.past).retain(|model, _| config.model(model).is_some());
    }
}

pub(super) fn with_canaries(
    configured: &FleetConfig,
    canaries: &BTreeMap<ModelName, CanarySpec>,
) -> FleetConfig {
    let mut config = configured.clone();
    for (model, canary) in canaries {
        let base = configured.model(model);
        config.models.extend(base.map(|base| SharedSpec::new(canary_spec(base, canary), canary.facts)));
    }
    config
}

/// Settings of a canary: those of its model, with another name, binary and loading and one process.
fn canary_spec(base: &ModelSpec, canary: &CanarySpec) -> ModelSpec {
    let mut spec = base.clone();
    spec.name = canary_name(&base.name);
    spec.aliases.clear();
    spec.canary_of = Some(base.name.clone());
    spec.command.binary.clone_from(&canary.binary);
    (spec.run.replicas, spec.run.preload, spec.run.pin) = (1, true, false);
    // The conversations return to the model's own build after the trial.
    spec.run.warm = warden_policies::modes::WarmMode::Off;
    (spec.ttl, spec.start.fallback) = (None, None);
    spec.loading.guest = true;
    (spec.loading.pin, spec.loading.ttl) = (false, None);
    spec.loading.companions.clear();
    if let Some(needs) = &mut spec.loading.needs {
        // The model's own process has the mapped model file in memory already.
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
