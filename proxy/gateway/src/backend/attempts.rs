//! From the lease to the head of the answer: connect, send, and if that fails, try again where that is safe.
//!
//! A request is sent again if nothing can have been executed:
//! - no connection was made, or the request came back from it unsent;
//! - the connection ended before any byte of an answer, the request asks for a stream, its whole body is still held, and
//!   the build is known to send the head of a stream when the request gets its slot (older ones and forks send it with
//!   the first token: there no head proves nothing);
//! - it is a `GET` or `HEAD`, which executes nothing.
//!
//! And once, if its server died or was stopped before any byte of the answer came, if it only computes an answer, and if the
//! operator leaves it so (`on_death`): whatever was executed died with its server. If the second one dies too, the client
//! gets the error that it would have got for the first.
//!
//! A canary is left for the model's own build at whatever goes wrong: it gets only what can be repeated, and what became of it there is no
//! attempt.
//!
//! Each new attempt takes a new lease: the generation that failed is dead or dying. If it died, the request is a suspect
//! from then on, and its next attempt has its generation for itself (see [`warden_policies::quarantine`]).

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
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_supervisor::{Address, Alone, Denied, Endpoint};

use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::checkpoint::{Checkpoint, let_others_in_later};
use crate::backend::message::Message;
use crate::backend::pool::Pool;
use crate::backend::request_body::RequestBody;
use crate::backend::tried::{BROKE, Canary, STOPPED};
use crate::backend::unread_body::end_connection_behind;
use crate::backend::upstream::Upstream;
use crate::backend::upstream_conn::{SendError, UpstreamConn};
use crate::body::intake::Intake;
use crate::body::limits::Limits;
use crate::body::sent::Sent;
use crate::observe::Record;
use crate::refusal::{BodyFault, Refusal};
use crate::requests::Progress;
use crate::trace::Peer;

/// While the supervisor has not noticed that a generation is gone, it is asked this many times within the time to
/// connect.
const ASKS: u32 = 50;

/// A backend's answer has begun.
pub(crate) struct Relayed {
    pub(crate) response: Response<Incoming>,
    /// What was read of its body already.
    pub(crate) ahead: VecDeque<Bytes>,
    pub(crate) backend: Box<Backend>,
    /// The request, if it asked for a stream and may be executed once more.
    pub(crate) kept: Option<Box<Message>>,
}

/// What the answer comes by, and what ends with it.
pub(crate) struct Backend {
    pub(crate) lease: Arc<dyn BackendLease>,
    /// Resolves when `lease` is taken away.
    pub(crate) revoked: BoxFuture<'static, ()>,
    pub(crate) conn: UpstreamConn,
    pub(crate) pool: Arc<Pool>,
    pub(crate) sent: Arc<Sent>,
    /// When the exchange must be over.
    pub(crate) deadline: Instant,
    /// When something of the answer must be there, or the model's own build is asked; `None` if that one answers.
    pub(crate) begins_by: Option<Instant>,
}

/// A request that a backend is looked for: what each attempt needs to know of it.
pub(crate) struct Attempts<'a> {
    pub(crate) upstream: &'a Upstream,
    pub(crate) record: &'a mut Record,
    /// How it is shown.
    pub(crate) progress: &'a Progress,
    pub(crate) model: &'a ModelName,
    pub(crate) kind: LeaseKind,
    /// Tokens of the prompt, where admission wants to know.
    pub(crate) tokens: Option<u64>,
    /// A model that is not loaded is loaded for it.
    pub(crate) loads: bool,
    /// Of its body.
    pub(crate) limits: &'a Limits,
    /// Its server died when it may have been executed: what its client gets if it ends without an answer.
    pub(crate) died: Option<Refusal>,
    /// For how long the beginning of a canary's answer is awaited.
    pub(crate) patience: Duration,
}

