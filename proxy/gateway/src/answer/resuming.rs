//! State of a stream between two backends: the first is lost, and another is searched for.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

use crate::answer::continuation::{EventTranslator, StreamCut};
use crate::backend::attempts::RelayedAnswer;
use crate::backend::backends::BoxFuture;
use crate::observe::RequestRecord;

/// Result of the search for another backend, with the request's record. With an [`EventTranslator`], that
/// backend continues the answer of the first.
pub(crate) type ResumeResult = (RequestRecord, Result<(RelayedAnswer, Option<EventTranslator>), StreamCut>);

pub(crate) struct ResumeSearch {
    looking: BoxFuture<'static, ResumeResult>,
    comment: Pin<Box<Sleep>>,
    interval: Duration,
}

impl ResumeSearch {
    /// Starts a search (`looking`) during which the client gets a comment every `interval`.
    pub(crate) fn new(looking: BoxFuture<'static, ResumeResult>, interval: Duration) -> Self {
        Self { looking, comment: Box::pin(sleep(interval)), interval }
    }

    /// Returns the result, or `None` when a comment is due.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<ResumeResult>> {
        if let Poll::Ready(found) = self.looking.as_mut().poll(context) {
            return Poll::Ready(Some(found));
        }
        ready!(self.comment.as_mut().poll(context));
        self.comment.as_mut().reset(Instant::now() + self.interval);
        Poll::Ready(None)
    }
}
