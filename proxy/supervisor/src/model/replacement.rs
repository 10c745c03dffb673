//! Replacements of one model's processes: those under way, and the results of the last ones.
//!
//! A [`Replacement`] makes no decisions. It is complete when the new process serves, the old one is gone and
//! the new one's memory is known.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::working_set::BudgetPass;
use warden_policies::lifecycle::{AfterStop, BackendPhase};
use warden_policies::replacement_cost::LullHistory;
use warden_policies::sample::{HostMemory, VramReading};
use warden_policies::warmth::{NoFileReason, WarmthReport};
use warden_policies::{
    GenerationId, MemoryKind, ModelName, Reason, RecycleAction, RecycleDecision, cooldown,
};
use warden_sensors::CudaReport;

use super::context::ReplacementPermit;
use super::environment::TaskEnvironment;
use super::needs::NeedsState;
use super::pace::RecyclePace;
use super::unit::{LiveGeneration, ProcessUnit, UnitRole};
use super::warm::unpack::{SharedWarmState, WarmState};
use super::words;
use crate::clock;
use crate::lease::queue::OpenedGate;
use crate::spec::ModelSpec;
use crate::view::event::EventKind;
use crate::view::ledger::{GpuAfterExit, LedgerEntry, ReplacementEvidence, ReplacementMode};

