//! A request whose server died after its head and before anything of its answer: it is executed once more, and its client, who
//! has a head that promises events, gets those of the second execution.

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

/// What it takes to execute a request once more. Kept until something of its answer is with its client.
pub(crate) struct Again {
    pub(crate) search: Search,
    pub(crate) message: Box<Message>,
}

/// How another server is looked for.
#[derive(Clone)]
pub(crate) struct Search {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) progress: Progress,
    pub(crate) model: ModelName,
    pub(crate) kind: LeaseKind,
    /// Tokens of the prompt, where admission wants to know.
    pub(crate) tokens: Option<u64>,
    pub(crate) limits: Limits,
    /// When the exchange must be over.
    pub(crate) deadline: Instant,
}

impl Again {
    /// Looks for another server than the one that died, and gives it the request. `died` is what the client gets if there is
    /// none. Behind a build that is only tried, the death of the next one is another matter: the answer's `kept` and a copy of the search are
    /// for that.
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
            // What computes was let in, and its process comes back by itself.
            loads: true,
            limits: &limits,
            // Of a build that is tried it says nothing for those to come.
            died: (!dead.is_canary()).then_some(died),
            patience: Duration::ZERO,
        };
        attempts.run_again(dead, message, deadline).await
    }
}
