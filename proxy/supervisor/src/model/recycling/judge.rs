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

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::cooldown::{CooldownQuery, HoldReason};
use warden_policies::growth::GrowthVerdict;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent, LifecycleTimer};
use warden_policies::recycle::{
    RecycleDecision, RecycleFacts, RecycleHindrance, RecyclePolicy, decide_without_barred,
};
use warden_policies::replacement_cost::ReplacementLoad;
use warden_policies::{MemoryKind, Reason, RecycleAction};

use crate::clock;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::LiveGeneration;
use crate::model::life::TaskLife;
use crate::model::message::TaskMail;
use crate::model::replacement::needs::{READ_AHEAD_LIMIT, URGENT_READ_AHEAD_LIMIT};
use crate::model::replacement::pace::RecyclePace;
use crate::model::unit::{ProcessUnit, UnitId, UnitRole};
use crate::sync::lock;
use crate::view::event::EventKind;

impl ModelTask {
    pub(crate) fn judge_unit(&mut self, id: UnitId) {
        let now = Instant::now();
        let policy = &self.env.spec.recycle;
        let Some(unit) = self.units.get_mut(id) else { return };
        let (phase, role, replica) = (unit.phase(), unit.role, unit.replica);
        let idle = unit.generation().and_then(|generation| self.env.leases.idle_since(generation));
        if let Some(idle) = idle.map(|since| since.elapsed())
            && idle >= policy.common.quiet_for
        {
            // This idle period would have sufficed for a replacement.
            self.replacements.pace.lulls.record_lull(self.env.context.now().saturating_sub(idle));
        }
        if !matches!(phase, BackendPhase::Ready | BackendPhase::Draining) {
            return;
        }
        let overlaps = self.room.would_overlap(&self.env, unit);
        let Some(live) = &mut unit.live else { return };
        let pace = &mut self.replacements.pace;
        let load = pace.replacement_load(&self.env, live, overlaps);
        let facts = live.policy_facts(&self.env, load, now);
        let RecyclePace { cooldown, load_time, .. } = pace;
        for held in live.wish.passed.add_facts(&facts, *load_time, cooldown, policy) {
            self.env.log_event(Some(live.id), EventKind::PolicyOff { message: held.to_string() });
            self.life.note_action();
        }
        let barred =
            |reason, series| cooldown.find_bar(reason, series, facts.charged(series), policy).is_some();
        let denied = live.denies_growth(now, self.env.watch.sensors.confirm_interval);
        let decision = decide_without_barred(policy, &facts, |reason, series| {
            barred(reason, series) || denied && is_growth_of_host(Some(reason), series)
        });
        let futile = decision.reason.is_some_and(|reason| barred(reason, decision.series));
        live.memory.facts = Some(facts);
        // Only a drain counts: a decision that waits for a permit or an interval does not drain yet.
        let is_urgent = phase == BackendPhase::Draining && decision.action >= RecycleAction::DrainNow;
        live.wish.urgent_since = if is_urgent { live.wish.urgent_since.or(Some(now)) } else { None };
        match phase {
            BackendPhase::Ready if role == UnitRole::Current => {
                self.act_on_decision(id, replica, decision, now);
            }
            // Do not cut running requests if ending the process would free nothing.
            BackendPhase::Draining
                if decision.action == RecycleAction::KillNow && !futile && !self.env.is_spared(&decision) =>
            {
                live.cut_drain(&self.env, &decision);
                self.step_machine(id, LifecycleEvent::Timer(LifecycleTimer::Drain));
            }
            _ => {}
        }
    }