/// Makes a decision for a replacement that the policy did not decide.
pub(super) fn decision_for(reason: Reason) -> RecycleDecision {
    RecycleDecision {
        action: RecycleAction::DrainNow,
        reason: Some(reason),
        due: true,
        ..RecycleDecision::OBSERVE
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ExceededBudget {
    pub(super) first: BudgetPass,
    /// True if the previous replacement for this budget helped only for a short time.
    pub(super) repeats: bool,
}

#[derive(Debug)]
pub(super) struct Replacement {
    entry: LedgerEntry,
    times: ReplacementTimes,
    /// Bytes that the old generation held of the memory in question when it was new.
    young_bytes: Option<u64>,
    running_at_close: u32,
    /// True if the memory of the new process is known, or cannot become known.
    sampled: bool,
    /// True if the memory freed by the old process is known.
    measured: bool,
    /// True if the result shows nothing about memory, because the end of the old process was not seen.
    pub(super) is_inconclusive: bool,
    pub(super) budget: Option<ExceededBudget>,
    pub(super) permit: Option<ReplacementPermit>,
    pub(super) warm_state: Option<SharedWarmState>,
    pub(super) no_file: Option<NoFileReason>,
}

#[derive(Debug)]
struct ReplacementTimes {
    began: Instant,
    closed: Option<Instant>,
    drained: Option<Instant>,
    gone: Option<Instant>,
    /// Time without a serving process; may have begun before the replacement.
    gap: Option<Duration>,
    gap_since_began: Option<Duration>,
    /// End of a time in which the model was not meant to have a process: that time is no outage.
    idle_until: Option<Instant>,
    start: Option<Duration>,
}

impl Replacement {
    /// `running`: requests that the old process is serving.
    pub(super) fn new(
        model: &ModelName,
        unit: &ProcessUnit,
        reason: Reason,
        decision: &RecycleDecision,
        mode: ReplacementMode,
        note: Option<String>,
        running: u32,
    ) -> Self {
        let now = Instant::now();
        let live = unit.live.as_ref();
        // The life-cycle machine has closed the generation already if the process became suspect.
        let is_closed =
            matches!(unit.phase(), BackendPhase::Suspect | BackendPhase::Draining | BackendPhase::Stopping)
                && live.is_some();
        let mut entry = LedgerEntry::new(model.clone(), unit.replica, reason, mode);
        entry.from = unit.generation();
        if let Some(live) = live {
            entry.evidence = decision_evidence(live, decision, note);
            entry.host_before = live.memory.history.host;
            entry.vram_before.clone_from(&live.memory.history.vram);
        }
        Self {
            entry,
            times: ReplacementTimes {
                began: now,
                closed: is_closed.then_some(now),
                drained: None,
                gone: None,
                gap: None,
                gap_since_began: None,
                idle_until: (unit.phase() == BackendPhase::Idle).then_some(now),
                start: None,
            },
            young_bytes: live.and_then(|live| live.memory.facts_of(decision.series)?.fresh()),
            running_at_close: if is_closed { running } else { 0 },
            sampled: false,
            measured: live.is_none(),
            is_inconclusive: false,
            budget: None,
            permit: None,
            warm_state: None,
            no_file: None,
        }
    }

    pub(super) fn reason(&self) -> Reason {
        self.entry.reason
    }

    pub(super) fn replica(&self) -> u32 {
        self.entry.replica
    }

    pub(super) fn from(&self) -> Option<GenerationId> {
        self.entry.from
    }

    /// Returns the ledger entry without time and number. `failed`: why the replacement failed.
    pub(super) fn finish(self, failed: Option<String>) -> LedgerEntry {
        let times = &self.times;
        // A replacement that did not begin shows nothing about memory.
        let began = times.closed.is_some() || failed.is_none() || self.entry.mode == ReplacementMode::Overlap;
        let helped = if began && !self.is_inconclusive { self.helped(failed.is_some()) } else { None };
        let span = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(0, |(from, to)| clock::millis(to.saturating_duration_since(from)))
        };
        // An interrupted drain does not show how many requests ended in it.
        let ended = if times.drained.is_some() { u64::from(self.running_at_close) } else { 0 };
        LedgerEntry {
            to: if failed.is_none() { self.entry.to } else { None },
            drained: ended.saturating_sub(self.entry.cut),
            gap_ms: clock::millis(times.gap.unwrap_or_default()),
            drain_ms: span(times.closed, times.drained),
            exit_ms: times.gone.map(|gone| span(times.drained, Some(gone))),
            ours_ms: self.own_ms(),
            start_ms: times.start.map(clock::millis),
            helped,
            failed,
            ..self.entry
        }
    }

    /// For a replacement because of memory: true if the new process holds less of it.
    fn helped(&self, failed: bool) -> Option<bool> {
        let entry = &self.entry;
        if !entry.reason.is_memory() {
            return None;
        }
        if failed || self.budget.is_some_and(|budget| budget.repeats) {
            return Some(false);
        }
        let of_gpu =
            |all: &[VramReading], gpu| all.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes);
        let (before, after) = match entry.evidence.series.unwrap_or(MemoryKind::Host) {
            MemoryKind::Host => {
                (entry.host_before.map(HostMemory::charged), entry.host_after.map(HostMemory::charged))
            }
            MemoryKind::Vram(gpu) => (of_gpu(&entry.vram_before, gpu), of_gpu(&entry.vram_after, gpu)),
        };
        // All other limits concern more than one process.
        let own =
            matches!(entry.reason, Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard);
        let budget = if own { entry.evidence.budget_bytes } else { None };
        Some(cooldown::recycle_helped(before?, after?, self.young_bytes, budget))
    }

    /// Milliseconds of the outage that the supervisor itself caused, without the old process's drain and end
    /// and the new process's start.
    fn own_ms(&self) -> Option<u64> {
        if self.entry.mode != ReplacementMode::Sequential {
            return None;
        }
        let times = &self.times;
        let theirs = times.gone?.saturating_duration_since(times.closed?) + times.start?;
        Some(clock::millis(times.gap_since_began?.saturating_sub(theirs)))
    }

    /// True if the new process serves. The old process may still be ending.
    pub(super) fn has_taken_over(&self) -> bool {
        self.entry.to.is_some()
    }

    pub(super) fn give_up(&mut self) {
        self.is_inconclusive = true;
        self.entry.given_up = true;
    }

    pub(super) fn is_complete(&self) -> bool {
        let gone = self.entry.from.is_none() || self.times.gone.is_some();
        self.entry.to.is_some() && gone && self.sampled && self.measured
    }
}

