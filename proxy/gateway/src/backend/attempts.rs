//! From the lease to the head of the answer: connects, sends, and retries where that is safe.
//!
//! A request is sent again if the backend cannot have executed anything, because
//! - no connection was made, or the connection handed the request back unsent; or
//! - the connection ended before any byte of an answer, the request asks for a stream, its whole body is
//!   still held, and the build is known to send the head of a stream when the request gets its slot (older
//!   builds and forks send the head with the first token, so a missing head proves nothing); or
//! - the request is a `GET` or `HEAD`, which executes nothing.
//!
//! If the server dies or is stopped before any byte of the answer, its result is lost. The gateway then sends
//! the request again, if the request only computes an answer and the operator allows a second execution
//! (`on_death`). If the second server dies, too, the client gets the error of the first death.
//!
//! If a canary fails in any way, the model's normal build takes over. The canary's attempt does not count.
//!
//! Each attempt takes a new lease, because the failed generation is dead or dying. If it died, the request
//! becomes a suspect: at its next attempt, no other request runs on the same generation (see
//! [`warden_policies::quarantine`]).

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_supervisor::{LeaseAddress, LeaseDenied, PromptFacts, SolitudeResult};

use crate::backend::{
    AttemptFailure, CANARY_BROKE, CANARY_STOPPED, CanaryAttempt, LeaseDemand, LeaseMode, RelayedAnswer,
    SharedLease, UpstreamContext, UpstreamRequest, attempt_once, join_others_later,
};
use crate::body::{BodyIntake, BodyLimits, SentBody};
use crate::observe::RequestRecord;
use crate::refusal::{BodyError, RequestRefusal};
use crate::requests::ProgressHandle;
use crate::trace::TracePeer;

/// Number of lease requests within the connect timeout while the offered generation is gone.
const LEASE_RETRIES: u32 = 50;

/// Facts that decide which backends may answer a request.
#[derive(Clone)]
pub(crate) struct BackendSearch {
    pub(crate) upstream: Arc<UpstreamContext>,
    pub(crate) progress: ProgressHandle,
    pub(crate) model: ModelName,
    pub(crate) kind: LeaseKind,
    /// Number of prompt tokens; set if admission depends on it.
    pub(crate) tokens: Option<u64>,
    /// Conversation key, if [`crate::backend::LeaseProvider::needs_conversation_key`] asks for it.
    pub(crate) conversation: Option<u64>,
    /// True if the request may load its model.
    pub(crate) may_load: bool,
    pub(crate) limits: BodyLimits,
    /// Time limit for a canary to begin its answer.
    pub(crate) patience: Duration,
}

impl BackendSearch {
    pub(crate) fn new(
        upstream: Arc<UpstreamContext>,
        progress: ProgressHandle,
        model: ModelName,
        kind: LeaseKind,
        may_load: bool,
        limits: BodyLimits,
    ) -> Self {
        Self {
            upstream,
            progress,
            model,
            kind,
            tokens: None,
            conversation: None,
            may_load,
            limits,
            patience: Duration::ZERO,
        }
    }

    /// Waits for the first lease; `None` if the model is not loaded and the request must not load it.
    pub(crate) async fn first_lease(&self) -> Result<Option<SharedLease>, LeaseDenied> {
        self.lease(if self.may_load { LeaseMode::First } else { LeaseMode::IfLoaded }).await
    }

    async fn lease(&self, mode: LeaseMode) -> Result<Option<SharedLease>, LeaseDenied> {
        let prompt = PromptFacts { tokens: self.tokens, conversation: self.conversation };
        let demand = LeaseDemand { kind: self.kind, prompt, mode };
        self.upstream.backends.lease(&self.model, demand).await
    }

    pub(crate) fn quarantine_refusal(&self, print: RequestFingerprint, executed: bool) -> RequestRefusal {
        let backends = &self.upstream.backends;
        let left = match backends.request_standing(&self.model, print) {
            RequestStanding::Refused { left } => left,
            RequestStanding::Clear | RequestStanding::Suspect => Duration::ZERO,
        };
        backends.note_refusal(&self.model, print);
        RequestRefusal::Quarantined { model: self.model.clone(), print, left, executed }
    }
}

pub(crate) struct BackendAttempts<'a> {
    pub(crate) search: &'a BackendSearch,
    pub(crate) record: &'a mut RequestRecord,
    /// The client's error if no answer follows; set when a server may have executed the request and died.
    pub(crate) died: Option<RequestRefusal>,
    /// True if the answer keeps the request for another way of continuing.
    pub(crate) keeps_message: bool,
}

