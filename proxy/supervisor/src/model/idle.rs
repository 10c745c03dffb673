//! A model that nobody asks for is unloaded after its time (`ttl`), and loaded again by its next request.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::Phase;

use super::Model;
use super::unit::{Role, Unit};
use crate::clock;
use crate::view::event::EventKind;

/// How often it is looked whether a model that stays for another one still does.
const COMPANY_LOOK: Duration = Duration::from_secs(1);

impl Model {
    /// Drains and stops processes that have had no request for their time. Who comes in this very moment waits for them to end, and
    /// then for the next ones.
    pub(super) fn unload_the_idle(&mut self) {
        self.timers.idle = None;
        let Some(ttl) = self.spec.ttl.filter(|_| self.end.is_none()) else { return };
        let serves = |unit: &Unit| unit.role == Role::Current && unit.phase() == Phase::Ready;
        // What starts, ends or is replaced is looked at again when it has come to rest.
        let rests = self.replacements.is_empty() && self.operators.restarts.is_empty();
        if !rests || self.units.is_empty() || !self.units.iter().all(serves) {
            return;
        }
        let now = Instant::now();
        let idle = self.lives().map(|live| self.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // It is at work. When it is looked at again nothing can be due yet, and then it is known since when it rests.
            None => clock::after(now, ttl),
        };
        if due > now || self.leases.waiting() > 0 {
            self.timers.idle = Some(due.max(clock::again(now, super::LOOK_FOR_ROOM)));
            return;
        }
        if self.context.loading.keeps_company(&self.who) {
            self.timers.idle = Some(clock::after(now, COMPANY_LOOK));
            return;
        }
        self.tell(None, EventKind::Unloaded { idle_ms: clock::millis(ttl) });
        self.wanted = false;
        self.all_down();
    }
}