#[derive(Debug)]
pub(super) struct ReplacementTracker {
    under_way: Vec<Replacement>,
    pub(super) last: Vec<LedgerEntry>,
    /// Result of the last replacement that carried conversations over.
    pub(super) warm: Option<WarmthReport>,
    pub(super) counts: Vec<(Reason, u64)>,
    pub(super) pace: RecyclePace,
    pub(super) needs: NeedsState,
    /// Reason for the mode of the last replacement, or for not replacing.
    pub(super) note: Option<String>,
}

impl ReplacementTracker {
    pub(super) fn new(lulls: LullHistory) -> Self {
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

    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Reason for keeping the present process, or the note of the last replacement.
    pub(super) fn note_for_view(&self) -> Option<String> {
        let missing = self.needs.blocking.as_ref().and_then(|check| check.missing.as_ref());
        missing.map(|missing| missing.message.clone()).or_else(|| self.note.clone())
    }

    /// Releases the permits: the next processes may wait long for memory.
    pub(super) fn release_permits(&mut self) {
        for known in &mut self.under_way {
            drop(known.permit.take());
        }
    }

    pub(super) fn track(
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
    pub(super) fn begin(
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
    pub(super) fn give_up(&mut self, env: &TaskEnvironment, mut replacement: Replacement, because: &str) {
        if replacement.has_taken_over() {
            let entry = self.write_entry(env, replacement, None);
            self.note_completed(entry);
        } else {
            replacement.give_up();
            self.write_entry(env, replacement, Some(because.to_owned()));
        }
    }

    /// Ends a replacement with an entry in the ledger.
    pub(super) fn write_entry(
        &mut self,
        env: &TaskEnvironment,
        mut replacement: Replacement,
        failed: Option<String>,
    ) -> LedgerEntry {
        // Keep the permit until the events below are logged; then other replacements may begin.
        let _held = replacement.permit.take();
        let entry = LedgerEntry {
            id: env.context.ledger.next_number(),
            at: clock::wall_time(),
            ..replacement.finish(failed)
        };
        env.context.ledger.append(&entry);
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

    pub(super) fn reason(&self, replica: u32) -> Option<Reason> {
        self.of_replica(replica).map(Replacement::reason)
    }

    pub(super) fn replacement_of(&self, generation: GenerationId) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.entry.from == Some(generation))
    }

    pub(super) fn replacement_of_mut(&mut self, generation: GenerationId) -> Option<&mut Replacement> {
        self.under_way.iter_mut().find(|known| known.entry.from == Some(generation))
    }

    /// Records the operator who requested a restart.
    pub(super) fn note_operator(&mut self, replica: u32, by: Option<&str>) {
        let of_operator =
            |known: &&mut Replacement| known.replica() == replica && known.entry.reason == Reason::Operator;
        if let Some(known) = self.under_way.iter_mut().find(of_operator) {
            known.entry.by = by.map(str::to_owned);
        }
    }

    pub(super) fn of_replica(&self, replica: u32) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.replica() == replica)
    }