enum NextAttempt {
    /// Counts as an attempt: the failed one executed nothing that matters.
    Counted,
    /// Executes the request again, because its server died or was stopped.
    OnceMore,
}

impl<'a> BackendAttempts<'a> {
    pub(crate) fn new(search: &'a BackendSearch, record: &'a mut RequestRecord) -> Self {
        Self { search, record, died: None, keeps_message: false }
    }

    /// Waits for a lease, and meanwhile reads the body: only reading shows that the client has left.
    #[inline]
    pub(crate) async fn lease(&mut self, intake: &mut BodyIntake) -> Result<SharedLease, RequestRefusal> {
        self.note_waiting();
        let granted = tokio::select! {
            biased;
            granted = self.search.first_lease() => granted,
            refusal = intake.read_ahead() => return Err(refusal),
        };
        self.note_granted(granted)
    }

    pub(crate) fn note_granted(
        &mut self,
        granted: Result<Option<SharedLease>, LeaseDenied>,
    ) -> Result<SharedLease, RequestRefusal> {
        let model = &self.search.model;
        let granted = granted.map_err(|denied| RequestRefusal::Denied { model: model.clone(), denied })?;
        let lease = granted.ok_or_else(|| RequestRefusal::NotLoaded { model: model.clone() })?;
        self.record.queued += lease.queued_for();
        if let Some(trace) = &mut self.record.trace {
            trace.note_granted(lease.queued_for());
        }
        self.record.generation = Some(lease.generation());
        self.search.progress.note_leased(lease.generation(), self.record.queued);
        Ok(lease)
    }

    pub(crate) fn note_waiting(&mut self) {
        if let Some(trace) = &mut self.record.trace {
            trace.note_waiting();
        }
    }

    pub(crate) fn note_sent(&mut self, lease: &SharedLease, message: &mut UpstreamRequest) {
        if let Some(trace) = &mut self.record.trace {
            let peer = || TracePeer::from_address(lease.generation(), lease.is_canary(), lease.address());
            message.set_parent_span(trace.start_attempt(peer));
        }
    }

    /// Makes the gateway's own request to the backend a child of the current span, without a separate span.
    pub(crate) fn note_side_question(&mut self, message: &mut UpstreamRequest) {
        if let Some(trace) = &mut self.record.trace {
            message.set_parent_span(trace.side_traceparent());
        }
    }

    pub(crate) fn note_failed(&mut self, why: &'static str) {
        if let Some(trace) = &mut self.record.trace {
            trace.end_attempt(Some(why));
        }
    }

    /// Tries until a backend answers. Inlined, because another function would copy the large future.
    #[inline]
    pub(crate) async fn run(
        &mut self,
        lease: SharedLease,
        message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let relayed = {
            let searching = pin!(self.run_attempts(lease, message, deadline));
            searching.await
        };
        relayed.map_err(|refusal| self.choose_refusal(refusal))
    }

    /// Like [`Self::run`], for a request whose server died after its answer had begun.
    pub(crate) async fn run_again(
        &mut self,
        dead: SharedLease,
        message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        match self.lease_once_more(dead).await {
            Ok(lease) => self.run(lease, message, deadline).await,
            Err(refusal) => Err(self.choose_refusal(refusal)),
        }
    }

    /// Chooses the error for the client: the death of the first server, not the failed search for a second.
    pub(crate) fn choose_refusal(&mut self, refusal: RequestRefusal) -> RequestRefusal {
        match self.died.take() {
            Some(died) if !refusal.may_have_executed() => died.merge_with(refusal),
            _ => refusal,
        }
    }

