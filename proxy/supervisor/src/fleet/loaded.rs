//! Requests that load no model, and unloading by a client, as in llama-server's router.

use std::time::Duration;

use tokio::sync::oneshot;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use super::Fleet;
use crate::error::{ControlError, LeaseDenied};
use crate::lease::Lease;
use crate::model::ControlMessage;
use crate::view::ModelState;

/// Polling interval of a request that loads nothing. Such a request does not join the queue, because a
/// queued request starts a process.
const LOADED_POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Fleet {
    /// Lease for a request that loads nothing: on a serving process, or after waiting for one that starts
    /// or is replaced. `None`: the model is not loaded and not being loaded.
    ///
    /// # Errors
    ///
    /// As [`Self::lease_for`].
    pub async fn lease_loaded(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Result<Option<Lease>, LeaseDenied> {
        loop {
            let leases = self.model_leases(model)?;
            if leases.any_open() {
                if kind == LeaseKind::Slot {
                    return leases.lease(kind, tokens).await.map(Some);
                }
                // A queued request would start a process.
                if let Some(lease) = leases.lease_now(kind, tokens) {
                    return Ok(Some(lease));
                }
            }
            if !self.is_coming(model) {
                return Ok(None);
            }
            tokio::time::sleep(LOADED_POLL_INTERVAL).await;
        }
    }

    /// True if a process of the model serves, or will without a further request.
    fn is_coming(&self, model: &ModelName) -> bool {
        let view = self.inner.context.publisher.view();
        let shown = view.models.iter().find(|shown| shown.name == *model);
        shown.is_some_and(|shown| {
            matches!(shown.state, ModelState::Loaded | ModelState::Loading | ModelState::Draining)
        })
    }

    /// Drains and stops a model as [`Self::drain_by`] does, without waiting for the end.
    ///
    /// # Errors
    ///
    /// There is no such model.
    pub fn unload(&self, model: &str, by: &str) -> Result<(), ControlError> {
        let (reply, _) = oneshot::channel();
        self.operator_target(model, "unload", Some(by))?.send(ControlMessage::Drain(reply));
        Ok(())
    }
}
