//! Asks a process to give memory back, before it is replaced for its memory or because an operator wants it.
//!
//! ```text
//!   decision ── first rung ── ask (in a helper) ── answer ── a reading at once ── entry ── judged again
//!   operator ─────────────────────────┘               │
//!                                                     └ the process ends or is silent: the entry says so
//! ```
//!
//! The process serves meanwhile, and drains, replacements, kills and shutdown do not wait for its answer. An
//! answer of a process that is gone is ignored.

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::reclaim::{NoReclaim, ReclaimDecision, ReclaimParts, ReclaimWorth};
use warden_policies::recycle::RecycleHindrance;
use warden_policies::{GenerationId, Reason, RecycleAction, RecycleDecision};

use super::message::RequestedBy;
use super::operators::ReclaimRequest;
use super::unit::{LiveGeneration, ProcessUnit, UnitId};
use super::{HelperReport, ModelTask};
use crate::clock;
use crate::error::ControlError;
use crate::memory::loading::LoadingReport;
use crate::process::reclaim_file::ReclaimResult;
use crate::view::event::EventKind;
use crate::view::reclaim_entry::ReclaimEntry;
use crate::view::{ReclaimTotals, ReclaimView};

/// Reclaim request under way.
#[derive(Debug)]
pub(super) struct PendingReclaim {
    entry: ReclaimEntry,
    /// Number of readings begun when the answer came. Only a reading with a higher number shows the effect.
    answered_at_reading: Option<u64>,
}

/// Results of all reclaim requests to a model's processes.
#[derive(Debug, Default)]
pub(super) struct ReclaimCounts {
    totals: ReclaimTotals,
    /// True if the requests under way are to free memory for another model.
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

    pub(super) fn show(&self) -> ReclaimTotals {
        self.totals.clone()
    }
}

