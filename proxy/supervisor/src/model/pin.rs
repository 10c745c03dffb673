//! Pins set by operators. Such a pin overrides the configuration, even after a reload or a handover, until
//! an operator changes it or the program ends.

use serde::{Deserialize, Serialize};

use super::ModelTask;
use crate::clock;
use crate::error::ControlError;
use crate::view::event::EventKind;
use crate::view::pin_entry::{PinEntry, PinKind, PinView};

/// Last pin command of an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ManualPin {
    pub(super) pinned: bool,
    pub(super) by: String,
}

impl ModelTask {
    /// Pins or unpins the model on behalf of an operator.
    pub(super) fn set_pin(&mut self, pinned: bool, by: &str) -> Result<PinView, ControlError> {
        if self.end.is_some() {
            return Err(ControlError::ShuttingDown);
        }
        if self.spec.canary_of.is_some() {
            let because = "a canary is temporary, and is unloaded before all others".to_owned();
            return Err(ControlError::CannotPin { model: self.spec.name.clone(), because });
        }
        // A command that repeats the present pin is not recorded.
        if self.manual_pin.as_ref().is_none_or(|said| said.pinned != pinned) {
            self.manual_pin = Some(ManualPin { pinned, by: by.to_owned() });
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
            ledger.append_pin(&entry);
            self.log_event(None, EventKind::Pinned { entry: Box::new(entry) });
        }
        Ok(self.pin_view())
    }

    /// True if the model must never be unloaded for another one.
    pub(super) fn is_pinned(&self) -> bool {
        self.manual_pin.as_ref().map_or(self.spec.loading.pin, |said| said.pinned)
    }

    pub(super) fn pin_view(&self) -> PinView {
        let by = self.manual_pin.as_ref().map(|said| said.by.clone());
        PinView { pinned: self.is_pinned(), by }
    }

    /// Takes over the pin from the previous instance.
    pub(super) fn inherit_pin(&mut self, said: Option<ManualPin>) {
        if said.is_some() {
            self.manual_pin = said;
            self.apply_loading();
        }
    }
}
