//! Replacements of one model: those under way, and what came of the last ones.
//!
//! A [`Replacement`] decides nothing. It is told what happens to the generations that it joins, writes it into its entry for
//! the ledger, and is complete when the new one serves, the old one is gone and the new one's memory is known.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::working_set::BudgetPass;
use warden_policies::lifecycle::Phase;
use warden_policies::sample::{HostMemory, Vram};
use warden_policies::warmth::{NoFile, Warmth};
use warden_policies::{Decision, GenerationId, MemoryKind, ModelName, Reason, cooldown};
use warden_sensors::Report;

use super::context::Permit;
use super::unit::{Generation, Unit};
use super::warm::unpack::Luggage;
use super::words;
use crate::clock;
use crate::lease::queue::Opened;
use crate::view::ledger::{AfterExit, Evidence, LedgerEntry, Mode};

/// A budget for which a process is replaced.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassedBudget {
    /// The reading at which the process had passed it.
    pub(super) first: BudgetPass,
    /// The replacement before, for the same budget, was undone soon: this one will be, too.
    pub(super) repeats: bool,
}

/// One replacement under way.
#[derive(Debug)]
pub(super) struct Replacement {
    /// What is known so far.
    entry: LedgerEntry,
    began: Instant,
    /// What the old generation held of the memory that is the reason when it was young.
    fresh: Option<u64>,
    closed: Option<Instant>,
    running_at_close: u32,
    drained: Option<Instant>,
    gone: Option<Instant>,
    /// For how long nothing was open, if nothing was: since before the replacement, where a process did not answer or had died.
    gap: Option<Duration>,
    /// The part of it that is not older than the replacement.
    gap_since_began: Option<Duration>,
    /// Time before this is no outage: the model was meant to have no process.
    idle_until: Option<Instant>,
    start: Option<Duration>,
    /// The new one's memory is known, or will not be.
    sampled: bool,
    /// What came back of the old one's memory is known.
    measured: bool,
    /// It says nothing about memory: the old process serves on, or whether it does was not waited for.
    pub(super) tells_nothing: bool,
    /// The budget that is the reason, if one is.
    pub(super) budget: Option<PassedBudget>,
    /// Others wait as long as this is held.
    pub(super) permit: Option<Permit>,
    /// What the next process is made warm with.
    pub(super) luggage: Option<Luggage>,
    /// Why there are no files in it.
    pub(super) no_file: Option<NoFile>,
}

impl Replacement {
    /// One that begins now. `running` are the requests of the unit's generation.
    pub(super) fn new(
        model: &ModelName,
        unit: &Unit,
        (reason, decision): (Reason, &Decision),
        (mode, note): (Mode, Option<String>),
        running: u32,
        permit: Option<Permit>,
    ) -> Self {
        let live = unit.live.as_ref();
        // The machine may have closed it already, when it became suspect.
        let closed =
            matches!(unit.phase(), Phase::Suspect | Phase::Draining | Phase::Stopping) && live.is_some();
        let mut entry = LedgerEntry::of(model.clone(), unit.replica, reason, mode);
        entry.from = unit.generation();
        if let Some(live) = live {
            entry.evidence = evidence(live, decision, note);
            entry.host_before = live.memory.host;
            entry.vram_before.clone_from(&live.memory.vram);
        }
        Self {
            entry,
            began: Instant::now(),
            fresh: live.and_then(|live| live.memory.facts_of(decision.series)?.fresh()),
            closed: closed.then(Instant::now),
            running_at_close: if closed { running } else { 0 },
            drained: None,
            gone: None,
            gap: None,
            gap_since_began: None,
            idle_until: (unit.phase() == Phase::Idle).then(Instant::now),
            start: None,
            sampled: false,
            measured: live.is_none(),
            tells_nothing: false,
            budget: None,
            permit,
            luggage: None,
            no_file: None,
        }
    }

    pub(super) fn reason(&self) -> Reason {
        self.entry.reason
    }

    /// The generation that goes.
    pub(super) fn from(&self) -> Option<GenerationId> {
        self.entry.from
    }

