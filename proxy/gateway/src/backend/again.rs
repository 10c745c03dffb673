//! Executes a request once more whose server died after the head of its answer and before anything else.
//! The client has a head that promises events, and gets those of the second execution.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use crate::backend::attempts::{Attempts, Relayed};
use crate::backend::backends::BackendLease;
use crate::backend::message::Message;
use crate::backend::upstream::Upstream;
use crate::body::limits::Limits;
use crate::observe::Record;
use crate::refusal::Refusal;
use crate::requests::Progress;

/// State needed to execute a request once more. Kept until the client has something of the answer.
pub(crate) struct Again {
    pub(crate) search: Search,
    pub(crate) message: Box<Message>,
}

/// Parameters of the search for another server.
#[derive(Clone)]
pub(crate) struct Search {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) progress: Progress,
    pub(crate) model: ModelName,
    pub(crate) kind: LeaseKind,
    /// Prompt tokens, if admission needs them.
    pub(crate) tokens: Option<u64>,
    pub(crate) limits: Limits,
    /// End of the whole exchange.
    pub(crate) deadline: Instant,
}

impl Again {
    /// Looks for another server than the dead one and sends it the request. `died` is the client's error if
    /// there is none.
    ///
    /// If the dead server was a canary, the death of the next one may be repaired once more. The answer's
    /// `kept` and a copy of the search are for that.
    pub(crate) async fn run(
        self,
        record: &mut Record,
        dead: Arc<dyn BackendLease>,
        died: Refusal,
    ) -> Result<Relayed, Refusal> {
        let Self { search: Search { upstream, progress, model, kind, tokens, limits, deadline }, message } =
            self;
        let mut attempts = Attempts {
            upstream: &upstream,
            record,
            progress: &progress,
            model: &model,
            kind,
            tokens,
            // The request was admitted before, and its process is restarted anyway.
            loads: true,
            limits: &limits,
            // The death of a canary does not count for the next servers.
            died: (!dead.is_canary()).then_some(died),
            patience: Duration::ZERO,
        };
        attempts.run_again(dead, message, deadline).await
    }
}
