//! Reads memory and applies the recycle policy.
//!
//! Memory is read at regular intervals, after a process becomes ready, and after its last request. The
//! policy is applied after each reading, and again when a replacement may find a quiet moment.
//!
//! ```text
//!     facts ──> decide ──> reclaim? ──> due? ──> cooldown ──> confirmed? ──> permit ──> replace
//!                 │           │                      │            └ no: another replacement goes first
//!                 │           │                      └ growth of host memory is first read page by page
//!                 │           └ held: logged once
//!                 └ kill: at once, a draining process too
//! ```

use tokio::time::Instant;
use warden_policies::cooldown::{CooldownQuery, HoldReason};
use warden_policies::growth::GrowthVerdict;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::recycle::{RecycleDecision, RecycleFacts, RecycleHindrance, decide_without_barred};
use warden_policies::share::ReplacementReach;
use warden_policies::{MemoryKind, Reason, RecycleAction};

use super::ModelTask;
use super::look::{READ_AHEAD_LIMIT, URGENT_READ_AHEAD_LIMIT};
use super::unit::{LiveGeneration, UnitId, UnitRole};
use crate::clock;
use crate::model::context::ReplacementPermit;
use crate::sync::lock;
use crate::view::event::EventKind;
use crate::view::ledger::ReplacementMode;

impl ModelTask {
    pub(super) fn judge_unit(&mut self, id: UnitId) {
        let now = Instant::now();
        self.note_lull(id);
        let Some(facts) = self.policy_facts(id, now) else { return };
        self.note_exceeded_budgets(id, &facts);
        let cooldown = &self.replacements.cooldown;
        let barred = |reason, series| {
            cooldown.find_bar(reason, series, facts.charged(series), &self.spec.recycle).is_some()
        };
        let denied = self.denies_growth(id, now);
        let decision = decide_without_barred(&self.spec.recycle, &facts, |reason, series| {
            barred(reason, series) || denied && is_growth_of_host(Some(reason), series)
        });
        let futile = decision.reason.is_some_and(|reason| barred(reason, decision.series));
        let Some(unit) = self.units.get_mut(id) else { return };
        let phase = unit.phase();
        let Some(live) = &mut unit.live else { return };
        live.memory.facts = Some(facts);
        // Only a drain counts: a decision that waits for a permit or an interval does not drain yet.
        let is_urgent = phase == BackendPhase::Draining && decision.action >= RecycleAction::DrainNow;
        live.wish.urgent_since = if is_urgent { live.wish.urgent_since.or(Some(now)) } else { None };
        match phase {
            BackendPhase::Ready if unit.role == UnitRole::Current => {
                let replica = unit.replica;
                self.act_on_decision(id, replica, decision, now);
            }
            // Do not cut running requests if ending the process would free nothing.
            BackendPhase::Draining
                if decision.action == RecycleAction::KillNow && !futile && !self.is_spared(&decision) =>
            {
                self.cut_drain(id, &decision);
            }
            _ => {}
        }
    }

    fn note_exceeded_budgets(&mut self, id: UnitId, facts: &RecycleFacts) {
        let Some(live) = self.units.live_mut(id) else { return };
        let generation = live.id;
        let load_time = self.experience.load_time;
        let cooldown = &mut self.replacements.cooldown;
        for held in live.wish.passed.add_facts(facts, load_time, cooldown, &self.spec.recycle) {
            self.log_event(Some(generation), EventKind::PolicyOff { message: held.to_string() });
            self.life.note_action();
        }
    }

    /// Reason that holds this decision back until an operator acts.
    fn lasting_hold_of(&self, id: UnitId, decision: &RecycleDecision) -> Option<HoldReason> {
        let memory = &self.units.live(id)?.memory;
        let held = decision.series.and_then(|series| memory.charged_bytes(series));
        self.replacements.cooldown.find_bar(decision.reason?, decision.series, held, &self.spec.recycle)
    }