    /// Its entry, all but when and under which number. `failed`: why it did not succeed.
    pub(super) fn end(self, failed: Option<String>) -> LedgerEntry {
        // One that did not begin says nothing about memory.
        let began = self.closed.is_some() || failed.is_none() || self.entry.mode == Mode::Overlap;
        let helped = self.helped(failed.is_some()).filter(|_| began && !self.tells_nothing);
        let ours_ms = self.ours();
        let span = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(0, |(from, to)| clock::millis(to.saturating_duration_since(from)))
        };
        // Of a drain that is not followed to its end nobody knows who ends by himself.
        let ended = self.drained.map_or(0, |_| u64::from(self.running_at_close));
        let drained = ended.saturating_sub(self.entry.cut);
        LedgerEntry {
            to: self.entry.to.filter(|_| failed.is_none()),
            drained,
            gap_ms: clock::millis(self.gap.unwrap_or_default()),
            drain_ms: span(self.closed, self.drained),
            exit_ms: self.gone.map(|gone| span(self.drained, Some(gone))),
            ours_ms,
            start_ms: self.start.map(clock::millis),
            helped,
            failed,
            ..self.entry
        }
    }

    /// For one because of memory: whether the memory that was the reason came down.
    fn helped(&self, failed: bool) -> Option<bool> {
        let entry = &self.entry;
        if !entry.reason.is_memory() {
            return None;
        }
        if failed || self.budget.is_some_and(|budget| budget.repeats) {
            return Some(false);
        }
        let of_gpu = |all: &[Vram], gpu| all.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes);
        let (before, after) = match entry.evidence.series.unwrap_or(MemoryKind::Host) {
            MemoryKind::Host => {
                (entry.host_before.map(HostMemory::charged), entry.host_after.map(HostMemory::charged))
            }
            MemoryKind::Vram(gpu) => (of_gpu(&entry.vram_before, gpu), of_gpu(&entry.vram_after, gpu)),
        };
        // The other limits are about more than this process.
        let own =
            matches!(entry.reason, Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard);
        let budget = entry.evidence.budget_bytes.filter(|_| own);
        Some(cooldown::helped(before?, after?, self.fresh, budget))
    }

    /// What is left of the time without a process when the drain, the old one's end and the new one's start are taken away.
    fn ours(&self) -> Option<u64> {
        let (closed, gone) = (self.closed?, self.gone?);
        let theirs = gone.saturating_duration_since(closed) + self.start?;
        let gap = self.gap_since_began.filter(|_| self.entry.mode == Mode::Sequential)?;
        Some(clock::millis(gap.saturating_sub(theirs)))
    }

    /// The new one serves: what is left is the old one's end, and what is measured of both.
    pub(super) fn took_place(&self) -> bool {
        self.entry.to.is_some()
    }

    /// What it is ended by is something else that was asked for.
    pub(super) fn give_up(&mut self) {
        self.tells_nothing = true;
        self.entry.given_up = true;
    }

    fn is_complete(&self) -> bool {
        let gone = self.entry.from.is_none() || self.gone.is_some();
        self.entry.to.is_some() && gone && self.sampled && self.measured
    }
}

#[derive(Debug, Default)]
pub(super) struct Replacements {
    under_way: Vec<Replacement>,
    /// The last complete one of each replica.
    pub(super) last: Vec<LedgerEntry>,
    /// What became of the conversations at the last one that had any.
    pub(super) warm: Option<Warmth>,
    /// How many were completed for each reason.
    pub(super) counts: Vec<(Reason, u64)>,
}

impl Replacements {
    /// None is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// The processes that follow wait for room, however long that takes: no other replacement is to wait for that.
    pub(super) fn give_turns_back(&mut self) {
        for known in &mut self.under_way {
            drop(known.permit.take());
        }
    }

    pub(super) fn begin(&mut self, replacement: Replacement) {
        self.under_way.push(replacement);
    }

    /// Why a replica is being replaced, if it is.
    pub(super) fn reason(&self, replica: u32) -> Option<Reason> {
        self.under_way.iter().find(|known| known.entry.replica == replica).map(Replacement::reason)
    }

