//! Requests that must not cause a model to be loaded, and unloading by a client, as in llama-server's
//! router.

use std::time::Duration;

use tokio::sync::oneshot;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use super::Fleet;
use crate::error::{ControlError, LeaseDenied};
use crate::lease::Lease;
use crate::model::ControlMessage;
use crate::view::ModelState;

/// Polling interval of a request that must not load a model. Such a request does not join the queue,
/// because a queued request causes a process to be started.
const LOADED_POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Fleet {
    /// Returns a lease without causing the model to be loaded: at once if a process serves, or after
    /// waiting for a process that is starting or being replaced. `None`: the model is neither loaded nor
    /// being loaded.
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
                // Do not queue the request: that would cause a process to be started.
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

    /// True if a process of the model serves, or is going to serve without a further request.
    fn is_coming(&self, model: &ModelName) -> bool {
        let view = self.inner.context.publisher.view();
        let shown = view.models.iter().find(|shown| shown.name == *model);
        shown.is_some_and(|shown| {
            matches!(shown.state, ModelState::Loaded | ModelState::Loading | ModelState::Draining)
        })
    }

    /// Drains and stops a model like [`Self::drain_by`], but does not wait until the processes are gone.
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
