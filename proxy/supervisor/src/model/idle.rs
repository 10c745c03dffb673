//! Unloads a model without requests after its `ttl`. The next request loads it again.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

use super::ModelTask;
use super::unit::{ProcessUnit, UnitRole};
use crate::clock;
use crate::view::event::EventKind;

/// Interval for checking if a model that is kept for another one still has to stay.
const COMPANY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl ModelTask {
    /// Drains and stops processes that had no request for `ttl`. A request that arrives at this moment
    /// waits for the end and the next start.
    pub(super) fn unload_if_idle(&mut self) {
        self.timers.idle = None;
        let Some(ttl) = self.spec.ttl.filter(|_| self.end.is_none()) else { return };
        let serves =
            |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        // Replicas that start, end or are replaced are checked again when they have settled.
        let rests = self.replacements.is_empty() && self.operators.restarts.is_empty();
        if !rests || self.units.is_empty() || !self.units.iter().all(serves) {
            return;
        }
        let now = Instant::now();
        let idle = self.live_generations().map(|live| self.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // Requests are running. The next check comes after `ttl`, which is the earliest possible time.
            None => clock::after(now, ttl),
        };
        if due > now || self.leases.waiting() > 0 {
            self.timers.idle = Some(due.max(clock::after_pause(now, super::ROOM_CHECK_INTERVAL)));
            return;
        }
        if self.context.loading.keeps_company(&self.who) {
            self.timers.idle = Some(clock::after(now, COMPANY_CHECK_INTERVAL));
            return;
        }
        self.log_event(None, EventKind::Unloaded { idle_ms: clock::millis(ttl) });
        self.wanted = false;
        self.stop_all();
    }
}
