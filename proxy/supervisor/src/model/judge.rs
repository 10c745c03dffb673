//! Reads memory and lets the policy judge it.
//!
//! A sample is due every interval, right after a process has become ready, and a moment after its last request has ended
//! if it is idle since. The policy is asked at every sample, and once more when a replacement that waits for quiet may
//! have found it.
//!
//! ```text
//!   facts ──> decide ──> due? ──> restraint ──> confirmed? ──> turn ──> replace
//!                 │                   │             │            └ no: another replacement goes first
//!                 │                   │             └ growth of host memory is read page by page first
//!                 │                   └ held: told once
//!                 └ kill: at once, a draining process too
//! ```

use tokio::time::Instant;
use warden_policies::lifecycle::{Event, Phase, Timer};
use warden_policies::recycle::{Decision, Facts, WhyNot, decide_unless};
use warden_policies::restraint::{Ask, Held};
use warden_policies::share::Reach;
use warden_policies::{Action, GenerationId, Reason, Series};

use super::Model;
use super::unit::{Live, Role, UnitId};
use crate::clock;
use crate::context::Permit;
use crate::event::EventKind;

impl Model {
    /// Asks the policy about a unit and acts on the answer.
    pub(super) fn judge(&mut self, id: UnitId) {
        let now = Instant::now();
        self.note_lull(id);
        let Some(facts) = self.facts(id, now) else { return };
        let barred = |reason, series| self.restraint.bars(reason, series, &self.spec.restraint).is_some();
        let denied = self.denies_growth(id, now);
        let unseen = |reason, series| denied && reason == Reason::Growth && series == Some(Series::Host);
        let decision = decide_unless(&self.spec.recycle, &facts, |reason, series| {
            barred(reason, series) || unseen(reason, series)
        });
        let futile = decision.reason.is_some_and(|reason| barred(reason, decision.series));
        let Some(unit) = self.unit_mut(id) else { return };
        let (replica, phase, role) = (unit.replica, unit.phase(), unit.role);
        let Some(live) = &mut unit.live else { return };
        live.watched.facts = Some(facts);
        // Only a drain can last too long: what waits for its turn or its interval has not had one yet.
        let urgent = phase == Phase::Draining && decision.action >= Action::DrainNow;
        live.watched.urgent_since = if urgent { live.watched.urgent_since.or(Some(now)) } else { None };
        match phase {
            Phase::Ready if role == Role::Current => self.weigh(id, replica, decision, now),
            // An end that brings nothing back is not worth the requests that it cuts.
            Phase::Draining
                if decision.action == Action::KillNow && !futile && !self.is_spared(&decision) =>
            {
                self.cut_short(id, &decision);
            }
            _ => {}
        }
    }

    /// What follows from a decision about a process that serves.
    fn weigh(&mut self, id: UnitId, replica: u32, mut decision: Decision, now: Instant) {
        let ask = |live: &Live| Ask { now: self.context.now(), load_time: self.load_time, unit: live.random };
        let Some(live) = self.unit(id).and_then(|unit| unit.live.as_ref()) else { return };
        let generation = live.id;
        let before = live.policy;
        let wanted = decision.action != Action::Observe;
        let due = wanted && decision.due;
        let long = live.drain_at.filter(|at| *at > now && !decision.threat).map(|at| {
            let left = at.saturating_duration_since(now);
            Held::LongRequests { seconds_left: left.as_secs() + u64::from(left.subsec_nanos() > 0) }
        });
        let check = || self.restraint.check(&decision, &ask(live), &self.spec.restraint).err();
        let held = if due { check().or(long.filter(|_| decision.action < Action::KillNow)) } else { None };
        if let Some(by) = held {
            decision = decision.but(WhyNot::Held { by });
            self.context.census.pin(generation);
        }
        let replacing = !self.replacements.is_empty() || self.end.is_some();
        let free = due && held.is_none() && !replacing;
        let spared = free && self.is_spared(&decision);
        let go = free && !spared && self.is_confirmed(id, &decision, now);
        let alone = decision.action < Action::KillNow && self.another_comes(replica);
        // Where memory is almost gone nobody waits for a file system.
        let prepared = if go && !alone && decision.action < Action::KillNow {
            self.may_replace(id)
        } else {
            Some(Ok(()))
        };
        let mut held = held;
        let go = go && prepared == Some(Ok(()));
        if free && is_growth_of_host(&decision) && self.denies_growth(id, now) {
            decision = decision.but(WhyNot::NotConfirmed);
        }
        if let Some(Err(missing)) = &prepared {
            held = Some(Held::CannotStart);
            decision = decision.but(WhyNot::Held { by: Held::CannotStart });
            self.keep_the_old(replica, &decision, missing);
        }
        let permit = if go && !alone { self.permit(id, replica) } else { None };
        if spared || go && permit.is_none() && decision.action < Action::KillNow {
            decision = decision.but(WhyNot::InTurn);
        }
        self.remember(id, decision, held, now);
        if wanted && !due {
            let told = before.and_then(|(decision, _)| decision.reason);
            if told != decision.reason {
                let host_bytes = self.charged(id, Series::Host);
                let series_bytes = decision.series.and_then(|series| self.charged(id, series));
                let kind = EventKind::RecycleWanted { decision, host_bytes, series_bytes };
                self.tell(Some(generation), kind);
                self.changed();
            }
        }
        match held {
            Some(held) if !replacing => self.tell_held(id, before, decision, held),
            _ if go && decision.action == Action::KillNow => {
                let permit = permit.unwrap_or_else(|| self.claim(id, replica));
                self.kill_now(id, replica, &decision, permit);
            }
            _ if permit.is_some() => self.replace_by_policy(replica, decision, permit),
            _ => {}
        }
    }

