//! Actions of the task's parts that carry conversations over.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleTimer};
use warden_policies::modes::WarmMode;
use warden_policies::warmth::NoFileReason;
use warden_policies::{GenerationId, Reason};

use super::behind::GateWarmer;
use super::pack::{SavedSlots, SlotPacking};
use super::stored::save::{ConversationSave, EndedConversations, StoreReport};
use super::stored::{StoreLimits, StoredConversations, StoredSource, stored_generation};
use super::unpack::{ProcessWarming, SharedWarmState, WarmState, WarmingResult};
use super::{KeptState, away};
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::model::environment::TaskEnvironment;
use crate::model::experience::ModelExperience;
use crate::model::generation::{LiveGeneration, PackProgress, process_recipe, take_due};
use crate::model::life::TaskEnd;
use crate::model::message::{HelperReport, TaskMail};
use crate::model::replacement::{Replacement, ReplacementTracker};
use crate::model::unit::{ProcessUnit, UnitList, UnitRole};
use crate::process::hints;
use crate::process::slot_files::{self, SlotFiles};
use crate::spec::{ServerCommand, SharedSpec};
use crate::sync::lock;
use crate::view::event::EventKind;

const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);

impl TaskEnvironment {
    /// Bounds of the model's conversations on disk.
    fn store_limits(&self) -> StoreLimits {
        let run = &self.spec.run;
        StoreLimits { bytes: run.warm_disk_bytes.0, age: run.warm_disk_age, fresh_for: run.warm_away }
    }
}

/// True if replacements for this reason are planned and their old process is healthy.
fn is_planned(reason: Reason) -> bool {
    let is_ill = matches!(
        reason,
        Reason::Crashed
            | Reason::Unresponsive
            | Reason::Wedged
            | Reason::ComputeErrors
            | Reason::DeviceFault
            | Reason::Degraded
            | Reason::MemoryExhausted
    );
    !is_ill && !reason.is_answers()
}

impl LiveGeneration {
    /// True if no symptom suggests wrong slot contents.
    fn is_well(&self) -> bool {
        let symptoms = self.health.symptoms();
        self.health.degraded.is_none() && symptoms.iter().all(|symptom| is_planned(symptom.reason()))
    }
}

impl ModelExperience {
    pub(crate) fn slot_files(&self, spec: &SharedSpec, socket: &Path) -> Option<Arc<SlotFiles>> {
        let command = &spec.command;
        let saves = self.command_no_file(spec, command).is_none();
        let stored = self.stored.as_ref().map(|store| store.directory());
        saves.then(|| Arc::new(SlotFiles::from_command(command, socket, stored)))
    }

    /// Follows the setting `warm`: opens the model's conversations on disk, or removes them.
    pub(crate) fn follow_warm_mode(&mut self, env: &TaskEnvironment) {
        if env.spec.run.warm != WarmMode::Disk {
            self.close_store();
        } else if self.stored.is_none() && env.spec.canary_of.is_none() {
            let store = StoredConversations::new(&env.context.paths.conversations, &env.spec.name);
            self.stored = Some(Arc::new(store));
            self.next_sweep = Some(Instant::now());
        }
    }

    /// Removes the model's conversations on disk.
    pub(crate) fn close_store(&mut self) {
        self.next_sweep = None;
        if let Some(store) = self.stored.take() {
            store.begin_removal();
        }
    }

    /// Removes expired conversations from disk, each hour.
    pub(crate) fn sweep_store(&mut self, env: &TaskEnvironment, now: Instant) {
        if let Some(store) = &self.stored
            && take_due(&mut self.next_sweep, now)
        {
            store.begin_sweep(env.store_limits());
            self.next_sweep = Some(clock::after(now, SWEEP_INTERVAL));
        }
    }

