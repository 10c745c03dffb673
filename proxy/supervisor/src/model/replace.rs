//! Replacements, from the decision to the entry in the ledger.
//!
//! ```text
//!   sequential:  Recycle -> old drains -> old stops -> new starts -> new opens -> its first sample -> entry
//!   overlap:     new unit starts -> new opens, old closes -> old drains and stops \
//!                                                        new's first sample       > entry
//! ```
//!
//! A [`Replacement`] decides nothing. It is told what happens to the generations that it joins, and is complete when the
//! new one serves, the old one is gone and the new one's memory is known. One replacement at a time per model: more would
//! take several replicas, or memory for several processes, at once.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::{Event, Phase, Then, Timer};
use warden_policies::recycle::SeriesFacts;
use warden_policies::restraint;
use warden_policies::sample::{HostMemory, Vram};
use warden_policies::{Action, Decision, GenerationId, Reason, Series};
use warden_sensors::Report;

use super::unit::{Live, Role, Unit, UnitId};
use super::{Model, millis, words};
use crate::clock;
use crate::context::Permit;
use crate::error::ControlError;
use crate::event::EventKind;
use crate::ledger::{AfterExit, Evidence, LedgerEntry, Mode};
use crate::shared::Opened;
use crate::view::Failure;

/// How often a turn is asked for again, at most.
const TURN: Duration = Duration::from_secs(1);

/// A decision of somebody else than the policy.
pub(super) fn because(reason: Reason) -> Decision {
    Decision { action: Action::DrainNow, reason: Some(reason), due: true, ..Decision::OBSERVE }
}

/// What is known when a replacement is decided.
fn evidence(live: &Live, decision: &Decision, note: Option<String>) -> Evidence {
    let work = live.cell.work();
    let facts = facts_of(live, decision);
    let growth = decision.series.and_then(|series| live.watched.growth(series));
    let forecast = facts.and_then(|facts| facts.to_hard.or(facts.to_soft).or(facts.to_end));
    Evidence {
        host_bytes: live.host.map(HostMemory::charged),
        budget_bytes: decision.limit_bytes,
        requests: work.requests,
        work,
        age_s: live.ready.map(|ready| ready.elapsed()).unwrap_or_default().as_secs_f64(),
        note,
        report: live.report.as_ref().map(Report::totals),
        series: decision.series,
        series_bytes: facts.and_then(|facts| facts.charged),
        verdict: growth.map(|growth| growth.verdict),
        slope: growth.and_then(|growth| growth.slope),
        blame: growth.and_then(|growth| growth.blame.clone()),
        forecast,
        words: grounds(live, decision),
    }
}

/// The facts of the memory that a decision is about.
fn facts_of<'a>(live: &'a Live, decision: &Decision) -> Option<&'a SeriesFacts> {
    live.watched.facts.as_ref()?.series.iter().find(|facts| Some(facts.series) == decision.series)
}

/// The grounds in a sentence.
fn grounds(live: &Live, decision: &Decision) -> Option<String> {
    let symptoms = live.watched.symptoms();
    let symptom = symptoms.iter().find(|symptom| Some(symptom.reason()) == decision.reason);
    symptom.map(ToString::to_string).or_else(|| words::grounds(decision, facts_of(live, decision)?))
}

/// One replacement under way.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) replica: u32,
    pub(super) reason: Reason,
    pub(super) mode: Mode,
    evidence: Evidence,
    began: Instant,
    from: Option<GenerationId>,
    host_before: Option<HostMemory>,
    vram_before: Vec<Vram>,
    /// What the old generation held of the memory that is the reason when it was young.
    fresh: Option<u64>,
    closed: Option<Instant>,
    running_at_close: u32,
    drained: Option<Instant>,
    cut: u32,
    to: Option<GenerationId>,
    opened: Opened,
    gap: Duration,
    start: Option<Duration>,
    sampled: bool,
    host_after: Option<HostMemory>,
    vram_after: Vec<Vram>,
    after_exit: Vec<AfterExit>,
    /// What came back of the old one's memory is known.
    measured: bool,
    /// It says nothing about memory, because the old process serves on.
    given_up: bool,
    gone: Option<Instant>,
    /// Others wait as long as this is held.
    permit: Option<Permit>,
}

