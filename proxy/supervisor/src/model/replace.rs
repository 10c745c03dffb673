//! Replacements, from the decision to the ledger entry.
//!
//! ```text
//!   sequential:  Recycle -> old drains -> old stops -> new starts -> new opens -> its first sample -> entry
//!   overlap:     new unit starts -> new opens, old closes -> old drains and stops \
//!                                                        new's first sample       > entry
//! ```
//!
//! The available memory decides the mode. Each model has one replacement at a time, because several would
//! take several replicas out of service or need memory for several additional processes.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{AfterStop, BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::sample::HostMemory;
use warden_policies::share::ReplacementReach;
use warden_policies::units::scale_bytes;
use warden_policies::{ByteSize, MemoryKind, Reason, RecycleAction, RecycleDecision};

use super::ModelTask;
use super::context::ReplacementPermit;
use super::loading::LoadState;
use super::replacement::{ExceededBudget, Replacement};
use super::unit::{LiveGeneration, ProcessUnit, UnitId, UnitRole, process_recipe};
use crate::clock;
use crate::error::{BackendFailure, ControlError};
use crate::memory::loading::LoadingReport;
use crate::spec::ReplaceMode;
use crate::view::event::EventKind;
use crate::view::ledger::{LedgerEntry, ReplacementMode};

const MAX_PERMIT_INTERVAL: Duration = Duration::from_secs(1);

/// Makes a decision for a replacement that the policy did not decide.
pub(super) fn decision_for(reason: Reason) -> RecycleDecision {
    RecycleDecision {
        action: RecycleAction::DrainNow,
        reason: Some(reason),
        due: true,
        ..RecycleDecision::OBSERVE
    }
}

impl ModelTask {
    /// Begins a replacement that the policy has decided.
    pub(super) fn replace_by_policy(
        &mut self,
        replica: u32,
        decision: RecycleDecision,
        permit: Option<ReplacementPermit>,
    ) {
        if self.room.is_asking_to_stay() {
            // Room for the new settings is not granted yet. The unit is judged again later.
            return;
        }
        let Some(unit) = self.units.current(replica) else { return };
        let id = unit.id;
        let (mode, note) = self.choose_mode(unit);
        self.note_policy_replacement(&decision);
        self.record_replacement(replica, &decision, mode, note, permit);
        self.execute_replacement(id, replica, mode);
    }

