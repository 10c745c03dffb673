//! Asks a process to give memory back, before it is replaced for its memory or because an operator wants it.
//!
//! ```text
//!   decision ── first rung ── ask (in a helper) ── answer ── a reading at once ── entry ── judged again
//!   operator ─────────────────────────┘               │
//!                                                     └ the process ends or is silent: the entry says so
//! ```
//!
//! The process serves meanwhile. Drains, replacements, kills and shutdown do not wait for its answer.

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::reclaim::{NoReclaim, ReclaimDecision, ReclaimHistory, ReclaimParts, ReclaimWorth};
use warden_policies::recycle::RecycleHindrance;
use warden_policies::{GenerationId, Reason, RecycleAction, RecycleDecision};

use super::control::ReclaimRequest;
use super::message::RequestedBy;
use super::unit::{LiveGeneration, ProcessUnit, UnitId};
use super::{HelperReport, ModelTask};
use crate::clock;
use crate::error::ControlError;
use crate::memory::loading::LoadingReport;
use crate::process::reclaim_file::ReclaimResult;
use crate::view::entry::ReclaimEntry;
use crate::view::event::EventKind;
use crate::view::{ReclaimTotals, ReclaimView};

#[derive(Debug, Default)]
pub(super) struct ReclaimState {
    pub(super) history: ReclaimHistory,
    pub(super) pending: Option<PendingReclaim>,
    count: u64,
    last: Option<ReclaimEntry>,
    refusal: Option<NoReclaim>,
}

#[derive(Debug)]
pub(super) struct PendingReclaim {
    entry: ReclaimEntry,
    /// Number of readings begun before the answer. Only a later reading shows the effect.
    answered_at_reading: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct ReclaimCounts {
    pub(super) totals: ReclaimTotals,
    /// True if the pending requests are made to free memory for another model.
    for_another: bool,
}

impl ReclaimCounts {
    fn add(&mut self, entry: &ReclaimEntry) {
        match self.totals.counts.iter_mut().find(|(known, _)| *known == entry.outcome) {
            Some((_, count)) => *count += 1,
            None => self.totals.counts.push((entry.outcome, 1)),
        }
        self.totals.given = self.totals.given.plus(entry.given);
    }
}

impl ModelTask {
    /// Tries to make the process give memory back. Returns `None` if `decision` is to be carried out now, or
    /// a decision that holds it back.
    pub(super) fn try_reclaim(
        &mut self,
        id: UnitId,
        decision: &RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let at = self.context.now();
        let free = self.replacements.is_empty() && self.life.end.is_none();
        let policy = self.spec.recycle.common;
        let live = self.units.live_mut(id)?;
        let facts = live.memory.facts_of(decision.series).cloned();
        let rung = live.reclaim.history.decide(&policy, live.memory.last.parts, decision, facts.as_ref(), at);
        live.reclaim.refusal = if let ReclaimDecision::Replace(why) = rung { Some(why) } else { None };
        match rung {
            ReclaimDecision::Replace(_) => None,
            // Another replacement of the model goes first.
            ReclaimDecision::Reclaim if !free => None,
            ReclaimDecision::Reclaim => {
                live.reclaim.history.record_request(&policy, Some((decision, facts.as_ref())), at);
                let reason = decision.reason?;
                self.send_reclaim(id, reason, Some(decision));
                Some(decision.held_back(RecycleHindrance::Reclaiming))
            }
            ReclaimDecision::Wait => {
                live.timers.judgement =
                    Some(clock::after_pause(now, policy.reclaim_limit_of(decision.action)));
                Some(decision.held_back(RecycleHindrance::Reclaiming))
            }
            ReclaimDecision::Rest { seconds, bytes } => Some(RecycleDecision {
                reason: decision.reason,
                series: decision.series,
                limit_bytes: decision.limit_bytes,
                why_not: Some(RecycleHindrance::Reclaimed { seconds, bytes }),
                ..RecycleDecision::OBSERVE
            }),
        }
    }