impl Attempts<'_> {
    /// Waits for a lease and reads the body ahead meanwhile, because a client's leaving can only be seen behind it.
    #[inline]
    pub(crate) async fn lease(&mut self, intake: &mut Intake) -> Result<Arc<dyn BackendLease>, Refusal> {
        self.waits();
        let granted = tokio::select! {
            biased;
            granted = self.upstream.backends.lease(self.model, self.kind, self.tokens) => granted,
            refusal = intake.ahead() => return Err(refusal),
        };
        self.granted(granted)
    }

    /// The same for a request that loads nothing.
    pub(crate) async fn lease_loaded(
        &mut self,
        intake: &mut Intake,
    ) -> Result<Arc<dyn BackendLease>, Refusal> {
        tokio::select! {
            biased;
            lease = self.loaded() => lease,
            refusal = intake.ahead() => Err(refusal),
        }
    }

    async fn loaded(&mut self) -> Result<Arc<dyn BackendLease>, Refusal> {
        self.waits();
        let granted = self.upstream.backends.lease_loaded(self.model, self.kind, self.tokens).await;
        match granted.transpose() {
            Some(granted) => self.granted(granted),
            None => Err(Refusal::NotLoaded { model: self.model.clone() }),
        }
    }

    /// Notes what was granted.
    pub(crate) fn granted(
        &mut self,
        granted: Result<Arc<dyn BackendLease>, Denied>,
    ) -> Result<Arc<dyn BackendLease>, Refusal> {
        let lease = granted.map_err(|denied| Refusal::Denied { model: self.model.clone(), denied })?;
        self.record.queued += lease.queued_for();
        if let Some(trace) = &mut self.record.trace {
            trace.granted(lease.queued_for());
        }
        self.record.generation = Some(lease.generation());
        self.progress.leased(lease.generation(), self.record.queued);
        Ok(lease)
    }

    /// Notes that it asks for a lease.
    pub(crate) fn waits(&mut self) {
        if let Some(trace) = &mut self.record.trace {
            trace.waits();
        }
    }

    /// Notes that this is sent to a backend, and makes it a part of that.
    pub(crate) fn asks(&mut self, lease: &Arc<dyn BackendLease>, message: &mut Message) {
        if let Some(trace) = &mut self.record.trace {
            let peer = || Peer::of(lease.generation(), lease.is_canary(), lease.address());
            message.follow(trace.asks(peer));
        }
    }

    /// Makes a question of ours a part of what it is asked for. Its own span would tell nobody anything.
    pub(crate) fn asks_beside(&mut self, message: &mut Message) {
        if let Some(trace) = &mut self.record.trace {
            message.follow(trace.asks_beside());
        }
    }

    /// Notes that what was sent came to nothing.
    pub(crate) fn failed(&mut self, why: &'static str) {
        if let Some(trace) = &mut self.record.trace {
            trace.answered(Some(why));
        }
    }

    /// Tries until a backend answers. Inlined, as what it calls: where the future is made elsewhere, it is copied to where it is kept,
    /// and it is large.
    #[inline]
    pub(crate) async fn run(
        &mut self,
        lease: Arc<dyn BackendLease>,
        message: Box<Message>,
        deadline: Instant,
    ) -> Result<Relayed, Refusal> {
        let relayed = {
            let searching = pin!(self.search(lease, message, deadline));
            searching.await
        };
        relayed.map_err(|refusal| self.judged(refusal))
    }

    /// The same for a request whose server died when its answer had begun.
    pub(crate) async fn run_again(
        &mut self,
        dead: Arc<dyn BackendLease>,
        message: Box<Message>,
        deadline: Instant,
    ) -> Result<Relayed, Refusal> {
        match self.once_more(dead).await {
            Ok(lease) => self.run(lease, message, deadline).await,
            Err(refusal) => Err(self.judged(refusal)),
        }
    }

    /// That no second server was found says nothing of the first.
    pub(crate) fn judged(&mut self, refusal: Refusal) -> Refusal {
        match self.died.take() {
            Some(died) if !refusal.may_have_executed() => died.instead_of(refusal),
            _ => refusal,
        }
    }

    #[inline]
    async fn search(
        &mut self,
        mut lease: Arc<dyn BackendLease>,
        mut message: Box<Message>,
        deadline: Instant,
    ) -> Result<Relayed, Refusal> {
        let Self { upstream, model, limits, .. } = *self;
        let config = &upstream.config.upstream;
        let mut attempt = 1;
        if lease.is_canary() {
            // Rare: not a part of every request's future.
            match Box::pin(self.by_canary(lease, message, deadline)).await? {
                Canary::Answers(relayed) => return Ok(*relayed),
                Canary::Left(other, back) => (lease, message) = (other, back),
            }
        }
        loop {
            if message.is_safe() {
                lease.reads();
            }
            if let Some(print) = message.sent().print() {
                lease = self.make_way(lease, print, deadline).await?;
            }
            self.asks(&lease, &mut message);
            let mut revoked = lease.clone().revoked();
            let result = {
                // Pinned first: the clock around it would take a copy of it.
                let once = pin!(Self::once(upstream, &lease, &mut message));
                let mut once = pin!(timeout_at(deadline, once));
                tokio::select! {
                    biased;
                    result = &mut once => Some(result),
                    () = &mut revoked => if lease.is_running() {
                        None
                    } else {
                        // Its end is known sooner than that of its connection, which says how far the request came.
                        timeout_at(Instant::now() + config.connect_timeout, once).await.ok()
                    },
                }
            };
            let Some(result) = result else {
                self.failed("stopped");
                if let Some(print) = message.sent().whole_print() {
                    lease.lost(print);
                    if lease.is_alone() {
                        // As below: if it died of this request, that is known when it has ended.
                        drop(timeout_at(deadline, lease.settled()).await);
                    }
                    if let Standing::Refused { .. } = lease.standing(print) {
                        return Err(upstream.quarantined(model, print, true));
                    }
                }
                let revoked_early = lease.taken_away(model);
                if !self.may_repeat(&message) {
                    return Err(revoked_early);
                }
                self.died = Some(revoked_early);
                drop(revoked);
                lease = Box::pin(self.once_more(lease)).await?;
                continue;
            };
            let failed = match result {
                Err(_) => {
                    return Err(Refusal::TimedOut { model: model.clone() });
                }
                Ok(Ok((response, conn, pool))) => {
                    let sent = message.sent();
                    let backend =
                        Box::new(Backend { lease, revoked, conn, pool, sent, deadline, begins_by: None });
                    let kept = message.streams() && self.may_repeat(&message);
                    return Ok(Relayed {
                        response,
                        ahead: VecDeque::new(),
                        backend,
                        kept: kept.then_some(message),
                    });
                }
                Ok(Err(failed)) => failed,
            };
            self.failed(failed.as_str());
            let sent = message.sent();
            match (sent.fault(), sent.print()) {
                (Some(BodyFault::Quarantined), Some(print)) => {
                    return Err(upstream.quarantined(model, print, false));
                }
                (Some(BodyFault::Stopped), _) => {
                    return Err(Refusal::Unreachable { model: model.clone(), attempts: attempt });
                }
                (Some(fault), _) => return Err(limits.refusal(fault)),
                (None, _) => {}
            }
            // Who was not sent whole was not begun with.
            let print = sent.whole_print().filter(|_| failed.was_sent());
            if let Some(print) = print {
                lease.broke(print);
            }
            if failed != Failed::Starved {
                lease.doubt();
            }
            let held = message.is_held();
            let is_safe = message.is_safe();
            let not_begun = held && message.generates_stream() && lease.facts().no_head_means_not_begun();
            let proved = match failed {
                Failed::Refused | Failed::Starved | Failed::Unsent => true,
                Failed::Sent => held && (is_safe || not_begun),
                Failed::Begun => held && is_safe,
                Failed::Garbled => false,
            };
            let nothing_ran = match failed {
                Failed::Sent => not_begun,
                Failed::Begun | Failed::Garbled => false,
                Failed::Refused | Failed::Starved | Failed::Unsent => true,
            };
            if let Some(print) = print.filter(|_| lease.is_alone()) {
                // Its server may have died of it: nobody else was there. However long it takes to end (its GPU gives memory
                // back slowly), nobody else waits for the answer, and another server would meet the same.
                drop(timeout_at(deadline, lease.settled()).await);
                if let Standing::Refused { .. } = lease.standing(print) {
                    return Err(upstream.quarantined(model, print, !nothing_ran));
                }
            }
            if let Failed::Garbled = failed {
                let why = "it is not HTTP/1.1".to_owned();
                return Err(Refusal::Garbled { model: model.clone(), why });
            }
            if !proved && !self.may_repeat(&message) {
                return Err(Refusal::Died { model: model.clone() });
            }
            if !proved {
                self.died = Some(Refusal::Died { model: model.clone() });
                drop(revoked);
                lease = Box::pin(self.once_more(lease)).await?;
                continue;
            }
            if attempt >= config.attempts {
                return Err(if nothing_ran {
                    Refusal::Unreachable { model: model.clone(), attempts: attempt }
                } else {
                    Refusal::Died { model: model.clone() }
                });
            }
            attempt += 1;
            self.record.retries += 1;
            // `revoked` keeps the old lease alive, and the next attempt may have to wait for that lease's place.
            drop(revoked);
            lease = Box::pin(self.again(lease, config.connect_timeout)).await?;
        }
    }

    /// Whether it may be executed again although it may have been executed.
    pub(super) fn may_repeat(&self, message: &Message) -> bool {
        self.died.is_none() && message.repeats()
    }

    /// A lease for a request that may have been executed by a server that is dead or dying.
    pub(crate) async fn once_more(
        &mut self,
        dead: Arc<dyn BackendLease>,
    ) -> Result<Arc<dyn BackendLease>, Refusal> {
        self.record.continued = true;
        self.failed("died");
        if dead.is_canary() {
            self.leave(if dead.was_stopped() { STOPPED } else { BROKE });
        } else {
            self.record.retries += 1;
        }
        self.again(dead, self.upstream.config.upstream.connect_timeout).await
    }

    /// Makes way for a request that a server died with: it waits until nobody else runs on its generation. What ends
    /// meanwhile costs no attempt, because nothing was sent.
    async fn make_way(
        &mut self,
        mut lease: Arc<dyn BackendLease>,
        print: Fingerprint,
        deadline: Instant,
    ) -> Result<Arc<dyn BackendLease>, Refusal> {
        loop {
            match lease.standing(print) {
                Standing::Clear => return Ok(lease),
                Standing::Refused { .. } => {
                    return Err(self.upstream.quarantined(self.model, print, false));
                }
                Standing::Suspect => {}
            }
            // Rare: not a part of every request's future.
            let alone = timeout_at(deadline, lease.clone().alone(print)).await;
            match alone.map_err(|_| Refusal::Unreachable { model: self.model.clone(), attempts: 0 })? {
                Alone::Granted => {
                    let_others_in_later(&lease, print, &self.upstream.tasks);
                    return Ok(lease);
                }
                Alone::InCompany => return Ok(lease),
                Alone::Refused(_) => return Err(self.upstream.quarantined(self.model, print, false)),
                Alone::Gone => {
                    let patience = self.upstream.config.upstream.connect_timeout;
                    lease = Box::pin(self.again(lease, patience)).await?;
                }
            }
        }
    }

    /// A lease on another generation than the one that failed. Until the supervisor has noticed that the old one is
    /// gone it may be offered again; that is worth waiting for, but not for ever: it may also be alive and odd.
    pub(super) async fn again(
        &mut self,
        failed: Arc<dyn BackendLease>,
        patience: Duration,
    ) -> Result<Arc<dyn BackendLease>, Refusal> {
        self.progress.waits_again(self.record.continued);
        if failed.is_canary() {
            // Another model's: whatever becomes of it, nobody waits for that.
            drop(failed);
            self.waits();
            let granted = self.upstream.backends.lease_again(self.model, self.kind, self.tokens).await;
            return self.granted(granted);
        }
        let (generation, settled) = (failed.generation(), failed.settled());
        drop(failed);
        // What became of it decides whether the request may be sent beside others.
        drop(timeout_at(Instant::now() + patience, settled).await);
        if !self.loads {
            return self.loaded().await;
        }
        let until = Instant::now() + patience;
        loop {
            self.waits();
            let granted = self.upstream.backends.lease_again(self.model, self.kind, self.tokens).await;
            let lease = self.granted(granted)?;
            // An endpoint has been asked before it was opened again.
            let is_remote = matches!(lease.address(), Address::Remote(_));
            if lease.generation() != generation || is_remote || Instant::now() >= until {
                return Ok(lease);
            }
            drop(lease);
            sleep(patience / ASKS).await;
        }
    }

    /// One attempt on one generation. An idle connection that turns out to be closed costs a second connection, not an
    /// attempt.
    #[inline]
    pub(crate) async fn once(
        upstream: &Upstream,
        lease: &Arc<dyn BackendLease>,
        message: &mut Message,
    ) -> Result<(Response<Incoming>, UpstreamConn, Arc<Pool>), Failed> {
        let pool = upstream.pool(&**lease);
        let mut request = None;
        if let Some(mut conn) = pool.reuse() {
            let sending = Self::request(upstream, message, lease);
            lease.note_asked(message.sent(), message.streams());
            match conn.send(sending).await {
                Ok(response) => return Ok((response, conn, pool)),
                Err(SendError::Sent(error)) => return Err(Failed::sent(&error)),
                Err(SendError::Begun(error)) => return Err(Failed::begun(&error)),
                Err(SendError::Unsent(unsent)) => request = Some(*unsent),
            }
        }
        let mut conn = match connect(&**lease, &pool).await {
            Ok(conn) => conn,
            Err(error) => {
                tracing::debug!(%error, "cannot connect to a backend");
                if let Some(request) = request {
                    message.put_back(request);
                }
                return Err(Failed::refused(&error));
            }
        };
        let request = request.unwrap_or_else(|| Self::request(upstream, message, lease));
        lease.note_asked(message.sent(), message.streams());
        match conn.send(request).await {
            Ok(response) => Ok((response, conn, pool)),
            Err(SendError::Sent(error)) => Err(Failed::sent(&error)),
            Err(SendError::Begun(error)) => Err(Failed::begun(&error)),
            Err(SendError::Unsent(request)) => {
                message.put_back(*request);
                Err(Failed::Unsent)
            }
        }
    }

    /// The request for one attempt. A body that is still coming is looked at when its end is here.
    fn request(
        upstream: &Upstream,
        message: &mut Message,
        lease: &Arc<dyn BackendLease>,
    ) -> Request<RequestBody> {
        let mut request = message.request();
        if let Address::Remote(origin) = lease.address()
            && let Err(error) = origin.address(&mut request)
        {
            // Cannot be: address and key were looked at when they were configured, and the path is one.
            tracing::error!(%error, "a request cannot be addressed");
        }
        end_connection_behind(&mut request, lease.facts());
        request.body_mut().stop_at(|| Checkpoint::new(lease, upstream.tasks.clone()));
        request
    }
}