    fn act_on_decision(&mut self, id: UnitId, replica: u32, decision: RecycleDecision, now: Instant) {
        let is_replacing = !self.replacements.is_empty() || self.life.end.is_some();
        let Some(unit) = self.units.get_mut(id) else { return };
        let pace = &self.replacements.pace;
        let left =
            unit.reclaim_first(&self.env, &mut self.mail, &mut self.life, pace, !is_replacing, decision);
        let Some(mut decision) = left else { return };
        let Some(live) = &mut unit.live else { return };
        let interval = self.env.watch.sensors.confirm_interval;
        let generation = live.id;
        let before = live.wish.last_decision;
        let is_wanted = decision.action != RecycleAction::Observe;
        let is_due = is_wanted && decision.due;
        let mut held = pace.hold_reason(&self.env, live, &decision, now);
        if let Some(by) = held {
            decision = decision.held_back(RecycleHindrance::Held { by });
            self.env.context.fleet_memory.pin(generation);
        }
        let is_free = is_due && held.is_none() && !is_replacing;
        let is_spared = is_free && self.env.is_spared(&decision);
        let mut goes = is_free && !is_spared && live.is_confirmed(&decision, now, interval);
        let kills = decision.action >= RecycleAction::KillNow;
        let many = self.env.spec.lifecycle.failures_told;
        let is_alone = !kills && self.units.is_another_starting(replica, many);
        // Skip the file check when memory is almost exhausted: a file system may be slow.
        if goes && !is_alone && !kills {
            let is_urgent = decision.action >= RecycleAction::DrainNow;
            let limit = if is_urgent { URGENT_READ_AHEAD_LIMIT } else { READ_AHEAD_LIMIT };
            let Some(unit) = self.units.get(id) else { return };
            let prepared = self.replacements.needs.may_replace(&self.env, &mut self.mail, unit, limit);
            goes = prepared == Some(Ok(()));
            if let Some(Err(missing)) = prepared {
                held = Some(HoldReason::CannotStart);
                decision = decision.held_back(RecycleHindrance::Held { by: HoldReason::CannotStart });
                let failure = self.replacements.keep_present(&self.env, unit, &decision, &missing);
                if let Some(failure) = failure {
                    self.fail_replacement(replica, &failure);
                }
            }
        }
        let Some(unit) = self.units.get_mut(id) else { return };
        let wants_permit = goes && !is_alone;
        let permit = if wants_permit { self.room.policy_permit(&self.env, unit) } else { None };
        let Some(live) = &mut unit.live else { return };
        if is_free && is_growth_of_host(decision.reason, decision.series) && live.denies_growth(now, interval)
        {
            decision = decision.held_back(RecycleHindrance::NotConfirmed);
        }
        if is_spared || goes && permit.is_none() && !kills {
            decision = decision.held_back(RecycleHindrance::InTurn);
        }
        let mut news = live.remember_decision(&self.env, decision, held, now);
        let is_same = before.and_then(|(decision, _)| decision.reason) == decision.reason;
        if is_wanted && !is_due && held.is_none() && !is_same {
            self.env.log_event(Some(generation), live.wanted_event(decision));
            news = true;
        }
        if let Some(held) = held
            && !is_replacing
            && !is_same_hold(before, decision, held)
        {
            let message = held.to_string();
            self.env.log_event(Some(generation), EventKind::RecycleHeld { decision, held, message });
            news = true;
        }
        if news {
            self.life.note_action();
        }
        let is_held = held.is_some() && !is_replacing;
        if !is_held && (permit.is_some() || goes && decision.action == RecycleAction::KillNow) {
            self.replace_by_policy(id, decision, permit);
        }
    }
}

impl RecyclePace {
    /// Reason that holds this decision back until an operator acts.
    fn lasting_hold(
        &self,
        live: &LiveGeneration,
        decision: &RecycleDecision,
        policy: &RecyclePolicy,
    ) -> Option<HoldReason> {
        let held = decision.series.and_then(|series| live.memory.charged_bytes(series));
        self.cooldown.find_bar(decision.reason?, decision.series, held, policy)
    }

    fn hold_reason(
        &self,
        env: &TaskEnvironment,
        live: &LiveGeneration,
        decision: &RecycleDecision,
        now: Instant,
    ) -> Option<HoldReason> {
        if decision.action == RecycleAction::Observe {
            return None;
        }
        if !decision.due {
            // If only an operator can help, report that now, although the decision is not due.
            return self.lasting_hold(live, decision, &env.spec.recycle);
        }
        let ask = CooldownQuery {
            now: env.context.now(),
            load_time: self.load_time,
            unit: live.wish.random,
            held: decision.series.and_then(|series| live.memory.charged_bytes(series)),
        };
        if let Err(held) = self.cooldown.check(decision, &ask, &env.spec.recycle) {
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
        env: &TaskEnvironment,
        live: &LiveGeneration,
        facts: &mut Option<RecycleFacts>,
        waiting: &RecycleDecision,
        now: Instant,
    ) -> Option<RecycleDecision> {
        let (Some(RecycleHindrance::Reclaimed { .. }), Some(series)) = (waiting.why_not, waiting.series)
        else {
            return None;
        };
        if facts.is_none() {
            facts.clone_from(&live.memory.facts);
        }
        let facts = facts.as_mut()?;
        facts.series.iter_mut().find(|facts| facts.series == series)?.growth.as_mut()?.verdict =
            GrowthVerdict::Steady;
        let denied = live.denies_growth(now, env.watch.sensors.confirm_interval);
        let cooldown = &self.cooldown;
        let decision = decide_without_barred(&env.spec.recycle, facts, |reason, series| {
            cooldown.find_bar(reason, series, facts.charged(series), &env.spec.recycle).is_some()
                || denied && is_growth_of_host(Some(reason), series)
        });
        (decision.action != RecycleAction::Observe).then_some(decision)
    }
}

impl ProcessUnit {
    fn is_reclaiming(&self) -> bool {
        self.live.as_ref().is_some_and(|live| live.reclaim.pending.is_some())
    }