impl Replacement {
    /// For one because of memory: whether the memory that was the reason came down.
    fn helped(&self, failed: bool) -> Option<bool> {
        if !self.reason.is_memory() {
            return None;
        }
        if failed {
            return Some(false);
        }
        let of_gpu = |all: &[Vram], gpu| all.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes);
        let (before, after) = match self.evidence.series.unwrap_or(Series::Host) {
            Series::Host => {
                (self.host_before.map(HostMemory::charged), self.host_after.map(HostMemory::charged))
            }
            Series::Vram(gpu) => (of_gpu(&self.vram_before, gpu), of_gpu(&self.vram_after, gpu)),
        };
        // The other limits are about more than this process.
        let own =
            matches!(self.reason, Reason::HostSoft | Reason::HostHard | Reason::VramSoft | Reason::VramHard);
        let budget = self.evidence.budget_bytes.filter(|_| own);
        Some(restraint::helped(before?, after?, self.fresh, budget))
    }

    /// What is left of the time without a process when the drain, the old one's end and the new one's start are taken away.
    fn ours(&self) -> Option<u64> {
        let (closed, gone) = (self.closed?, self.gone?);
        let theirs = gone.saturating_duration_since(closed) + self.start?;
        (self.mode == Mode::Sequential && self.opened.gap.is_some())
            .then(|| millis(self.gap.saturating_sub(theirs)))
    }

    fn is_complete(&self) -> bool {
        let gone = self.from.is_none() || self.gone.is_some();
        self.to.is_some() && gone && self.sampled && self.measured
    }
}

impl Model {
    /// Begins a replacement that the policy decided and nothing holds back.
    pub(super) fn replace_by_policy(&mut self, replica: u32, decision: Decision, permit: Option<Permit>) {
        let Some(unit) = self.current(replica) else { return };
        let id = unit.id;
        let (mode, note) = self.choose(unit);
        self.began_by_policy(&decision);
        self.record(replica, &decision, mode, note, permit);
        self.carry_on(id, replica, mode);
    }

    /// The same for one that does not drain; its end is the caller's business.
    pub(super) fn begin_by_policy(
        &mut self,
        replica: u32,
        decision: &Decision,
        permit: Option<Permit>,
        note: &str,
    ) {
        self.began_by_policy(decision);
        self.record(replica, decision, Mode::Sequential, Some(note.to_owned()), permit);
    }

    fn began_by_policy(&mut self, decision: &Decision) {
        let Some(reason) = decision.reason else { return };
        let off = self.restraint.began(self.context.now(), reason, &self.spec.restraint);
        if let Some(held) = off {
            self.tell(None, EventKind::PolicyOff { message: held.to_string() });
        }
    }

    /// Begins to replace the process of a replica, or starts it if it has none. An operator does not wait for a turn, a new
    /// configuration does; others wait for both.
    pub(super) fn replace(&mut self, replica: u32, reason: Reason) {
        let Some(id) = self.current(replica).map(|unit| unit.id) else { return };
        if !self.is_prepared(id, replica, reason) {
            return;
        }
        let permit = if reason == Reason::Configuration {
            let Some(permit) = self.permit_alone(id, replica) else {
                // A turn comes when another replacement has ended, which nobody reports.
                self.configuration_at =
                    Some(clock::again(Instant::now(), self.spec.recycle.quiet_for.min(TURN)));
                return;
            };
            permit
        } else {
            self.claim(id, replica)
        };
        let Some(unit) = self.current(replica) else { return };
        let (mode, note) = self.choose(unit);
        self.record(replica, &because(reason), mode, note, Some(permit));
        self.carry_on(id, replica, mode);
    }

    fn carry_on(&mut self, id: UnitId, replica: u32, mode: Mode) {
        match mode {
            Mode::Sequential => self.step(id, Event::Recycle),
            Mode::Overlap => {
                let successor = self.add_unit(replica, Role::Successor);
                self.step(successor, Event::Up);
            }
        }
    }

    /// Keeps account of a replacement from now on; something else makes it happen.
    pub(super) fn record(
        &mut self,
        replica: u32,
        decision: &Decision,
        mode: Mode,
        note: Option<String>,
        permit: Option<Permit>,
    ) {
        let from = self.current(replica).and_then(Unit::generation);
        self.book(replica, decision, mode, note.clone(), permit);
        if let Some(reason) = decision.reason {
            self.tell(from, EventKind::RecycleBegan { reason, mode, note });
        }
        self.changed();
    }

