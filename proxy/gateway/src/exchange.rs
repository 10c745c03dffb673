//! One request's life.
//!
//! ```text
//!   Received -> [ ours? ] -> answered here
//!      | body taken in, model resolved
//!   Admitted -> lease (waits in the model's queue; the body is read ahead meanwhile)
//!   Leased   -> connection, reused or new ---- refused -------------------------+
//!   Connected-> request sent ----------------- handed back unsent --------------+-> next attempt
//!   Sent     -> head ------------------------- ended before any byte of a       |   (new lease)
//!      |                                       stream's answer, body still held +
//!      |         anything else that fails here: 502, executed maybe
//!   Streaming -> see `relay`
//! ```
//!
//! A request is sent again only with proof that nothing was executed: the three arrows on the right. The third rests on
//! llama-server sending the head of a streamed answer at the moment when the request gets its slot.
//!
//! The whole life is one future. Dropping it, which is what happens when the client leaves, gives back the place in the
//! queue, the lease, the held bytes, and closes the connection to the backend.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_ORIGIN, CONNECTION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue, ORIGIN,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use tokio::time::{Instant, sleep, timeout_at};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;
use warden_supervisor::ResolveError;

use crate::backends::Right;
use crate::client_io::{Busy, ConnState};
use crate::errors::Refusal;
use crate::gateway::Shared;
use crate::headers;
use crate::intake::{Intake, Named};
use crate::observe::{Flight, Outcome};
use crate::own;
use crate::pool::{Link, Pool, SendError};
use crate::query;
use crate::relay::{AnswerBody, Relay, RelayTerms};
use crate::request_body::{RequestBody, Sent};
use crate::routes::{self, Own, Route};

/// Answers one request.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    conn: Arc<ConnState>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Response<AnswerBody> {
    let busy = conn.begin();
    let (parts, body) = request.into_parts();
    let request_id = headers::given_request_id(&parts.headers).unwrap_or_else(headers::fresh_request_id);
    let own = routes::own(&parts.method, parts.uri.path());
    let route = routes::route(&parts.method, parts.uri.path());
    let label = match &own {
        None => route.name,
        Some(Own::Health) => "health",
        Some(Own::Models | Own::Model(_)) => "models",
        Some(Own::Preflight) => "preflight",
        Some(Own::Forbidden) => "forbidden",
    };
    let flight = Flight::begin(
        shared.observer.clone(),
        shared.gauges.clone(),
        request_id.to_str().unwrap_or_default().to_owned(),
        peer,
        parts.method.clone(),
        label,
    );
    let origin = parts.headers.get(ORIGIN).cloned();
    let mut exchange = Exchange { shared, conn, route, request_id, origin, flight, body_left: true };
    let result = match own {
        _ if head_bytes(&parts) > exchange.shared.config.header_bytes => {
            Err(Refusal::HeadTooLarge { limit: exchange.shared.config.header_bytes })
        }
        _ if !has_one_host(&parts) => Err(Refusal::Host),
        Some(own) => exchange.own(&parts, &own),
        None => match exchange.forward(parts, body).await {
            Ok(relayed) => return exchange.relay(relayed, busy),
            Err(refusal) => Err(refusal),
        },
    };
    match result {
        Ok(words) => exchange.words(words, busy),
        Err(refusal) => exchange.refuse(&refusal, busy),
    }
}

/// RFC 9112 section 3.2: a request of HTTP/1.1 has exactly one `Host`.
fn has_one_host(parts: &Parts) -> bool {
    let hosts = parts.headers.get_all(HOST).iter().count();
    hosts == 1 || (hosts == 0 && parts.version < Version::HTTP_11)
}

/// Bytes of a request head. hyper looks at its limit only while a head is incomplete, so one that comes in few large
/// pieces passes there.
fn head_bytes(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields: usize = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    target + fields
}

struct Exchange {
    shared: Arc<Shared>,
    conn: Arc<ConnState>,
    route: Route,
    request_id: HeaderValue,
    origin: Option<HeaderValue>,
    flight: Flight,
    /// The client may still be sending its body.
    body_left: bool,
}