    #[inline]
    async fn run_attempts(
        &mut self,
        mut lease: SharedLease,
        mut message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let BackendSearch { upstream, model, .. } = self.search;
        let config = &upstream.config.upstream;
        let mut attempt = 1;
        if lease.is_canary() {
            // Boxed, because canaries are rare and would enlarge the future of every request.
            match Box::pin(self.try_canary(lease, message, deadline)).await? {
                CanaryAttempt::Answers(relayed) => return Ok(*relayed),
                CanaryAttempt::Failed(other, back) => (lease, message) = (other, back),
            }
        }
        loop {
            if message.is_safe() {
                lease.mark_read_only();
            }
            if let Some(print) = message.sent().fingerprint() {
                lease = self.wait_until_alone(lease, print, deadline).await?;
            }
            self.note_sent(&lease, &mut message);
            let mut revoked = lease.clone().revoked();
            let result = {
                // Pin the attempt first, so that the timeout does not move a copy of it.
                let once = pin!(attempt_once(upstream, &lease, &mut message));
                let mut once = pin!(timeout_at(deadline, once));
                tokio::select! {
                    biased;
                    result = &mut once => Some(result),
                    () = &mut revoked => if lease.is_running() {
                        None
                    } else {
                        // The end of the process is noticed before the end of its connection. Only the
                        // connection shows how far the request got, so wait for its end.
                        timeout_at(Instant::now() + config.connect_timeout, once).await.ok()
                    },
                }
            };
            // Boxed, because failures are rare and would enlarge the future of every request.
            let next = match result {
                Some(Ok(Ok(answer))) => {
                    let kept = message.streams && (self.keeps_message || self.may_repeat(&message));
                    let mut relayed = answer.with_lease(lease, revoked, message.sent(), deadline);
                    relayed.message = kept.then_some(message);
                    return Ok(relayed);
                }
                Some(Err(_)) => return Err(RequestRefusal::TimedOut { model: model.clone() }),
                None => Box::pin(self.handle_revoked(&lease, &mut message, deadline)).await?,
                Some(Ok(Err(failed))) => {
                    Box::pin(self.handle_failure(failed, &lease, &mut message, deadline, attempt)).await?
                }
            };
            // `revoked` keeps the old lease, for whose slot the next attempt may wait.
            drop(revoked);
            lease = match next {
                NextAttempt::OnceMore => Box::pin(self.lease_once_more(lease)).await?,
                NextAttempt::Counted => {
                    attempt += 1;
                    self.record.retries += 1;
                    Box::pin(self.lease_elsewhere(lease, config.connect_timeout)).await?
                }
            };
        }
    }

    async fn handle_revoked(
        &mut self,
        lease: &SharedLease,
        message: &mut UpstreamRequest,
        deadline: Instant,
    ) -> Result<NextAttempt, RequestRefusal> {
        self.note_failed("stopped");
        if let Some(print) = message.sent().sent_fingerprint() {
            lease.report_lost(print);
            if lease.is_alone() {
                // Only the end of the process shows whether this request killed it.
                drop(timeout_at(deadline, lease.settled()).await);
            }
            if let RequestStanding::Refused { .. } = lease.request_standing(print) {
                return Err(self.search.quarantine_refusal(print, true));
            }
        }
        self.once_more_or(message, lease.revoked_refusal(&self.search.model))
    }

    async fn handle_failure(
        &mut self,
        failed: AttemptFailure,
        lease: &SharedLease,
        message: &mut UpstreamRequest,
        deadline: Instant,
        attempt: u32,
    ) -> Result<NextAttempt, RequestRefusal> {
        let model = self.search.model.clone();
        self.note_failed(failed.as_str());
        let print = self.report_failure(failed, lease, &message.sent(), attempt)?;
        let held = message.is_held();
        let is_safe = message.is_safe();
        let not_begun = held && message.generates_stream && lease.server_facts().no_head_means_not_begun();
        let (nothing_ran, proved) = match failed {
            AttemptFailure::Refused | AttemptFailure::NoDescriptors | AttemptFailure::Unsent => (true, true),
            AttemptFailure::Sent => (not_begun, held && (is_safe || not_begun)),
            AttemptFailure::Begun => (false, held && is_safe),
            AttemptFailure::Garbled => (false, false),
        };
        if let Some(print) = print
            && lease.is_alone()
        {
            // No other request was running, so this request may have killed its server. Wait for the end of
            // the process, even if the GPU frees its memory slowly: only this client waits, and the request
            // could kill another server.
            drop(timeout_at(deadline, lease.settled()).await);
            if let RequestStanding::Refused { .. } = lease.request_standing(print) {
                return Err(self.search.quarantine_refusal(print, !nothing_ran));
            }
        }
        if failed == AttemptFailure::Garbled {
            let why = "it is not HTTP/1.1".to_owned();
            return Err(RequestRefusal::Garbled { model, why });
        }
        if !proved {
            return self.once_more_or(message, RequestRefusal::Died { model });
        }
        if attempt < self.search.upstream.config.upstream.attempts {
            return Ok(NextAttempt::Counted);
        }
        Err(if nothing_ran {
            RequestRefusal::Unreachable { model, attempts: attempt }
        } else {
            RequestRefusal::Died { model }
        })
    }