    /// The same, and nothing is told of it yet.
    pub(super) fn book(
        &mut self,
        replica: u32,
        decision: &Decision,
        mode: Mode,
        note: Option<String>,
        permit: Option<Permit>,
    ) {
        let (Some(unit), Some(reason)) = (self.current(replica), decision.reason) else { return };
        let live = unit.live.as_ref();
        let from = unit.generation();
        // The machine may have closed it already, when it became suspect.
        let closed = matches!(unit.phase(), Phase::Suspect | Phase::Draining | Phase::Stopping);
        let closed = from.filter(|_| closed);
        let replacement = Replacement {
            replica,
            reason,
            mode,
            evidence: live.map(|live| evidence(live, decision, note.clone())).unwrap_or_default(),
            began: Instant::now(),
            from,
            host_before: live.and_then(|live| live.host),
            vram_before: live.map(|live| live.watched.vram.clone()).unwrap_or_default(),
            fresh: live.and_then(|live| facts_of(live, decision)?.fresh()),
            closed: closed.map(|_| Instant::now()),
            running_at_close: closed.map_or(0, |generation| self.shared.in_flight(generation)),
            drained: None,
            cut: 0,
            to: None,
            opened: Opened::default(),
            gap: Duration::ZERO,
            start: None,
            sampled: false,
            host_after: None,
            vram_after: Vec::new(),
            after_exit: Vec::new(),
            measured: from.is_none(),
            given_up: false,
            gone: None,
            permit,
        };
        self.replacements.push(replacement);
        self.note = note;
    }

    // --- what happens to the generations ---