    pub(super) fn note_policy_replacement(&mut self, decision: &RecycleDecision) {
        let Some(reason) = decision.reason else { return };
        let cooldown = &mut self.replacements.cooldown;
        if let Some(held) = cooldown.record_start(self.context.now(), reason, &self.spec.recycle) {
            self.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
    }

    /// Begins to replace the process of a replica, or starts a process if there is none. Only a replacement
    /// for a new configuration waits for a permit.
    pub(super) fn replace_replica(&mut self, replica: u32, reason: Reason) {
        let Some(id) = self.units.current(replica).map(|unit| unit.id) else { return };
        if !self.may_start() || !self.may_begin_replacement(id, replica, reason) {
            return;
        }
        let permit = if reason == Reason::Configuration {
            // Replace one process at a time, so that each decision sees the memory that the previous
            // replacement left.
            self.replacement_permit(id, replica, ReplacementReach::Machine)
        } else {
            Some(self.claim_permit(id, replica))
        };
        if permit.is_none() {
            // No message reports a free permit, so try again after a pause.
            let pause = self.spec.recycle.common.quiet_for.min(MAX_PERMIT_INTERVAL);
            self.life.timers.configuration = Some(clock::after_pause(Instant::now(), pause));
            return;
        }
        let Some(unit) = self.units.current(replica) else { return };
        let (mode, note) = self.choose_mode(unit);
        self.record_replacement(replica, &decision_for(reason), mode, note, permit);
        self.execute_replacement(id, replica, mode);
    }

    fn execute_replacement(&mut self, id: UnitId, replica: u32, mode: ReplacementMode) {
        match mode {
            ReplacementMode::Sequential => self.step_machine(id, LifecycleEvent::Recycle),
            ReplacementMode::Overlap => {
                let successor = self.add_unit(replica, UnitRole::Successor);
                self.step_machine(successor, LifecycleEvent::Up);
            }
        }
    }

    /// Tracks and logs a replacement. The caller carries it out.
    pub(super) fn record_replacement(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        let from = self.units.current(replica).and_then(ProcessUnit::generation);
        self.track_replacement(replica, decision, mode, note.clone(), permit);
        if let Some(reason) = decision.reason {
            self.log_event(from, EventKind::RecycleBegan { reason, mode, note });
        }
        self.life.note_action();
    }

    pub(super) fn track_replacement(
        &mut self,
        replica: u32,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        let (Some(unit), Some(reason)) = (self.units.current(replica), decision.reason) else { return };
        let running = unit.generation().map_or(0, |generation| self.leases.in_flight(generation));
        let name = &self.spec.name;
        let mut replacement = Replacement::new(name, unit, reason, decision, mode, note.clone(), running);
        replacement.permit = permit;
        let load_time = self.experience.load_time;
        let passed = unit.live.as_ref().and_then(|live| live.wish.passed.find(reason, decision.series));
        replacement.budget = passed.map(|first| ExceededBudget {
            first: *first,
            repeats: self.replacements.cooldown.is_repeated(first, load_time, &self.spec.recycle),
        });
        self.replacements.add(replacement);
        self.replacements.note = note;
    }

    /// True if a drain may exceed its deadline: the reason is size, age or speed, and memory suffices.
    pub(super) fn may_outlast_drain(&self, id: UnitId) -> bool {
        let Some(unit) = self.units.get(id) else { return false };
        let Some(live) = &unit.live else { return false };
        let Some(replacement) = self.replacements.replacement_of(live.id) else { return false };
        let reason = replacement.reason();
        let ill = matches!(
            reason,
            Reason::MemoryExhausted | Reason::Wedged | Reason::ComputeErrors | Reason::DeviceFault
        );
        let facts = live.memory.facts.as_ref();
        let short =
            facts.is_none_or(|facts| facts.series.iter().any(|series| self.spec.recycle.is_short(series)));
        self.life.end.is_none()
            && self.operators.restarts.is_empty()
            && unit.machine.after_stop() == Some(AfterStop::Restart)
            && reason.is_policy()
            && !ill
            && !short
            && !live.child.short_grace
            && live.probing.crashed_at.is_none()
            && live.probing.silent_for(self.spec.lifecycle.probes_lost).is_none()
    }

    /// Handles an expired drain deadline without interrupting requests: the process serves again and is
    /// drained later.
    pub(super) fn postpone_drain(&mut self, id: UnitId) {
        let deadline = self.spec.lifecycle.drain_deadline;
        let Some(unit) = self.units.get_mut(id) else { return };
        let replica = unit.replica;
        let now = Instant::now();
        if unit.role == UnitRole::Retiring {
            // Another process already serves: continue the drain, but let other replacements begin.
            unit.timer = Some((LifecycleTimer::Drain, clock::after_pause(now, deadline)));
            let from = unit.generation();
            if let Some(replacement) = from.and_then(|from| self.replacements.replacement_of_mut(from)) {
                drop(replacement.permit.take());
            }
            return;
        }
        let Some(live) = &mut unit.live else { return };
        live.wish.not_before = Some(clock::after_pause(now, deadline.saturating_mul(2)));
        live.timers.probe = Some(now);
        live.timers.sample = Some(now);
        let generation = live.id;
        let running = self.leases.in_flight(generation);
        self.step_machine(id, LifecycleEvent::Resume);
        let message = format!(
            "{running} request(s) were still running at the drain deadline, and the machine has memory: the process \
             continues to serve, and is drained again later"
        );
        if let Some(mut replacement) = self.replacements.take(replica) {
            replacement.is_inconclusive = true;
            self.write_entry(replacement, Some(message));
        }
        self.life.note_action();
    }

    pub(super) fn complete_replacements(&mut self) {
        while let Some(replacement) = self.replacements.take_first(Replacement::is_complete) {
            let entry = self.write_entry(replacement, None);
            self.replacements.note_completed(entry);
            // During the replacement, the loader got no memory reports.
            self.report_memory();
            self.life.note_action();
        }
    }

    /// Ends a replacement whose new process does not serve. The ledger and operators get the reason.
    pub(super) fn fail_replacement(&mut self, replica: u32, failure: &BackendFailure) {
        let Some(replacement) = self.replacements.take(replica) else { return };
        if replacement.reason() == Reason::Configuration {
            self.room.report(LoadingReport::ReplacementDropped);
            self.life.timers.configuration =
                Some(clock::after_pause(Instant::now(), self.spec.recycle.common.min_interval));
        }
        self.write_entry(replacement, Some(failure.message.clone()));
        for restart in std::mem::take(&mut self.operators.restarts) {
            let model = self.spec.name.clone();
            let failure = failure.clone();
            self.answer(restart.reply, Err(ControlError::StartFailed { model, failure }));
        }
        self.life.note_action();
    }

    /// Ends all replacements because of another command. The ledger and waiting operators get the reason.
    pub(super) fn give_up_replacements(&mut self, because: &str) {
        while let Some(replacement) = self.replacements.take_any() {
            self.give_up_replacement(replacement, because);
        }
        self.answer_done_restarts();
        for restart in std::mem::take(&mut self.operators.restarts) {
            let model = self.spec.name.clone();
            let because = because.to_owned();
            self.answer(restart.reply, Err(ControlError::GivenUp { model, because }));
        }
        self.life.note_action();
    }

    /// Stops tracking a replacement. It counts as done if the new process already serves, even without
    /// measurements.
    pub(super) fn give_up_replacement(&mut self, mut replacement: Replacement, because: &str) {
        if replacement.has_taken_over() {
            let entry = self.write_entry(replacement, None);
            self.replacements.note_completed(entry);
        } else {
            replacement.give_up();
            self.write_entry(replacement, Some(because.to_owned()));
        }
    }

    fn write_entry(&mut self, mut replacement: Replacement, failed: Option<String>) -> LedgerEntry {
        // Keep the permit until the events below are logged; then other replacements may begin.
        let _held = replacement.permit.take();
        let entry = LedgerEntry {
            id: self.context.ledger.next_number(),
            at: clock::wall_time(),
            ..replacement.finish(failed)
        };
        self.context.ledger.append(&entry);
        self.log_event(entry.to.or(entry.from), EventKind::RecycleDone { entry: Box::new(entry.clone()) });
        let series = entry.evidence.series.unwrap_or(MemoryKind::Host);
        let policy = &self.spec.recycle;
        let cooldown = &mut self.replacements.cooldown;
        let is_known = cooldown.find_bar(entry.reason, Some(series), None, policy).is_some();
        if let Some(helped) = entry.helped
            && let Some(held) = cooldown.record_result(series, helped, policy)
            && !is_known
        {
            self.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
        entry
    }

    /// Returns the replacement mode and an explanation for people.
    pub(super) fn choose_mode(&self, unit: &ProcessUnit) -> (ReplacementMode, Option<String>) {
        self.replace_mode(unit, || self.context.world.available_memory())
    }

    /// True if a replacement now would overlap. Uses the available memory of the last sample, and reads it
    /// only if there is none.
    pub(super) fn would_overlap(&self, unit: &ProcessUnit) -> bool {
        let sampled = unit.live.as_ref().and_then(|live| live.memory.last.totals);
        let available =
            || sampled.map(|totals| totals.available).or_else(|| self.context.world.available_memory());
        self.replace_mode(unit, available).0 == ReplacementMode::Overlap
    }

    fn replace_mode(
        &self,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, Option<String>) {
        if unit.phase() != BackendPhase::Ready {
            return (
                ReplacementMode::Sequential,
                Some(format!("sequential: the process is {}", unit.phase())),
            );
        }
        match self.spec.run.replace {
            ReplaceMode::Sequential => {
                (ReplacementMode::Sequential, Some("sequential: as configured".to_owned()))
            }
            ReplaceMode::Overlap => (ReplacementMode::Overlap, Some("overlap: as configured".to_owned())),
            ReplaceMode::Auto if !self.fits_next_to_old(unit) => {
                let why = "sequential: with its new settings it has no room beside the process that is there";
                (ReplacementMode::Sequential, Some(why.to_owned()))
            }
            ReplaceMode::Auto => {
                let (mode, note) = self.mode_by_memory(unit, available);
                (mode, Some(note))
            }
        }
    }

    /// True if a process with the latest settings has room next to the old one.
    fn fits_next_to_old(&self, unit: &ProcessUnit) -> bool {
        let is_older = || unit.live.as_ref().is_some_and(|live| live.recipe != process_recipe(&self.spec));
        !matches!(self.room.state, LoadState::Granted { beside: false, .. }) || !is_older()
    }

    fn mode_by_memory(
        &self,
        unit: &ProcessUnit,
        available: impl FnOnce() -> Option<u64>,
    ) -> (ReplacementMode, String) {
        let sequential = |why: String| (ReplacementMode::Sequential, format!("sequential: {why}"));
        let Some(live) = &unit.live else { return sequential("nothing is known of its memory".to_owned()) };
        let last = &live.memory.last;
        if let Some(no_vram) = last.no_vram.as_ref().filter(|no_vram| !no_vram.is_normal) {
            return sequential(format!("a GPU is present, and {}", no_vram.why));
        }
        if last.devices.as_ref().is_none_or(|devices| devices.readings.is_empty())
            && self.context.world.has_gpu()
        {
            return sequential("a GPU is present, and its memory might not hold two".to_owned());
        }
        match available() {
            Some(available) => self.mode_by_room(live, available),
            None => sequential("the available memory is unknown".to_owned()),
        }
    }

    fn mode_by_room(&self, live: &LiveGeneration, available: u64) -> (ReplacementMode, String) {
        let policy = &self.spec.recycle.common;
        let held = live.memory.history.host.map_or(0, HostMemory::charged);
        let needed = scale_bytes(held.max(policy.overlap_floor.0), policy.overlap_headroom);
        let promised = |memory| self.context.loading.promised_to_others(&self.room.who, memory);
        let available = available.saturating_sub(promised(MemoryKind::Host));
        let mut words = vec![format!("{} available, {} needed", ByteSize(available), ByteSize(needed))];
        let mut fits = available >= needed;
        for vram in &live.memory.history.vram {
            // The next process will reach the same peak. Memory that present processes gave back counts too,
            // because they may take it again.
            let all = &self.context.fleet_memory;
            let peak = vram.bytes.max(all.vram_peak(live.id, vram.gpu));
            let needed = scale_bytes(peak, policy.overlap_headroom);
            // Memory reserved for models that are being loaded still looks free.
            let reserved =
                all.reserved_vram(None, vram.gpu).saturating_add(promised(MemoryKind::Vram(vram.gpu)));
            let devices = live.memory.last.devices.as_ref();
            let free = devices.and_then(|devices| devices.reading(vram.gpu)?.free);
            fits &= free.is_some_and(|free| free.saturating_sub(reserved) >= needed);
            let free = free.map_or_else(|| "an unknown amount".to_owned(), |free| ByteSize(free).to_string());
            let reserved = match reserved {
                0 => String::new(),
                bytes => format!(
                    ", {} of it reserved for others and for pools that were given back",
                    ByteSize(bytes)
                ),
            };
            words.push(format!("{free} free on GPU {}{reserved}, {} needed", vram.gpu.0, ByteSize(needed)));
        }
        let mode = if fits { ReplacementMode::Overlap } else { ReplacementMode::Sequential };
        (mode, format!("{}: {}", mode.as_str(), words.join(", ")))
    }
}