    /// Detects from output lines that the slot directory prevented a start: a wrapper may run the server
    /// where the directory does not exist. Later processes of the model then get none.
    pub(crate) fn note_slot_refusal(&mut self, spec: &SharedSpec, lines: &[String]) -> bool {
        let news = !self.refuses_slot_files
            && self.command_no_file(spec, &spec.command).is_none()
            && !slot_files::has_given_directory(&spec.command)
            && lines.iter().any(|line| line.contains(slot_files::SLOT_PATH_FLAG));
        self.refuses_slot_files |= news;
        news
    }

    /// Reason why processes with this command save no slots, if known before the start.
    fn command_no_file(&self, spec: &SharedSpec, command: &ServerCommand) -> Option<NoFileReason> {
        let can = spec.facts.slot_files == Some(true) && !self.refuses_slot_files;
        if spec.run.warm == WarmMode::Off || spec.run.warm_bytes.0 == 0 {
            Some(NoFileReason::Off)
        } else if !can && !slot_files::has_given_directory(command) {
            Some(NoFileReason::Build)
        } else {
            hints::no_slot_files(command)
        }
    }

    /// Reason why a running process saves no slots for its successor.
    fn process_no_file(&self, env: &TaskEnvironment, live: &LiveGeneration) -> Option<NoFileReason> {
        let Some(kin) = live.cell.kin.get() else { return Some(NoFileReason::Other) };
        if process_recipe(&env.spec).command() != live.recipe.command() {
            // The next process has another command and cannot use the slots.
            return Some(NoFileReason::Other);
        }
        // Earlier processes showed that restored slots are not used.
        let made_of = kin.made_of;
        let is_unused =
            self.reuses_no_slots == Some(made_of) || env.leases.turns.are_slots_unused_by(made_of);
        self.command_no_file(&env.spec, live.recipe.command())
            .or_else(|| live.warm.files.is_none().then_some(NoFileReason::Build))
            .or_else(|| (!env.leases.settings.are_untouched()).then_some(NoFileReason::Adapters))
            .or(is_unused.then_some(NoFileReason::NotReused))
    }

    /// Inputs for saving the slots of a process, or the reason for not saving them.
    pub(crate) fn make_packing(
        &self,
        env: &TaskEnvironment,
        live: &LiveGeneration,
        alone: bool,
    ) -> Result<SlotPacking, NoFileReason> {
        if let Some(why) = self.process_no_file(env, live) {
            return Err(why);
        }
        let (Some(process), Some(files), Some(kin)) =
            (&live.child.process, &live.warm.files, live.cell.kin.get())
        else {
            return Err(NoFileReason::Other);
        };
        Ok(SlotPacking {
            process: Arc::clone(process),
            files: Arc::clone(files),
            kin: *kin,
            conversations: env.leases.turns.conversations_of(live.id),
            slots: live.start.slots.unwrap_or(1),
            bytes: env.spec.run.warm_bytes.0,
            available: env.context.world.available_memory(),
            pace: env.leases.turns.prompt_pace(),
            shows_within: env.spec.lifecycle.slot_shows_within,
            alone,
            to_disk: false,
            until: clock::after(Instant::now(), warden_policies::defaults().warmth.before_gate / 2),
        })
    }

    /// Inputs for warming a new process from the state kept since the model was unloaded.
    pub(crate) fn unloaded_unpacking(
        &self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
    ) -> Option<ProcessWarming> {
        if env.spec.run.warm == WarmMode::Off {
            return None;
        }
        let left = self.kept_state.iter().find(|kept| kept.replica == unit.replica);
        if let Some(left) = left.filter(|left| !env.leases.turns.conversations_of(left.from).is_empty()) {
            return unit.make_unpacking(env, left.from, &left.warm_state, left.no_file, false);
        }
        self.stored_unpacking(env, unit)
    }

