//! State that all requests to backends share.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;
use warden_policies::ModelName;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};

use crate::backend::backends::{BackendLease, LeaseProvider};
use crate::backend::pool::{ConnectionPool, PoolLimits};
use crate::config::GatewayConfig;
use crate::protocol::LEAST_BUFFER;
use crate::refusal::RequestRefusal;

pub(crate) struct UpstreamContext {
    pub(crate) backends: Arc<dyn LeaseProvider>,
    pub(crate) config: Arc<GatewayConfig>,
    /// Tracks detached connections and delayed tasks.
    pub(crate) tasks: TaskTracker,
    threads: usize,
}

impl UpstreamContext {
    pub(crate) fn new(backends: Arc<dyn LeaseProvider>, config: Arc<GatewayConfig>, threads: usize) -> Self {
        Self { backends, config, tasks: TaskTracker::new(), threads }
    }

    /// Returns the connection pool of the lease's generation.
    pub(crate) fn pool(&self, lease: &dyn BackendLease) -> Arc<ConnectionPool> {
        lease.pool(&|| {
            let limits = PoolLimits {
                connect: self.config.upstream.connect_timeout,
                idle: self.config.upstream.idle_timeout,
                kept: self.config.upstream.idle_connections,
                kept_unknown: self.config.upstream.idle_connections_unknown,
                head: self.config.server.header_bytes.in_memory().max(LEAST_BUFFER),
            };
            ConnectionPool::new(self.threads, limits, self.tasks.clone())
        })
    }

    /// Builds the refusal of a request that is known to kill its server.
    pub(crate) fn quarantine_refusal(
        &self,
        model: &ModelName,
        print: RequestFingerprint,
        executed: bool,
    ) -> RequestRefusal {
        let left = match self.backends.request_standing(model, print) {
            RequestStanding::Refused { left } => left,
            RequestStanding::Clear | RequestStanding::Suspect => Duration::ZERO,
        };
        self.backends.note_refusal(model, print);
        RequestRefusal::Quarantined { model: model.clone(), print, left, executed }
    }
}