    /// Reports a failed attempt to its lease and returns the fingerprint of a request that may have been
    /// executed. If the body caused the failure, returns the body's refusal as an error.
    pub(super) fn report_failure(
        &self,
        failed: AttemptFailure,
        lease: &SharedLease,
        sent: &SentBody,
        attempt: u32,
    ) -> Result<Option<RequestFingerprint>, RequestRefusal> {
        match (sent.fault(), sent.fingerprint()) {
            (Some(BodyError::Quarantined), Some(print)) => {
                return Err(self.search.quarantine_refusal(print, false));
            }
            (Some(BodyError::Stopped), _) => {
                let model = self.search.model.clone();
                return Err(RequestRefusal::Unreachable { model, attempts: attempt });
            }
            (Some(fault), _) => return Err(self.search.limits.refusal(fault)),
            (None, _) => {}
        }
        // A backend does not execute a request before it has all of it.
        let print = if failed.was_sent() { sent.sent_fingerprint() } else { None };
        if let Some(print) = print {
            lease.report_broken(print);
        }
        if failed != AttemptFailure::NoDescriptors {
            lease.doubt();
        }
        Ok(print)
    }

    /// Allows a second execution after the server died or was stopped, or else returns `died`.
    fn once_more_or(
        &mut self,
        message: &UpstreamRequest,
        died: RequestRefusal,
    ) -> Result<NextAttempt, RequestRefusal> {
        if !self.may_repeat(message) {
            return Err(died);
        }
        self.died = Some(died);
        Ok(NextAttempt::OnceMore)
    }

    /// Returns whether the request may be repeated although a server may have executed it.
    pub(super) fn may_repeat(&self, message: &UpstreamRequest) -> bool {
        self.died.is_none() && message.may_repeat()
    }

    /// Takes a lease for a request that a dead or dying server may have executed.
    pub(crate) async fn lease_once_more(&mut self, dead: SharedLease) -> Result<SharedLease, RequestRefusal> {
        self.record.continued = true;
        self.note_failed("died");
        if dead.is_canary() {
            self.note_canary_failure(if dead.was_stopped() { CANARY_STOPPED } else { CANARY_BROKE });
        } else {
            self.record.retries += 1;
        }
        self.lease_elsewhere(dead, self.search.upstream.config.upstream.connect_timeout).await
    }

    /// Waits until a suspect is alone on its generation. Nothing is sent yet, so no attempt counts.
    async fn wait_until_alone(
        &mut self,
        mut lease: SharedLease,
        print: RequestFingerprint,
        deadline: Instant,
    ) -> Result<SharedLease, RequestRefusal> {
        loop {
            match lease.request_standing(print) {
                RequestStanding::Clear => return Ok(lease),
                RequestStanding::Refused { .. } => return Err(self.search.quarantine_refusal(print, false)),
                RequestStanding::Suspect => {}
            }
            // Boxed, because suspects are rare and would enlarge the future of every request.
            let alone = timeout_at(deadline, lease.clone().alone(print)).await;
            let model = &self.search.model;
            match alone.map_err(|_| RequestRefusal::Unreachable { model: model.clone(), attempts: 0 })? {
                SolitudeResult::Granted => {
                    join_others_later(&lease, print, &self.search.upstream.tasks);
                    return Ok(lease);
                }
                SolitudeResult::Shared => return Ok(lease),
                SolitudeResult::Refused(_) => return Err(self.search.quarantine_refusal(print, false)),
                SolitudeResult::Gone => {
                    let patience = self.search.upstream.config.upstream.connect_timeout;
                    lease = Box::pin(self.lease_elsewhere(lease, patience)).await?;
                }
            }
        }
    }

    /// Takes a lease on a generation other than the failed one. The supervisor may offer the failed one until
    /// it notices the failure. The wait is limited, because the failed generation may be alive and
    /// misbehaving.
    pub(super) async fn lease_elsewhere(
        &mut self,
        failed: SharedLease,
        patience: Duration,
    ) -> Result<SharedLease, RequestRefusal> {
        self.search.progress.note_waiting_again(self.record.continued);
        let may_load = self.search.may_load;
        let mode = if may_load { LeaseMode::Again } else { LeaseMode::IfLoaded };
        if failed.is_canary() {
            // A canary's lease belongs to another model, so do not wait for the end of its process.
            drop(failed);
            self.note_waiting();
            let granted = self.search.lease(mode).await;
            return self.note_granted(granted);
        }
        let generation = failed.generation();
        let settled = failed.settled();
        drop(failed);
        // The end of the failed process decides whether the request may run next to others.
        drop(timeout_at(Instant::now() + patience, settled).await);
        let until = Instant::now() + patience;
        loop {
            self.note_waiting();
            let granted = self.search.lease(mode).await;
            let lease = self.note_granted(granted)?;
            // The supervisor probes a remote endpoint before it grants a lease on it again.
            let is_remote = matches!(lease.address(), LeaseAddress::Remote(_));
            let is_other = lease.generation() != generation || is_remote;
            if is_other || !may_load || Instant::now() >= until {
                return Ok(lease);
            }
            drop(lease);
            sleep(patience / LEASE_RETRIES).await;
        }
    }
}