    /// Stores conversations and slots of a generation for the next process.
    pub(super) fn set_warm_state(&mut self, from: GenerationId, state: WarmState) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.warm_state = Some(Arc::new(Mutex::new(Some(state))));
        }
    }

    pub(super) fn set_no_file(&mut self, from: GenerationId, why: NoFileReason) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.no_file = Some(why);
        }
    }

    pub(super) fn note_warm(&mut self, from: GenerationId, warmth: &WarmthReport) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.entry.warm = Some(warmth.clone());
        }
        self.warm = Some(warmth.clone());
    }

    /// Returns for how long a replacement of this generation for this reason has been under way.
    pub(super) fn replaced_since(&self, generation: GenerationId, reason: Reason) -> Option<Duration> {
        let known = self.replacement_of(generation).filter(|known| known.entry.reason == reason)?;
        Some(known.times.began.elapsed())
    }

    /// True if a drain may exceed its deadline: the reason is size, age or speed, and memory suffices.
    pub(super) fn may_outlast_drain(&self, unit: &ProcessUnit, spec: &ModelSpec) -> bool {
        let Some(live) = &unit.live else { return false };
        let Some(reason) = self.replacement_of(live.id).map(Replacement::reason) else { return false };
        let ill = matches!(
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

    pub(super) fn take(&mut self, replica: u32) -> Option<Replacement> {
        self.take_first(|known| known.replica() == replica)
    }

    pub(super) fn take_first(&mut self, wanted: impl Fn(&Replacement) -> bool) -> Option<Replacement> {
        let index = self.under_way.iter().position(wanted)?;
        Some(self.under_way.remove(index))
    }

    pub(super) fn take_any(&mut self) -> Option<Replacement> {
        self.under_way.pop()
    }

    pub(super) fn note_completed(&mut self, entry: LedgerEntry) {
        match self.counts.iter_mut().find(|(known, _)| *known == entry.reason) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((entry.reason, 1)),
        }
        self.last.retain(|known| known.replica != entry.replica);
        self.last.push(entry);
    }

    // --- events of the old and new generations ---

    pub(super) fn note_closed(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.replacement_of_mut(generation)
            && replacement.times.closed.is_none()
        {
            replacement.times.closed = Some(Instant::now());
            replacement.running_at_close = running;
        }
        // If the new process closes again, no sample of it will come.
        self.note_sampled(generation, None, &[]);
    }

    pub(super) fn note_stopped(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.replacement_of_mut(generation)
            && replacement.times.drained.is_none()
        {
            replacement.times.drained = Some(Instant::now());
            replacement.entry.cut = u64::from(running);
        }
    }

    pub(super) fn note_gone(&mut self, generation: GenerationId, running: u32) {
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
    pub(super) fn open_gate(&mut self, env: &TaskEnvironment, unit: &ProcessUnit) {
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

    pub(super) fn note_sampled(
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

    pub(super) fn note_after_exit(&mut self, generation: GenerationId, gpus: &[GpuAfterExit]) {
        if let Some(replacement) = self.replacement_of_mut(generation) {
            replacement.entry.vram_after_exit = gpus.to_vec();
            replacement.measured = true;
        }
    }
}

fn decision_evidence(
    live: &LiveGeneration,
    decision: &RecycleDecision,
    note: Option<String>,
) -> ReplacementEvidence {
    let work = live.cell.work();
    let facts = live.memory.facts_of(decision.series);
    let growth = decision.series.and_then(|series| live.memory.growth(series));
    let forecast = facts.and_then(|facts| facts.to_hard.or(facts.to_soft).or(facts.to_end));
    ReplacementEvidence {
        host_bytes: live.memory.history.host.map(HostMemory::charged),
        budget_bytes: decision.limit_bytes,
        requests: work.requests,
        work,
        age_s: live.start.ready.map(|ready| ready.elapsed()).unwrap_or_default().as_secs_f64(),
        note,
        report: live.memory.last.report.as_ref().map(CudaReport::totals),
        series: decision.series,
        series_bytes: facts.and_then(|facts| facts.charged),
        verdict: growth.map(|growth| growth.verdict),
        slope: growth.and_then(|growth| growth.slope),
        blame: growth.and_then(|growth| growth.blame.clone()),
        forecast,
        words: decision_grounds(live, decision),
    }
}

fn decision_grounds(live: &LiveGeneration, decision: &RecycleDecision) -> Option<String> {
    let symptoms = live.health.symptoms();
    let symptom = symptoms.iter().find(|symptom| Some(symptom.reason()) == decision.reason);
    let words = symptom
        .map(ToString::to_string)
        .or_else(|| words::memory_sentence(decision, live.memory.facts_of(decision.series)?));
    let is_memory = decision.reason.is_some_and(Reason::is_memory);
    let no_reclaim = if is_memory { live.logged_no_reclaim() } else { None };
    match (words, no_reclaim) {
        (Some(words), Some(why)) => Some(format!("{words}; {why}")),
        (None, Some(why)) => Some(why.to_string()),
        (words, None) => words,
    }
}
