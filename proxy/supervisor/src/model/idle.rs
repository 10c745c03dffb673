//! Unloads a model without requests after its `ttl`. The next request loads it again.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

use super::ModelTask;
use super::unit::{ProcessUnit, UnitRole};
use crate::clock;
use crate::view::event::EventKind;

/// Interval for checking whether a model that is kept loaded because of another one still has to stay.
const COMPANY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl ModelTask {
    /// Drains and stops the model's processes if none had a request for `ttl`. A request that arrives at
    /// this moment waits until the processes have ended and started again.
    pub(super) fn unload_if_idle(&mut self) {
        self.timers.idle = None;
        let Some(ttl) = self.spec.ttl.filter(|_| self.end.is_none()) else { return };
        let serves =
            |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        // While a replica starts, ends or is replaced, nothing is unloaded; this check runs again
        // afterwards.
        let rests = self.replacements.is_empty() && self.operators.restarts.is_empty();
        if !rests || self.units.is_empty() || !self.units.iter().all(serves) {
            return;
        }
        let now = Instant::now();
        let idle = self.live_generations().map(|live| self.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // Requests are running, so the model can be unloaded after another `ttl` at the earliest.
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