impl ModelTask {
    /// Tries to make the process give memory back before `decision` is carried out. Returns a decision that
    /// holds the replacement back meanwhile, or `None` if `decision` is to be carried out.
    pub(super) fn try_reclaim(
        &mut self,
        id: UnitId,
        decision: &RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let at = self.context.now();
        let free = self.replacements.is_empty() && self.end.is_none();
        let policy = self.spec.recycle.common;
        let live = self.live_mut(id)?;
        let facts = live.memory.facts_of(decision.series).cloned();
        let rung = live.reclaims.decide(&policy, live.memory.parts, decision, facts.as_ref(), at);
        live.no_reclaim = match rung {
            ReclaimDecision::Replace(why) => Some(why),
            _ => None,
        };
        match rung {
            ReclaimDecision::Replace(_) => None,
            // A replacement of this or another process of the model is under way and goes first.
            ReclaimDecision::Reclaim if !free => None,
            ReclaimDecision::Reclaim => {
                live.reclaims.record_request(&policy, Some((decision, facts.as_ref())), at);
                let reason = decision.reason?;
                self.send_reclaim(id, reason, Some(decision));
                Some(decision.held_back(RecycleHindrance::Reclaiming))
            }
            ReclaimDecision::Wait => {
                let limit = if decision.action >= RecycleAction::DrainNow {
                    policy.reclaim_limit_hard
                } else {
                    policy.reclaim_limit
                };
                live.timers.judgement = Some(clock::after_pause(now, limit));
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

    /// Starts a helper task that sends the request to the process.
    fn send_reclaim(&mut self, id: UnitId, reason: Reason, decision: Option<&RecycleDecision>) {
        let policy = self.spec.recycle.common;
        let urgent = decision.is_some_and(|decision| decision.action >= RecycleAction::DrainNow);
        let wait = if urgent { policy.reclaim_wait_hard } else { policy.reclaim_wait };
        let name = self.spec.name.clone();
        let Some(unit) = self.unit_mut(id) else { return };
        let replica = unit.replica;
        let Some(live) = &mut unit.live else { return };
        let Some(process) = live.process.clone() else { return };
        let generation = live.id;
        let mut entry = ReclaimEntry::new(name, replica, generation, reason);
        entry.series = decision.and_then(|decision| decision.series);
        entry.budget_bytes = decision.and_then(|decision| decision.limit_bytes);
        entry.host_before = live.memory.host;
        entry.vram_before.clone_from(&live.memory.vram);
        live.pending_reclaim = Some(PendingReclaim { entry, answered_at_reading: None });
        self.spawn_helper(generation, async move {
            HelperReport::Reclaimed(Box::new(process.reclaim(wait).await))
        });
        self.note_action();
    }

    /// Handles the answer to a reclaim request, or the lack of an answer in time.
    pub(super) fn note_reclaimed(&mut self, id: UnitId, answer: &ReclaimResult) {
        let at = self.context.now();
        let Some(live) = self.live_mut(id) else { return };
        let Some(asked) = &mut live.pending_reclaim else { return };
        asked.entry.outcome = answer.outcome;
        asked.entry.heap = answer.heap;
        asked.entry.cuda = answer.cuda;
        asked.entry.given = answer.given;
        asked.entry.ms = answer.ms;
        if live.reclaims.record_answer(answer.outcome, at) {
            asked.answered_at_reading = Some(live.memory.note_reclaim());
            live.timers.sample = Some(Instant::now());
        } else {
            self.end_reclaim(id, None);
            self.judge_unit(id);
        }
        self.note_action();
    }

    /// Completes a ledger entry with the first reading that began after the answer.
    pub(super) fn complete_reclaim(&mut self, id: UnitId, number: u64) {
        let at = self.context.now();
        let Some(live) = self.live_mut(id) else { return };
        let Some(asked) = &mut live.pending_reclaim else { return };
        if asked.answered_at_reading.is_none_or(|answered| number <= answered) {
            return;
        }
        asked.entry.host_after = live.memory.host;
        asked.entry.vram_after.clone_from(&live.memory.vram);
        let memory = &live.memory;
        let worth = live.reclaims.add_reading(at, |series| memory.charged_bytes(series));
        self.end_reclaim(id, worth);
    }

    /// Writes the ledger entry of a finished request.
    pub(super) fn end_reclaim(&mut self, id: UnitId, worth: Option<ReclaimWorth>) {
        let Some(asked) = self.live_mut(id).and_then(|live| live.pending_reclaim.take()) else { return };
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
        self.context.ledger.append_reclaim(&entry);
        self.reclaim_counts.add(&entry);
        if let Some(live) = self.live_mut(id) {
            live.reclaim_count += 1;
            live.last_reclaim = Some(entry.clone());
        }
        self.log_event(Some(entry.generation), EventKind::Reclaimed { entry: Box::new(entry.clone()) });
        for reclaiming in self.operators.note_reclaimed(entry.generation, &entry) {
            self.answer(reclaiming.reply, Ok(reclaiming.entries));
        }
        self.report_reclaimed();
        self.note_action();
    }

    /// Asks all processes that can give memory back to do so, because another model needs memory. After the
    /// last answer, the loader gets a report.
    pub(super) fn reclaim_for_other(&mut self) {
        let policy = self.spec.recycle.common;
        let serves = |unit: &&ProcessUnit| unit.phase() == BackendPhase::Ready;
        let able: Vec<UnitId> = self
            .units
            .iter()
            .filter(|_| self.end.is_none())
            .filter(serves)
            .filter(|unit| unit.live.as_ref().is_some_and(|live| live.can_reclaim(&policy)))
            .map(|unit| unit.id)
            .collect();
        self.reclaim_counts.for_another = true;
        self.ask_each(able, Reason::Room);
        self.report_reclaimed();
    }

    /// Reports to the loader that all requests are answered, if so.
    fn report_reclaimed(&mut self) {
        if self.reclaim_counts.for_another
            && !self.live_generations().any(|live| live.pending_reclaim.is_some())
        {
            self.reclaim_counts.for_another = false;
            self.report_memory();
            self.report_loading(LoadingReport::Reclaimed);
        }
    }

    /// Carries out an operator's reclaim request: asks all serving processes at once to give memory back. The
    /// reply has one entry per process.
    pub(super) fn reclaim_for_operator(
        &mut self,
        by: RequestedBy,
        reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
    ) {
        let policy = self.spec.recycle.common;
        let refused = |because: &str| ControlError::CannotReclaim {
            model: self.spec.name.clone(),
            because: because.to_owned(),
        };
        if self.end.is_some() {
            self.answer(reply, Err(ControlError::ShuttingDown));
            return;
        }
        if !policy.reclaim {
            let error =
                refused("`policy.reclaim` is off for it: its processes have no channel for such requests");
            self.answer(reply, Err(error));
            return;
        }
        let serves = |unit: &&ProcessUnit| unit.phase() == BackendPhase::Ready && unit.live.is_some();
        let serving: Vec<(UnitId, GenerationId, Option<bool>)> = self
            .units
            .iter()
            .filter(serves)
            .filter_map(|unit| {
                let live = unit.live.as_ref()?;
                Some((unit.id, live.id, live.memory.parts.map(ReclaimParts::any)))
            })
            .collect();
        if serving.is_empty() {
            let error = refused("no process of it serves now; the next request starts one");
            self.answer(reply, Err(error));
            return;
        }
        let able: Vec<(UnitId, GenerationId)> = serving
            .iter()
            .filter(|(.., able)| *able != Some(false))
            .map(|(id, generation, _)| (*id, *generation))
            .collect();
        if able.is_empty() {
            let error = refused(
                "its build cannot be asked: `llama-warden build` makes one with the fixes `reclaim-heap` and `reclaim-cuda`",
            );
            self.answer(reply, Err(error));
            return;
        }
        let generations = able.iter().map(|(_, generation)| *generation).collect();
        self.operators.reclaims.push(ReclaimRequest { generations, entries: Vec::new(), by, reply });
        self.ask_each(able.into_iter().map(|(id, _)| id), Reason::Operator);
    }

    /// Asks these processes to give memory back, without a policy decision. A request already under way is
    /// not repeated.
    fn ask_each(&mut self, ids: impl IntoIterator<Item = UnitId>, reason: Reason) {
        let (at, policy) = (self.context.now(), self.spec.recycle.common);
        for id in ids {
            if let Some(live) = self.live_mut(id).filter(|live| live.pending_reclaim.is_none()) {
                live.reclaims.record_request(&policy, None, at);
                self.send_reclaim(id, reason, None);
            }
        }
    }
}

impl LiveGeneration {
    /// True if `policy.reclaim` is on and the process has reported that its build can give memory back.
    pub(super) fn can_reclaim(&self, policy: &Recycle) -> bool {
        policy.reclaim && self.memory.parts.is_some_and(ReclaimParts::any)
    }

    /// Reclaim requests to the process, for the view.
    pub(super) fn reclaim_view(&self) -> ReclaimView {
        ReclaimView {
            parts: self.memory.parts,
            wanted: self.recipe.reclaim,
            asking: self.pending_reclaim.is_some(),
            count: self.reclaim_count,
            last: self.last_reclaim.clone(),
        }
    }

    /// Why the process is replaced without being asked to give memory back, if that is worth logging.
    pub(super) fn logged_no_reclaim(&self) -> Option<NoReclaim> {
        self.no_reclaim.filter(|why| {
            matches!(why, NoReclaim::NoHelp { .. } | NoReclaim::NoAnswer | NoReclaim::TooOften { .. })
        })
    }
}
