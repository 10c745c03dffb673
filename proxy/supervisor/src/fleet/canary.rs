//! Canaries: another build of llama-server is tried with a model, beside its own. It is a model of its own in the fleet, with the settings
//! of its model but another binary, so it has processes, leases, memory, health, events like every other. No client can ask for it.
//!
//! ```text
//!   start ── no room ───────────────────────────────> refused, with numbers
//!     │ its process starts ── it does not come ──────> worse
//!     v
//!   running: `trial` is told of each request, death, symptom, verdict on memory
//!     │ sure, or the time is over; an operator; a reload; another model needs the room; the end
//!     v
//!   ended: clients meet the model's own build alone; what runs there is drained; ledger, event, `status`
//! ```
//!
//! Lock order: `Change` before anything here. The trial's lock is held for moments, and nothing is taken under it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::Instant;
use warden_policies::canary::{Exchange, Trial, Verdict};
use warden_policies::dispatch::LeaseKind;
use warden_policies::world::SplitMix;
use warden_policies::{GenerationId, ModelName, QuickMap};

use super::{Change, Fleet};
use crate::clock;
use crate::error::{CanaryError, ResolveError};
use crate::lease::Lease;
use crate::spec::{CanarySpec, FleetConfig, ModelSpec, SharedSpec};
use crate::sync::lock;
use crate::view::canary::{CanaryEntry, CanaryKind, CanaryState, CanaryView};
use crate::view::event::EventKind;

/// Behind the name of a model: its canary.
const SUFFIX: &str = "@canary";

/// The name under which the canary of a model stands.
pub(super) fn name_of(model: &ModelName) -> ModelName {
    ModelName::new(format!("{model}{SUFFIX}"))
}

/// Canaries that run, and the last one of each model.
#[derive(Debug, Default)]
pub(super) struct Canaries {
    /// There is one, so that nobody looks where there is none.
    any: AtomicBool,
    running: ArcSwap<QuickMap<ModelName, Arc<Running>>>,
    past: Mutex<BTreeMap<ModelName, CanaryView>>,
    /// Of each canary another one, so that each gets other conversations.
    seeds: AtomicU64,
}

/// Where a canary is, for those who wait for it. From each it goes to a later one only.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stage {
    /// It asks for room.
    Waits,
    /// Its process was made.
    Starts,
    /// It was ready once.
    Runs,
    Ended(Box<CanaryView>),
}

/// A canary that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) model: ModelName,
    pub(super) name: ModelName,
    pub(super) spec: CanarySpec,
    seed: u64,
    /// Its processes are made after this one.
    pub(super) after: GenerationId,
    began: Instant,
    began_at: String,
    pub(super) trial: Mutex<Trial>,
    pub(super) stage: watch::Sender<Stage>,
    /// Something was told.
    pub(super) told: tokio::sync::Notify,
}

