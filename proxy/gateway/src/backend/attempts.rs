//! From the lease to the head of the answer: connects, sends, and retries where that is safe.
//!
//! A request is sent again if the backend cannot have executed anything, because
//! - no connection was made, or the connection handed the request back unsent; or
//! - the connection ended before any byte of an answer, the request asks for a stream, its whole body is
//!   still held, and the build is known to send the head of a stream when the request gets its slot (older
//!   builds and forks send the head with the first token, so a missing head proves nothing); or
//! - the request is a `GET` or `HEAD`, which executes nothing.
//!
//! A request is also sent again if its server died or was stopped before any byte of the answer came,
//! provided that the request only computes an answer and the operator allows it (`on_death`): the result of
//! the first execution was lost with its server. If the second server dies, too, the client gets the error
//! of the first death.
//!
//! If a canary fails in any way, the model's normal build takes over. A canary gets only requests that can be
//! repeated, and its attempt is not counted.
//!
//! Each attempt takes a new lease, because the generation that failed is dead or dying. If it died, the
//! request becomes a suspect: at its next attempt, no other request runs on the same generation (see
//! [`warden_policies::quarantine`]).

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout_at};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_supervisor::{LeaseAddress, LeaseDenied, ListenAddress, SolitudeResult};

use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::checkpoint::{BodyCheckpoint, join_others_later};
use crate::backend::message::UpstreamRequest;
use crate::backend::pool::ConnectionPool;
use crate::backend::request_body::RequestBody;
use crate::backend::tried::{CANARY_BROKE, CANARY_STOPPED, CanaryAttempt};
use crate::backend::unread_body::close_after_unread_body;
use crate::backend::upstream::UpstreamContext;
use crate::backend::upstream_conn::{UpstreamConn, UpstreamSendError};
use crate::body::intake::BodyIntake;
use crate::body::limits::BodyLimits;
use crate::body::sent::SentBody;
use crate::observe::RequestRecord;
use crate::refusal::{BodyError, RequestRefusal};
use crate::requests::ProgressHandle;
use crate::trace::TracePeer;

/// Number of times that a lease is requested within the connect timeout, while the supervisor still offers a
/// generation that is gone.
const LEASE_RETRIES: u32 = 50;

/// A backend's answer whose head has arrived.
pub(crate) struct RelayedAnswer {
    pub(crate) response: Response<Incoming>,
    /// Pieces of the answer's body that were read already.
    pub(crate) read_ahead: VecDeque<Bytes>,
    pub(crate) backend: Box<AnsweringBackend>,
    /// The request, if it asked for a stream and may be executed again.
    pub(crate) message: Option<Box<UpstreamRequest>>,
}

/// Resources that serve an answer and are released with it.
pub(crate) struct AnsweringBackend {
    pub(crate) lease: Arc<dyn BackendLease>,
    /// Resolves when `lease` is revoked.
    pub(crate) revoked: BoxFuture<'static, ()>,
    pub(crate) conn: UpstreamConn,
    pub(crate) pool: Arc<ConnectionPool>,
    pub(crate) sent: Arc<SentBody>,
    /// Deadline of the whole exchange.
    pub(crate) deadline: Instant,
    /// Deadline by which a canary must begin its answer; then the request moves to the model's normal build.
    /// `None` if the backend is no canary.
    pub(crate) first_event_deadline: Option<Instant>,
}

/// State shared by all attempts to get an answer from a backend.
pub(crate) struct BackendAttempts<'a> {
    pub(crate) upstream: &'a UpstreamContext,
    pub(crate) record: &'a mut RequestRecord,
    /// Progress of the request, as shown to operators.
    pub(crate) progress: &'a ProgressHandle,
    pub(crate) model: &'a ModelName,
    pub(crate) kind: LeaseKind,
    /// Prompt tokens; set if admission depends on their number.
    pub(crate) tokens: Option<u64>,
    /// The request may cause its model to be loaded.
    pub(crate) may_load: bool,
    /// Limits of the request's body.
    pub(crate) limits: &'a BodyLimits,
    /// Error for the client if no answer follows; set once a server has died that may have executed the
    /// request.
    pub(crate) died: Option<RequestRefusal>,
    /// Time within which a canary must begin its answer.
    pub(crate) patience: Duration,
}

