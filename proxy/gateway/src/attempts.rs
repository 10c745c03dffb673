//! From the lease to the head of the answer: connect, send, and if that fails, try again where that is safe.
//!
//! A request is sent again only if nothing can have been executed:
//! - no connection was made, or the request came back from it unsent;
//! - the connection ended before any byte of an answer, the request asks for a stream, its whole body is still held, and
//!   the build is known to send the head of a stream when the request gets its slot (older ones and forks send it with
//!   the first token: there no head proves nothing);
//! - it is a `GET` or `HEAD`, which executes nothing.
//!
//! Each new attempt takes a new lease: the generation that failed is dead or dying. If it died, the request is a suspect
//! from then on, and its next attempt has its generation for itself (see [`warden_policies::quarantine`]).

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout_at};
use warden_policies::ModelName;
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_supervisor::{Alone, Denied, Endpoint};

use crate::backends::Right;
use crate::checkpoint::{Checkpoint, let_others_in_later};
use crate::errors::Refusal;
use crate::exchange::Exchange;
use crate::intake::Intake;
use crate::link::{Link, SendError};
use crate::pool::Pool;
use crate::relay::Backend;
use crate::request_body::{BodyFault, RequestBody, Sent};
use crate::routes::Route;
use crate::target;

/// While the supervisor has not noticed that a generation is gone, it is asked this many times within the time to
/// connect.
const ASKS: u32 = 50;

/// Bytes of a line of a request's head, its end included, that llama-server takes (`CPPHTTPLIB_MAX_LINE_LENGTH`).
const LINE_BYTES: usize = 32 * 1024;

/// A backend's answer has begun.
pub(crate) struct Relayed {
    pub(crate) response: Response<Incoming>,
    pub(crate) backend: Backend,
}

/// What goes to a backend.
pub(crate) struct Message {
    head: Request<()>,
    body: Outgoing,
    /// It asks for a stream.
    streams: bool,
}

#[expect(clippy::large_enum_variant, reason = "one per request, and never in a collection")]
enum Outgoing {
    /// May be sent again, even after it was received: each attempt sends a copy that shares the bytes.
    Again(Intake),
    /// Sent once, unless it comes back unsent.
    Once(Option<RequestBody>, Arc<Sent>),
}

impl Exchange {
    /// Notes what was granted.
    pub(crate) fn granted(
        &mut self,
        model: &ModelName,
        granted: Result<Arc<dyn Right>, Denied>,
    ) -> Result<Arc<dyn Right>, Refusal> {
        let right = granted.map_err(|denied| Refusal::Denied { model: model.clone(), denied })?;
        self.flight.record.queued += right.queued_for();
        self.flight.record.generation = Some(right.generation());
        Ok(right)
    }

    /// Tries until a backend answers.
    pub(crate) async fn attempts(
        &mut self,
        model: ModelName,
        mut right: Arc<dyn Right>,
        mut message: Message,
    ) -> Result<Relayed, Refusal> {
        let shared = self.shared.clone();
        let config = &shared.config;
        let deadline = Instant::now() + config.exchange_timeout;
        self.conn.bound(deadline + config.keep_alive);
        let mut attempt = 1;
        loop {
            if executes_nothing(message.head.method()) {
                right.reads();
            }
            if let Some(print) = message.sent().print() {
                right = self.make_way(&model, right, print, deadline).await?;
            }
            let mut revoked = right.clone().revoked();
            let result = {
                let mut once = pin!(timeout_at(deadline, self.once(&right, &mut message)));
                tokio::select! {
                    biased;
                    result = &mut once => Some(result),
                    () = &mut revoked => if right.is_running() {
                        None
                    } else {
                        // Its end is known sooner than that of its connection, which says how far the request came.
                        timeout_at(Instant::now() + config.connect_timeout, once).await.ok()
                    },
                }
            };
            let Some(result) = result else {
                if let Some(print) = message.sent().whole_print() {
                    right.lost(print);
                    if let Standing::Refused { .. } = right.standing(print) {
                        return Err(self.quarantined(&model, print, true));
                    }
                }
                return Err(Refusal::Revoked { model });
            };
            let failed = match result {
                Err(_) => return Err(Refusal::TimedOut { model, after: config.exchange_timeout }),
                Ok(Ok((response, link, pool))) => {
                    let sent = message.sent();
                    let backend = Backend { right, revoked, link, pool, sent, deadline };
                    return Ok(Relayed { response, backend });
                }
                Ok(Err(failed)) => failed,
            };
            let sent = message.sent();
            match (sent.fault(), sent.print()) {
                (Some(BodyFault::Quarantined), Some(print)) => {
                    return Err(self.quarantined(&model, print, false));
                }
                (Some(BodyFault::Stopped), _) => {
                    return Err(Refusal::Unreachable { model, attempts: attempt });
                }
                (Some(fault), _) => return Err(Refusal::of_body(fault, config.limits(self.route.size))),
                (None, _) => {}
            }
            // Who was not sent whole was not begun with.
            let print = sent.whole_print().filter(|_| failed.was_sent());
            if let Some(print) = print {
                right.broke(print);
            }
            if failed != Failed::Starved {
                right.doubt();
            }
            let held = matches!(message.body, Outgoing::Again(_));
            let is_safe = executes_nothing(message.head.method());
            let not_begun = held && !is_safe && right.facts().no_head_means_not_begun();
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
            if let Some(print) = print.filter(|_| right.is_alone()) {
                // Its server may have died of it: nobody else was there. However long it takes to end (its GPU gives memory
                // back slowly), nobody else waits for the answer, and another server would meet the same.
                drop(timeout_at(deadline, right.settled()).await);
                if let Standing::Refused { .. } = right.standing(print) {
                    return Err(self.quarantined(&model, print, !nothing_ran));
                }
            }
            if let Failed::Garbled = failed {
                let why = "it is not HTTP/1.1".to_owned();
                return Err(Refusal::Garbled { model, why });
            }
            if !proved {
                return Err(Refusal::Died { model });
            }
            if attempt >= config.attempts {
                return Err(if nothing_ran {
                    Refusal::Unreachable { model, attempts: attempt }
                } else {
                    Refusal::Died { model }
                });
            }
            attempt += 1;
            self.flight.record.retries += 1;
            // `revoked` keeps the old lease alive, and the next attempt may have to wait for that lease's place.
            drop(revoked);
            right = Box::pin(self.again(&model, right, config.connect_timeout)).await?;
        }
    }

