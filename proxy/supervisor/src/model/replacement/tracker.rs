//! Replacements of one model's processes: those under way, and the results of the last ones.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::working_set::BudgetPass;
use warden_policies::health::ProbeBaseline;
use warden_policies::lifecycle::AfterStop;
use warden_policies::replacement_cost::LullHistory;
use warden_policies::sample::{HostMemory, VramReading};
use warden_policies::warmth::{NoFileReason, WarmthReport};
use warden_policies::{GenerationId, MemoryKind, Reason, RecycleDecision};

use crate::clock;
use crate::lease::queue::OpenedGate;
use crate::model::context::ReplacementPermit;
use crate::model::environment::TaskEnvironment;
use crate::model::replacement::needs::NeedsState;
use crate::model::replacement::pace::RecyclePace;
use crate::model::replacement::record::{ExceededBudget, Replacement};
use crate::model::unit::{ProcessUnit, UnitRole};
use crate::model::warm::unpack::WarmState;
use crate::process::needs::AnswerIdentity;
use crate::spec::ModelSpec;
use crate::view::event::EventKind;
use crate::view::ledger::{GpuAfterExit, LedgerEntry, ReplacementMode};

#[derive(Debug)]
pub(crate) struct ReplacementTracker {
    under_way: Vec<Replacement>,
    pub(crate) last: Vec<LedgerEntry>,
    /// Result of the last replacement that carried conversations over.
    pub(crate) warm: Option<WarmthReport>,
    pub(crate) counts: Vec<(Reason, u64)>,
    pub(crate) pace: RecyclePace,
    pub(crate) needs: NeedsState,
    /// Reason for the mode of the last replacement, or for not replacing.
    pub(crate) note: Option<String>,
}

