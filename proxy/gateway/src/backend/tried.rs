//! An attempt by a canary. If it fails in any way, the model's normal build takes over.

use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use hyper::body::Body as _;
use tokio::time::{Instant, timeout_at};

use crate::backend::{
    AnsweringBackend, AttemptFailure, BackendAttempts, RelayedAnswer, SharedLease, UpstreamRequest,
    attempt_once,
};
use crate::protocol::{headers, wire};
use crate::refusal::RequestRefusal;

impl BackendAttempts<'_> {
    /// Makes one attempt by a canary. Without a valid answer, returns a lease of the model's normal build.
    pub(super) async fn try_canary(
        &mut self,
        lease: SharedLease,
        mut message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<CanaryAttempt, RequestRefusal> {
        let upstream = &self.search.upstream;
        self.note_sent(&lease, &mut message);
        let mut revoked = lease.clone().revoked();
        let until = deadline.min(Instant::now() + self.search.patience);
        let result = {
            let mut once = pin!(timeout_at(until, attempt_once(upstream, &lease, &mut message)));
            tokio::select! {
                biased;
                result = &mut once => Some(result),
                () = &mut revoked => None,
            }
        };
        let why = match result {
            Some(Ok(Ok(answer))) => {
                let relayed = answer.with_lease(lease, revoked, message.sent(), deadline);
                return self.pass_canary_answer(relayed, message, until).await;
            }
            None => {
                if let Some(print) = message.sent().sent_fingerprint() {
                    lease.report_lost(print);
                }
                why_revoked(&lease)
            }
            Some(Err(_)) => TOO_LATE,
            Some(Ok(Err(failed))) => {
                self.report_failure(failed, &lease, &message.sent(), 1)?;
                if failed == AttemptFailure::Garbled { ANSWER_GARBLED } else { CANARY_BROKE }
            }
        };
        drop(revoked);
        let other = self.lease_own_build(lease, why).await?;
        Ok(CanaryAttempt::Failed(other, message))
    }

    async fn pass_canary_answer(
        &mut self,
        mut relayed: RelayedAnswer,
        message: Box<UpstreamRequest>,
        until: Instant,
    ) -> Result<CanaryAttempt, RequestRefusal> {
        relayed.backend.first_event_deadline = Some(until);
        let most = self.search.upstream.config.upstream.continue_bytes.in_memory();
        let Err(why) = check_canary_answer(&mut relayed, most, until).await else {
            let kept = message.streams && self.may_repeat(&message);
            relayed.message = kept.then_some(message);
            return Ok(CanaryAttempt::Answers(Box::new(relayed)));
        };
        let AnsweringBackend { lease, sent, .. } = *relayed.backend;
        if why == CANARY_BROKE
            && let Some(print) = sent.sent_fingerprint()
        {
            lease.report_broken(print);
            lease.doubt();
        }
        let other = self.lease_own_build(lease, why).await?;
        Ok(CanaryAttempt::Failed(other, message))
    }

    /// Replaces the canary's lease by one of the model's normal build.
    async fn lease_own_build(
        &mut self,
        lease: SharedLease,
        why: &'static str,
    ) -> Result<SharedLease, RequestRefusal> {
        tracing::debug!(model = %self.search.model, why, "a canary failed: the request goes to the model's own build");
        self.note_failed("canary_left");
        self.note_canary_failure(why);
        self.lease_elsewhere(lease, Duration::ZERO).await
    }

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

pub(super) enum CanaryAttempt {
    Answers(Box<RelayedAnswer>),
    /// The canary failed. Holds a lease of the model's normal build, and the request to send there.
    Failed(SharedLease, Box<UpstreamRequest>),
}

pub(super) const CANARY_BROKE: &str = "its process ended, or its connection broke";
pub(super) const CANARY_STOPPED: &str = "it was stopped";
/// The answer is too large to be held and checked, which is no fault of the canary.
const ANSWER_TOO_LARGE: &str = "its answer exceeds the size limit";
const ANSWER_GARBLED: &str = "its answer cannot be read";
const TOO_LATE: &str = "it did not answer in time";

fn why_revoked(lease: &SharedLease) -> &'static str {
    if lease.was_stopped() { CANARY_STOPPED } else { CANARY_BROKE }
}

/// Checks whether a canary's answer can be passed on. Reads a non-streaming answer, up to `most` bytes,
/// before its head is passed on: afterwards no other build could replace the answer.
async fn check_canary_answer(
    relayed: &mut RelayedAnswer,
    most: usize,
    until: Instant,
) -> Result<(), &'static str> {
    let RelayedAnswer { response, read_ahead, backend, .. } = relayed;
    // The model's normal build may accept this request: the canary may lack a route or a field.
    if !response.status().is_success() {
        return Err("it answered with an error");
    }
    if wire::check_answer(response.status(), response.headers()).is_err() {
        return Err(ANSWER_GARBLED);
    }
    if headers::is_events(response.headers()) {
        return Ok(());
    }
    let mut read = 0;
    while read <= most && !response.body().is_end_stream() {
        let body = response.body_mut();
        let next = poll_fn(|context| backend.conn.poll_piece(body, context));
        let piece = tokio::select! {
            biased;
            piece = timeout_at(until, next) => piece,
            () = &mut backend.revoked => return Err(why_revoked(&backend.lease)),
        };
        match piece {
            Ok(None) => break,
            Ok(Some(Ok(piece))) => {
                backend.lease.note_progress(piece.len());
                read += piece.len();
                read_ahead.push_back(piece);
            }
            Ok(Some(Err(_))) => return Err(CANARY_BROKE),
            Err(_) => return Err(TOO_LATE),
        }
    }
    if read > most { Err(ANSWER_TOO_LARGE) } else { Ok(()) }
}
