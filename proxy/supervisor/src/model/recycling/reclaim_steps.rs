//! Asks a process to give memory back, before it is replaced for its memory or because an operator wants it.
//!
//! ```text
//!   decision ── first rung ── ask (in a helper) ── answer ── a reading at once ── entry ── judged again
//!   operator ─────────────────────────┘               │
//!                                                     └ the process ends or is silent: the entry says so
//! ```
//!
//! The process serves meanwhile. Drains, replacements, kills and shutdown do not wait for its answer.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::defaults::Recycle;
use warden_policies::lifecycle::BackendPhase;
use warden_policies::reclaim::{NoReclaim, ReclaimDecision, ReclaimParts, ReclaimWorth};
use warden_policies::recycle::RecycleHindrance;
use warden_policies::{GenerationId, Reason, RecycleAction, RecycleDecision};

use crate::clock;
use crate::error::ControlError;
use crate::memory::loading::LoadingReport;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{LiveGeneration, PendingReclaim, ReclaimCounts};
use crate::model::loading::room::ModelRoom;
use crate::model::message::{HelperReport, RequestedBy, TaskMail};
use crate::model::operators::{OperatorRequests, ReclaimRequest};
use crate::model::replacement::ReplacementTracker;
use crate::model::unit::{ProcessUnit, UnitId, UnitList};
use crate::process::reclaim_file::ReclaimResult;
use crate::spec::ModelSpec;
use crate::view::ReclaimView;
use crate::view::entry::ReclaimEntry;
use crate::view::event::EventKind;

impl ModelTask {
    /// Handles the answer to a reclaim request, or its timeout.
    pub(crate) fn note_reclaimed(&mut self, id: UnitId, answer: &ReclaimResult) {
        let at = self.env.context.now();
        let Some(live) = self.units.live_mut(id) else { return };
        let Some(asked) = &mut live.reclaim.pending else { return };
        asked.set_answer(answer);
        if live.reclaim.history.record_answer(answer.outcome, at) {
            asked.answered_at_reading = Some(live.memory.note_reclaim());
            live.timers.sample = Some(Instant::now());
        } else {
            self.end_reclaim(id, None);
            self.judge_unit(id);
        }
        self.life.note_action();
    }

    pub(crate) fn end_reclaim(&mut self, id: UnitId, worth: Option<ReclaimWorth>) {
        let Some(live) = self.units.live_mut(id) else { return };
        let by = self.operators.who_reclaims(live.id);
        let Some(entry) = live.end_reclaim(&self.env, worth, by) else { return };
        self.experience.reclaims.add(&entry);
        self.operators.note_reclaimed(&entry);
        let reclaims = &mut self.experience.reclaims;
        self.room.report_reclaimed(&self.env, &self.units, &self.replacements, reclaims);
        self.life.note_action();
    }
}

impl ModelRoom {
    /// Reports to the loader if no request that frees memory for another model is pending any more.
    pub(crate) fn report_reclaimed(
        &self,
        env: &TaskEnvironment,
        units: &UnitList,
        replacements: &ReplacementTracker,
        reclaims: &mut ReclaimCounts,
    ) {
        if reclaims.for_another && !units.lives().any(|live| live.reclaim.pending.is_some()) {
            reclaims.for_another = false;
            self.report_memory(env, units, replacements);
            self.report(LoadingReport::Reclaimed);
        }
    }
}

impl OperatorRequests {
    /// Asks all serving processes at once; the operator gets one entry per process.
    pub(crate) fn begin_reclaim(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        units: &mut UnitList,
        is_over: bool,
        by: RequestedBy,
        reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
    ) {
        let able = if is_over { Err(ControlError::ShuttingDown) } else { units.able_to_reclaim(&env.spec) };
        let able = match able {
            Ok(able) => able,
            Err(error) => return self.answer(reply, Err(error)),
        };
        let generations = able.iter().map(|(_, generation)| *generation).collect();
        self.reclaims.push(ReclaimRequest { generations, entries: Vec::new(), by, reply });
        units.send_reclaims(env, mail, able.into_iter().map(|(id, _)| id), Reason::Operator);
    }
}

impl UnitList {
    /// Asks each process that can give memory back, because another model needs memory.
    pub(crate) fn reclaim_for_other(&mut self, env: &TaskEnvironment, mail: &mut TaskMail) {
        let able = |unit: &&ProcessUnit| {
            let live = unit.live.as_ref();
            unit.phase() == BackendPhase::Ready
                && live.is_some_and(|live| live.can_reclaim(&env.spec.recycle.common))
        };
        let able: Vec<UnitId> = self.all.iter().filter(able).map(|unit| unit.id).collect();
        self.send_reclaims(env, mail, able, Reason::Room);
    }

