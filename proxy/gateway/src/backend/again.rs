//! Executes a request again after its server died with only the head of the answer sent. The client already
//! has this head, which announces an event stream, and gets the events of the second execution.

use std::time::Duration;

use tokio::time::Instant;

use crate::backend::{BackendAttempts, BackendSearch, RelayedAnswer, SharedLease, UpstreamRequest};
use crate::observe::RequestRecord;
use crate::refusal::RequestRefusal;

/// State for executing a request again, kept until the client has any part of the answer's body.
pub(crate) struct RepeatableRequest {
    pub(crate) search: BackendSearch,
    pub(crate) message: Box<UpstreamRequest>,
    /// Deadline of the whole exchange.
    pub(crate) deadline: Instant,
}

impl RepeatableRequest {
    pub(crate) fn new(search: BackendSearch, message: Box<UpstreamRequest>, deadline: Instant) -> Self {
        // The request was admitted before, and the supervisor restarts the model's process in any case.
        let search = BackendSearch { may_load: true, patience: Duration::ZERO, ..search };
        Self { search, message, deadline }
    }

    /// Sends the request to a server other than the dead one. `died` is the client's error if none is found.
    ///
    /// If a canary's request has to be moved once more, the answer has it in `kept`.
    pub(crate) async fn run(
        self,
        record: &mut RequestRecord,
        dead: SharedLease,
        died: RequestRefusal,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let mut attempts = BackendAttempts::new(&self.search, record);
        // The death of a canary does not count: the request may be repeated once more.
        attempts.died = (!dead.is_canary()).then_some(died);
        attempts.run_again(dead, self.message, self.deadline).await
    }
}