/// A new connection to a generation, and to nobody else.
pub(crate) async fn connect(lease: &dyn BackendLease, pool: &Pool) -> io::Result<UpstreamConn> {
    let conn = pool.connect(lease.address()).await?;
    // Its port may be another's by now, who would be given the request.
    let is_its_own = !matches!(lease.address(), Address::Process(Endpoint::Tcp(_))) || lease.is_running();
    is_its_own.then_some(conn).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// No connection.
    Refused,
    /// No connection because we may open no more files: that says nothing about the backend, and passes.
    Starved,
    /// The connection was closed before a byte was sent.
    Unsent,
    /// The connection ended after the request was sent, at least in part, and before any byte of an answer.
    Sent,
    /// An answer began, and the connection ended before its head was whole.
    Begun,
    /// An answer began that cannot be read.
    Garbled,
}

impl Failed {
    /// The word for traces, one of a bounded set.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Starved => "no_files",
            Self::Unsent => "unsent",
            Self::Sent => "died",
            Self::Begun => "died_in_its_head",
            Self::Garbled => "garbled",
        }
    }

    /// Whether the backend may have the request.
    pub(super) fn was_sent(self) -> bool {
        matches!(self, Self::Sent | Self::Begun | Self::Garbled)
    }

    fn refused(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE) => Self::Starved,
            _ => Self::Refused,
        }
    }

    fn sent(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's connection ended before its answer");
        if error.is_parse() { Self::Garbled } else { Self::Sent }
    }

    fn begun(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's answer broke off in its head");
        if error.is_parse() { Self::Garbled } else { Self::Begun }
    }
}