    /// The one that takes the place of a generation.
    pub(super) fn of(&self, generation: GenerationId) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.entry.from == Some(generation))
    }

    pub(super) fn of_mut(&mut self, generation: GenerationId) -> Option<&mut Replacement> {
        self.under_way.iter_mut().find(|known| known.entry.from == Some(generation))
    }

    /// Who asked for the replacement of a replica, if one is under way that an operator wants.
    pub(super) fn note_who(&mut self, replica: u32, by: Option<&str>) {
        let of_operator = |known: &&mut Replacement| {
            known.entry.replica == replica && known.entry.reason == Reason::Operator
        };
        if let Some(known) = self.under_way.iter_mut().find(of_operator) {
            known.entry.by = by.map(str::to_owned);
        }
    }

    /// The one of a replica.
    pub(super) fn of_replica(&self, replica: u32) -> Option<&Replacement> {
        self.under_way.iter().find(|known| known.entry.replica == replica)
    }

    /// What goes along from a generation.
    pub(super) fn bring(&mut self, from: GenerationId, luggage: Luggage) {
        if let Some(replacement) = self.of_mut(from) {
            replacement.luggage = Some(luggage);
        }
    }

    /// Nothing of it is in files.
    pub(super) fn bring_no_file(&mut self, from: GenerationId, why: NoFile) {
        if let Some(replacement) = self.of_mut(from) {
            replacement.no_file = Some(why);
        }
    }

    /// What became of the conversations of a generation.
    pub(super) fn note_warm(&mut self, from: GenerationId, warmth: &Warmth) {
        if let Some(replacement) = self.of_mut(from) {
            replacement.entry.warm = Some(warmth.clone());
        }
        self.warm = Some(warmth.clone());
    }

    /// For how long a generation has been under replacement for this reason.
    pub(super) fn replaced_since(&self, generation: GenerationId, reason: Reason) -> Option<Duration> {
        Some(self.of(generation).filter(|known| known.entry.reason == reason)?.began.elapsed())
    }

    /// Takes out the one of a replica, to end it.
    pub(super) fn take(&mut self, replica: u32) -> Option<Replacement> {
        self.take_first(|known| known.entry.replica == replica)
    }

    fn take_first(&mut self, wanted: impl Fn(&Replacement) -> bool) -> Option<Replacement> {
        let index = self.under_way.iter().position(wanted)?;
        Some(self.under_way.remove(index))
    }

    /// Takes out any that is under way, to end it.
    pub(super) fn take_any(&mut self) -> Option<Replacement> {
        self.under_way.pop()
    }

    /// Takes out one of a replica that is no longer configured, to end it.
    pub(super) fn take_surplus(&mut self, replicas: u32) -> Option<Replacement> {
        self.take_first(|known| known.entry.replica >= replicas)
    }

    /// Takes out one that is complete.
    pub(super) fn take_complete(&mut self) -> Option<Replacement> {
        self.take_first(Replacement::is_complete)
    }

    /// Remembers the entry of a complete one.
    pub(super) fn completed(&mut self, entry: LedgerEntry) {
        match self.counts.iter_mut().find(|(known, _)| *known == entry.reason) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((entry.reason, 1)),
        }
        self.last.retain(|known| known.replica != entry.replica);
        self.last.push(entry);
    }

    /// Forgets the entries of replicas that are no longer configured.
    pub(super) fn keep_replicas(&mut self, replicas: u32) {
        self.last.retain(|entry| entry.replica < replicas);
    }

    // --- what happens to the generations ---

    pub(super) fn note_closed(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.of_mut(generation).filter(|known| known.closed.is_none()) {
            replacement.closed = Some(Instant::now());
            replacement.running_at_close = running;
        }
        // A new process that is closed again is not sampled any more.
        self.note_sampled(generation, None, &[]);
    }

    pub(super) fn note_stopped(&mut self, generation: GenerationId, running: u32) {
        if let Some(replacement) = self.of_mut(generation).filter(|known| known.drained.is_none()) {
            replacement.drained = Some(Instant::now());
            replacement.entry.cut = u64::from(running);
        }
    }

    pub(super) fn note_gone(&mut self, generation: GenerationId, running: u32) {
        // A process that died while it drained cut what was still running.
        self.note_stopped(generation, running);
        if let Some(replacement) = self.of_mut(generation) {
            replacement.gone = Some(Instant::now());
        }
    }

    /// A generation of a replica that is not on its way out takes requests, so long after its creation. Returns why it took the
    /// place of another one, if it did, and which budget that one had passed.
    pub(super) fn note_opened(
        &mut self,
        replica: u32,
        generation: GenerationId,
        opened: &Opened,
        start: Duration,
    ) -> Option<(Reason, Option<BudgetPass>)> {
        let of = |known: &&mut Replacement| {
            let entry = &known.entry;
            entry.replica == replica && entry.to.is_none() && entry.from != Some(generation)
        };
        let replacement = self.under_way.iter_mut().find(of)?;
        replacement.entry.to = Some(generation);
        replacement.start = Some(start);
        if let Some(since) = opened.gap {
            let in_it = since.max(replacement.began).elapsed();
            replacement.gap_since_began = Some(in_it);
            let since = replacement.idle_until.map_or(since, |until| since.max(until));
            replacement.gap = Some(since.elapsed());
            replacement.entry.carried_over = opened.waiting as u64;
        }
        Some((replacement.entry.reason, replacement.budget.map(|budget| budget.first)))
    }

    pub(super) fn note_sampled(&mut self, generation: GenerationId, host: Option<HostMemory>, vram: &[Vram]) {
        let of = |known: &&mut Replacement| known.entry.to == Some(generation);
        if let Some(replacement) = self.under_way.iter_mut().find(of) {
            replacement.sampled = true;
            replacement.entry.host_after = replacement.entry.host_after.or(host);
            if replacement.entry.vram_after.is_empty() {
                replacement.entry.vram_after = vram.to_vec();
            }
        }
    }

    pub(super) fn note_after_exit(&mut self, generation: GenerationId, gpus: &[AfterExit]) {
        if let Some(replacement) = self.of_mut(generation) {
            replacement.entry.vram_after_exit = gpus.to_vec();
            replacement.measured = true;
        }
    }
}

