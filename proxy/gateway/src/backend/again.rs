//! Executes a request once more whose server died after the head of its answer and before anything else.
//! The client has a head that promises events, and gets those of the second execution.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use crate::backend::attempts::{BackendAttempts, RelayedAnswer};
use crate::backend::backends::BackendLease;
use crate::backend::message::UpstreamRequest;
use crate::backend::upstream::UpstreamContext;
use crate::body::limits::BodyLimits;
use crate::observe::RequestRecord;
use crate::refusal::RequestRefusal;
use crate::requests::ProgressHandle;

/// State needed to execute a request once more. Kept until the client has something of the answer.
pub(crate) struct RepeatableRequest {
    pub(crate) search: BackendSearch,
    pub(crate) message: Box<UpstreamRequest>,
}

/// Parameters of the search for another server.
#[derive(Clone)]
pub(crate) struct BackendSearch {
    pub(crate) upstream: Arc<UpstreamContext>,
    pub(crate) progress: ProgressHandle,
    pub(crate) model: ModelName,
    pub(crate) kind: LeaseKind,
    /// Prompt tokens, if admission needs them.
    pub(crate) tokens: Option<u64>,
    pub(crate) limits: BodyLimits,
    /// End of the whole exchange.
    pub(crate) deadline: Instant,
}

impl RepeatableRequest {
    /// Looks for another server than the dead one and sends it the request. `died` is the client's error if
    /// there is none.
    ///
    /// If the dead server was a canary, the death of the next one may be repaired once more. The answer's
    /// `kept` and a copy of the search are for that.
    pub(crate) async fn run(
        self,
        record: &mut RequestRecord,
        dead: Arc<dyn BackendLease>,
        died: RequestRefusal,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let Self {
            search: BackendSearch { upstream, progress, model, kind, tokens, limits, deadline },
            message,
        } = self;
        let mut attempts = BackendAttempts {
            upstream: &upstream,
            record,
            progress: &progress,
            model: &model,
            kind,
            tokens,
            // The request was admitted before, and its process is restarted anyway.
            may_load: true,
            limits: &limits,
            // The death of a canary does not count for the next servers.
            died: (!dead.is_canary()).then_some(died),
            patience: Duration::ZERO,
        };
        attempts.run_again(dead, message, deadline).await
    }
}
