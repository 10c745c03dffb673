//! Requests that load nothing, and unloading by a client: llama-server's router has both.

use std::time::Duration;

use tokio::sync::oneshot;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use super::Fleet;
use crate::error::{ControlError, Denied};
use crate::lease::Lease;
use crate::model::Control;
use crate::view::ModelState;

/// How often a request that loads nothing looks for a process. It waits in no queue, because a queue is a reason to
/// start one.
const COMING_LOOK: Duration = Duration::from_millis(50);

impl Fleet {
    /// A lease for a request that loads nothing: a process that serves is used, and one that starts or is replaced is
    /// waited for. `None`: the model is not loaded, and nobody is loading it.
    ///
    /// # Errors
    ///
    /// As [`Self::lease_for`].
    pub async fn lease_loaded(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Option<Lease>, Denied> {
        loop {
            let leases = self.leases(model)?;
            if leases.any_open() {
                if kind == LeaseKind::Slot {
                    return leases.lease(kind, tokens).await.map(Some);
                }
                // Who waits in the queue is a reason to start a process.
                if let Some(lease) = leases.lease_now(kind, tokens) {
                    return Ok(Some(lease));
                }
            }
            if !self.is_coming(model) {
                return Ok(None);
            }
            tokio::time::sleep(COMING_LOOK).await;
        }
    }

    /// Whether a process of the model serves, or will without a further request.
    fn is_coming(&self, model: &ModelName) -> bool {
        let view = self.inner.context.publisher.view();
        let shown = view.models.iter().find(|shown| shown.name == *model);
        shown.is_some_and(|shown| {
            matches!(shown.state, ModelState::Loaded | ModelState::Loading | ModelState::Draining)
        })
    }

    /// Drains and stops a model, as [`Self::drain_by`] does, and does not wait for that.
    ///
    /// # Errors
    ///
    /// There is no such model.
    pub fn unload(&self, model: &str, by: &str) -> Result<(), ControlError> {
        let (reply, _) = oneshot::channel();
        self.asked(model, "unload", Some(by))?.send(Control::Drain(reply));
        Ok(())
    }
}