    /// Tries to make the process give memory back. Returns the decision that is left to carry out.
    fn reclaim_first(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        life: &mut TaskLife,
        pace: &RecyclePace,
        is_free: bool,
        mut decision: RecycleDecision,
    ) -> Option<RecycleDecision> {
        let now = Instant::now();
        let was_asking = self.is_reclaiming();
        let generation = self.live.as_mut()?;
        let mut facts = None;
        let left = loop {
            let held = pace.lasting_hold(generation, &decision, &env.spec.recycle);
            // If the budget is too small, the server needs the memory for its work and cannot give it back.
            if matches!(held, Some(HoldReason::BudgetTooSmall { .. })) {
                break Some(decision);
            }
            let Some(waiting) = generation.try_reclaim(env, mail, self.replica, is_free, &decision, now)
            else {
                break Some(decision);
            };
            let other = pace.other_than_suspended(env, generation, &mut facts, &waiting, now);
            let Some(other) = other else {
                if generation.remember_decision(env, waiting, None, now) {
                    life.note_action();
                }
                break None;
            };
            decision = other;
        };
        if self.is_reclaiming() != was_asking {
            life.note_action();
        }
        left
    }
}

impl LiveGeneration {
    /// Prepares the end of a drain, which interrupts its running requests.
    pub(crate) fn cut_drain(&mut self, env: &TaskEnvironment, decision: &RecycleDecision) {
        self.child.short_grace = true;
        tracing::warn!(
            model = %env.spec.name, generation = ?Some(self.id), ?decision,
            "drain cut short: stopping without waiting for running requests"
        );
    }

    /// Returns true if the decision differs from the last one.
    fn remember_decision(
        &mut self,
        env: &TaskEnvironment,
        decision: RecycleDecision,
        held: Option<HoldReason>,
        now: Instant,
    ) -> bool {
        let policy = &env.spec.recycle.common;
        let idle_since = env.leases.idle_since(self.id);
        let is_wanted = decision.action != RecycleAction::Observe;
        let news = self.wish.last_decision.is_none_or(|(before, _)| before != decision);
        self.wish.last_decision = Some((decision, held));
        self.wish.since = if is_wanted { self.wish.since.or(Some(now)) } else { None };
        if is_wanted && !decision.due && held.is_none() {
            let within = self.wish.since.map(|since| clock::after(since, policy.quiet_within));
            let quiet = idle_since.map(|since| clock::after(since, policy.quiet_for));
            // No message reports a free permit, so try again after a pause.
            let turn = (decision.why_not == Some(RecycleHindrance::InTurn))
                .then(|| clock::after_pause(now, policy.quiet_for));
            self.timers.judgement = quiet.into_iter().chain(within).chain(turn).filter(|at| *at > now).min();
        }
        news
    }

    fn wanted_event(&self, decision: RecycleDecision) -> EventKind {
        let host_bytes = self.memory.charged_bytes(MemoryKind::Host);
        let series_bytes = decision.series.and_then(|series| self.memory.charged_bytes(series));
        EventKind::RecycleWanted { decision, host_bytes, series_bytes }
    }

    /// True if an exact reading confirms the growth of host memory. Exact readings are slow, so they are
    /// made only just before a replacement.
    fn is_confirmed(&mut self, decision: &RecycleDecision, now: Instant, interval: Duration) -> bool {
        if !is_growth_of_host(decision.reason, decision.series) {
            return true;
        }
        let shown = self.memory.confirmation(now, interval);
        if shown.is_none() {
            self.memory.confirm_next();
            self.timers.sample = Some(now);
        }
        shown == Some(true)
    }

    /// True if an exact reading contradicts the growth that the counters show.
    fn denies_growth(&self, now: Instant, interval: Duration) -> bool {
        self.memory.confirmation(now, interval) == Some(false)
    }

    fn policy_facts(&self, env: &TaskEnvironment, load: ReplacementLoad, now: Instant) -> RecycleFacts {
        let since = |moment: Option<Instant>| moment.map(|moment| now.saturating_duration_since(moment));
        let idle_since = env.leases.idle_since(self.id);
        let memory = &self.memory;
        let series = memory.series_facts(&env.spec.recycle);
        let totals: Vec<_> = series.iter().map(|facts| (facts.series, facts.total)).collect();
        let total = |series| totals.iter().find(|(of, _)| *of == series).and_then(|(_, total)| *total);
        let budgets = lock(&env.context.common).shared;
        RecycleFacts {
            series,
            symptoms: self.health.symptoms(),
            shared: env.context.fleet_memory.shared_decision(self.id, &budgets, total),
            admission: env.leases.admission_wish(self.id),
            age: since(self.start.ready).unwrap_or_default(),
            work: self.cell.work(),
            idle_for: since(idle_since),
            wanted_for: since(self.wish.since),
            urgent_for: since(self.wish.urgent_since),
            minute: env.context.world.minute_of_day(),
            load,
            unit: self.wish.random,
        }
    }
}

/// True if the last decision was held back for the same reason.
fn is_same_hold(
    before: Option<(RecycleDecision, Option<HoldReason>)>,
    decision: RecycleDecision,
    held: HoldReason,
) -> bool {
    let kind = |held: &HoldReason| std::mem::discriminant(held);
    let told = before.and_then(|(before, held)| Some((before.reason?, kind(&held?))));
    told == decision.reason.map(|reason| (reason, kind(&held)))
}

fn is_growth_of_host(reason: Option<Reason>, series: Option<MemoryKind>) -> bool {
    (reason, series) == (Some(Reason::Growth), Some(MemoryKind::Host))
}