impl BackendAttempts<'_> {
    /// Waits for a lease. Meanwhile reads the body, because a client's leaving is noticed only by reading.
    #[inline]
    pub(crate) async fn lease(
        &mut self,
        intake: &mut BodyIntake,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        self.note_waiting();
        let granted = tokio::select! {
            biased;
            granted = self.upstream.backends.lease(self.model, self.kind, self.tokens) => granted,
            refusal = intake.read_ahead() => return Err(refusal),
        };
        self.note_granted(granted)
    }

    /// Like [`Self::lease`], for a request that must not cause its model to be loaded.
    pub(crate) async fn lease_loaded(
        &mut self,
        intake: &mut BodyIntake,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        tokio::select! {
            biased;
            lease = self.lease_if_loaded() => lease,
            refusal = intake.read_ahead() => Err(refusal),
        }
    }

    async fn lease_if_loaded(&mut self) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        self.note_waiting();
        let granted = self.upstream.backends.lease_loaded(self.model, self.kind, self.tokens).await;
        match granted.transpose() {
            Some(granted) => self.note_granted(granted),
            None => Err(RequestRefusal::NotLoaded { model: self.model.clone() }),
        }
    }

    /// Records the result of asking for a lease.
    pub(crate) fn note_granted(
        &mut self,
        granted: Result<Arc<dyn BackendLease>, LeaseDenied>,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        let lease = granted.map_err(|denied| RequestRefusal::Denied { model: self.model.clone(), denied })?;
        self.record.queued += lease.queued_for();
        if let Some(trace) = &mut self.record.trace {
            trace.note_granted(lease.queued_for());
        }
        self.record.generation = Some(lease.generation());
        self.progress.note_leased(lease.generation(), self.record.queued);
        Ok(lease)
    }

    /// Records that the request starts to wait for a lease.
    pub(crate) fn note_waiting(&mut self) {
        if let Some(trace) = &mut self.record.trace {
            trace.note_waiting();
        }
    }

    /// Records that the request is sent to a backend, and makes the backend's span a child of the trace.
    pub(crate) fn note_sent(&mut self, lease: &Arc<dyn BackendLease>, message: &mut UpstreamRequest) {
        if let Some(trace) = &mut self.record.trace {
            let peer = || TracePeer::from_address(lease.generation(), lease.is_canary(), lease.address());
            message.set_parent_span(trace.start_attempt(peer));
        }
    }

    /// Makes a question of the gateway a child of the current span. The question gets no span itself, which
    /// would be of no use.
    pub(crate) fn note_side_question(&mut self, message: &mut UpstreamRequest) {
        if let Some(trace) = &mut self.record.trace {
            message.set_parent_span(trace.side_traceparent());
        }
    }

    /// Records that an attempt ended without an answer.
    pub(crate) fn note_failed(&mut self, why: &'static str) {
        if let Some(trace) = &mut self.record.trace {
            trace.end_attempt(Some(why));
        }
    }

    /// Tries until a backend answers. Inlined like the functions it calls: the future is large, and would
    /// be copied if another function created it.
    #[inline]
    pub(crate) async fn run(
        &mut self,
        lease: Arc<dyn BackendLease>,
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
        dead: Arc<dyn BackendLease>,
        message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        match self.lease_once_more(dead).await {
            Ok(lease) => self.run(lease, message, deadline).await,
            Err(refusal) => Err(self.choose_refusal(refusal)),
        }
    }

    /// Chooses the error for the client: the death of the first server takes precedence over the failed
    /// search for a second.
    pub(crate) fn choose_refusal(&mut self, refusal: RequestRefusal) -> RequestRefusal {
        match self.died.take() {
            Some(died) if !refusal.may_have_executed() => died.merge_with(refusal),
            _ => refusal,
        }
    }

    #[inline]
    async fn run_attempts(
        &mut self,
        mut lease: Arc<dyn BackendLease>,
        mut message: Box<UpstreamRequest>,
        deadline: Instant,
    ) -> Result<RelayedAnswer, RequestRefusal> {
        let Self { upstream, model, limits, .. } = *self;
        let config = &upstream.config.upstream;
        let mut attempt = 1;
        if lease.is_canary() {
            // Boxed because canaries are rare, and the future of every request would grow.
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
                // Pin the attempt first; otherwise the timeout would move a copy of it.
                let once = pin!(Self::attempt_once(upstream, &lease, &mut message));
                let mut once = pin!(timeout_at(deadline, once));
                tokio::select! {
                    biased;
                    result = &mut once => Some(result),
                    () = &mut revoked => if lease.is_running() {
                        None
                    } else {
                        // The end of the process is noticed before the end of its connection. Only the latter
                        // shows how far the request got, so wait for it.
                        timeout_at(Instant::now() + config.connect_timeout, once).await.ok()
                    },
                }
            };
            let Some(result) = result else {
                self.note_failed("stopped");
                if let Some(print) = message.sent().sent_fingerprint() {
                    lease.report_lost(print);
                    if lease.is_alone() {
                        // Wait for the end of the process: only then is known whether this request killed it.
                        drop(timeout_at(deadline, lease.settled()).await);
                    }
                    if let RequestStanding::Refused { .. } = lease.request_standing(print) {
                        return Err(upstream.quarantine_refusal(model, print, true));
                    }
                }
                let revoked_early = lease.revoked_refusal(model);
                if !self.may_repeat(&message) {
                    return Err(revoked_early);
                }
                self.died = Some(revoked_early);
                drop(revoked);
                lease = Box::pin(self.lease_once_more(lease)).await?;
                continue;
            };
            let failed = match result {
                Err(_) => {
                    return Err(RequestRefusal::TimedOut { model: model.clone() });
                }
                Ok(Ok((response, conn, pool))) => {
                    let sent = message.sent();
                    let backend = Box::new(AnsweringBackend {
                        lease,
                        revoked,
                        conn,
                        pool,
                        sent,
                        deadline,
                        first_event_deadline: None,
                    });
                    let kept = message.streams() && self.may_repeat(&message);
                    return Ok(RelayedAnswer {
                        response,
                        read_ahead: VecDeque::new(),
                        backend,
                        message: kept.then_some(message),
                    });
                }
                Ok(Err(failed)) => failed,
            };
            self.note_failed(failed.as_str());
            let sent = message.sent();
            match (sent.fault(), sent.fingerprint()) {
                (Some(BodyError::Quarantined), Some(print)) => {
                    return Err(upstream.quarantine_refusal(model, print, false));
                }
                (Some(BodyError::Stopped), _) => {
                    return Err(RequestRefusal::Unreachable { model: model.clone(), attempts: attempt });
                }
                (Some(fault), _) => return Err(limits.refusal(fault)),
                (None, _) => {}
            }
            // A request that was not sent completely cannot have been executed.
            let print = sent.sent_fingerprint().filter(|_| failed.was_sent());
            if let Some(print) = print {
                lease.report_broken(print);
            }
            if failed != AttemptFailure::NoDescriptors {
                lease.doubt();
            }
            let held = message.is_held();
            let is_safe = message.is_safe();
            let not_begun =
                held && message.generates_stream() && lease.server_facts().no_head_means_not_begun();
            let proved = match failed {
                AttemptFailure::Refused | AttemptFailure::NoDescriptors | AttemptFailure::Unsent => true,
                AttemptFailure::Sent => held && (is_safe || not_begun),
                AttemptFailure::Begun => held && is_safe,
                AttemptFailure::Garbled => false,
            };
            let nothing_ran = match failed {
                AttemptFailure::Sent => not_begun,
                AttemptFailure::Begun | AttemptFailure::Garbled => false,
                AttemptFailure::Refused | AttemptFailure::NoDescriptors | AttemptFailure::Unsent => true,
            };
            if let Some(print) = print.filter(|_| lease.is_alone()) {
                // No other request was running, so this request may have killed its server. Wait for the
                // end of the process, however long it takes (the GPU frees memory slowly): only this client
                // waits, and another server would die as well.
                drop(timeout_at(deadline, lease.settled()).await);
                if let RequestStanding::Refused { .. } = lease.request_standing(print) {
                    return Err(upstream.quarantine_refusal(model, print, !nothing_ran));
                }
            }
            if let AttemptFailure::Garbled = failed {
                let why = "it is not HTTP/1.1".to_owned();
                return Err(RequestRefusal::Garbled { model: model.clone(), why });
            }
            if !proved && !self.may_repeat(&message) {
                return Err(RequestRefusal::Died { model: model.clone() });
            }
            if !proved {
                self.died = Some(RequestRefusal::Died { model: model.clone() });
                drop(revoked);
                lease = Box::pin(self.lease_once_more(lease)).await?;
                continue;
            }
            if attempt >= config.attempts {
                return Err(if nothing_ran {
                    RequestRefusal::Unreachable { model: model.clone(), attempts: attempt }
                } else {
                    RequestRefusal::Died { model: model.clone() }
                });
            }
            attempt += 1;
            self.record.retries += 1;
            // Drop `revoked` first: it keeps the old lease, whose slot the next attempt may be waiting for.
            drop(revoked);
            lease = Box::pin(self.lease_elsewhere(lease, config.connect_timeout)).await?;
        }
    }

    /// Returns whether the request may be sent again although it may have been executed.
    pub(super) fn may_repeat(&self, message: &UpstreamRequest) -> bool {
        self.died.is_none() && message.may_repeat()
    }

    /// Takes a lease for a request that a dead or dying server may have executed.
    pub(crate) async fn lease_once_more(
        &mut self,
        dead: Arc<dyn BackendLease>,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        self.record.continued = true;
        self.note_failed("died");
        if dead.is_canary() {
            self.note_canary_failure(if dead.was_stopped() { CANARY_STOPPED } else { CANARY_BROKE });
        } else {
            self.record.retries += 1;
        }
        self.lease_elsewhere(dead, self.upstream.config.upstream.connect_timeout).await
    }

    /// Waits until no other request runs on the generation that is to serve a suspect. If the generation ends
    /// meanwhile, no attempt is counted, because nothing was sent.
    async fn wait_until_alone(
        &mut self,
        mut lease: Arc<dyn BackendLease>,
        print: RequestFingerprint,
        deadline: Instant,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        loop {
            match lease.request_standing(print) {
                RequestStanding::Clear => return Ok(lease),
                RequestStanding::Refused { .. } => {
                    return Err(self.upstream.quarantine_refusal(self.model, print, false));
                }
                RequestStanding::Suspect => {}
            }
            // Boxed because suspects are rare, and the future of every request would grow.
            let alone = timeout_at(deadline, lease.clone().alone(print)).await;
            match alone.map_err(|_| RequestRefusal::Unreachable { model: self.model.clone(), attempts: 0 })? {
                SolitudeResult::Granted => {
                    join_others_later(&lease, print, &self.upstream.tasks);
                    return Ok(lease);
                }
                SolitudeResult::Shared => return Ok(lease),
                SolitudeResult::Refused(_) => {
                    return Err(self.upstream.quarantine_refusal(self.model, print, false));
                }
                SolitudeResult::Gone => {
                    let patience = self.upstream.config.upstream.connect_timeout;
                    lease = Box::pin(self.lease_elsewhere(lease, patience)).await?;
                }
            }
        }
    }

    /// Takes a lease on a generation other than the failed one. The supervisor may offer the failed
    /// generation again until it notices the failure. The wait for that is limited, because the failed
    /// generation may still be alive and misbehaving.
    pub(super) async fn lease_elsewhere(
        &mut self,
        failed: Arc<dyn BackendLease>,
        patience: Duration,
    ) -> Result<Arc<dyn BackendLease>, RequestRefusal> {
        self.progress.note_waiting_again(self.record.continued);
        if failed.is_canary() {
            // The failed lease belongs to another model: do not wait for the end of its process.
            drop(failed);
            self.note_waiting();
            let granted = self.upstream.backends.lease_again(self.model, self.kind, self.tokens).await;
            return self.note_granted(granted);
        }
        let (generation, settled) = (failed.generation(), failed.settled());
        drop(failed);
        // The end of the failed generation decides whether the request may run next to others.
        drop(timeout_at(Instant::now() + patience, settled).await);
        if !self.may_load {
            return self.lease_if_loaded().await;
        }
        let until = Instant::now() + patience;
        loop {
            self.note_waiting();
            let granted = self.upstream.backends.lease_again(self.model, self.kind, self.tokens).await;
            let lease = self.note_granted(granted)?;
            // A remote endpoint may be used again: the supervisor probes it before it grants leases again.
            let is_remote = matches!(lease.address(), LeaseAddress::Remote(_));
            if lease.generation() != generation || is_remote || Instant::now() >= until {
                return Ok(lease);
            }
            drop(lease);
            sleep(patience / LEASE_RETRIES).await;
        }
    }

    /// Makes one attempt on one generation. If an idle connection turns out to be closed, a second
    /// connection is made within the same attempt.
    #[inline]
    pub(crate) async fn attempt_once(
        upstream: &UpstreamContext,
        lease: &Arc<dyn BackendLease>,
        message: &mut UpstreamRequest,
    ) -> Result<(Response<Incoming>, UpstreamConn, Arc<ConnectionPool>), AttemptFailure> {
        let pool = upstream.pool(&**lease);
        let mut request = None;
        if let Some(mut conn) = pool.reuse() {
            let sending = Self::build_request(upstream, message, lease);
            lease.note_sent(message.sent(), message.streams());
            match conn.send(sending).await {
                Ok(response) => return Ok((response, conn, pool)),
                Err(UpstreamSendError::Sent(error)) => return Err(AttemptFailure::from_send_error(&error)),
                Err(UpstreamSendError::Begun(error)) => return Err(AttemptFailure::from_head_error(&error)),
                Err(UpstreamSendError::Unsent(unsent)) => request = Some(*unsent),
            }
        }
        let mut conn = match connect_to_generation(&**lease, &pool).await {
            Ok(conn) => conn,
            Err(error) => {
                tracing::debug!(%error, "cannot connect to a backend");
                if let Some(request) = request {
                    message.put_back(request);
                }
                return Err(AttemptFailure::from_connect_error(&error));
            }
        };
        let request = request.unwrap_or_else(|| Self::build_request(upstream, message, lease));
        lease.note_sent(message.sent(), message.streams());
        match conn.send(request).await {
            Ok(response) => Ok((response, conn, pool)),
            Err(UpstreamSendError::Sent(error)) => Err(AttemptFailure::from_send_error(&error)),
            Err(UpstreamSendError::Begun(error)) => Err(AttemptFailure::from_head_error(&error)),
            Err(UpstreamSendError::Unsent(request)) => {
                message.put_back(*request);
                Err(AttemptFailure::Unsent)
            }
        }
    }

    /// Builds the request for one attempt. A body that is still arriving gets a checkpoint at
    /// its end.
    fn build_request(
        upstream: &UpstreamContext,
        message: &mut UpstreamRequest,
        lease: &Arc<dyn BackendLease>,
    ) -> Request<RequestBody> {
        let mut request = message.request();
        if let LeaseAddress::Remote(origin) = lease.address()
            && let Err(error) = origin.address_request(&mut request)
        {
            // Cannot happen: address and key were checked at configuration, and the path was parsed.
            tracing::error!(%error, "cannot address a request to its endpoint");
        }
        close_after_unread_body(&mut request, lease.server_facts());
        request.body_mut().set_checkpoint(|| BodyCheckpoint::new(lease, upstream.tasks.clone()));
        request
    }
}