    /// Inputs for warming a new process from the conversations on disk.
    fn stored_unpacking(&self, env: &TaskEnvironment, unit: &ProcessUnit) -> Option<ProcessWarming> {
        let store = self.stored.as_ref()?;
        // A process of the previous instance has its conversations. After a failed start, the next one is cold:
        // a conversation may be the cause.
        if unit.start_failures > 0 || unit.live.as_ref().is_none_or(|live| live.start.adopted.is_some()) {
            return None;
        }
        let state = Arc::new(Mutex::new(Some(WarmState::Saved(None))));
        let mut unpacking = unit.make_unpacking(env, stored_generation(unit.replica), &state, None, false)?;
        unpacking.stored = Some(StoredSource {
            store: Arc::clone(store),
            replica: unit.replica,
            replicas: env.spec.run.replicas,
            limits: env.store_limits(),
        });
        Some(unpacking)
    }

    /// False while the slots of a drained process are being saved.
    pub(crate) fn is_packed(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        replacements: &mut ReplacementTracker,
        unit: &mut ProcessUnit,
        end: Option<TaskEnd>,
    ) -> bool {
        let Some(live) = &mut unit.live else { return true };
        let reason = replacements.replacement_of(live.id).map(Replacement::reason);
        let store = self.stored.clone();
        let goes = unit.machine.after_stop() == Some(AfterStop::Idle)
            && reason.is_none()
            && unit.replica < env.spec.run.replicas
            && env.spec.run.warm != WarmMode::Off
            && live.is_well()
            && (store.is_some() || !env.spec.run.warm_away.is_zero());
        let follows = unit.machine.after_stop() == Some(AfterStop::Restart) && reason.is_some_and(is_planned);
        let planned = unit.role == UnitRole::Current && (follows || goes);
        // At the exit of the program, only conversations that stay on disk are of use.
        let limit = clock::after(Instant::now(), warden_policies::defaults().warmth.to_disk);
        let until = match end {
            None => limit,
            Some(TaskEnd::Shutdown(deadline)) if goes && store.is_some() => deadline.min(limit),
            Some(_) => return true,
        };
        if !planned || live.child.short_grace || live.probing.crashed_at.is_some() {
            return true;
        }
        match live.warm.packed {
            PackProgress::Done => return true,
            PackProgress::UnderWay => return false,
            PackProgress::NotYet => {}
        }
        let generation = live.id;
        let replica = unit.replica;
        if let Some(from) = live.warm.from
            && goes
        {
            // Include conversations of an earlier process that were never evaluated in this one.
            env.leases.turns.move_all(from, generation);
        }
        if env.leases.turns.conversations_of(generation).is_empty() {
            return true;
        }
        if let Some(store) = store.filter(|_| goes) {
            self.begin_store(env, mail, unit, store, until);
            return false;
        }
        let mut packing = self.make_packing(env, live, true);
        if goes {
            let no_file = packing.as_ref().err().copied();
            let kept = KeptState::new(replica, generation, no_file, env.spec.run.warm_away);
            self.kept_state.retain(|kept| kept.replica != replica);
            self.kept_state.push(kept);
            if let Ok(packing) = &mut packing {
                packing.available = packing.available.map(|bytes| bytes / away::MEMORY_SHARE_DIVISOR);
                packing.until = packing.until.min(clock::after(Instant::now(), away::SLOT_SAVE_TIMEOUT));
            }
        } else {
            replacements.set_warm_state(generation, WarmState::Saved(None));
        }
        let packing = match packing {
            Ok(packing) => packing,
            Err(why) => {
                live.warm.packed = PackProgress::Done;
                replacements.set_no_file(generation, why);
                return true;
            }
        };
        live.warm.packed = PackProgress::UnderWay;
        // The requests are done: the drain timer now limits the saving of slots.
        if let Some((LifecycleTimer::Drain, at)) = &mut unit.timer {
            *at = (*at).max(clock::after(packing.until, env.spec.lifecycle.probe_timeout));
        }
        mail.spawn_helper(generation, async move { HelperReport::Packed(Box::new(packing.run().await)) });
        false
    }