    fn act_on_decision(&mut self, id: UnitId, replica: u32, decision: RecycleDecision, now: Instant) {
        let Some(mut decision) = self.reclaim_first(id, decision, now) else { return };
        let Some(live) = self.units.live(id) else { return };
        let generation = live.id;
        let before = live.wish.last_decision;
        let is_wanted = decision.action != RecycleAction::Observe;
        let is_due = is_wanted && decision.due;
        let mut held = self.hold_reason(id, live, &decision, now);
        if let Some(by) = held {
            decision = decision.held_back(RecycleHindrance::Held { by });
            self.context.fleet_memory.pin(generation);
        }
        let is_replacing = !self.replacements.is_empty() || self.life.end.is_some();
        let is_free = is_due && held.is_none() && !is_replacing;
        let is_spared = is_free && self.is_spared(&decision);
        let mut goes = is_free && !is_spared && self.is_confirmed(id, &decision, now);
        let kills = decision.action >= RecycleAction::KillNow;
        let is_alone = !kills && self.units.is_another_starting(replica, self.spec.lifecycle.failures_told);
        // Skip the file check when memory is almost exhausted: a file system may be slow.
        if goes && !is_alone && !kills {
            let is_urgent = decision.action >= RecycleAction::DrainNow;
            let limit = if is_urgent { URGENT_READ_AHEAD_LIMIT } else { READ_AHEAD_LIMIT };
            let prepared = self.may_replace(id, limit);
            goes = prepared == Some(Ok(()));
            if let Some(Err(missing)) = prepared {
                held = Some(HoldReason::CannotStart);
                decision = decision.held_back(RecycleHindrance::Held { by: HoldReason::CannotStart });
                self.keep_present_process(replica, &decision, &missing);
            }
        }
        if is_free && is_growth_of_host(decision.reason, decision.series) && self.denies_growth(id, now) {
            decision = decision.held_back(RecycleHindrance::NotConfirmed);
        }
        let permit = if goes && !is_alone { self.policy_permit(id, replica) } else { None };
        if is_spared || goes && permit.is_none() && !kills {
            decision = decision.held_back(RecycleHindrance::InTurn);
        }
        self.remember_decision(id, decision, held, now);
        if is_wanted && !is_due && held.is_none() {
            self.log_wanted(id, before, decision);
        }
        match held {
            Some(held) if !is_replacing => self.log_held(id, before, decision, held),
            _ if goes && decision.action == RecycleAction::KillNow => {
                let permit = permit.unwrap_or_else(|| self.claim_permit(id, replica));
                self.kill_now(id, replica, &decision, permit);
            }
            _ if permit.is_some() => self.replace_by_policy(replica, decision, permit),
            _ => {}
        }
    }

    /// Tries to make the process give memory back. Returns the decision that is left to carry out.
    fn reclaim_first(
        &mut self,
        id: UnitId,
        mut decision: RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let mut facts = None;
        // If the budget is too small, the server needs the memory for its work and cannot give it back.
        while !matches!(self.lasting_hold_of(id, &decision), Some(HoldReason::BudgetTooSmall { .. }))
            && let Some(waiting) = self.try_reclaim(id, &decision, now)
        {
            let Some(other) = self.other_than_suspended(id, &mut facts, &waiting, now) else {
                self.remember_decision(id, waiting, None, now);
                return None;
            };
            decision = other;
        }
        Some(decision)
    }

    fn hold_reason(
        &self,
        id: UnitId,
        live: &LiveGeneration,
        decision: &RecycleDecision,
        now: Instant,
    ) -> Option<HoldReason> {
        if decision.action == RecycleAction::Observe {
            return None;
        }
        if !decision.due {
            // If only an operator can help, report that now, although the decision is not due.
            return self.lasting_hold_of(id, decision);
        }
        let ask = CooldownQuery {
            now: self.context.now(),
            load_time: self.experience.load_time,
            unit: live.wish.random,
            held: decision.series.and_then(|series| live.memory.charged_bytes(series)),
        };
        if let Err(held) = self.replacements.cooldown.check(decision, &ask, &self.spec.recycle) {
            return Some(held);
        }
        let at = live.wish.not_before.filter(|at| *at > now)?;
        if decision.threat || decision.action >= RecycleAction::KillNow {
            return None;
        }
        let left = at.saturating_duration_since(now);
        let seconds_left = left.as_secs() + u64::from(left.subsec_nanos() > 0);
        Some(HoldReason::LongRequests { seconds_left })
    }

