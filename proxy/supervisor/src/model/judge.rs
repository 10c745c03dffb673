//! Reads memory and lets the policy judge it.
//!
//! A sample is due every interval, right after a process has become ready, and a moment after its last request has ended
//! if it is idle since. The policy is asked at every sample, and once more when a replacement that waits for quiet may
//! have found it.

use tokio::time::Instant;
use warden_policies::lifecycle::Phase;
use warden_policies::recycle::{Facts, SeriesFacts, decide};
use warden_policies::restraint::{Ask, Held};
use warden_policies::sample::{Edge, HostMemory, Series};
use warden_policies::{Action, Decision};
use warden_sensors::Report as MemoryReport;

use super::unit::{Role, UnitId};
use super::{Model, Report};
use crate::clock;
use crate::event::EventKind;
use crate::process::Sample;

impl Model {
    /// Notices idle edges: they arm the idle sample and, where a replacement waits for quiet, the next look at it.
    pub(super) fn watch_idle(&mut self) {
        let (settle, quiet_for) = (self.watch.idle_settle, self.spec.recycle.quiet_for);
        for unit in &mut self.units {
            let phase = unit.phase();
            let Some(live) = &mut unit.live else { continue };
            if phase != Phase::Ready {
                continue;
            }
            let idle = self.shared.idle_since(live.id);
            if live.idle_seen == idle {
                continue;
            }
            live.idle_seen = idle;
            live.idle_sample_at = idle.map(|since| (clock::after(since, settle), since));
            if let Some(since) = idle
                && live.wanted_since.is_some()
            {
                live.judge_at = Some(clock::after(since, quiet_for));
            }
        }
    }

    pub(super) fn fire_samples(&mut self, id: UnitId, now: Instant) {
        let interval = self.watch.interval;
        let Some(unit) = self.unit_mut(id) else { return };
        if !matches!(unit.phase(), Phase::Ready | Phase::Suspect) {
            return;
        }
        let Some(live) = &mut unit.live else { return };
        let generation = live.id;
        let idle = live.idle_sample_at.take_if(|(at, _)| *at <= now).map(|(_, since)| since);
        let tick = live.sample_at.take_if(|at| *at <= now).is_some();
        if tick {
            live.sample_at = Some(clock::again(now, interval));
        }
        let judge = live.judge_at.take_if(|at| *at <= now).is_some();
        let Some(process) = live.process.clone() else { return };
        // The idle edge counts only if nothing has come since.
        let idle = idle.is_some() && idle == self.shared.idle_since(generation);
        if tick || idle {
            let edge = if idle { Edge::Idle } else { Edge::Tick };
            self.help(generation, async move {
                let Sample { host, report } = process.sample().await;
                Report::Sampled { edge, host, report }
            });
        } else if judge {
            self.judge(id);
        }
    }

    pub(super) fn sampled(
        &mut self,
        id: UnitId,
        edge: Edge,
        host: Option<HostMemory>,
        report: Option<MemoryReport>,
    ) {
        let Some(unit) = self.unit_mut(id) else { return };
        let Some(live) = &mut unit.live else { return };
        let generation = live.id;
        // The last known figure stays: an unreadable file is no sign of less memory.
        live.host = host.or(live.host);
        live.report = report.or_else(|| live.report.take());
        let first = !std::mem::replace(&mut live.sampled, true);
        if first {
            live.host_at_ready = host;
        }
        tracing::trace!(model = %self.spec.name, %generation, ?edge, ?host, "sample");
        if first {
            self.note_sampled(generation, host);
        }
        self.changed();
        self.judge(id);
    }

    /// Asks the policy about a unit and acts on the answer.
    fn judge(&mut self, id: UnitId) {
        let policy = self.spec.recycle.clone();
        let now = Instant::now();
        let replacing = !self.replacements.is_empty() || self.end.is_some();
        let Some(unit) = self.unit(id) else { return };
        let replica = unit.replica;
        if unit.role != Role::Current || unit.phase() != Phase::Ready {
            return;
        }
        let Some(live) = &unit.live else { return };
        let generation = live.id;
        let host_bytes = live.host.map(HostMemory::charged);
        let idle_since = self.shared.idle_since(generation);
        let facts = Facts {
            series: vec![SeriesFacts::of(Series::Host, host_bytes)],
            age: live.ready.map_or_else(Default::default, |ready| now.saturating_duration_since(ready)),
            work: live.cell.work(),
            idle_for: idle_since.map(|since| now.saturating_duration_since(since)),
            wanted_for: live.wanted_since.map(|since| now.saturating_duration_since(since)),
            unit: live.random,
            ..Facts::default()
        };
        let decision = decide(&policy, &facts);
        let before = live.policy;
        let due = decision.action != Action::Observe && decision.due;
        let ask = Ask { now: self.context.now(), load_time: None, unit: live.random };
        let allowed = self.restraint.check(&decision, &ask, &self.spec.restraint);
        let held = allowed.err().filter(|_| due);

        let wanted = decision.action != Action::Observe;
        let Some(live) = self.unit_mut(id).and_then(|unit| unit.live.as_mut()) else { return };
        live.policy = wanted.then_some((decision, held));
        live.wanted_since = if wanted { live.wanted_since.or(Some(now)) } else { None };
        if wanted && !due {
            let within = live.wanted_since.map(|since| clock::after(since, policy.quiet_within));
            let quiet = idle_since.map(|since| clock::after(since, policy.quiet_for));
            live.judge_at = quiet.into_iter().chain(within).filter(|at| *at > now).min();
        }

        let reason_before = before.and_then(|(decision, _)| decision.reason);
        if wanted && !due && reason_before != decision.reason {
            self.tell(Some(generation), EventKind::RecycleWanted { decision, host_bytes });
            self.changed();
        }
        if !due || replacing {
            return;
        }
        match held {
            Some(held) => self.tell_held(id, before, decision, held),
            None => self.replace_by_policy(replica, decision),
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
}
