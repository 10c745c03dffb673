//! An attempt by a canary. If it fails in any way, the model's normal build takes over.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use hyper::body::{Body as _, Incoming};
use tokio::time::{Instant, timeout_at};

use crate::backend::attempts::{AnsweringBackend, AttemptFailure, BackendAttempts, RelayedAnswer};
use crate::backend::backends::BackendLease;
use crate::backend::message::UpstreamRequest;
use crate::protocol::{headers, wire};
use crate::refusal::{BodyError, RequestRefusal};

impl BackendAttempts<'_> {
    /// Makes one attempt by a canary. Without a valid answer, returns a lease of the model's normal build.
    pub(super) async fn try_canary(
        &mut self,
        lease: Arc<dyn BackendLease>,
        mut message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<CanaryAttempt, RequestRefusal> {
        let Self { upstream, model, limits, .. } = *self;
        self.note_sent(&lease, &mut message);
        let mut revoked = lease.clone().revoked();
        let until = deadline.min(Instant::now() + self.patience);
        let result = {
            let mut once = pin!(timeout_at(until, Self::attempt_once(upstream, &lease, &mut message)));
            tokio::select! {
                biased;
                result = &mut once => Some(result),
                () = &mut revoked => None,
            }
        };
        let why = match result {
            Some(Ok(Ok((response, conn, pool)))) => {
                let (sent, begins_by) = (message.sent(), Some(until));
                let backend = Box::new(AnsweringBackend {
                    lease,
                    revoked,
                    conn,
                    pool,
                    sent,
                    deadline,
                    first_event_deadline: begins_by,
                });
                match check_canary_answer(
                    response,
                    backend,
                    upstream.config.upstream.continue_bytes.in_memory(),
                    until,
                )
                .await
                {
                    Ok((response, ahead, backend)) => {
                        let kept = message.streams() && self.may_repeat(&message);
                        let kept = kept.then_some(message);
                        return Ok(CanaryAttempt::Answers(Box::new(RelayedAnswer {
                            response,
                            read_ahead: ahead,
                            backend,
                            message: kept,
                        })));
                    }
                    Err((backend, why)) => {
                        let AnsweringBackend { lease, sent, .. } = *backend;
                        if let Some(print) = sent.sent_fingerprint().filter(|_| why == CANARY_BROKE) {
                            lease.report_broken(print);
                            lease.doubt();
                        }
                        let other = self.lease_own_build(lease, why).await?;
                        return Ok(CanaryAttempt::Failed(other, message));
                    }
                }
            }
            None => {
                if let Some(print) = message.sent().sent_fingerprint() {
                    lease.report_lost(print);
                }
                if lease.was_stopped() { CANARY_STOPPED } else { CANARY_BROKE }
            }
            Some(Err(_)) => "it did not answer in time",
            Some(Ok(Err(failed))) => {
                let sent = message.sent();
                // A body that the client did not send completely, or that is quarantined, is no fault of
                // the canary.
                match (sent.fault(), sent.fingerprint()) {
                    (Some(BodyError::Quarantined), Some(print)) => {
                        return Err(upstream.quarantine_refusal(model, print, false));
                    }
                    (Some(fault), _) => return Err(limits.refusal(fault)),
                    (None, _) => {}
                }
                if let Some(print) = sent.sent_fingerprint().filter(|_| failed.was_sent()) {
                    lease.report_broken(print);
                }
                if failed != AttemptFailure::NoDescriptors {
                    lease.doubt();
                }
                if failed == AttemptFailure::Garbled { ANSWER_GARBLED } else { CANARY_BROKE }
            }
        };
        drop(revoked);
        let other = self.lease_own_build(lease, why).await?;
        Ok(CanaryAttempt::Failed(other, message))
    }

    /// Takes a lease of the model's normal build in place of the canary's lease.
    async fn lease_own_build(
        &mut self,
        lease: Arc<dyn BackendLease>,
        why: &'static str,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        tracing::debug!(model = %self.model, why, "a canary failed: the request goes to the model's own build");
        self.note_failed("canary_left");
        self.note_canary_failure(why);
        self.lease_elsewhere(lease, Duration::ZERO).await
    }

    /// Records that a canary did not answer.
    pub(crate) fn note_canary_failure(&mut self, why: &'static str) {
        self.record.retries += 1;
        match &mut self.record.canary_part {
            // Neither a deliberate stop nor a large answer is the canary's fault.
            tried if why == CANARY_STOPPED || why == ANSWER_TOO_LARGE => *tried = None,
            Some(tried) => tried.canary_failure = Some(why),
            None => {}
        }
    }
}

/// Result of a request that was sent to a canary.
pub(super) enum CanaryAttempt {
    Answers(Box<RelayedAnswer>),
    /// The canary failed: a lease of the model's normal build, and the request to send there.
    Failed(Arc<dyn BackendLease>, Box<UpstreamRequest>),
}

/// Reasons why a canary was abandoned.
pub(super) const CANARY_BROKE: &str = "its process ended, or its connection broke";
pub(super) const CANARY_STOPPED: &str = "it was stopped";
/// The answer exceeds the bytes that may be held to check it first; no fault of the canary.
const ANSWER_TOO_LARGE: &str = "its answer exceeds the size limit";
const ANSWER_GARBLED: &str = "its answer cannot be read";

/// Checks whether a canary's answer can be passed on. A non-streaming answer is read, up to `most` bytes,
/// before its head is passed on: afterwards another build could not replace the answer.
async fn check_canary_answer(
    mut response: Response<Incoming>,
    mut backend: Box<AnsweringBackend>,
    most: usize,
    until: Instant,
) -> Result<(Response<Incoming>, VecDeque<Bytes>, Box<AnsweringBackend>), (Box<AnsweringBackend>, &'static str)>
{
    // The model's normal build may accept a request that the canary refuses: the canary may lack a route or
    // a field.
    if !response.status().is_success() {
        return Err((backend, "it answered with an error"));
    }
    if wire::check_answer(response.status(), response.headers()).is_err() {
        return Err((backend, ANSWER_GARBLED));
    }
    let mut ahead = VecDeque::new();
    if headers::is_events(response.headers()) {
        return Ok((response, ahead, backend));
    }
    let mut read = 0;
    while read <= most && !response.body().is_end_stream() {
        let body = response.body_mut();
        let next = poll_fn(|context| backend.conn.poll_piece(body, context));
        let piece = tokio::select! {
            biased;
            piece = timeout_at(until, next) => piece,
            () = &mut backend.revoked => {
                let why = if backend.lease.was_stopped() { CANARY_STOPPED } else { CANARY_BROKE };
                return Err((backend, why));
            }
        };
        match piece {
            Ok(None) => break,
            Ok(Some(Ok(piece))) => {
                backend.lease.note_progress(piece.len());
                read += piece.len();
                ahead.push_back(piece);
            }
            Ok(Some(Err(_))) => return Err((backend, CANARY_BROKE)),
            Err(_) => return Err((backend, "it did not answer in time")),
        }
    }
    if read > most {
        return Err((backend, ANSWER_TOO_LARGE));
    }
    Ok((response, ahead, backend))
}