    /// While a growth decision is suspended after a reclaim, returns a decision for another reason. Marks the
    /// suspended growth as steady in `facts`.
    fn other_than_suspended(
        &self,
        id: UnitId,
        facts: &mut Option<RecycleFacts>,
        waiting: &RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let (Some(RecycleHindrance::Reclaimed { .. }), Some(series)) = (waiting.why_not, waiting.series)
        else {
            return None;
        };
        if facts.is_none() {
            facts.clone_from(&self.units.live(id)?.memory.facts);
        }
        let facts = facts.as_mut()?;
        facts.series.iter_mut().find(|facts| facts.series == series)?.growth.as_mut()?.verdict =
            GrowthVerdict::Steady;
        let denied = self.denies_growth(id, now);
        let cooldown = &self.replacements.cooldown;
        let decision = decide_without_barred(&self.spec.recycle, facts, |reason, series| {
            cooldown.find_bar(reason, series, facts.charged(series), &self.spec.recycle).is_some()
                || denied && is_growth_of_host(Some(reason), series)
        });
        (decision.action != RecycleAction::Observe).then_some(decision)
    }

    fn remember_decision(
        &mut self,
        id: UnitId,
        decision: RecycleDecision,
        held: Option<HoldReason>,
        now: Instant,
    ) {
        let policy = &self.spec.recycle.common;
        let Some(live) = self.units.live_mut(id) else { return };
        let idle_since = self.leases.idle_since(live.id);
        let is_wanted = decision.action != RecycleAction::Observe;
        let news = live.wish.last_decision.is_none_or(|(before, _)| before != decision);
        live.wish.last_decision = Some((decision, held));
        live.wish.since = if is_wanted { live.wish.since.or(Some(now)) } else { None };
        if is_wanted && !decision.due && held.is_none() {
            let within = live.wish.since.map(|since| clock::after(since, policy.quiet_within));
            let quiet = idle_since.map(|since| clock::after(since, policy.quiet_for));
            // No message reports a free permit, so try again after a pause.
            let turn = (decision.why_not == Some(RecycleHindrance::InTurn))
                .then(|| clock::after_pause(now, policy.quiet_for));
            live.timers.judgement = quiet.into_iter().chain(within).chain(turn).filter(|at| *at > now).min();
        }
        if news {
            self.life.note_action();
        }
    }

    fn log_wanted(
        &mut self,
        id: UnitId,
        before: Option<(RecycleDecision, Option<HoldReason>)>,
        decision: RecycleDecision,
    ) {
        if before.and_then(|(decision, _)| decision.reason) == decision.reason {
            return;
        }
        let Some(live) = self.units.live(id) else { return };
        let host_bytes = live.memory.charged_bytes(MemoryKind::Host);
        let series_bytes = decision.series.and_then(|series| live.memory.charged_bytes(series));
        let kind = EventKind::RecycleWanted { decision, host_bytes, series_bytes };
        self.log_event(Some(live.id), kind);
        self.life.note_action();
    }

    fn log_held(
        &mut self,
        id: UnitId,
        before: Option<(RecycleDecision, Option<HoldReason>)>,
        decision: RecycleDecision,
        held: HoldReason,
    ) {
        let kind = |held: &HoldReason| std::mem::discriminant(held);
        let told = before.and_then(|(before, held)| Some((before.reason?, kind(&held?))));
        if told != decision.reason.map(|reason| (reason, kind(&held))) {
            let generation = self.units.generation(id);
            let message = held.to_string();
            self.log_event(generation, EventKind::RecycleHeld { decision, held, message });
            self.life.note_action();
        }
    }

    /// True if another process was ended a moment ago for the same shortage: its memory may suffice.
    fn is_spared(&self, decision: &RecycleDecision) -> bool {
        decision.reason == Some(Reason::MemoryExhausted)
            && decision.series.is_some_and(|series| !self.context.may_end_backend(series))
    }