/// A backend's answer has begun.
struct Relayed {
    response: Response<Incoming>,
    right: Arc<dyn Right>,
    link: Link,
    pool: Arc<Pool>,
    sent: Arc<Sent>,
    deadline: Instant,
    is_head: bool,
}

/// What goes to a backend, once or again.
struct Message {
    head: Request<()>,
    body: Outgoing,
}

enum Outgoing {
    /// Held whole: each attempt sends a copy that shares the bytes.
    Replay(Intake),
    /// Ready to be sent, once.
    Once(Option<RequestBody>, Arc<Sent>),
}

impl Exchange {
    fn own(&mut self, parts: &Parts, own: &Own<'_>) -> Result<own::Words, Refusal> {
        self.body_left = false;
        let view = || self.shared.backends.view();
        match own {
            Own::Health if self.shared.stop.is_cancelled() => Err(Refusal::ShuttingDown),
            Own::Health => Ok(own::health()),
            Own::Models => Ok(own::models(&view(), self.shared.started)),
            Own::Model(id) => {
                let name = query::path(id).unwrap_or_else(|| (*id).to_owned());
                let resolved = self.shared.backends.resolve(Some(&name))?;
                own::model(&view(), resolved.as_str(), self.shared.started)
                    .ok_or_else(|| ResolveError::Unknown { name, known: self.known() }.into())
            }
            Own::Preflight => Ok(own::preflight()),
            Own::Forbidden => Err(Refusal::Method(parts.method.clone())),
        }
    }

    fn known(&self) -> Vec<String> {
        self.shared.backends.view().models.iter().map(|model| model.name.to_string()).collect()
    }

    async fn forward(&mut self, mut parts: Parts, body: Incoming) -> Result<Relayed, Refusal> {
        let config = &self.shared.clone().config;
        let mut intake = Intake::begin(&parts.headers, body, self.shared.budget.clone(), config)?;
        let asked = parts.uri.query().and_then(|query| query::parameter(query, "model"));
        // With `any_name`, every name means the only model, so that a large body need not be searched for one.
        let search = asked.is_none() && self.shared.backends.resolve(Some("")).is_err();
        intake.take(search, config).await?;
        let model = self.model(asked, &intake, search)?;
        self.flight.record.model = Some(model.clone());

        headers::to_backend(&mut parts.headers, &self.request_id);
        let is_head = parts.method == Method::HEAD;
        let right = self.lease(&model, &mut intake).await?;
        self.body_left = !intake.is_whole();
        let message = self.message(parts, intake)?;
        self.attempts(model, right, message, is_head).await
    }

    fn model(&self, asked: Option<String>, intake: &Intake, search: bool) -> Result<ModelName, Refusal> {
        let backends = &self.shared.backends;
        if let Some(name) = asked {
            return Ok(backends.resolve(Some(&name))?);
        }
        if !search {
            return Ok(backends.resolve(Some(""))?);
        }
        let named = intake.named();
        if let Named::Model(name) = &named {
            return Ok(backends.resolve(Some(name))?);
        }
        // The only model takes whatever comes and answers itself; with several, the reason must be ours.
        backends.resolve(None).map_err(|error| match (named, error) {
            (Named::NotJson, ResolveError::Missing { known }) => Refusal::NotJson { known },
            (Named::NotText, ResolveError::Missing { known }) => Refusal::ModelNotText { known },
            (_, error) => Refusal::Resolve(error),
        })
    }

    /// Waits for a lease and reads the body ahead meanwhile, because a client's leaving can only be seen behind it.
    async fn lease(&mut self, model: &ModelName, intake: &mut Intake) -> Result<Arc<dyn Right>, Refusal> {
        let shared = self.shared.clone();
        let lease = shared.backends.lease(model, self.route.kind);
        let granted = tokio::select! {
            biased;
            granted = lease => granted,
            refusal = intake.ahead() => return Err(refusal),
        };
        self.granted(model, granted)
    }

    fn granted(
        &mut self,
        model: &ModelName,
        granted: Result<Arc<dyn Right>, warden_supervisor::Denied>,
    ) -> Result<Arc<dyn Right>, Refusal> {
        let right = granted.map_err(|denied| Refusal::Denied { model: model.clone(), denied })?;
        self.flight.record.queued += right.queued_for();
        self.flight.record.generation = Some(right.generation());
        Ok(right)
    }

