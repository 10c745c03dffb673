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
use warden_policies::lifecycle::{Event, Phase};
use warden_policies::restraint;
use warden_policies::sample::HostMemory;
use warden_policies::{ByteSize, Decision, GenerationId, MemoryLimit, Reason, Series};
use warden_sensors::Report;

use super::unit::{Role, Unit};
use super::{Model, millis};
use crate::clock;
use crate::error::ControlError;
use crate::event::EventKind;
use crate::ledger::{Evidence, LedgerEntry, Mode};
use crate::shared::Opened;
use crate::spec::Replace;
use crate::view::Failure;

/// One replacement under way.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) replica: u32,
    pub(super) reason: Reason,
    pub(super) mode: Mode,
    evidence: Evidence,
    began: Instant,
    from: Option<GenerationId>,
    from_gone: bool,
    host_before: Option<HostMemory>,
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
}

impl Replacement {
    fn is_complete(&self) -> bool {
        self.to.is_some() && self.from_gone && self.sampled
    }
}

impl Model {
    /// Begins a replacement that the policy decided and nothing holds back.
    pub(super) fn replace_by_policy(&mut self, replica: u32, decision: Decision) {
        let Some(reason) = decision.reason else { return };
        let now = self.context.now();
        let off = self.restraint.began(now, reason, &self.spec.restraint);
        if let Some(held) = off {
            self.tell(None, EventKind::PolicyOff { message: held.to_string() });
        }
        self.replace(replica, reason);
    }

    /// Begins to replace the process of a replica, or starts it if it has none.
    pub(super) fn replace(&mut self, replica: u32, reason: Reason) {
        let Some(unit) = self.current(replica) else { return };
        let id = unit.id;
        let (mode, note) = self.choose(unit);
        self.record(replica, reason, mode, note);
        match mode {
            Mode::Sequential => self.step(id, Event::Recycle),
            Mode::Overlap => {
                let successor = self.add_unit(replica, Role::Successor);
                self.step(successor, Event::Up);
            }
        }
    }

    /// Keeps account of a replacement from now on; something else makes it happen.
    pub(super) fn record(&mut self, replica: u32, reason: Reason, mode: Mode, note: Option<String>) {
        let Some(unit) = self.current(replica) else { return };
        let live = unit.live.as_ref();
        let from = unit.generation();
        let work = live.map(|live| live.cell.work()).unwrap_or_default();
        let age = live.and_then(|live| live.ready).map(|ready| ready.elapsed()).unwrap_or_default();
        let host_before = live.and_then(|live| live.host);
        // The machine may have closed it already, when it became suspect.
        let closed = matches!(unit.phase(), Phase::Suspect | Phase::Draining | Phase::Stopping);
        let closed = from.filter(|_| closed);
        let evidence = Evidence {
            host_bytes: host_before.map(HostMemory::charged),
            budget_bytes: self.budget(reason).map(|budget| budget.0),
            requests: work.requests,
            work,
            age_s: age.as_secs_f64(),
            note: note.clone(),
            report: live.and_then(|live| live.report.as_ref()).map(Report::totals),
            ..Evidence::default()
        };
        self.replacements.push(Replacement {
            replica,
            reason,
            mode,
            evidence,
            began: Instant::now(),
            from,
            from_gone: from.is_none(),
            host_before,
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
        });
        self.note.clone_from(&note);
        self.tell(from, EventKind::RecycleBegan { reason, mode, note });
        self.changed();
    }

    fn budget(&self, reason: Reason) -> Option<ByteSize> {
        let bytes = |limit: Option<MemoryLimit>| limit.and_then(MemoryLimit::bytes);
        match reason {
            Reason::HostSoft => bytes(self.spec.recycle.host_soft),
            Reason::HostHard => bytes(self.spec.recycle.host_hard),
            _ => None,
        }
    }

    /// The way of replacing, and why, for people.
    fn choose(&self, unit: &Unit) -> (Mode, Option<String>) {
        if unit.phase() != Phase::Ready {
            return (Mode::Sequential, Some(format!("sequential: the process is {}", unit.phase())));
        }
        match self.spec.replace {
            Replace::Sequential => (Mode::Sequential, Some("sequential: as configured".to_owned())),
            Replace::Overlap => (Mode::Overlap, Some("overlap: as configured".to_owned())),
            Replace::Auto => {
                let (mode, note) = self.choose_by_memory(unit);
                (mode, Some(note))
            }
        }
    }

    fn choose_by_memory(&self, unit: &Unit) -> (Mode, String) {
        let world = &self.context.world;
        if world.has_gpu() {
            return (
                Mode::Sequential,
                "sequential: a GPU is present, and its memory might not hold two".to_owned(),
            );
        }
        let Some(available) = world.available() else {
            return (Mode::Sequential, "sequential: the available memory is unknown".to_owned());
        };
        let held = unit.live.as_ref().and_then(|live| live.host).map_or(0, HostMemory::charged);
        let needed = scale(held.max(self.watch.overlap_floor.0), self.watch.overlap_headroom);
        let mode = if available >= needed { Mode::Overlap } else { Mode::Sequential };
        let (available, needed) = (ByteSize(available), ByteSize(needed));
        (mode, format!("{}: {available} available, {needed} needed", mode.as_str()))
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
        self.note_sampled(generation, None);
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

    pub(super) fn note_gone(&mut self, generation: GenerationId, running: u32) {
        // A process that died while it drained cut what was still running.
        self.note_stopped(generation, running);
        let of = |replacement: &&mut Replacement| replacement.from == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.from_gone = true;
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

    pub(super) fn note_sampled(&mut self, generation: GenerationId, host: Option<HostMemory>) {
        let of = |replacement: &&mut Replacement| replacement.to == Some(generation);
        if let Some(replacement) = self.replacements.iter_mut().find(of) {
            replacement.sampled = true;
            replacement.host_after = replacement.host_after.or(host);
        }
    }

    // --- the end ---

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
        let of_memory = matches!(replacement.reason, Reason::HostSoft | Reason::HostHard);
        let host_after = replacement.host_after;
        let helped = match (&failed, replacement.host_before, host_after) {
            (Some(_), _, _) if of_memory => Some(false),
            (None, Some(before), Some(after)) if of_memory => {
                let budget = replacement.evidence.budget_bytes;
                Some(restraint::helped(before.charged(), after.charged(), budget))
            }
            _ => None,
        };
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
            start_ms: replacement.start.map(millis),
            host_before: replacement.host_before,
            host_after,
            vram_before: Vec::new(),
            vram_after: Vec::new(),
            vram_after_exit: Vec::new(),
            helped,
            failed,
        };
        self.context.ledger.append(&entry);
        self.tell(entry.to.or(entry.from), EventKind::RecycleDone { entry: Box::new(entry.clone()) });
        if let Some(helped) = helped
            && let Some(held) = self.restraint.ended(Series::Host, helped, &self.spec.restraint)
        {
            self.tell(None, EventKind::PolicyOff { message: held.to_string() });
        }
        entry
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "bytes of memory times a small factor: far from the ends of both types, and an estimate anyway"
)]
fn scale(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor.max(0.0)) as u64
}