    /// True if an exact reading confirms the growth of host memory. Exact readings are slow, so they are
    /// made only just before a replacement.
    fn is_confirmed(&mut self, id: UnitId, decision: &RecycleDecision, now: Instant) -> bool {
        if !is_growth_of_host(decision.reason, decision.series) {
            return true;
        }
        let interval = self.watch.sensors.confirm_interval;
        let Some(live) = self.units.live_mut(id) else { return false };
        let shown = live.memory.confirmation(now, interval);
        if shown.is_none() {
            live.memory.confirm_next();
            live.timers.sample = Some(now);
        }
        shown == Some(true)
    }

    /// True if an exact reading contradicts the growth that the counters show.
    fn denies_growth(&self, id: UnitId, now: Instant) -> bool {
        let live = self.units.live(id);
        let interval = self.watch.sensors.confirm_interval;
        live.and_then(|live| live.memory.confirmation(now, interval)) == Some(false)
    }

    fn policy_permit(&self, id: UnitId, replica: u32) -> Option<ReplacementPermit> {
        // Two overlapping replacements would count the same free memory twice.
        let overlaps = self.would_overlap(self.units.get(id)?);
        let reach = if overlaps { ReplacementReach::Machine } else { ReplacementReach::Gpus };
        self.replacement_permit(id, replica, reach)
    }

    pub(super) fn replacement_permit(
        &self,
        id: UnitId,
        replica: u32,
        reach: ReplacementReach,
    ) -> Option<ReplacementPermit> {
        let gpus = self.units.live(id)?.memory.used_gpus();
        self.context.replacement_permit(&self.spec.name, replica, &gpus, reach)
    }

    /// Returns a permit at once; other replacements wait until it is dropped.
    pub(super) fn claim_permit(&self, id: UnitId, replica: u32) -> ReplacementPermit {
        let gpus = self.units.live(id).map(|live| live.memory.used_gpus());
        self.context.claim_permit(&self.spec.name, replica, &gpus.unwrap_or_default())
    }

    /// Ends a process without a drain and with a short grace period, because memory is almost exhausted.
    fn kill_now(&mut self, id: UnitId, replica: u32, decision: &RecycleDecision, permit: ReplacementPermit) {
        let note = "sequential: memory is almost gone, so it does not drain".to_owned();
        self.note_policy_replacement(decision);
        self.record_replacement(replica, decision, ReplacementMode::Sequential, Some(note), Some(permit));
        self.step_machine(id, LifecycleEvent::Recycle);
        self.cut_drain(id, decision);
    }

    /// Ends a drain now and interrupts its running requests.
    fn cut_drain(&mut self, id: UnitId, decision: &RecycleDecision) {
        let Some(live) = self.units.live_mut(id) else { return };
        live.child.short_grace = true;
        tracing::warn!(
            model = %self.spec.name, generation = ?Some(live.id), ?decision,
            "drain cut short: stopping without waiting for running requests"
        );
        self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
    }

    fn policy_facts(&self, id: UnitId, now: Instant) -> Option<RecycleFacts> {
        let unit = self.units.get(id)?;
        if !matches!(unit.phase(), BackendPhase::Ready | BackendPhase::Draining) {
            return None;
        }
        let live = unit.live.as_ref()?;
        let since = |moment: Option<Instant>| moment.map(|moment| now.saturating_duration_since(moment));
        let idle_since = self.leases.idle_since(live.id);
        let memory = &live.memory;
        let series = memory.series_facts(&self.spec.recycle);
        let totals: Vec<_> = series.iter().map(|facts| (facts.series, facts.total)).collect();
        let total = |series| totals.iter().find(|(of, _)| *of == series).and_then(|(_, total)| *total);
        let budgets = lock(&self.context.common).shared;
        Some(RecycleFacts {
            series,
            symptoms: live.health.symptoms(),
            shared: self.context.fleet_memory.shared_decision(live.id, &budgets, total),
            admission: self.leases.admission_wish(live.id),
            age: since(live.start.ready).unwrap_or_default(),
            work: live.cell.work(),
            idle_for: since(idle_since),
            wanted_for: since(live.wish.since),
            urgent_for: since(live.wish.urgent_since),
            minute: self.context.world.minute_of_day(),
            load: self.replacement_load(unit),
            unit: live.wish.random,
        })
    }
}

fn is_growth_of_host(reason: Option<Reason>, series: Option<MemoryKind>) -> bool {
    (reason, series) == (Some(Reason::Growth), Some(MemoryKind::Host))
}