    fn message(&self, parts: Parts, intake: Intake) -> Result<Message, Refusal> {
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
        let target = if target.starts_with('/') { target.to_owned() } else { "/".to_owned() };
        let mut head = Request::new(());
        *head.uri_mut() = Uri::try_from(target).map_err(|_| Refusal::Host)?;
        *head.headers_mut() = parts.headers;
        let takes_body =
            !matches!(parts.method, Method::GET | Method::HEAD | Method::OPTIONS | Method::DELETE);
        if takes_body && intake.is_whole() && intake.len() == 0 {
            // Without it, llama-server would wait for a body until the connection ends.
            head.headers_mut().insert(http::header::CONTENT_LENGTH, HeaderValue::from(0));
        }
        *head.method_mut() = parts.method;
        let replay = intake.is_whole() && intake.len() <= self.shared.config.replay_bytes as u64;
        let body = if replay {
            Outgoing::Replay(intake)
        } else {
            let sent = intake.sent.clone();
            Outgoing::Once(Some(intake.into_body()), sent)
        };
        Ok(Message { head, body })
    }

    async fn attempts(
        &mut self,
        model: ModelName,
        mut right: Arc<dyn Right>,
        mut message: Message,
        is_head: bool,
    ) -> Result<Relayed, Refusal> {
        let shared = self.shared.clone();
        let config = &shared.config;
        let deadline = Instant::now() + config.exchange_timeout;
        self.conn.bound(deadline + config.keep_alive);
        // A stream's head comes with its slot, so without one nothing was executed.
        let provable = self.route.head_with_slot && message.is_stream();
        let mut attempt = 1;
        loop {
            let one = self.once(&right, &mut message);
            let revoked = right.clone().revoked();
            let result = tokio::select! {
                biased;
                result = timeout_at(deadline, one) => result,
                () = revoked => {
                    return Err(Refusal::Revoked { model });
                }
            };
            let failed = match result {
                Err(_) => return Err(Refusal::TimedOut { model, after: config.exchange_timeout }),
                Ok(Ok((response, link, pool))) => {
                    let sent = message.sent();
                    return Ok(Relayed { response, right, link, pool, sent, deadline, is_head });
                }
                Ok(Err(failed)) => failed,
            };
            if let Some(fault) = message.sent().fault() {
                return Err(Refusal::of_body(fault, config.body_bytes));
            }
            let proved = match failed {
                Failed::Refused | Failed::Unsent => true,
                Failed::Sent => provable && message.can_repeat(),
            };
            if !proved {
                return Err(Refusal::Died { model });
            }
            if attempt >= config.attempts {
                return Err(Refusal::Unreachable { model, attempts: attempt });
            }
            attempt += 1;
            self.flight.record.retries += 1;
            right = self.again(&model, right, config.connect_timeout).await?;
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
            let granted = shared.backends.lease(model, self.route.kind).await;
            let right = self.granted(model, granted)?;
            if right.generation() != generation || Instant::now() >= until {
                return Ok(right);
            }
            drop(right);
            sleep(patience / 50).await;
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
        if let Some(mut link) = pool.reuse().await {
            match link.send(message.request()).await {
                Ok(response) => return Ok((response, link, pool)),
                Err(SendError::Sent(error)) => return Err(Failed::sent(&error)),
                Err(SendError::Unsent(unsent)) => request = Some(*unsent),
            }
        }
        let mut link = match pool.connect(right.endpoint()).await {
            Ok(link) => link,
            Err(error) => {
                tracing::debug!(%error, "cannot connect to a backend");
                if let Some(request) = request {
                    message.put_back(request);
                }
                return Err(Failed::Refused);
            }
        };
        let request = request.unwrap_or_else(|| message.request());
        match link.send(request).await {
            Ok(response) => Ok((response, link, pool)),
            Err(SendError::Sent(error)) => Err(Failed::sent(&error)),
            Err(SendError::Unsent(request)) => {
                message.put_back(*request);
                Err(Failed::Unsent)
            }
        }
    }

    fn relay(mut self, relayed: Relayed, busy: Busy) -> Response<AnswerBody> {
        let Relayed { response, right, link, pool, sent, deadline, is_head } = relayed;
        let (mut parts, incoming) = response.into_parts();
        let config = &self.shared.config;
        let is_events = parts
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(b"text/event-stream"));
        let has_body = !is_head && parts.status != StatusCode::NOT_MODIFIED;
        headers::to_client(&mut parts.headers, &self.request_id, has_body);
        self.flight.record.status = parts.status.as_u16();
        self.flight.record.stream = is_events;
        right.note_progress();
        let terms = RelayTerms {
            tail_bytes: (self.route.kind == LeaseKind::Slot).then_some(config.tail_bytes),
            events: is_events.then_some((config.event_bytes, config.stream_idle)),
            deadline,
            anthropic: self.route.anthropic,
            // llama-server closes after a stream and after an error, whatever its headers promise.
            reusable: !is_events && parts.status.as_u16() < 400,
        };
        if !sent.is_whole() {
            self.conn.must_linger();
        }
        let mut answer = Response::new(AnswerBody::relay(
            Relay::new(incoming, self.flight, right, link, pool, sent, &terms),
            busy,
        ));
        *answer.status_mut() = parts.status;
        *answer.headers_mut() = parts.headers;
        answer
    }

