//! Replacement of one process: its times and its ledger entry.
//!
//! A [`Replacement`] makes no decisions. It is complete when the new process serves, the old one is gone and
//! the new one's memory is known.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::working_set::BudgetPass;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::sample::{HostMemory, VramReading};
use warden_policies::warmth::NoFileReason;
use warden_policies::{
    GenerationId, MemoryKind, ModelName, Reason, RecycleAction, RecycleDecision, cooldown,
};
use warden_sensors::CudaReport;

use crate::clock;
use crate::model::context::ReplacementPermit;
use crate::model::generation::LiveGeneration;
use crate::model::recycling::words;
use crate::model::unit::ProcessUnit;
use crate::model::warm::unpack::SharedWarmState;
use crate::view::ledger::{LedgerEntry, ReplacementEvidence, ReplacementMode};

/// Makes a decision for a replacement that the policy did not decide.
pub(crate) fn decision_for(reason: Reason) -> RecycleDecision {
    RecycleDecision {
        action: RecycleAction::DrainNow,
        reason: Some(reason),
        due: true,
        ..RecycleDecision::OBSERVE
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ExceededBudget {
    pub(crate) first: BudgetPass,
    /// True if the previous replacement for this budget helped only for a short time.
    pub(crate) repeats: bool,
}

#[derive(Debug)]
pub(crate) struct Replacement {
    pub(super) entry: LedgerEntry,
    pub(super) times: ReplacementTimes,
    /// Bytes that the old generation held of the memory in question when it was new.
    pub(super) young_bytes: Option<u64>,
    pub(super) running_at_close: u32,
    /// True if the memory of the new process is known, or cannot become known.
    pub(super) sampled: bool,
    /// True if the memory freed by the old process is known.
    pub(super) measured: bool,
    /// True if the result shows nothing about memory, because the end of the old process was not seen.
    pub(crate) is_inconclusive: bool,
    pub(crate) budget: Option<ExceededBudget>,
    pub(crate) permit: Option<ReplacementPermit>,
    pub(crate) warm_state: Option<SharedWarmState>,
    pub(crate) no_file: Option<NoFileReason>,
}

#[derive(Debug)]
pub(super) struct ReplacementTimes {
    pub(super) began: Instant,
    pub(super) closed: Option<Instant>,
    pub(super) drained: Option<Instant>,
    pub(super) gone: Option<Instant>,
    /// Time without a serving process; may have begun before the replacement.
    pub(super) gap: Option<Duration>,
    pub(super) gap_since_began: Option<Duration>,
    /// End of a time in which the model was not meant to have a process: that time is no outage.
    pub(super) idle_until: Option<Instant>,
    pub(super) start: Option<Duration>,
}

impl Replacement {
    /// `running`: requests that the old process is serving.
    pub(crate) fn new(
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

    pub(crate) fn reason(&self) -> Reason {
        self.entry.reason
    }

    pub(crate) fn replica(&self) -> u32 {
        self.entry.replica
    }

    pub(crate) fn from(&self) -> Option<GenerationId> {
        self.entry.from
    }

    /// Returns the ledger entry without time and number. `failed`: why the replacement failed.
    pub(crate) fn finish(self, failed: Option<String>) -> LedgerEntry {
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

    /// Milliseconds of the outage that the supervisor itself caused: the outage minus the drain and end of the
    /// old process and the start of the new one.
    fn own_ms(&self) -> Option<u64> {
        if self.entry.mode != ReplacementMode::Sequential {
            return None;
        }
        let times = &self.times;
        let theirs = times.gone?.saturating_duration_since(times.closed?) + times.start?;
        Some(clock::millis(times.gap_since_began?.saturating_sub(theirs)))
    }

    /// True if the new process serves. The old process may still be ending.
    pub(crate) fn has_taken_over(&self) -> bool {
        self.entry.to.is_some()
    }

    pub(crate) fn give_up(&mut self) {
        self.is_inconclusive = true;
        self.entry.given_up = true;
    }

    pub(crate) fn is_complete(&self) -> bool {
        let gone = self.entry.from.is_none() || self.times.gone.is_some();
        self.entry.to.is_some() && gone && self.sampled && self.measured
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
