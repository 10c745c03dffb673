//! State that all requests to backends share.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;
use warden_policies::ModelName;
use warden_policies::quarantine::{Fingerprint, Standing};

use crate::backend::backends::{BackendLease, Backends};
use crate::backend::pool::{Pool, PoolLimits};
use crate::config::GatewayConfig;
use crate::protocol::LEAST_BUFFER;
use crate::refusal::Refusal;

pub(crate) struct Upstream {
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) config: Arc<GatewayConfig>,
    /// Tracks detached connections and delayed tasks.
    pub(crate) tasks: TaskTracker,
    threads: usize,
}

impl Upstream {
    pub(crate) fn new(backends: Arc<dyn Backends>, config: Arc<GatewayConfig>, threads: usize) -> Self {
        Self { backends, config, tasks: TaskTracker::new(), threads }
    }

    /// Returns the connection pool of the lease's generation.
    pub(crate) fn pool(&self, lease: &dyn BackendLease) -> Arc<Pool> {
        lease.pool(&|| {
            let limits = PoolLimits {
                connect: self.config.upstream.connect_timeout,
                idle: self.config.upstream.idle_timeout,
                kept: self.config.upstream.idle_connections,
                kept_unknown: self.config.upstream.idle_connections_unknown,
                head: self.config.server.header_bytes.in_memory().max(LEAST_BUFFER),
            };
            Pool::new(self.threads, limits, self.tasks.clone())
        })
    }

    /// Builds the refusal of a request that is known to kill its server.
    pub(crate) fn quarantined(&self, model: &ModelName, print: Fingerprint, executed: bool) -> Refusal {
        let left = match self.backends.standing(model, print) {
            Standing::Refused { left } => left,
            Standing::Clear | Standing::Suspect => Duration::ZERO,
        };
        self.backends.note_refusal(model, print);
        Refusal::Quarantined { model: model.clone(), print, left, executed }
    }
}