/// Connects to a generation, and checks that no other process listens at its address.
pub(crate) async fn connect_to_generation(
    lease: &dyn BackendLease,
    pool: &ConnectionPool,
) -> io::Result<UpstreamConn> {
    let conn = pool.connect(lease.address()).await?;
    // If the generation's process has ended, another process may own its port, and would get the request.
    let is_its_own =
        !matches!(lease.address(), LeaseAddress::Process(ListenAddress::Tcp(_))) || lease.is_running();
    is_its_own.then_some(conn).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
}

/// Reasons why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptFailure {
    /// No connection.
    Refused,
    /// No connection, because this process is out of file descriptors; temporary, and no fault of the
    /// backend.
    NoDescriptors,
    /// The connection was closed before a byte was sent.
    Unsent,
    /// The connection ended after the request was sent, at least in part, and before any byte of an answer.
    Sent,
    /// An answer began, and the connection ended within its head.
    Begun,
    /// An answer began that cannot be parsed.
    Garbled,
}

impl AttemptFailure {
    /// Label for traces, one of a bounded set.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::NoDescriptors => "no_files",
            Self::Unsent => "unsent",
            Self::Sent => "died",
            Self::Begun => "died_in_its_head",
            Self::Garbled => "garbled",
        }
    }

    /// Returns whether the backend may have received the request.
    pub(super) fn was_sent(self) -> bool {
        matches!(self, Self::Sent | Self::Begun | Self::Garbled)
    }

    fn from_connect_error(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE) => Self::NoDescriptors,
            _ => Self::Refused,
        }
    }

    fn from_send_error(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's connection ended before its answer");
        if error.is_parse() { Self::Garbled } else { Self::Sent }
    }

    fn from_head_error(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's answer broke off in its head");
        if error.is_parse() { Self::Garbled } else { Self::Begun }
    }
}
