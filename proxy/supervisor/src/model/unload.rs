//! Keeps a pinned model loaded, and unloads a model without requests after its `ttl`.
//!
//! An operator's pin overrides the configuration, also after a reload or handover, until an operator changes
//! it or the program ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

use super::ModelTask;
use super::loading::ModelRoom;
use super::unit::{ProcessUnit, UnitRole};
use crate::clock;
use crate::error::ControlError;
use crate::spec::ModelSpec;
use crate::view::entry::{PinEntry, PinKind, PinView};
use crate::view::event::EventKind;

/// Interval for checking whether a model kept loaded because of another one must still stay.
const COMPANY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ManualPin {
    pub(super) pinned: bool,
    pub(super) by: String,
}

impl ModelRoom {
    pub(super) fn is_pinned(&self, spec: &ModelSpec) -> bool {
        self.manual_pin.as_ref().map_or(spec.loading.pin, |said| said.pinned)
    }

    pub(super) fn pin_view(&self, spec: &ModelSpec) -> PinView {
        let by = self.manual_pin.as_ref().map(|said| said.by.clone());
        PinView { pinned: self.is_pinned(spec), by }
    }
}

impl ModelTask {
    pub(super) fn set_pin(&mut self, pinned: bool, by: &str) -> Result<PinView, ControlError> {
        if self.life.end.is_some() {
            return Err(ControlError::ShuttingDown);
        }
        if self.spec.canary_of.is_some() {
            let because = "a canary is temporary, and is unloaded before all others".to_owned();
            return Err(ControlError::CannotPin { model: self.spec.name.clone(), because });
        }
        if self.room.manual_pin.as_ref().is_none_or(|said| said.pinned != pinned) {
            self.room.manual_pin = Some(ManualPin { pinned, by: by.to_owned() });
            self.apply_loading();
            let ledger = &self.context.ledger;
            let entry = PinEntry {
                kind: PinKind::Pin,
                id: ledger.next_number(),
                at: clock::wall_time(),
                model: self.spec.name.clone(),
                pinned,
                configured: self.spec.loading.pin,
                by: by.to_owned(),
            };
            ledger.append(&entry);
            self.log_event(None, EventKind::Pinned { entry: Box::new(entry) });
        }
        Ok(self.room.pin_view(&self.spec))
    }

    /// Drains and stops the model's processes if none had a request for `ttl`.
    pub(super) fn unload_if_idle(&mut self) {
        self.life.timers.idle = None;
        let Some(ttl) = self.spec.ttl else { return };
        let serves =
            |unit: &ProcessUnit| unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        // Unload nothing while a replica starts, ends or is replaced.
        if self.life.end.is_some()
            || !self.replacements.is_empty()
            || !self.operators.restarts.is_empty()
            || self.units.all.is_empty()
            || !self.units.all.iter().all(serves)
        {
            return;
        }
        let now = Instant::now();
        let idle = self.units.lives().map(|live| self.leases.idle_since(live.id));
        let due = match idle.collect::<Option<Vec<Instant>>>().and_then(|since| since.into_iter().max()) {
            Some(since) => clock::after(since, ttl),
            // While requests run, the model stays for at least another `ttl`.
            None => clock::after(now, ttl),
        };
        if due > now || self.leases.waiting() > 0 {
            self.life.timers.idle = Some(due.max(clock::after_pause(now, super::ROOM_CHECK_INTERVAL)));
            return;
        }
        if self.context.loading.keeps_company(&self.room.who) {
            self.life.timers.idle = Some(clock::after(now, COMPANY_CHECK_INTERVAL));
            return;
        }
        self.log_event(None, EventKind::Unloaded { idle_ms: clock::millis(ttl) });
        self.room.wanted = false;
        self.stop_all();
    }
}
