//! Executes a request again after its server died with only the head of the answer sent. The client already
//! has this head, which announces an event stream, and gets the events of the second execution.

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

/// State needed to execute a request again. Kept until the client has any part of the answer's body.
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
    /// Prompt tokens; set if admission depends on their number.
    pub(crate) tokens: Option<u64>,
    pub(crate) limits: BodyLimits,
    /// Deadline of the whole exchange.
    pub(crate) deadline: Instant,
}

impl RepeatableRequest {
    /// Searches for a server other than the dead one and sends the request to it. `died` is the error for the
    /// client if no server is found.
    ///
    /// If the dead server was a canary, the request may be moved once more after the death of the next
    /// server. For this case the answer keeps the request (`kept`) and a copy of the search.
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
            // The request was admitted before, and the model's process is restarted in any case.
            may_load: true,
            limits: &limits,
            // The death of a canary does not count against a repetition on the next server.
            died: (!dead.is_canary()).then_some(died),
            patience: Duration::ZERO,
        };
        attempts.run_again(dead, message, deadline).await
    }
}