impl Running {
    fn new(model: ModelName, spec: CanarySpec, seed: u64, after: GenerationId) -> Self {
        let trial = Trial::new(spec.numbers);
        Self {
            name: name_of(&model),
            model,
            spec,
            seed,
            after,
            began: Instant::now(),
            began_at: clock::wall(),
            trial: Mutex::new(trial),
            stage: watch::Sender::new(Stage::Waits),
            told: tokio::sync::Notify::new(),
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// It has come so far, if it was not farther already.
    pub(super) fn reaches(&self, now: Stage) {
        let rank = |stage: &Stage| match stage {
            Stage::Waits => 0,
            Stage::Starts => 1,
            Stage::Runs => 2,
            Stage::Ended(_) => 3,
        };
        self.stage.send_if_modified(|stage| {
            let is_later = rank(&now) > rank(stage);
            if is_later {
                *stage = now;
            }
            is_later
        });
    }

    fn show(&self, state: CanaryState, verdict: Verdict) -> CanaryView {
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
            ended_at: ended.then(clock::wall),
            verdict,
            report: lock(&self.trial).report(),
        }
    }

    /// As it is now.
    fn view(&self) -> CanaryView {
        match &*self.stage.borrow() {
            Stage::Ended(view) => return (**view).clone(),
            Stage::Waits | Stage::Starts => {
                return self.show(CanaryState::Starting, Verdict::undecided("its process starts"));
            }
            Stage::Runs => {}
        }
        let (verdict, _) = lock(&self.trial).judge(self.elapsed());
        self.show(CanaryState::Running, verdict)
    }
}

/// The canary of a model, as requests see it.
#[derive(Clone, Debug, PartialEq)]
pub struct CanaryRoute {
    /// Under which name its leases are.
    pub name: ModelName,
    /// The share of conversations whose clients it answers.
    pub share: f64,
    /// Of each canary another one, so that each gets other conversations.
    pub seed: u64,
    /// For how long the beginning of its answer may be awaited before the model's own build is asked.
    pub patience: Duration,
}

impl CanaryRoute {
    /// Whether it answers the clients of this conversation. The same at each turn of it.
    pub fn takes(&self, conversation: u64) -> bool {
        // Spread evenly whatever the hash is like.
        SplitMix::new(conversation ^ self.seed).chance(self.share)
    }
}

impl Fleet {
    /// The canary of a model that runs, if it has one. Costs one load where there is none at all. None, too, while clients have set
    /// something in the model's own processes, which the canary's do not have.
    pub fn canary(&self, model: &ModelName) -> Option<CanaryRoute> {
        let running = self.running_canary(model)?;
        if !self.leases(model).ok()?.settings.are_untouched() {
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

    fn running_canary(&self, model: &ModelName) -> Option<Arc<Running>> {
        let canaries = &self.inner.canaries;
        if !canaries.any.load(Ordering::Relaxed) {
            return None;
        }
        canaries.running.load().get(model).cloned()
    }

    /// A request of a model that has a canary has ended, on either side. Nothing, if it has none.
    pub fn note_exchange(&self, model: &ModelName, exchange: &Exchange) {
        if let Some(running) = self.running_canary(model)
            && *running.stage.borrow() == Stage::Runs
        {
            lock(&running.trial).note(exchange);
            running.told.notify_one();
        }
    }

    /// A lease that can be had at once: nobody waits, is refused, or is loaded for it.
    pub fn lease_now(&self, model: &ModelName, kind: LeaseKind, tokens: Option<u64>) -> Option<Lease> {
        self.leases(model).ok()?.lease_now(kind, tokens)
    }

    /// Tries another build with a model, beside its own. Resolves when its process is being started.
    ///
    /// # Errors
    ///
    /// There is no such model, an endpoint serves it, it has a canary, the binary is missing, there is no room beside the models that are
    /// loaded, the share cannot be had, or everything ends.
    pub async fn start_canary(&self, model: &str, spec: CanarySpec) -> Result<CanaryView, CanaryError> {
        let fleet = self.clone();
        let model = self.inner.roster.load().resolve(Some(model))?;
        // In a task of its own: a caller that leaves must not leave half a canary behind.
        let task = self.inner.tasks.spawn(async move { fleet.begin_canary(model, spec).await });
        let running = task.await.unwrap_or(Err(CanaryError::ShuttingDown))?;
        let mut stage = running.stage.subscribe();
        let begun = stage.wait_for(|stage| *stage != Stage::Waits).await.map(|stage| stage.clone());
        match begun {
            Ok(Stage::Ended(view)) => Err(CanaryError::DidNotBegin {
                model: running.model.clone(),
                because: view.verdict.words().join("; "),
            }),
            _ => Ok(running.view()),
        }
    }

    async fn begin_canary(&self, model: ModelName, spec: CanarySpec) -> Result<Arc<Running>, CanaryError> {
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
        super::check(&with_canaries(&change.configured, &with))?;
        change.canaries = with;
        let seed = inner.canaries.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let running = Arc::new(Running::new(model.clone(), spec, seed, inner.context.last_generation()));
        let binary = running.spec.binary.clone();
        // Before its model's task is there, so that no event of it is missed.
        let watching = self.clone().watch_canary(Arc::clone(&running));
        inner.tasks.spawn(watching);
        inner.canaries.insert(&running);
        inner.context.journal.tell(Some(&model), None, EventKind::CanaryBegan { binary, share: Some(share) });
        let configured = change.configured.clone();
        Box::pin(self.put_in_place(&mut change, configured)).await;
        Ok(running)
    }

    /// Ends the canary of a model. What runs there is answered; resolves when no new request goes there any more.
    ///
    /// # Errors
    ///
    /// There is no such model, or it has no canary.
    pub async fn stop_canary(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        let running = self.running_canary(&model).ok_or(CanaryError::None(model))?;
        let (verdict, _) = lock(&running.trial).judge(running.elapsed());
        let verdict = match verdict {
            Verdict::Undecided { mut missing } => {
                missing.insert(0, "it was stopped by an operator".to_owned());
                Verdict::Undecided { missing }
            }
            decided => decided,
        };
        self.end_canary(&running, verdict).await;
        let ended = running.stage.borrow().clone();
        match ended {
            Stage::Ended(view) => Ok(*view),
            // Cannot be: it was ended above.
            _ => Ok(running.view()),
        }
    }

    /// The canary of a model: the one that runs, else the last one.
    ///
    /// # Errors
    ///
    /// There is no such model, or it never had a canary since we run.
    pub fn canary_view(&self, model: &str) -> Result<CanaryView, CanaryError> {
        let model = self.inner.roster.load().resolve(Some(model))?;
        self.inner.canaries.view(&model).ok_or(CanaryError::None(model))
    }

    /// Ends a canary, once: with the first of those who do.
    pub(super) async fn end_canary(&self, running: &Arc<Running>, verdict: Verdict) {
        let mut change = self.inner.change.lock().await;
        let is_its = change.canaries.contains_key(&running.model) && self.conclude_canary(running, verdict);
        if is_its {
            change.canaries.remove(&running.model);
            let configured = change.configured.clone();
            Box::pin(self.put_in_place(&mut change, configured)).await;
        }
    }

    /// No new request goes to a canary any more, and what was made of it is kept. False if that was so already.
    pub(super) fn conclude_canary(&self, running: &Arc<Running>, verdict: Verdict) -> bool {
        let canaries = &self.inner.canaries;
        if !canaries.remove(running) {
            return false;
        }
        let view = running.show(CanaryState::Ended, verdict);
        lock(&canaries.past).insert(running.model.clone(), view.clone());
        let context = &self.inner.context;
        let (kind, id, at) = (CanaryKind::Canary, context.ledger.next(), clock::wall());
        let entry = CanaryEntry { kind, id, at, canary: view.clone() };
        context.ledger.append_canary(&entry);
        let entry = Box::new(entry);
        context.journal.tell(Some(&running.model), None, EventKind::CanaryEnded { entry });
        running.stage.send_replace(Stage::Ended(Box::new(view)));
        true
    }

    /// Everything ends.
    pub(super) fn conclude_all_canaries(&self, change: &mut Change) {
        change.canaries.clear();
        for running in self.inner.canaries.all() {
            self.conclude_canary(&running, Verdict::undecided("llama-warden was stopped"));
        }
    }

    /// Ends those that cannot go on under a new configuration.
    pub(super) fn keep_canaries(&self, change: &mut Change, new: &FleetConfig) {
        for running in self.inner.canaries.all() {
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
            self.conclude_canary(&running, Verdict::undecided(why));
        }
    }
}

impl Canaries {
    fn insert(&self, running: &Arc<Running>) {
        self.running.rcu(|map| {
            let mut map = QuickMap::clone(map);
            map.insert(running.model.clone(), Arc::clone(running));
            map
        });
        self.any.store(true, Ordering::Relaxed);
    }

    fn remove(&self, running: &Arc<Running>) -> bool {
        let is_it = |map: &QuickMap<ModelName, Arc<Running>>| {
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

    fn all(&self) -> Vec<Arc<Running>> {
        self.running.load().values().cloned().collect()
    }

    /// The one of a model that runs, else the last one.
    pub(super) fn view(&self, model: &ModelName) -> Option<CanaryView> {
        let running = self.running.load().get(model).cloned();
        running.map(|running| running.view()).or_else(|| lock(&self.past).get(model).cloned())
    }

    /// Forgets those of models that are gone.
    pub(super) fn forget_others(&self, config: &FleetConfig) {
        lock(&self.past).retain(|model, _| config.models.iter().any(|spec| spec.name == *model));
    }
}

/// A configuration with the canaries among its models, behind them.
pub(super) fn with_canaries(
    configured: &FleetConfig,
    canaries: &BTreeMap<ModelName, CanarySpec>,
) -> FleetConfig {
    let mut config = configured.clone();
    for (model, canary) in canaries {
        let base = configured.models.iter().find(|spec| spec.name == *model);
        config.models.extend(base.map(|base| SharedSpec::new(spec_of(base, canary), canary.facts)));
    }
    config
}

/// A canary as a model: all that is its model's, but for what concerns names, room, and the binary.
fn spec_of(base: &ModelSpec, canary: &CanarySpec) -> ModelSpec {
    let mut spec = base.clone();
    spec.name = name_of(&base.name);
    spec.aliases.clear();
    spec.canary_of = Some(base.name.clone());
    spec.command.binary.clone_from(&canary.binary);
    (spec.run.replicas, spec.run.preload, spec.run.pin) = (1, true, false);
    // Its conversations go back to the other one.
    spec.run.warm = warden_policies::modes::Warm::Off;
    (spec.ttl, spec.fallback) = (None, None);
    spec.loading.guest = true;
    (spec.loading.pin, spec.loading.ttl) = (false, None);
    spec.loading.with.clear();
    if let Some(needs) = &mut spec.loading.needs {
        // The other one has the same file mapped.
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