    /// Starts a helper that saves the conversations of a drained process to disk.
    fn begin_store(
        &self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        unit: &mut ProcessUnit,
        store: Arc<StoredConversations>,
        until: Instant,
    ) {
        let replica = unit.replica;
        let Some(live) = &mut unit.live else { return };
        live.warm.packed = PackProgress::UnderWay;
        // The requests are done: the drain timer now limits the saving.
        if let Some((LifecycleTimer::Drain, at)) = &mut unit.timer {
            *at = (*at).max(clock::after(until, env.spec.lifecycle.probe_timeout));
        }
        let packing = self.make_packing(env, live, true).and_then(|packing| {
            if packing.files.are_stored() { Ok(packing) } else { Err(NoFileReason::Build) }
        });
        let ended = EndedConversations {
            replica,
            kin: live.cell.kin.get().copied(),
            slots: live.start.slots.and_then(|slots| usize::try_from(slots).ok()).unwrap_or(1),
            conversations: env.leases.turns.conversations_of(live.id),
        };
        let save = ConversationSave { store, ended, packing, limits: env.store_limits(), until };
        mail.spawn_helper(live.id, async move {
            let begun = Instant::now();
            let result = save.run().await.map_err(|error| error.to_string());
            HelperReport::Stored(begun.elapsed(), result)
        });
    }

    /// Handles the end of a save to disk. What is on disk is no longer needed in memory.
    pub(crate) fn note_stored(
        &mut self,
        env: &TaskEnvironment,
        unit: &mut ProcessUnit,
        result: &Result<StoreReport, String>,
    ) {
        let (phase, replica) = (unit.phase(), unit.replica);
        let Some(live) = &mut unit.live else { return };
        if phase != BackendPhase::Draining {
            // After a cancelled drain, conversations are saved again at the next drain.
            live.warm.packed = PackProgress::NotYet;
            return;
        }
        live.warm.packed = PackProgress::Done;
        self.kept_state.retain(|kept| kept.replica != replica);
        if result.is_ok() {
            env.leases.turns.forget_generation(live.id);
        } else if !env.spec.run.warm_away.is_zero() {
            self.kept_state.push(KeptState::new(replica, live.id, None, env.spec.run.warm_away));
        }
    }

    pub(crate) fn note_packed(
        &mut self,
        replacements: &mut ReplacementTracker,
        phase: BackendPhase,
        live: &mut LiveGeneration,
        parcel: SavedSlots,
    ) {
        let drains = phase == BackendPhase::Draining;
        // After a cancelled drain, slots are saved again at the next drain.
        live.warm.packed = if drains { PackProgress::Done } else { PackProgress::NotYet };
        if drains {
            let state = WarmState::Saved(Some(Box::new(parcel)));
            if replacements.replacement_of(live.id).is_some() {
                replacements.set_warm_state(live.id, state);
            } else if let Some(kept) = self.kept_state.iter().find(|kept| kept.from == live.id) {
                *lock(&kept.warm_state) = Some(state);
            }
        }
    }

    /// Handles a death before the process was ready. A conversation may be the cause, so the next process is
    /// not warmed.
    pub(crate) fn note_warming_death(
        &mut self,
        leases: &LeaseQueue,
        replacements: &ReplacementTracker,
        replica: u32,
    ) {
        self.drop_state(leases, |kept| kept.replica == replica && lock(&kept.warm_state).is_none());
        let Some(replacement) = replacements.of_replica(replica) else { return };
        let is_taken = replacement.warm_state.as_ref().is_some_and(|state| lock(state).is_none());
        if is_taken && let Some(from) = replacement.from() {
            leases.turns.forget_generation(from);
        }
    }
}

