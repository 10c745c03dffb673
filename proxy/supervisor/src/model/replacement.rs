//! Replacements of one model's processes: those under way, and the results of the last ones.
//!
//! A [`Replacement`] decides nothing: its ledger entry records what happens to the old and the new
//! generation. A replacement is complete when the new process serves, the old one is gone and the new one's
//! memory is known.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::RecycleCooldown;
use warden_policies::cooldown::working_set::BudgetPass;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::{HostMemory, VramReading};
use warden_policies::warmth::{NoFileReason, WarmthReport};
use warden_policies::{GenerationId, MemoryKind, ModelName, Reason, RecycleDecision, cooldown};
use warden_sensors::CudaReport;

use super::context::ReplacementPermit;
use super::look::NeedsState;
use super::unit::{LiveGeneration, ProcessUnit};
use super::warm::unpack::{SharedWarmState, WarmState};
use super::words;
use crate::clock;
use crate::lease::queue::OpenedGate;
use crate::view::ledger::{GpuAfterExit, LedgerEntry, ReplacementEvidence, ReplacementMode};

#[derive(Clone, Copy, Debug)]
pub(super) struct ExceededBudget {
    pub(super) first: BudgetPass,
    /// True if the previous replacement for this budget helped for a short time only.
    pub(super) repeats: bool,
}

#[derive(Debug)]
pub(super) struct Replacement {
    /// Ledger entry with the facts known so far.
    entry: LedgerEntry,
    times: ReplacementTimes,
    /// Bytes of the memory in question that the old generation held when it was new.
    young_bytes: Option<u64>,
    running_at_close: u32,
    /// True once the memory of the new process is known, or is known to stay unknown.
    sampled: bool,
    /// True once the amount of memory that came back from the old process is known.
    measured: bool,
    /// True if the result says nothing about memory, because the old process was not seen to end.
    pub(super) is_inconclusive: bool,
    pub(super) budget: Option<ExceededBudget>,
    /// Permit that keeps other replacements waiting.
    pub(super) permit: Option<ReplacementPermit>,
    /// Conversations and slots to carry over to the next process.
    pub(super) warm_state: Option<SharedWarmState>,
    pub(super) no_file: Option<NoFileReason>,
}

/// Moments and durations of a replacement, as far as they are known.
#[derive(Debug)]
struct ReplacementTimes {
    began: Instant,
    closed: Option<Instant>,
    drained: Option<Instant>,
    gone: Option<Instant>,
    /// Time in which no process took requests; it may have begun before the replacement.
    gap: Option<Duration>,
    /// Part of `gap` since the replacement began.
    gap_since_began: Option<Duration>,
    /// Until this moment the model was meant to have no process, so the time before it counts as no outage.
    idle_until: Option<Instant>,
    start: Option<Duration>,
}

impl Replacement {
    /// Makes a replacement that begins now, while the old process serves `running` requests.
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
        // The generation may already take no requests: the life-cycle machine closed it when the process
        // became suspect.
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

    /// Returns the ledger entry, without time and number. `failed`: why the replacement did not succeed.
    pub(super) fn finish(self, failed: Option<String>) -> LedgerEntry {
        let times = &self.times;
        // A replacement that did not begin says nothing about memory.
        let began = times.closed.is_some() || failed.is_none() || self.entry.mode == ReplacementMode::Overlap;
        let helped = if began && !self.is_inconclusive { self.helped(failed.is_some()) } else { None };
        let span = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(0, |(from, to)| clock::millis(to.saturating_duration_since(from)))
        };
        // If the drain was not completed, the number of requests that would have ended in it is unknown.
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

    /// For a replacement because of memory: true if the new process holds less of that memory.
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
        // Compare only with a budget of this process; all other limits concern more than one process.
        let own =
            matches!(entry.reason, Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard);
        let budget = if own { entry.evidence.budget_bytes } else { None };
        Some(cooldown::recycle_helped(before?, after?, self.young_bytes, budget))
    }

    /// Milliseconds without a process for which we are responsible: the gap, without the old process's
    /// drain and end and without the new process's start.
    fn own_ms(&self) -> Option<u64> {
        if self.entry.mode != ReplacementMode::Sequential {
            return None;
        }
        let times = &self.times;
        let theirs = times.gone?.saturating_duration_since(times.closed?) + times.start?;
        Some(clock::millis(times.gap_since_began?.saturating_sub(theirs)))
    }

    /// True if the new process serves. The old process may still be ending, and measurements may be missing.
    pub(super) fn has_taken_over(&self) -> bool {
        self.entry.to.is_some()
    }

    /// Marks the replacement as ended by another command.
    pub(super) fn give_up(&mut self) {
        self.is_inconclusive = true;
        self.entry.given_up = true;
    }

    pub(super) fn is_complete(&self) -> bool {
        let gone = self.entry.from.is_none() || self.times.gone.is_some();
        self.entry.to.is_some() && gone && self.sampled && self.measured
    }
}