impl ReplacementTracker {
    pub(crate) fn new(lulls: LullHistory) -> Self {
        Self {
            under_way: Vec::new(),
            last: Vec::new(),
            warm: None,
            counts: Vec::new(),
            pace: RecyclePace::new(lulls),
            needs: NeedsState::default(),
            note: None,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Reason for keeping the present process, or the note of the last replacement.
    pub(crate) fn note_for_view(&self) -> Option<String> {
        let missing = self.needs.blocking.as_ref().and_then(|check| check.missing.as_ref());
        missing.map(|missing| missing.message.clone()).or_else(|| self.note.clone())
    }

    /// Releases the permits: the next processes may wait long for memory.
    pub(crate) fn release_permits(&mut self) {
        for known in &mut self.under_way {
            drop(known.permit.take());
        }
    }

    pub(crate) fn track(
        &mut self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        let Some(reason) = decision.reason else { return };
        let running = unit.generation().map_or(0, |generation| env.leases.in_flight(generation));
        let name = &env.spec.name;
        let mut replacement = Replacement::new(name, unit, reason, decision, mode, note.clone(), running);
        replacement.permit = permit;
        let passed = unit.live.as_ref().and_then(|live| live.wish.passed.find(reason, decision.series));
        replacement.budget = passed.map(|first| ExceededBudget {
            first: *first,
            repeats: self.pace.cooldown.is_repeated(first, self.pace.load_time, &env.spec.recycle),
        });
        self.under_way.push(replacement);
        self.note = note;
    }

    /// Tracks and logs a replacement. The caller carries it out.
    pub(crate) fn begin(
        &mut self,
        env: &TaskEnvironment,
        unit: &ProcessUnit,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        permit: Option<ReplacementPermit>,
    ) {
        self.track(env, unit, decision, mode, note.clone(), permit);
        if let Some(reason) = decision.reason {
            env.log_event(unit.generation(), EventKind::RecycleBegan { reason, mode, note });
        }
    }

    /// Stops tracking a replacement. It counts as done if the new process already serves, even without
    /// measurements.
    pub(crate) fn give_up(&mut self, env: &TaskEnvironment, mut replacement: Replacement, because: &str) {
        if replacement.has_taken_over() {
            let entry = self.write_entry(env, replacement, None);
            self.note_completed(entry);
        } else {
            replacement.give_up();
            self.write_entry(env, replacement, Some(because.to_owned()));
        }
    }

    /// Ends a replacement with an entry in the ledger.
    pub(crate) fn write_entry(
        &mut self,
        env: &TaskEnvironment,
        mut replacement: Replacement,
        failed: Option<String>,
    ) -> LedgerEntry {
        // Keep the permit until the events below are logged; then other replacements may begin.
        let _held = replacement.permit.take();
        let entry = LedgerEntry {
            id: env.context.records.ledger.next_number(),
            at: clock::wall_time(),
            ..replacement.finish(failed)
        };
        env.context.records.ledger.append(&entry);
        env.log_event(entry.to.or(entry.from), EventKind::RecycleDone { entry: Box::new(entry.clone()) });
        let series = entry.evidence.series.unwrap_or(MemoryKind::Host);
        let policy = &env.spec.recycle;
        let cooldown = &mut self.pace.cooldown;
        let is_known = cooldown.find_bar(entry.reason, Some(series), None, policy).is_some();
        if let Some(helped) = entry.helped
            && let Some(held) = cooldown.record_result(series, helped, policy)
            && !is_known
        {
            env.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
        entry
    }

    pub(crate) fn reason(&self, replica: u32) -> Option<Reason> {
        self.of_replica(replica).map(Replacement::reason)
    }

    /// Answers of a sound process like this one, if its predecessor is replaced for faulty answers.
    pub(crate) fn reference_answers(
        &self,
        env: &TaskEnvironment,
        replica: u32,
        kin: Option<&AnswerIdentity>,
    ) -> Option<Arc<ProbeBaseline>> {
        let is_wanted = env.tests_answers() && self.reason(replica).is_some_and(Reason::is_answers);
        let (made_of, baseline) = self.pace.sound_answers.as_ref().filter(|_| is_wanted)?;
        kin.is_some_and(|kin| kin.made_of == *made_of).then(|| Arc::clone(baseline))
    }

    pub(crate) fn replacement_of(&self, generation: GenerationId) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.entry.from == Some(generation))
    }

    pub(crate) fn replacement_of_mut(&mut self, generation: GenerationId) -> Option<&mut Replacement> {
        self.under_way.iter_mut().find(|known| known.entry.from == Some(generation))
    }

    /// Records the operator who requested a restart.
    pub(crate) fn note_operator(&mut self, replica: u32, by: Option<&str>) {
        let of_operator =
            |known: &&mut Replacement| known.replica() == replica && known.entry.reason == Reason::Operator;
        if let Some(known) = self.under_way.iter_mut().find(of_operator) {
            known.entry.by = by.map(str::to_owned);
        }
    }

    pub(crate) fn of_replica(&self, replica: u32) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.replica() == replica)
    }

    /// Stores conversations and slots of a generation for the next process.
    pub(crate) fn set_warm_state(&mut self, from: GenerationId, state: WarmState) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.warm_state = Some(Arc::new(Mutex::new(Some(state))));
        }
    }

    pub(crate) fn set_no_file(&mut self, from: GenerationId, why: NoFileReason) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.no_file = Some(why);
        }
    }

    pub(crate) fn note_warm(&mut self, from: GenerationId, warmth: &WarmthReport) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.entry.warm = Some(warmth.clone());
        }
        self.warm = Some(warmth.clone());
    }

    /// Adds the result for prompts that were left for later.
    pub(crate) fn note_later(
        &mut self,
        env: &TaskEnvironment,
        generation: GenerationId,
        later: WarmthReport,
    ) {
        if later.conversations > 0 {
            if let Some(last) = &mut self.warm {
                last.add_later(&later);
            }
            env.log_event(Some(generation), EventKind::Warmed { warmth: later });
        }
    }

    /// Returns for how long a replacement of this generation for this reason has been under way.
    pub(crate) fn replaced_since(&self, generation: GenerationId, reason: Reason) -> Option<Duration> {
        let known = self.replacement_of(generation).filter(|known| known.entry.reason == reason)?;
        Some(known.times.began.elapsed())
    }

    /// True if a drain may exceed its deadline: the reason is size, age or speed, and memory suffices.
    pub(crate) fn may_outlast_drain(&self, unit: &ProcessUnit, spec: &ModelSpec) -> bool {
        let Some(live) = &unit.live else { return false };
        let Some(reason) = self.replacement_of(live.id).map(Replacement::reason) else { return false };
        let ill = reason.is_answers()
            || matches!(
                reason,
                Reason::MemoryExhausted | Reason::Wedged | Reason::ComputeErrors | Reason::DeviceFault
            );
        let facts = live.memory.facts.as_ref();
        let short = facts.is_none_or(|facts| facts.series.iter().any(|series| spec.recycle.is_short(series)));
        unit.machine.after_stop() == Some(AfterStop::Restart)
            && reason.is_policy()
            && !ill
            && !short
            && live.may_drain_on(spec.lifecycle.probes_lost)
    }

    pub(crate) fn take(&mut self, replica: u32) -> Option<Replacement> {
        self.take_first(|known| known.replica() == replica)
    }

    pub(crate) fn take_first(&mut self, wanted: impl Fn(&Replacement) -> bool) -> Option<Replacement> {
        let index = self.under_way.iter().position(wanted)?;
        Some(self.under_way.remove(index))
    }

    pub(crate) fn take_any(&mut self) -> Option<Replacement> {
        self.under_way.pop()
    }

    pub(crate) fn note_completed(&mut self, entry: LedgerEntry) {
        match self.counts.iter_mut().find(|(known, _)| *known == entry.reason) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((entry.reason, 1)),
        }
        self.last.retain(|known| known.replica != entry.replica);
        self.last.push(entry);
    }

    // --- events of the old and new generations ---

    pub(crate) fn note_closed(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.replacement_of_mut(generation)
            && replacement.times.closed.is_none()
        {
            replacement.times.closed = Some(Instant::now());
            replacement.running_at_close = running;
        }
        // If the new process closes again, no sample of it will arrive.
        self.note_sampled(generation, None, &[]);
    }

    pub(crate) fn note_stopped(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.replacement_of_mut(generation)
            && replacement.times.drained.is_none()
        {
            replacement.times.drained = Some(Instant::now());
            replacement.entry.cut = u64::from(running);
        }
    }

    pub(crate) fn note_gone(&mut self, generation: GenerationId, running: u32) {
        // Requests on a process that dies while it drains count as cut.
        self.note_stopped(generation, running);
        if let Some(replacement) = self.replacement_of_mut(generation) {
            replacement.times.gone = Some(Instant::now());
        }
    }

    /// Records that a generation serves. If it replaced another one, returns the reason and the exceeded
    /// budget.
    fn note_opened(
        &mut self,
        replica: u32,
        generation: GenerationId,
        opened: &OpenedGate,
        start: Duration,
    ) -> Option<(Reason, Option<BudgetPass>)> {
        let of = |known: &&mut Replacement| {
            let entry = &known.entry;
            entry.replica == replica && entry.to.is_none() && entry.from != Some(generation)
        };
        let replacement = self.under_way.iter_mut().find(of)?;
        replacement.entry.to = Some(generation);
        let times = &mut replacement.times;
        times.start = Some(start);
        if let Some(since) = opened.gap {
            times.gap_since_began = Some(since.max(times.began).elapsed());
            times.gap = Some(times.idle_until.map_or(since, |until| since.max(until)).elapsed());
            replacement.entry.carried_over = opened.waiting as u64;
        }
        Some((replacement.entry.reason, replacement.budget.map(|budget| budget.first)))
    }

    /// Opens the gate of a ready process. It may end a replacement.
    pub(crate) fn open_gate(&mut self, env: &TaskEnvironment, unit: &ProcessUnit) {
        let Some(live) = &unit.live else { return };
        let limit = env.lease_limit(live.start.slots);
        let spawned = live.start.spawned;
        let start = live.start.ready.unwrap_or(spawned).saturating_duration_since(spawned);
        let opened = env.leases.open_gate(&live.cell, limit);
        if unit.role != UnitRole::Retiring
            && let Some((reason, passed)) = self.note_opened(unit.replica, live.id, &opened, start)
            && reason.is_policy()
        {
            let cooldown = &mut self.pace.cooldown;
            cooldown.record_ready(env.context.now());
            if let Some(first) = passed {
                cooldown.record_replacement(&first, self.pace.load_time, &env.spec.recycle);
            }
        }
    }

    pub(crate) fn note_sampled(
        &mut self,
        generation: GenerationId,
        host: Option<HostMemory>,
        vram: &[VramReading],
    ) {
        let of = |known: &&mut Replacement| known.entry.to == Some(generation);
        if let Some(replacement) = self.under_way.iter_mut().find(of) {
            replacement.sampled = true;
            replacement.entry.host_after = replacement.entry.host_after.or(host);
            if replacement.entry.vram_after.is_empty() {
                replacement.entry.vram_after = vram.to_vec();
            }
        }
    }

    pub(crate) fn note_after_exit(&mut self, generation: GenerationId, gpus: &[GpuAfterExit]) {
        if let Some(replacement) = self.replacement_of_mut(generation) {
            replacement.entry.vram_after_exit = gpus.to_vec();
            replacement.measured = true;
        }
    }
}