impl ProcessUnit {
    /// Inputs for warming a process with the conversations of another generation.
    fn make_unpacking(
        &self,
        env: &TaskEnvironment,
        from: GenerationId,
        state: &SharedWarmState,
        no_file: Option<NoFileReason>,
        urgent: bool,
    ) -> Option<ProcessWarming> {
        let live = self.live.as_ref()?;
        Some(ProcessWarming {
            warm_state: Arc::clone(state),
            leases: Arc::clone(&env.leases),
            from,
            cell: Arc::clone(&live.cell),
            files: live.warm.files.clone(),
            stored: None,
            no_file,
            shows_within: env.spec.lifecycle.slot_shows_within,
            urgent,
            // Warming is part of the start and shares its time limit.
            start: self.timer.filter(|(timer, _)| *timer == LifecycleTimer::Start).map(|(_, at)| at),
        })
    }
}

impl ReplacementTracker {
    /// Inputs for warming a new process from the process that it replaces.
    pub(crate) fn warming(
        &mut self,
        env: &TaskEnvironment,
        units: &UnitList,
        experience: &ModelExperience,
        unit: &ProcessUnit,
    ) -> Option<ProcessWarming> {
        let live = unit.live.as_ref()?;
        let replica = unit.replica;
        let role = unit.role;
        let Some(replacement) = self.of_replica(replica) else {
            return experience.unloaded_unpacking(env, unit);
        };
        if !is_planned(replacement.reason()) {
            return None;
        }
        let Some(from) = replacement.from() else {
            return experience.unloaded_unpacking(env, unit);
        };
        if from == live.id {
            return None;
        }
        if env.spec.run.warm == WarmMode::Off {
            return None;
        }
        if env.leases.turns.conversations_of(from).is_empty() {
            return experience.stored_unpacking(env, unit);
        }
        let mut no_file = replacement.no_file;
        let urgent = matches!(
            replacement.reason(),
            Reason::HostHard | Reason::VramHard | Reason::SharedHost | Reason::SharedVram
        );
        if role == UnitRole::Successor && replacement.warm_state.is_none() {
            let old = units.current(replica)?.live.as_ref().filter(|old| old.id == from)?;
            let packing = experience.make_packing(env, old, false);
            no_file = packing.as_ref().err().copied();
            let state = WarmState::Serving(packing.ok().map(Box::new));
            self.set_warm_state(from, state);
            if let Some(why) = no_file {
                self.set_no_file(from, why);
            }
        }
        let state = self.of_replica(replica)?.warm_state.as_ref()?;
        unit.make_unpacking(env, from, state, no_file, urgent)
    }

    /// Moves conversations to a process that was warmed, and starts a helper that warms it for the others.
    pub(crate) fn note_warmed(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        experience: &mut ModelExperience,
        live: &mut LiveGeneration,
        unpacked: WarmingResult,
    ) {
        let WarmingResult { from, warmth, warm, restored, used, begun, .. } = unpacked;
        live.warm.from = Some(from);
        let to = live.id;
        for kept in warm {
            env.leases.turns.move_conversation(&kept, to);
        }
        if let Some(kin) = live.cell.kin.get() {
            if warmth.no_file == Some(NoFileReason::NotReused) {
                experience.reuses_no_slots = Some(kin.made_of);
            }
            env.leases.turns.watch_restored(to, kin.made_of, &restored);
        }
        live.warm.restored_slots.clone_from(&used);
        self.note_warm(from, &warmth);
        let was_kept = experience.kept_state.extract_if(.., |kept| kept.from == from).count() > 0;
        if was_kept || from == stored_generation(live.cell.replica.load(Ordering::Relaxed)) {
            env.log_event(Some(to), EventKind::CameBack { warmth });
        }
        let Some(process) = live.child.process.clone() else { return };
        let warmer = GateWarmer {
            process,
            leases: Arc::clone(&env.leases),
            from,
            to,
            used_slots: used,
            restored,
            begun_slots: begun,
            timeout: env.spec.lifecycle.probe_timeout,
        };
        live.warm.is_behind = true;
        mail.spawn_helper(to, async move { HelperReport::Warmed(Box::new(warmer.run().await)) });
    }
}
