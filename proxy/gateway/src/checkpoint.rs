//! The last look at a body that is streamed: what it is known only when its last piece is here. That piece is held back
//! until it may pass, and llama-server begins with nothing before it has it.
//!
//! ```text
//!   pieces ... last piece --> [ nothing known against it? ] --yes--> passes
//!                                | suspect: waits to be alone -----> passes
//!                                | refused, or its process ends ---> the body fails, and the backend never has it whole
//! ```

use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use tokio_util::task::TaskTracker;
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_supervisor::Alone;

use crate::backends::{BoxFuture, Right};
use crate::request_body::BodyFault;

/// Where a streamed body is looked at.
pub(crate) struct Checkpoint {
    /// Not the lease itself: a body must not keep one longer than its exchange does.
    right: Weak<dyn Right>,
    tracker: TaskTracker,
    waiting: Option<BoxFuture<'static, Alone>>,
}

impl Checkpoint {
    pub(crate) fn new(right: &Arc<dyn Right>, tracker: TaskTracker) -> Self {
        Self { right: Arc::downgrade(right), tracker, waiting: None }
    }

    /// Whether the end of this body may pass.
    pub(crate) fn poll(
        &mut self,
        print: Fingerprint,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), BodyFault>> {
        if self.waiting.is_none() {
            let Some(right) = self.right.upgrade() else { return Poll::Ready(Err(BodyFault::Stopped)) };
            match right.standing(print) {
                Standing::Clear => return Poll::Ready(Ok(())),
                Standing::Refused { .. } => return Poll::Ready(Err(BodyFault::Quarantined)),
                Standing::Suspect => self.waiting = Some(right.alone(print)),
            }
        }
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let alone = ready!(waiting.as_mut().poll(context));
        self.waiting = None;
        Poll::Ready(match alone {
            Alone::Granted => {
                if let Some(right) = self.right.upgrade() {
                    let_others_in_later(&right, print, &self.tracker);
                }
                Ok(())
            }
            Alone::InCompany => Ok(()),
            Alone::Refused(_) => Err(BodyFault::Quarantined),
            Alone::Gone => Err(BodyFault::Stopped),
        })
    }
}

/// A suspect that runs for long is joined by others.
pub(crate) fn let_others_in_later(right: &Arc<dyn Right>, print: Fingerprint, tracker: &TaskTracker) {
    let (lone, after) = (Arc::downgrade(right), right.alone_for(print));
    drop(tracker.spawn(async move {
        tokio::time::sleep(after).await;
        if let Some(right) = lone.upgrade() {
            right.join();
        }
    }));
}