    fn remember(&mut self, id: UnitId, decision: Decision, held: Option<Held>, now: Instant) {
        let policy = &self.spec.recycle;
        let (within, quiet_for) = (policy.quiet_within, policy.quiet_for);
        let Some(live) = self.unit(id).and_then(|unit| unit.live.as_ref()) else { return };
        let idle_since = self.shared.idle_since(live.id);
        let wanted = decision.action != Action::Observe;
        let Some(live) = self.unit_mut(id).and_then(|unit| unit.live.as_mut()) else { return };
        let news = live.policy.is_none_or(|(before, _)| before != decision);
        live.policy = Some((decision, held));
        live.wanted_since = if wanted { live.wanted_since.or(Some(now)) } else { None };
        if wanted && !decision.due && held.is_none() {
            let within = live.wanted_since.map(|since| clock::after(since, within));
            let quiet = idle_since.map(|since| clock::after(since, quiet_for));
            // A turn comes when another replacement has ended, which nobody tells.
            let turn = (decision.why_not == Some(WhyNot::InTurn)).then(|| clock::again(now, quiet_for));
            live.judge_at = quiet.into_iter().chain(within).chain(turn).filter(|at| *at > now).min();
        }
        if news {
            self.changed();
        }
    }

    fn tell_held(
        &mut self,
        id: UnitId,
        before: Option<(Decision, Option<Held>)>,
        decision: Decision,
        held: Held,
    ) {
        let kind = |held: &Held| std::mem::discriminant(held);
        let told = before.and_then(|(before, held)| Some((before.reason?, kind(&held?))));
        if told != decision.reason.map(|reason| (reason, kind(&held))) {
            let generation = self.unit(id).and_then(super::Unit::generation);
            let message = held.to_string();
            self.tell(generation, EventKind::RecycleHeld { decision, held, message });
            self.changed();
        }
    }

    /// A shortage of memory is everybody's, and one backend that ends may be enough.
    fn is_spared(&self, decision: &Decision) -> bool {
        match decision.series.filter(|_| decision.reason == Some(Reason::MemoryExhausted)) {
            Some(series) => !self.context.may_end(series),
            None => false,
        }
    }

    /// Growth of host memory has to show in an exact reading, too, which is slow and so made only now.
    fn is_confirmed(&mut self, id: UnitId, decision: &Decision, now: Instant) -> bool {
        if !is_growth_of_host(decision) {
            return true;
        }
        let interval = self.watch.confirm_interval;
        let Some(live) = self.unit_mut(id).and_then(|unit| unit.live.as_mut()) else { return false };
        match live.watched.confirmed {
            Some((at, shown)) if now.saturating_duration_since(at) < interval => shown,
            _ => {
                live.watched.confirm_next = true;
                live.sample_at = Some(now);
                false
            }
        }
    }

    /// Whether growth of host memory that the counters show is not in the pages.
    fn denies_growth(&self, id: UnitId, now: Instant) -> bool {
        let live = self.unit(id).and_then(|unit| unit.live.as_ref());
        live.is_some_and(|live| live.watched.denies(now, self.watch.confirm_interval))
    }