    /// Makes way for a request that a server died with: it waits until nobody else runs on its generation. What ends
    /// meanwhile costs no attempt, because nothing was sent.
    async fn make_way(
        &mut self,
        model: &ModelName,
        mut right: Arc<dyn Right>,
        print: Fingerprint,
        deadline: Instant,
    ) -> Result<Arc<dyn Right>, Refusal> {
        loop {
            match right.standing(print) {
                Standing::Clear => return Ok(right),
                Standing::Refused { .. } => return Err(self.quarantined(model, print, false)),
                Standing::Suspect => {}
            }
            // Rare: not a part of every request's future.
            let alone = timeout_at(deadline, right.clone().alone(print)).await;
            match alone.map_err(|_| Refusal::Unreachable { model: model.clone(), attempts: 0 })? {
                Alone::Granted => {
                    let_others_in_later(&right, print, &self.shared.upstream);
                    return Ok(right);
                }
                Alone::InCompany => return Ok(right),
                Alone::Refused(_) => return Err(self.quarantined(model, print, false)),
                Alone::Gone => {
                    let patience = self.shared.config.connect_timeout;
                    right = Box::pin(self.again(model, right, patience)).await?;
                }
            }
        }
    }

    /// The refusal of a request that is known to kill its server.
    pub(crate) fn quarantined(&self, model: &ModelName, print: Fingerprint, executed: bool) -> Refusal {
        let backends = &self.shared.backends;
        let left = match backends.standing(model, print) {
            Standing::Refused { left } => left,
            Standing::Clear | Standing::Suspect => Duration::ZERO,
        };
        backends.note_refusal(model, print);
        Refusal::Quarantined { model: model.clone(), print, left, executed }
    }

    /// A lease on another generation than the one that failed. Until the supervisor has noticed that the old one is
    /// gone it may be offered again; that is worth waiting for, but not for ever: it may also be alive and odd.
    async fn again(
        &mut self,
        model: &ModelName,
        failed: Arc<dyn Right>,
        patience: Duration,
    ) -> Result<Arc<dyn Right>, Refusal> {
        let shared = self.shared.clone();
        let (generation, settled) = (failed.generation(), failed.settled());
        drop(failed);
        // What became of it decides whether the request may be sent beside others.
        drop(timeout_at(Instant::now() + patience, settled).await);
        let until = Instant::now() + patience;
        loop {
            let granted = shared.backends.lease(model, self.route.kind, self.tokens).await;
            let right = self.granted(model, granted)?;
            if right.generation() != generation || Instant::now() >= until {
                return Ok(right);
            }
            drop(right);
            sleep(patience / ASKS).await;
        }
    }

    /// One attempt on one generation. An idle connection that turns out to be closed costs a second connection, not an
    /// attempt.
    async fn once(
        &self,
        right: &Arc<dyn Right>,
        message: &mut Message,
    ) -> Result<(Response<Incoming>, Link, Arc<Pool>), Failed> {
        let pool = right.pool(&|| self.shared.new_pool());
        let mut request = None;
        if let Some(mut link) = pool.reuse() {
            let sending = self.request(message, right);
            right.note_asked(message.sent(), message.streams);
            match link.send(sending).await {
                Ok(response) => return Ok((response, link, pool)),
                Err(SendError::Sent(error)) => return Err(Failed::sent(&error)),
                Err(SendError::Begun(error)) => return Err(Failed::begun(&error)),
                Err(SendError::Unsent(unsent)) => request = Some(*unsent),
            }
        }
        let mut link = match connect(&**right, &pool).await {
            Ok(link) => link,
            Err(error) => {
                tracing::debug!(%error, "cannot connect to a backend");
                if let Some(request) = request {
                    message.put_back(request);
                }
                return Err(Failed::refused(&error));
            }
        };
        let request = request.unwrap_or_else(|| self.request(message, right));
        right.note_asked(message.sent(), message.streams);
        match link.send(request).await {
            Ok(response) => Ok((response, link, pool)),
            Err(SendError::Sent(error)) => Err(Failed::sent(&error)),
            Err(SendError::Begun(error)) => Err(Failed::begun(&error)),
            Err(SendError::Unsent(request)) => {
                message.put_back(*request);
                Err(Failed::Unsent)
            }
        }
    }
}