    fn able_to_reclaim(&self, spec: &ModelSpec) -> Result<Vec<(UnitId, GenerationId)>, ControlError> {
        let refused = |because: &str| ControlError::CannotReclaim {
            model: spec.name.clone(),
            because: because.to_owned(),
        };
        if !spec.recycle.common.reclaim {
            let because = "`policy.reclaim` is off for it: its processes have no channel for such requests";
            return Err(refused(because));
        }
        let units = self.all.iter().filter(|unit| unit.phase() == BackendPhase::Ready);
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
    fn send_reclaims(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        ids: impl IntoIterator<Item = UnitId>,
        reason: Reason,
    ) {
        let at = env.context.now();
        for id in ids {
            let Some(unit) = self.get_mut(id) else { continue };
            if let Some(live) = unit.live.as_mut().filter(|live| live.reclaim.pending.is_none()) {
                live.reclaim.history.record_request(&env.spec.recycle.common, None, at);
                live.send_reclaim(env, mail, unit.replica, reason, None);
            }
        }
    }
}

impl LiveGeneration {
    /// True if the policy allows reclaims and the process has parts that can give memory back.
    pub(crate) fn can_reclaim(&self, policy: &Recycle) -> bool {
        policy.reclaim && self.memory.last.parts.is_some_and(ReclaimParts::any)
    }

    pub(crate) fn reclaim_view(&self) -> ReclaimView {
        ReclaimView {
            parts: self.memory.last.parts,
            wanted: self.recipe.reclaim,
            asking: self.reclaim.pending.is_some(),
            count: self.reclaim.count,
            last: self.reclaim.last.clone(),
        }
    }

    /// Reason for not asking the process to give memory back, if worth logging.
    pub(crate) fn logged_no_reclaim(&self) -> Option<NoReclaim> {
        self.reclaim.refusal.filter(|why| {
            matches!(why, NoReclaim::NoHelp { .. } | NoReclaim::NoAnswer | NoReclaim::TooOften { .. })
        })
    }

    /// Tries to make the process give memory back. Returns `None` if `decision` is to be carried out now, or
    /// a decision that holds it back. `is_free`: no other replacement of the model goes first.
    pub(crate) fn try_reclaim(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        replica: u32,
        is_free: bool,
        decision: &RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let at = env.context.now();
        let policy = env.spec.recycle.common;
        let facts = self.memory.facts_of(decision.series).cloned();
        let rung = self.reclaim.history.decide(&policy, self.memory.last.parts, decision, facts.as_ref(), at);
        self.reclaim.refusal = if let ReclaimDecision::Replace(why) = rung { Some(why) } else { None };
        match rung {
            ReclaimDecision::Replace(_) => None,
            ReclaimDecision::Reclaim if !is_free => None,
            ReclaimDecision::Reclaim => {
                self.reclaim.history.record_request(&policy, Some((decision, facts.as_ref())), at);
                let reason = decision.reason?;
                self.send_reclaim(env, mail, replica, reason, Some(decision));
                Some(decision.held_back(RecycleHindrance::Reclaiming))
            }
            ReclaimDecision::Wait => {
                self.timers.judgement =
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

    fn send_reclaim(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        replica: u32,
        reason: Reason,
        decision: Option<&RecycleDecision>,
    ) {
        let policy = env.spec.recycle.common;
        let is_urgent = decision.is_some_and(|decision| decision.action >= RecycleAction::DrainNow);
        let wait = if is_urgent { policy.reclaim_wait_hard } else { policy.reclaim_wait };
        let Some(process) = self.child.process.clone() else { return };
        let generation = self.id;
        let entry = ReclaimEntry {
            series: decision.and_then(|decision| decision.series),
            budget_bytes: decision.and_then(|decision| decision.limit_bytes),
            host_before: self.memory.history.host,
            vram_before: self.memory.history.vram.clone(),
            ..ReclaimEntry::new(env.spec.name.clone(), replica, generation, reason)
        };
        self.reclaim.pending = Some(PendingReclaim { entry, answered_at_reading: None });
        mail.spawn_helper(generation, async move {
            HelperReport::Reclaimed(Box::new(process.reclaim(wait).await))
        });
    }

    /// Ends the pending request, with an entry in the ledger.
    fn end_reclaim(
        &mut self,
        env: &TaskEnvironment,
        worth: Option<ReclaimWorth>,
        by: Option<String>,
    ) -> Option<ReclaimEntry> {
        let asked = self.reclaim.pending.take()?;
        let entry = ReclaimEntry {
            id: env.context.records.ledger.next_number(),
            at: clock::wall_time(),
            helped: match worth {
                Some(ReclaimWorth::Enough) => Some(true),
                Some(ReclaimWorth::NotEnough) => Some(false),
                Some(ReclaimWorth::Unknown) | None => None,
            },
            by,
            ..asked.entry
        };
        env.context.records.ledger.append(&entry);
        self.reclaim.count += 1;
        self.reclaim.last = Some(entry.clone());
        env.log_event(Some(entry.generation), EventKind::Reclaimed { entry: Box::new(entry.clone()) });
        Some(entry)
    }

    /// Completes the pending entry with the first reading that began after the answer.
    pub(crate) fn note_reclaim_effect(&mut self, number: u64, at: Duration) -> Option<ReclaimWorth> {
        let asked = self.reclaim.pending.as_mut()?;
        if asked.answered_at_reading.is_none_or(|answered| number <= answered) {
            return None;
        }
        asked.entry.host_after = self.memory.history.host;
        asked.entry.vram_after.clone_from(&self.memory.history.vram);
        let memory = &self.memory;
        self.reclaim
            .history
            .add_reading(at, |series| memory.charged_bytes(series))
            .or(Some(ReclaimWorth::Unknown))
    }
}