    /// Whether another replica is on its way back without having been replaced: after a crash this one serves for both.
    fn another_comes(&self, replica: u32) -> bool {
        let told = self.watch.failures_told;
        self.units.iter().any(|unit| {
            let comes =
                matches!(unit.phase(), Phase::Starting | Phase::Draining | Phase::Stopping | Phase::Backoff);
            unit.role == Role::Current && unit.replica != replica && comes && !unit.is_hopeless(told)
        })
    }

    fn charged(&self, id: UnitId, series: Series) -> Option<u64> {
        let live = self.unit(id)?.live.as_ref()?;
        match series {
            Series::Host => live.host.map(warden_policies::sample::HostMemory::charged),
            Series::Vram(gpu) => live.watched.vram.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes),
        }
    }

    /// The right to replace a replica now; `None` while another one goes first.
    pub(super) fn permit(&self, id: UnitId, replica: u32) -> Option<Permit> {
        let unit = self.unit(id)?;
        let gpus = unit.live.as_ref()?.watched.gpus();
        // Two that overlap at a time would both take the same free memory.
        let reach = if self.would_overlap(unit) { Reach::Machine } else { Reach::Gpus };
        self.context.permit(&self.spec.name, replica, &gpus, reach)
    }

    /// The same for a process that a new configuration replaces: one after another, each judged by the memory that the last
    /// one left.
    pub(super) fn permit_alone(&self, id: UnitId, replica: u32) -> Option<Permit> {
        let gpus = self.unit(id)?.live.as_ref()?.watched.gpus();
        self.context.permit(&self.spec.name, replica, &gpus, Reach::Machine)
    }

    /// The same for what does not wait: others wait for it.
    pub(super) fn claim(&self, id: UnitId, replica: u32) -> Permit {
        let gpus = self.unit(id).and_then(|unit| unit.live.as_ref()).map(|live| live.watched.gpus());
        self.context.claim(&self.spec.name, replica, &gpus.unwrap_or_default())
    }

    /// Memory is almost gone: no drain, a short grace.
    fn kill_now(&mut self, id: UnitId, replica: u32, decision: &Decision, permit: Permit) {
        self.begin_by_policy(
            replica,
            decision,
            Some(permit),
            "sequential: memory is almost gone, so it does not drain",
        );
        self.step(id, Event::Recycle);
        self.cut_short(id, decision);
    }

    /// Ends a drain now.
    fn cut_short(&mut self, id: UnitId, decision: &Decision) {
        let Some(unit) = self.unit_mut(id) else { return };
        let generation: Option<GenerationId> = unit.generation();
        let Some(live) = &mut unit.live else { return };
        live.hurried = true;
        tracing::warn!(model = %self.spec.name, ?generation, ?decision, "ended without waiting for its requests");
        self.step(id, Event::Timer(Timer::Drain));
    }

    /// What is known about a unit that serves or drains.
    fn facts(&self, id: UnitId, now: Instant) -> Option<Facts> {
        let unit = self.unit(id)?;
        if !matches!(unit.phase(), Phase::Ready | Phase::Draining) {
            return None;
        }
        let live = unit.live.as_ref()?;
        let since = |moment: Option<Instant>| moment.map(|moment| now.saturating_duration_since(moment));
        let idle_since = self.shared.idle_since(live.id);
        let watched = &live.watched;
        let series = watched.series(&self.spec.recycle, live.host, live.host_at_ready);
        let totals: Vec<(Series, Option<u64>)> =
            series.iter().map(|facts| (facts.series, facts.total)).collect();
        let total =
            |series: Series| totals.iter().find(|(of, _)| *of == series).and_then(|(_, total)| *total);
        let budgets = crate::sync::lock(&self.context.common).shared;
        Some(Facts {
            series,
            symptoms: watched.symptoms(),
            shared: self.context.census.chosen(live.id, &budgets, total),
            admission: self.shared.admission_wish(live.id),
            age: since(live.ready).unwrap_or_default(),
            work: live.cell.work(),
            idle_for: since(idle_since),
            wanted_for: since(live.wanted_since),
            urgent_for: since(watched.urgent_since),
            minute: self.context.world.minute(),
            load: self.load(unit),
            unit: live.random,
        })
    }
}

fn is_growth_of_host(decision: &Decision) -> bool {
    (decision.reason, decision.series) == (Some(Reason::Growth), Some(Series::Host))
}
