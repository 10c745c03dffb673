//! The quarantine check for a streamed body, whose fingerprint is known only with its last piece. The last
//! piece is held back until the check permits it, because llama-server starts nothing before it has the
//! whole body.
//!
//! ```text
//!   pieces ... last piece --> [ not suspected? ] -- yes ----------------------> sent
//!                                | suspect: waits until no other request runs -> sent
//!                                | refused, or the process ends --------------> the body fails, incomplete
//! ```

use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use tokio_util::task::TaskTracker;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_supervisor::SolitudeResult;

use crate::backend::backends::{BackendLease, BoxFuture};
use crate::refusal::BodyError;

pub(crate) struct BodyCheckpoint {
    /// Weak reference: the body must not keep the lease after its exchange has ended.
    lease: Weak<dyn BackendLease>,
    tracker: TaskTracker,
    waiting: Option<BoxFuture<'static, SolitudeResult>>,
}

impl BodyCheckpoint {
    pub(crate) fn new(lease: &Arc<dyn BackendLease>, tracker: TaskTracker) -> Self {
        Self { lease: Arc::downgrade(lease), tracker, waiting: None }
    }

    /// Returns whether the last piece of the body may be sent.
    pub(crate) fn poll(
        &mut self,
        print: RequestFingerprint,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), BodyError>> {
        if self.waiting.is_none() {
            let Some(lease) = self.lease.upgrade() else { return Poll::Ready(Err(BodyError::Stopped)) };
            match lease.request_standing(print) {
                RequestStanding::Clear => return Poll::Ready(Ok(())),
                RequestStanding::Refused { .. } => return Poll::Ready(Err(BodyError::Quarantined)),
                RequestStanding::Suspect => self.waiting = Some(lease.alone(print)),
            }
        }
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let alone = ready!(waiting.as_mut().poll(context));
        self.waiting = None;
        Poll::Ready(match alone {
            SolitudeResult::Granted => {
                if let Some(lease) = self.lease.upgrade() {
                    join_others_later(&lease, print, &self.tracker);
                }
                Ok(())
            }
            SolitudeResult::Shared => Ok(()),
            SolitudeResult::Refused(_) => Err(BodyError::Quarantined),
            SolitudeResult::Gone => Err(BodyError::Stopped),
        })
    }
}

/// Admits other requests on the generation again if a suspect still runs after its time limit.
pub(crate) fn join_others_later(
    lease: &Arc<dyn BackendLease>,
    print: RequestFingerprint,
    tracker: &TaskTracker,
) {
    let (lone, after) = (Arc::downgrade(lease), lease.solitude_limit(print));
    drop(tracker.spawn(async move {
        tokio::time::sleep(after).await;
        if let Some(lease) = lone.upgrade() {
            lease.end_solitude();
        }
    }));
}