    fn send_reclaim(&mut self, id: UnitId, reason: Reason, decision: Option<&RecycleDecision>) {
        let policy = self.spec.recycle.common;
        let is_urgent = decision.is_some_and(|decision| decision.action >= RecycleAction::DrainNow);
        let wait = if is_urgent { policy.reclaim_wait_hard } else { policy.reclaim_wait };
        let Some(unit) = self.units.get_mut(id) else { return };
        let Some(live) = &mut unit.live else { return };
        let Some(process) = live.child.process.clone() else { return };
        let generation = live.id;
        let entry = ReclaimEntry {
            series: decision.and_then(|decision| decision.series),
            budget_bytes: decision.and_then(|decision| decision.limit_bytes),
            host_before: live.memory.history.host,
            vram_before: live.memory.history.vram.clone(),
            ..ReclaimEntry::new(self.spec.name.clone(), unit.replica, generation, reason)
        };
        live.reclaim.pending = Some(PendingReclaim { entry, answered_at_reading: None });
        self.mail.spawn_helper(generation, async move {
            HelperReport::Reclaimed(Box::new(process.reclaim(wait).await))
        });
        self.life.note_action();
    }

    /// Handles the answer to a reclaim request, or its timeout.
    pub(super) fn note_reclaimed(&mut self, id: UnitId, answer: &ReclaimResult) {
        let at = self.context.now();
        let Some(live) = self.units.live_mut(id) else { return };
        let Some(asked) = &mut live.reclaim.pending else { return };
        asked.entry.outcome = answer.outcome;
        asked.entry.heap = answer.heap;
        asked.entry.cuda = answer.cuda;
        asked.entry.given = answer.given;
        asked.entry.ms = answer.ms;
        if live.reclaim.history.record_answer(answer.outcome, at) {
            asked.answered_at_reading = Some(live.memory.note_reclaim());
            live.timers.sample = Some(Instant::now());
        } else {
            self.end_reclaim(id, None);
            self.judge_unit(id);
        }
        self.life.note_action();
    }

    /// Completes a ledger entry with the first reading that began after the answer.
    pub(super) fn complete_reclaim(&mut self, id: UnitId, number: u64) {
        let at = self.context.now();
        let Some(live) = self.units.live_mut(id) else { return };
        let Some(asked) = &mut live.reclaim.pending else { return };
        if asked.answered_at_reading.is_none_or(|answered| number <= answered) {
            return;
        }
        asked.entry.host_after = live.memory.history.host;
        asked.entry.vram_after.clone_from(&live.memory.history.vram);
        let memory = &live.memory;
        let worth = live.reclaim.history.add_reading(at, |series| memory.charged_bytes(series));
        self.end_reclaim(id, worth);
    }

    pub(super) fn end_reclaim(&mut self, id: UnitId, worth: Option<ReclaimWorth>) {
        let Some(asked) = self.units.live_mut(id).and_then(|live| live.reclaim.pending.take()) else {
            return;
        };
        let entry = ReclaimEntry {
            id: self.context.ledger.next_number(),
            at: clock::wall_time(),
            helped: match worth {
                Some(ReclaimWorth::Enough) => Some(true),
                Some(ReclaimWorth::NotEnough) => Some(false),
                Some(ReclaimWorth::Unknown) | None => None,
            },
            by: self.operators.who_reclaims(asked.entry.generation),
            ..asked.entry
        };
        self.context.ledger.append(&entry);
        self.experience.reclaims.add(&entry);
        if let Some(live) = self.units.live_mut(id) {
            live.reclaim.count += 1;
            live.reclaim.last = Some(entry.clone());
        }
        self.log_event(Some(entry.generation), EventKind::Reclaimed { entry: Box::new(entry.clone()) });
        for reclaiming in self.operators.note_reclaimed(entry.generation, &entry) {
            self.answer(reclaiming.reply, Ok(reclaiming.entries));
        }
        self.report_reclaimed();
        self.life.note_action();
    }