    pub(super) fn note_closed(&mut self, generation: GenerationId, running: u32) {
        let of = |replacement: &&mut Replacement| replacement.from == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of)
            && replacement.closed.is_none()
        {
            replacement.closed = Some(Instant::now());
            replacement.running_at_close = running;
        }
        // A new process that is closed again is not sampled any more.
        self.note_sampled(generation, None, &[]);
    }

    pub(super) fn note_stopped(&mut self, generation: GenerationId, running: u32) {
        let of = |replacement: &&mut Replacement| replacement.from == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of)
            && replacement.drained.is_none()
        {
            replacement.drained = Some(Instant::now());
            replacement.cut = running;
        }
    }

    /// For how long a generation has been under replacement for this reason.
    pub(super) fn replaced_since(&self, generation: GenerationId, reason: Reason) -> Option<Duration> {
        let of = |known: &&Replacement| known.from == Some(generation) && known.reason == reason;
        self.replacements.iter().find(of).map(|known| known.began.elapsed())
    }

    pub(super) fn note_gone(&mut self, generation: GenerationId, running: u32) {
        // A process that died while it drained cut what was still running.
        self.note_stopped(generation, running);
        let of = |replacement: &&mut Replacement| replacement.from == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.gone = Some(Instant::now());
        }
    }

    pub(super) fn note_opened(
        &mut self,
        replica: u32,
        role: Role,
        generation: GenerationId,
        opened: Opened,
        start: Duration,
    ) {
        let of = |replacement: &&mut Replacement| {
            replacement.replica == replica
                && replacement.to.is_none()
                && replacement.from != Some(generation)
                && role != Role::Retiring
        };
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.to = Some(generation);
            replacement.start = Some(start);
            if let Some(since) = opened.gap {
                replacement.gap = since.max(replacement.began).elapsed();
                replacement.opened = opened;
            }
        }
        self.changed();
    }

    pub(super) fn note_sampled(&mut self, generation: GenerationId, host: Option<HostMemory>, vram: &[Vram]) {
        let of = |replacement: &&mut Replacement| replacement.to == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.sampled = true;
            replacement.host_after = replacement.host_after.or(host);
            if replacement.vram_after.is_empty() {
                replacement.vram_after = vram.to_vec();
            }
        }
    }

    pub(super) fn note_after_exit(&mut self, generation: GenerationId, gpus: &[AfterExit]) {
        let of = |replacement: &&mut Replacement| replacement.from == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.after_exit = gpus.to_vec();
            replacement.measured = true;
        }
    }

    // --- the end ---

    /// Whether the requests of a generation that drains are worth more than its deadline: a policy wants it replaced for its
    /// size, its age or its speed, and the machine has memory.
    pub(super) fn may_drain_on(&self, id: UnitId) -> bool {
        let Some(unit) = self.unit(id) else { return false };
        let Some(live) = unit.live.as_ref() else { return false };
        let of = |known: &&Replacement| known.from == Some(live.id);
        let Some(replacement) = self.replacements.iter().find(of) else { return false };
        let ill = matches!(
            replacement.reason,
            Reason::MemoryExhausted | Reason::Wedged | Reason::ComputeErrors | Reason::DeviceFault
        );
        let facts = live.watched.facts.as_ref();
        let short =
            facts.is_none_or(|facts| facts.series.iter().any(|series| self.spec.recycle.is_short(series)));
        self.end.is_none()
            && self.restarts.is_empty()
            && unit.machine.then() == Some(Then::Restart)
            && replacement.reason.is_policy()
            && !ill
            && !short
            && !live.hurried
    }

    /// The drain deadline has passed, and what still runs is not to be cut: the process serves on, and the drain is tried
    /// again later.
    pub(super) fn drain_later(&mut self, id: UnitId) {
        let deadline = self.spec.timing.drain_deadline;
        let Some(unit) = self.unit_mut(id) else { return };
        let (replica, role) = (unit.replica, unit.role);
        let now = Instant::now();
        if role == Role::Retiring {
            // Another one serves: nobody waits for this one, and no other replacement is to wait for its requests.
            unit.timer = Some((Timer::Drain, clock::again(now, deadline)));
            let from = unit.generation();
            if let Some(known) = self.replacements.iter_mut().find(|known| known.from == from) {
                drop(known.permit.take());
            }
            return;
        }
        let Some(live) = &mut unit.live else { return };
        live.drain_at = Some(clock::again(now, deadline.saturating_mul(2)));
        live.probe_at = Some(now);
        live.sample_at = Some(now);
        let generation = live.id;
        let running = self.shared.in_flight(generation);
        self.step(id, Event::Resume);
        let message = format!(
            "{running} request(s) were still running at the drain deadline, and the machine has memory: the process serves on, \
             and is drained again later"
        );
        if let Some(index) = self.replacements.iter().position(|known| known.replica == replica) {
            let mut replacement = self.replacements.remove(index);
            replacement.given_up = true;
            self.enter(replacement, Some(message));
        }
        self.changed();
    }

    /// Writes the entries of complete replacements.
    pub(super) fn complete(&mut self) {
        while let Some(index) = self.replacements.iter().position(Replacement::is_complete) {
            let replacement = self.replacements.remove(index);
            let reason = replacement.reason;
            let entry = self.enter(replacement, None);
            match self.recycles.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, count)) => *count += 1,
                None => self.recycles.push((reason, 1)),
            }
            self.replaced.retain(|known| known.replica != entry.replica);
            self.replaced.push(entry);
            self.changed();
        }
    }

    /// The new process does not come to serve: the entry says so, and whoever waits for it is told.
    pub(super) fn fail(&mut self, replica: u32, failure: &Failure) {
        let Some(index) = self.replacements.iter().position(|known| known.replica == replica) else { return };
        let replacement = self.replacements.remove(index);
        if replacement.reason == Reason::Configuration {
            self.configuration_at = Some(clock::again(Instant::now(), self.spec.restraint.min_interval));
        }
        self.enter(replacement, Some(failure.message.clone()));
        for restart in std::mem::take(&mut self.restarts) {
            let (model, failure) = (self.spec.name.clone(), failure.clone());
            self.answer(restart.reply, Err(ControlError::StartFailed { model, failure }));
        }
        self.changed();
    }

    /// Another command came in between: no replacement took place.
    pub(super) fn give_up_replacements(&mut self, because: &str) {
        self.replacements.clear();
        for restart in std::mem::take(&mut self.restarts) {
            let (model, because) = (self.spec.name.clone(), because.to_owned());
            self.answer(restart.reply, Err(ControlError::GivenUp { model, because }));
        }
        self.changed();
    }

    fn enter(&mut self, replacement: Replacement, failed: Option<String>) -> LedgerEntry {
        let ours_ms = replacement.ours();
        // One that did not begin says nothing about memory.
        let began = replacement.closed.is_some() || failed.is_none() || replacement.mode == Mode::Overlap;
        let helped = replacement.helped(failed.is_some()).filter(|_| began && !replacement.given_up);
        let series = replacement.evidence.series.unwrap_or(Series::Host);
        let host_after = replacement.host_after;
        let span = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(0, |(from, to)| millis(to.saturating_duration_since(from)))
        };
        let entry = LedgerEntry {
            id: self.context.ledger.next(),
            at: clock::wall(),
            model: self.spec.name.clone(),
            replica: replacement.replica,
            reason: replacement.reason,
            evidence: replacement.evidence,
            mode: replacement.mode,
            from: replacement.from,
            to: replacement.to.filter(|_| failed.is_none()),
            carried_over: replacement.opened.waiting as u64,
            drained: u64::from(replacement.running_at_close.saturating_sub(replacement.cut)),
            cut: u64::from(replacement.cut),
            gap_ms: millis(replacement.gap),
            drain_ms: span(replacement.closed, replacement.drained),
            exit_ms: replacement.gone.map(|gone| span(replacement.drained, Some(gone))),
            ours_ms,
            start_ms: replacement.start.map(millis),
            host_before: replacement.host_before,
            host_after,
            vram_before: replacement.vram_before,
            vram_after: replacement.vram_after,
            vram_after_exit: replacement.after_exit,
            helped,
            failed,
        };
        self.context.ledger.append(&entry);
        self.tell(entry.to.or(entry.from), EventKind::RecycleDone { entry: Box::new(entry.clone()) });
        if let Some(helped) = helped
            && let Some(held) = self.restraint.ended(series, helped, &self.spec.restraint)
        {
            self.tell(None, EventKind::PolicyOff { message: held.to_string() });
        }
        entry
    }
}
