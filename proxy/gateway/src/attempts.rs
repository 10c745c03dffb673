//! From the lease to the head of the answer: connect, send, and if that fails, try again where that is safe.
//!
//! A request is sent again only if nothing can have been executed:
//! - no connection was made, or the request came back from it unsent;
//! - the connection ended before any byte of an answer, the request asks for a stream on a route where llama-server
//!   sends the head at the moment when the request gets its slot, and its whole body is still held;
//! - it is a `GET` or `HEAD`, which executes nothing.
//!
//! Each new attempt takes a new lease: the generation that failed is dead or dying.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use rustix::io::Errno;
use tokio::time::{Instant, sleep, timeout_at};
use warden_policies::ModelName;
use warden_supervisor::{Denied, Endpoint};

use crate::backends::Right;
use crate::errors::Refusal;
use crate::exchange::Exchange;
use crate::intake::Intake;
use crate::link::{Link, SendError};
use crate::pool::Pool;
use crate::relay::Backend;
use crate::request_body::{RequestBody, Sent};
use crate::routes::Route;
use crate::target;

/// While the supervisor has not noticed that a generation is gone, it is asked this many times within the time to
/// connect.
const ASKS: u32 = 50;

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
            let mut revoked = right.clone().revoked();
            let result = tokio::select! {
                biased;
                // Made here: a future with a name would be kept beside the one that it was moved into.
                result = timeout_at(deadline, self.once(&right, &mut message)) => result,
                () = &mut revoked => return Err(Refusal::Revoked { model }),
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
            if let Some(fault) = message.sent().fault() {
                return Err(Refusal::of_body(fault, config.limits(self.route.size)));
            }
            if failed != Failed::Starved {
                right.doubt();
            }
            if let Failed::Garbled = failed {
                let why = "it is not HTTP/1.1".to_owned();
                return Err(Refusal::Garbled { model, why });
            }
            let proved = match failed {
                Failed::Refused | Failed::Starved | Failed::Unsent => true,
                Failed::Sent => matches!(message.body, Outgoing::Again(_)),
                Failed::Begun => {
                    executes_nothing(message.head.method()) && matches!(message.body, Outgoing::Again(_))
                }
                Failed::Garbled => false,
            };
            if !proved {
                return Err(Refusal::Died { model });
            }
            if attempt >= config.attempts {
                let nothing_ran = match failed {
                    Failed::Sent => self.route.head_with_slot,
                    Failed::Begun => false,
                    _ => true,
                };
                return Err(if nothing_ran {
                    Refusal::Unreachable { model, attempts: attempt }
                } else {
                    Refusal::Died { model }
                });
            }
            attempt += 1;
            self.flight.record.retries += 1;
            // It holds the lease, for whose place the next one may have to wait.
            drop(revoked);
            right = Box::pin(self.again(&model, right, config.connect_timeout)).await?;
        }
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
        let generation = failed.generation();
        drop(failed);
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
            let sending = message.request();
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
        let request = request.unwrap_or_else(|| message.request());
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
        let provable = is_safe || (route.head_with_slot && intake.is_stream());
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
