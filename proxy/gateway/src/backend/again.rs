//! Executes a request again after its server died with only the head of the answer sent. The client already
//! has this head, which announces an event stream, and gets the events of the second execution.

use std::time::Duration;

use tokio::time::Instant;

use crate::backend::{BackendAttempts, BackendSearch, RelayedAnswer, SharedLease, UpstreamRequest};
use crate::observe::RequestRecord;
use crate::refusal::RequestRefusal;

/// State needed to execute a request again. Kept until the client has any part of the answer's body.
pub(crate) struct RepeatableRequest {
    pub(crate) search: BackendSearch,
    pub(crate) message: Box<UpstreamRequest>,
    /// Deadline of the whole exchange.
    pub(crate) deadline: Instant,
}

impl RepeatableRequest {
    pub(crate) fn new(search: BackendSearch, message: Box<UpstreamRequest>, deadline: Instant) -> Self {
        // The request was admitted before, and the model's process is restarted in any case.
        let search = BackendSearch { may_load: true, patience: Duration::ZERO, ..search };
        Self { search, message, deadline }
    }

    /// Searches for a server other than the dead one and sends the request to it. `died` is the error for the
    /// client if no server is found.
    ///
    /// If the dead server was a canary, the request may be moved once more after the death of the next
    /// server. For this case the answer keeps the request (`kept`) and a copy of the search.
    pub(crate) async fn run(
        self,
        record: &mut RequestRecord,
        dead: SharedLease,
        died: RequestRefusal,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let mut attempts = BackendAttempts::new(&self.search, record);
        // The death of a canary does not count against a repetition on the next server.
        attempts.died = (!dead.is_canary()).then_some(died);
        attempts.run_again(dead, self.message, self.deadline).await
    }
}