/// What is known when a replacement is decided.
fn evidence(live: &Generation, decision: &Decision, note: Option<String>) -> Evidence {
    let work = live.cell.work();
    let facts = live.memory.facts_of(decision.series);
    let growth = decision.series.and_then(|series| live.memory.growth(series));
    let forecast = facts.and_then(|facts| facts.to_hard.or(facts.to_soft).or(facts.to_end));
    Evidence {
        host_bytes: live.memory.host.map(HostMemory::charged),
        budget_bytes: decision.limit_bytes,
        requests: work.requests,
        work,
        age_s: live.ready.map(|ready| ready.elapsed()).unwrap_or_default().as_secs_f64(),
        note,
        report: live.memory.report.as_ref().map(Report::totals),
        series: decision.series,
        series_bytes: facts.and_then(|facts| facts.charged),
        verdict: growth.map(|growth| growth.verdict),
        slope: growth.and_then(|growth| growth.slope),
        blame: growth.and_then(|growth| growth.blame.clone()),
        forecast,
        words: grounds(live, decision),
    }
}

/// The grounds in a sentence.
fn grounds(live: &Generation, decision: &Decision) -> Option<String> {
    let symptoms = live.health.symptoms();
    let symptom = symptoms.iter().find(|symptom| Some(symptom.reason()) == decision.reason);
    let words = symptom
        .map(ToString::to_string)
        .or_else(|| words::grounds(decision, live.memory.facts_of(decision.series)?));
    match (words, live.why_no_reclaim().filter(|_| decision.reason.is_some_and(Reason::is_memory))) {
        (Some(words), Some(why)) => Some(format!("{words}; {why}")),
        (None, Some(why)) => Some(why.to_string()),
        (words, None) => words,
    }
}