    fn words(self, (headers, body): own::Words, busy: Busy) -> Response<AnswerBody> {
        self.reply(StatusCode::OK, headers, body, Outcome::Ok, busy)
    }

    fn refuse(self, refusal: &Refusal, busy: Busy) -> Response<AnswerBody> {
        tracing::debug!(request_id = %self.flight.record.request_id, %refusal, "refused");
        let answer = refusal.answer(self.route.anthropic);
        let mut headers: HeaderMap = answer.headers.into_iter().collect();
        if self.body_left {
            self.conn.must_linger();
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.reply(answer.status, headers, answer.body, refusal.outcome(), busy)
    }

    fn reply(
        mut self,
        status: StatusCode,
        mut headers: HeaderMap,
        body: Bytes,
        outcome: Outcome,
        busy: Busy,
    ) -> Response<AnswerBody> {
        headers.insert(headers::REQUEST_ID, self.request_id);
        if let Some(origin) = self.origin {
            // As llama-server does.
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        }
        self.flight.record.status = status.as_u16();
        let mut answer = Response::new(AnswerBody::fixed(body, self.flight, outcome, busy));
        *answer.status_mut() = status;
        *answer.headers_mut() = headers;
        answer
    }
}

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
    /// No connection.
    Refused,
    /// The connection was closed before a byte was sent.
    Unsent,
    /// The connection ended after the request was sent, at least in part, and before any byte of an answer.
    Sent,
}

impl Failed {
    fn sent(error: &hyper::Error) -> Self {
        tracing::debug!(%error, "a backend's connection ended before its answer");
        Self::Sent
    }
}

impl Message {
    /// A request to send. A body that cannot be repeated is given away by the first call.
    fn request(&mut self) -> Request<RequestBody> {
        let body = match &mut self.body {
            Outgoing::Replay(intake) => intake.copy(),
            Outgoing::Once(body, sent) => body.take().unwrap_or_else(|| RequestBody::nothing(sent.clone())),
        };
        let mut request = Request::new(body);
        *request.method_mut() = self.head.method().clone();
        *request.uri_mut() = self.head.uri().clone();
        *request.headers_mut() = self.head.headers().clone();
        request
    }

    /// Takes back what was not sent.
    fn put_back(&mut self, request: Request<RequestBody>) {
        if let Outgoing::Once(body, _) = &mut self.body {
            *body = Some(request.into_body());
        }
    }

    fn can_repeat(&self) -> bool {
        matches!(&self.body, Outgoing::Replay(_))
    }

    fn is_stream(&self) -> bool {
        matches!(&self.body, Outgoing::Replay(intake) if intake.is_stream())
    }

    fn sent(&self) -> Arc<Sent> {
        match &self.body {
            Outgoing::Replay(intake) => intake.sent.clone(),
            Outgoing::Once(_, sent) => sent.clone(),
        }
    }
}