    /// Asks each process that can give memory back, because another model needs memory. The loader gets a
    /// report after the last answer.
    pub(super) fn reclaim_for_other(&mut self) {
        let able = |unit: &&ProcessUnit| {
            let live = unit.live.as_ref();
            unit.phase() == BackendPhase::Ready
                && live.is_some_and(|live| live.can_reclaim(&self.spec.recycle.common))
        };
        let able: Vec<UnitId> = match self.life.end {
            None => self.units.all.iter().filter(able).map(|unit| unit.id).collect(),
            Some(_) => Vec::new(),
        };
        self.experience.reclaims.for_another = true;
        self.ask_each(able, Reason::Room);
        self.report_reclaimed();
    }

    /// Reports to the loader if no request is pending any more.
    fn report_reclaimed(&mut self) {
        if self.experience.reclaims.for_another
            && !self.units.lives().any(|live| live.reclaim.pending.is_some())
        {
            self.experience.reclaims.for_another = false;
            self.report_memory();
            self.room.report(LoadingReport::Reclaimed);
        }
    }

    /// Asks all serving processes at once; the operator gets one entry per process.
    pub(super) fn reclaim_for_operator(
        &mut self,
        by: RequestedBy,
        reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
    ) {
        let able = match self.able_for_operator() {
            Ok(able) => able,
            Err(error) => return self.answer(reply, Err(error)),
        };
        let generations = able.iter().map(|(_, generation)| *generation).collect();
        self.operators.reclaims.push(ReclaimRequest { generations, entries: Vec::new(), by, reply });
        self.ask_each(able.into_iter().map(|(id, _)| id), Reason::Operator);
    }

    fn able_for_operator(&self) -> Result<Vec<(UnitId, GenerationId)>, ControlError> {
        let refused = |because: &str| ControlError::CannotReclaim {
            model: self.spec.name.clone(),
            because: because.to_owned(),
        };
        if self.life.end.is_some() {
            return Err(ControlError::ShuttingDown);
        }
        if !self.spec.recycle.common.reclaim {
            let because = "`policy.reclaim` is off for it: its processes have no channel for such requests";
            return Err(refused(because));
        }
        let units = self.units.all.iter().filter(|unit| unit.phase() == BackendPhase::Ready);
        let serving: Vec<_> = units.filter_map(|unit| Some((unit.id, unit.live.as_ref()?))).collect();
        if serving.is_empty() {
            return Err(refused("no process of it serves now; the next request starts one"));
        }
        // A process without a reading may have reclaimable memory too.
        let able = serving.iter().filter(|(_, live)| live.memory.last.parts.is_none_or(ReclaimParts::any));
        let able: Vec<_> = able.map(|(id, live)| (*id, live.id)).collect();
        if able.is_empty() {
            return Err(refused(
                "its build cannot be asked: `llama-warden build` makes one with the fixes `reclaim-heap` and \
                 `reclaim-cuda`",
            ));
        }
        Ok(able)
    }

    /// Sends requests without a policy decision, except to a process with a pending request.
    fn ask_each(&mut self, ids: impl IntoIterator<Item = UnitId>, reason: Reason) {
        let at = self.context.now();
        for id in ids {
            if let Some(live) = self.units.live_mut(id)
                && live.reclaim.pending.is_none()
            {
                live.reclaim.history.record_request(&self.spec.recycle.common, None, at);
                self.send_reclaim(id, reason, None);
            }
        }
    }
}

impl LiveGeneration {
    /// True if the policy allows reclaims and the process has parts that can give memory back.
    pub(super) fn can_reclaim(&self, policy: &Recycle) -> bool {
        policy.reclaim && self.memory.last.parts.is_some_and(ReclaimParts::any)
    }

    pub(super) fn reclaim_view(&self) -> ReclaimView {
        ReclaimView {
            parts: self.memory.last.parts,
            wanted: self.recipe.reclaim,
            asking: self.reclaim.pending.is_some(),
            count: self.reclaim.count,
            last: self.reclaim.last.clone(),
        }
    }

    /// Reason for not asking the process to give memory back, if worth logging.
    pub(super) fn logged_no_reclaim(&self) -> Option<NoReclaim> {
        self.reclaim.refusal.filter(|why| {
            matches!(why, NoReclaim::NoHelp { .. } | NoReclaim::NoAnswer | NoReclaim::TooOften { .. })
        })
    }
}