impl Exchange {
    /// The request for one attempt. A body that is still coming is looked at when its end is here.
    fn request(&self, message: &mut Message, right: &Arc<dyn Right>) -> Request<RequestBody> {
        let mut request = message.request();
        request.body_mut().stop_at(|| Checkpoint::new(right, self.shared.upstream.clone()));
        request
    }
}

/// A new connection to a generation, and to nobody else.
pub(crate) async fn connect(right: &dyn Right, pool: &Pool) -> io::Result<Link> {
    let link = pool.connect(right.endpoint()).await?;
    // Its port may be another's by now, who would be given the request.
    let is_its_own = matches!(right.endpoint(), Endpoint::Unix(_)) || right.is_running();
    is_its_own.then_some(link).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
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
    /// Whether the backend may have the request.
    fn was_sent(self) -> bool {
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

/// Whether llama-server reads a request line with this target: it closes without a word over one that is longer.
pub(crate) fn fits_line(parts: &Parts) -> Result<(), Refusal> {
    // A target that begins with its query gets a slash.
    let target = parts.uri.path_and_query().map_or(1, |target| {
        let text = target.as_str();
        text.len() + usize::from(!text.starts_with('/'))
    });
    // `METHOD target HTTP/1.1` and the end of the line.
    if parts.method.as_str().len() + target + "  HTTP/1.1\r\n".len() > LINE_BYTES {
        return Err(Refusal::TargetTooLong { limit: LINE_BYTES });
    }
    Ok(())
}

/// The same for all lines of a head, as it goes to the backend.
pub(crate) fn fits_lines(parts: &Parts) -> Result<(), Refusal> {
    fits_line(parts)?;
    // `name: value` and the end of the line.
    let longest = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).max();
    if longest.is_some_and(|longest| longest > LINE_BYTES) {
        return Err(Refusal::LineTooLong { limit: LINE_BYTES });
    }
    Ok(())
}

/// RFC 9110 section 9.2.1. The other safe methods are answered by us.
fn executes_nothing(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

impl Message {
    /// A request with its body, as far as that was taken in. A body of at most `replay_bytes` may be kept to be sent again.
    pub(crate) fn new(
        parts: Parts,
        intake: Intake,
        route: Route,
        replay_bytes: usize,
    ) -> Result<Self, Refusal> {
        let mut head = Request::new(());
        *head.uri_mut() = target::origin_form(&parts.uri).map_err(|_| Refusal::Host)?;
        let is_safe = executes_nothing(&parts.method);
        // Whether that proves anything is looked at when it has failed: each attempt may meet another build.
        let provable = is_safe || (route.generates && intake.is_stream());
        *head.headers_mut() = parts.headers;
        if !is_safe && parts.method != Method::DELETE && intake.is_whole() && intake.len() == 0 {
            // Without it, llama-server would wait for a body until the connection ends.
            head.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(0));
        }
        *head.method_mut() = parts.method;
        let streams = intake.is_stream();
        let body = if provable && intake.is_whole() && intake.len() <= replay_bytes as u64 {
            Outgoing::Again(intake)
        } else {
            let sent = intake.sent.clone();
            Outgoing::Once(Some(intake.into_body()), sent)
        };
        Ok(Self { head, body, streams })
    }

    /// A request to send. One that is sent once is given away by the first call.
    fn request(&mut self) -> Request<RequestBody> {
        let (headers, body) = match &mut self.body {
            Outgoing::Again(intake) => (self.head.headers().clone(), intake.copy()),
            Outgoing::Once(body, sent) => {
                let body = body.take().unwrap_or_else(|| RequestBody::nothing(sent.clone()));
                (std::mem::take(self.head.headers_mut()), body)
            }
        };
        let mut request = Request::new(body);
        *request.method_mut() = self.head.method().clone();
        *request.uri_mut() = self.head.uri().clone();
        *request.headers_mut() = headers;
        request
    }

    /// Takes back what was not sent.
    fn put_back(&mut self, request: Request<RequestBody>) {
        if let Outgoing::Once(kept, _) = &mut self.body {
            let (parts, body) = request.into_parts();
            *self.head.headers_mut() = parts.headers;
            *kept = Some(body);
        }
    }

    fn sent(&self) -> Arc<Sent> {
        match &self.body {
            Outgoing::Again(intake) => intake.sent.clone(),
            Outgoing::Once(_, sent) => sent.clone(),
        }
    }
}