#[derive(Debug, Default)]
pub(super) struct ReplacementTracker {
    under_way: Vec<Replacement>,
    /// Last complete replacement of each replica.
    pub(super) last: Vec<LedgerEntry>,
    /// Conversations carried over at the last replacement that had any.
    pub(super) warm: Option<WarmthReport>,
    /// Number of completed replacements for each reason.
    pub(super) counts: Vec<(Reason, u64)>,
    pub(super) cooldown: RecycleCooldown,
    /// Checks of the files that the next process needs.
    pub(super) needs: NeedsState,
    /// Reason for the mode of the last replacement, or for having none.
    pub(super) note: Option<String>,
}

impl ReplacementTracker {
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Note for the view: why the present process is kept, or the note of the last replacement.
    pub(super) fn note_for_view(&self) -> Option<String> {
        let missing = self.needs.blocking.as_ref().and_then(|check| check.missing.as_ref());
        missing.map(|missing| missing.message.clone()).or_else(|| self.note.clone())
    }

    /// Releases the permits, because the next processes wait for memory for an unknown time.
    pub(super) fn release_permits(&mut self) {
        for known in &mut self.under_way {
            drop(known.permit.take());
        }
    }

    pub(super) fn add(&mut self, replacement: Replacement) {
        self.under_way.push(replacement);
    }

    pub(super) fn reason(&self, replica: u32) -> Option<Reason> {
        self.of_replica(replica).map(Replacement::reason)
    }

    /// Replacement under way whose old generation is `generation`.
    pub(super) fn replacement_of(&self, generation: GenerationId) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.entry.from == Some(generation))
    }

    pub(super) fn replacement_of_mut(&mut self, generation: GenerationId) -> Option<&mut Replacement> {
        self.under_way.iter_mut().find(|known| known.entry.from == Some(generation))
    }

    /// Records the operator who requested the restart of a replica that is under way.
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

    /// Stores the conversations and slots of a generation that the next process is to take over.
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

    /// Records the result of carrying over a generation's conversations.
    pub(super) fn note_warm(&mut self, from: GenerationId, warmth: &WarmthReport) {
        if let Some(replacement) = self.replacement_of_mut(from) {
            replacement.entry.warm = Some(warmth.clone());
        }
        self.warm = Some(warmth.clone());
    }

    /// Time since which a replacement of this generation for this reason has been under way.
    pub(super) fn replaced_since(&self, generation: GenerationId, reason: Reason) -> Option<Duration> {
        let known = self.replacement_of(generation).filter(|known| known.entry.reason == reason)?;
        Some(known.times.began.elapsed())
    }

    /// Removes the replacement of a replica from the list; the caller ends it.
    pub(super) fn take(&mut self, replica: u32) -> Option<Replacement> {
        self.take_first(|known| known.replica() == replica)
    }

    /// Removes a replacement from the list; the caller ends it.
    pub(super) fn take_first(&mut self, wanted: impl Fn(&Replacement) -> bool) -> Option<Replacement> {
        let index = self.under_way.iter().position(wanted)?;
        Some(self.under_way.remove(index))
    }

    /// Removes any one replacement from the list; the caller ends it.
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
        // If `generation` is the new process and closes again, no sample of it will come: do not wait for
        // one.
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
        // Requests that were running when a draining process dies count as cut.
        self.note_stopped(generation, running);
        if let Some(replacement) = self.replacement_of_mut(generation) {
            replacement.times.gone = Some(Instant::now());
        }
    }

    /// Records that a generation takes requests, and how long it took to start. If it replaced another
    /// generation, returns the reason and the exceeded budget.
    pub(super) fn note_opened(
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

/// Observations to record for a decision.
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

/// Explanation of a decision in one sentence.
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
