//! The life of one request.
//!
//! ```text
//!   Received -> [ gateway's own route? ] -> answered here        `local_routes`
//!      | head valid, client has access
//!   Admitted -> body read, model resolved, rules applied         `forward`
//!      |     -> lease (waits in the model's queue; the body is read ahead meanwhile)
//!      |        model not loaded, stream requested -> head sent, then its body  `reply`, `answer/interim`
//!   Leased   -> connection, reused or new ---- refused -------------------------+
//!            -> request sent ----------------- handed back unsent --------------+-> next attempt
//!            -> head ------------------------- ended before any byte of a       |   (new lease)
//!      |                                       stream's answer, body still held +
//!      |         any other failure here: 502, possibly executed
//!   Answered -> relayed, or assembled                            `reply`
//! ```
//!
//! Each state is a type with the data known in it. A request that ends without a backend's answer becomes a
//! [`RefusedRequest`], which also tells how much of its body the client may still send. The steps from the
//! lease to the head of the answer are in [`crate::backend::attempts`].
//!
//! The whole life is one future. hyper drops it when the client leaves, which frees the request's place in
//! the queue, the lease and the held bytes, and closes the connection to the backend.

mod conversation;
pub(crate) mod dropin;
mod forward;
mod local_routes;
mod naming;
mod prompt_size;
mod reply;
mod router;
mod tried;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue, ORIGIN};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use self::forward::ForwardResult;
use self::local_routes::LocalAnswer;
use self::router::RouterCall;
use crate::access::keys::{ApiKeys, ClientAccess};
use crate::access::{csrf, host_check};
use crate::answer::answer_body::AnswerBody;
use crate::answer::assemble::AnswerFormat;
use crate::answer::flight::InFlightRequest;
use crate::answer::remember::TurnRecorder;
use crate::backend::again::RepeatableRequest;
use crate::backend::attempts::RelayedAnswer;
use crate::backend::line_limits::check_request_line;
use crate::body::budget::{BodyBudget, ClientPeer, ClientShare};
use crate::body::intake::BodyIntake;
use crate::body::sent::SentBody;
use crate::live::LiveConfig;
use crate::observe::RequestRecord;
use crate::page::{self, OperatorPage, PageClient};
use crate::protocol::conn_state::ConnState;
use crate::protocol::raw_head::HeadResult;
use crate::protocol::{headers, prefix, wire};
use crate::refusal::RequestRefusal;
use crate::requests::{ProgressHandle, RequestStart};
use crate::route::target::{self, ModelPath};
use crate::route::{self, LocalRoute, RequestRoute};
use crate::rules::ModelRules;
use crate::shared::GatewayShared;
use crate::trace::GatewayTrace;

/// State that lasts from a request's head to the head of its answer.
struct HttpExchange {
    shared: Arc<GatewayShared>,
    /// Configuration in force when the request began.
    live: Arc<LiveConfig>,
    /// Drop-in mode: llama-warden replaces a single llama-server.
    drop_in: bool,
    conn: Arc<ConnState>,
    route: RequestRoute,
    request_id: HeaderValue,
    origin: Option<HeaderValue>,
    flight: Box<InFlightRequest>,
    /// State of the request body, once a part of it was read.
    body: Option<Arc<SentBody>>,
    /// Memory budget of the client, once the client is known.
    budget: Option<BodyBudget>,
    /// Rules of the requested name, if the configuration has rules for that name.
    name_rules: Option<Arc<ModelRules>>,
    /// Identifier of the conversation, if the client or a load balancer asked for it.
    conversation: Option<HeaderValue>,
}

/// A received request of which only the target was examined.
struct ReceivedRequest {
    parts: Box<Parts>,
    body: Incoming,
    /// Result of the second reader, which checks the framing independently of hyper.
    seen: Option<HeadResult>,
    /// The target lies outside `api_prefix`.
    is_outside: bool,
    /// The gateway's own route that answers the request, if any.
    local: Option<LocalRoute>,
    /// The model that the path names, if the path has the form that names one.
    named: Option<Result<ModelPath, RequestRefusal>>,
    /// Bytes held of request bodies from this client's address.
    held: Arc<ClientShare>,
}

/// A request with a valid head from a client with access.
enum AdmittedRequest {
    /// The gateway has already built the answer: headers and body.
    Answered(LocalAnswer),
    /// A request for the operators' page.
    Page(Box<PageRequest>),
    /// A route that llama-server's router answers itself.
    Router(RouterCall, ForwardRequest),
    Forward(ForwardRequest),
}

/// A request for the operators' page, and its handler.
struct PageRequest {
    page: Arc<dyn OperatorPage>,
    request: Request<Incoming>,
    asker: PageClient,
}

/// A request for a backend, with an unread body.
struct ForwardRequest {
    parts: Box<Parts>,
    body: Incoming,
    named: Option<Result<ModelPath, RequestRefusal>>,
    held: Arc<ClientShare>,
    access: ClientAccess,
}

/// A request whose backend has begun to answer.
struct AnsweredRequest {
    relayed: RelayedAnswer,
    rest: ClientBody,
    /// Dialect, if the answer is assembled from a stream.
    assemble: Option<AnswerFormat>,
    /// Setting that the request changes in the backend if it succeeds: route and body.
    sets: Option<(String, Bytes)>,
    /// State for executing the request again, if its server dies before the client has any part of the
    /// answer's body.
    again: Option<Box<RepeatableRequest>>,
    /// Recorder that keeps request and answer for the next process.
    remember: Option<Box<TurnRecorder>>,
}

/// A request that ends without a backend's answer.
struct RefusedRequest {
    refusal: RequestRefusal,
    rest: ClientBody,
}

/// State of the request body when the answer is sent: decides whether the connection can be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientBody {
    /// The head is invalid, or asks for a tunnel: the bytes after it are not a request.
    Unframed,
    /// A part of the body was not read, and must not be taken for the next request.
    Incomplete,
    /// The whole body was read, or hyper handles the rest.
    Complete,
}

impl AnsweredRequest {
    /// Creates an answer that is passed on unchanged.
    fn relayed_only(relayed: RelayedAnswer, rest: ClientBody) -> Self {
        Self { relayed, rest, assemble: None, sets: None, again: None, remember: None }
    }
}

impl ClientBody {
    /// Returns the state of a body before any of it is read.
    fn before_reading(body: &Incoming) -> Self {
        if body.is_end_stream() { Self::Complete } else { Self::Incomplete }
    }

    /// Returns the state of a body after a part of it was read.
    fn after_intake(intake: &BodyIntake) -> Self {
        if intake.is_whole() { Self::Complete } else { Self::Incomplete }
    }

    fn with_refusal(self, refusal: RequestRefusal) -> RefusedRequest {
        RefusedRequest { refusal, rest: self }
    }
}

impl HttpExchange {
    /// Adds the conversation's identifier to a successful answer. A refusal gets none, because it must not
    /// bind the conversation to this instance.
    fn add_conversation_header(&self, status: StatusCode, headers: &mut HeaderMap) {
        if let Some(word) = self.conversation.clone().filter(|_| status.is_success()) {
            headers.insert(headers::CONVERSATION, word);
        }
    }

    /// Ends the request for an operator. Its work is abandoned, as when its client leaves. `rest` is
    /// the last known state of the body; more of the body may have arrived since.
    fn cancelled_refusal(&self, rest: ClientBody) -> RefusedRequest {
        let has_come = self.body.as_ref().is_some_and(|body| body.fingerprint().is_some());
        let rest = if has_come { ClientBody::Complete } else { rest };
        rest.with_refusal(RequestRefusal::Cancelled { executed: self.flight.progress.is_sent() })
    }
}

/// Answers one request. Never fails; hyper's interface requires an error type. Inlined, so that its future is
/// built in place.
#[inline]
pub(crate) async fn answer(
    shared: Arc<GatewayShared>,
    conn: Arc<ConnState>,
    peer: ClientPeer,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Infallible> {
    let busy = conn.begin();
    let (mut exchange, received) = receive(shared, conn, peer, request);
    let ended = match admit(&mut exchange, received) {
        Ok(AdmittedRequest::Forward(asked)) => {
            let rest = ClientBody::before_reading(&asked.body);
            let forwarded = {
                let mut forwarding = pin!(forward::forward(&mut exchange, asked));
                poll_fn(|context| busy.unless_cancelled(forwarding.as_mut(), context)).await
            };
            match forwarded {
                Some(Ok(ForwardResult::Answered(answered))) => {
                    return Ok(reply::deliver(exchange, answered, busy).await);
                }
                Some(Ok(ForwardResult::Waiting(waits))) => {
                    return Ok(reply::begin_stream(exchange, *waits, busy));
                }
                Some(Err(refused)) => Err(refused),
                None => Err(exchange.cancelled_refusal(rest)),
            }
        }
        Ok(AdmittedRequest::Page(asked)) => {
            let PageRequest { page, request, asker } = *asked;
            let rest = ClientBody::before_reading(request.body());
            let answer = page.answer(request, asker).await;
            return Ok(reply::reply_with_page(exchange, answer, rest, busy));
        }
        // Boxed because router calls are rare, and the future of every request would grow.
        Ok(AdmittedRequest::Router(call, asked)) => {
            Box::pin(router::answer_router_call(&mut exchange, call, asked)).await
        }
        Ok(AdmittedRequest::Answered(words)) => Ok(words),
        Err(refused) => Err(refused),
    };
    Ok(match ended {
        Ok(words) => reply::reply_locally(exchange, words, busy),
        Err(refused) => reply::refuse(exchange, &refused, busy),
    })
}

/// Determines the route of a request from its target.
fn receive(
    shared: Arc<GatewayShared>,
    conn: Arc<ConnState>,
    peer: ClientPeer,
    request: Request<Incoming>,
) -> (HttpExchange, ReceivedRequest) {
    let seen = conn.next_head();
    let (parts, body) = request.into_parts();
    // Boxed, because each move of the parts would copy them.
    let mut parts = Box::new(parts);
    let is_outside = if shared.config.server.api_prefix.is_empty() {
        false
    } else {
        prefix::strip_prefix(&parts.uri, &shared.config.server.api_prefix)
            .map(|uri| parts.uri = uri)
            .is_none()
    };
    let request_id = headers::given_request_id(&parts.headers).unwrap_or_else(headers::fresh_request_id);
    let (backends, live) = (&*shared.upstream.backends, shared.live.current());
    let more = live.by_name.keys().map(String::as_str);
    let named = target::is_upstream(parts.uri.path())
        .then(|| target::parse_upstream(&parts.uri, &backends.view(), &more, backends.takes_any_name()));
    let route = match &named {
        // A model named in the path gets the body unchanged, so no rules apply.
        Some(Ok(named)) => {
            RequestRoute { shape: None, ..route::backend_route(&parts.method, named.target.path()) }
        }
        _ => route::backend_route(&parts.method, parts.uri.path()),
    };
    let local = match &named {
        Some(Ok(named)) if named.is_bare && parts.method == Method::GET => {
            Some(LocalRoute::Bare(named.name.clone()))
        }
        _ if has_page(&shared, &live, &parts) => Some(LocalRoute::Page),
        _ => route::local_route(&parts.method, parts.uri.path()),
    };
    let drop_in = dropin::is_drop_in(&shared);
    let local =
        local.filter(|local| !drop_in || dropin::answers_locally(&shared, local, live.keys.is_some()));
    let traces = shared.config.traces.filter(|_| local.is_none());
    let trace = traces.map(|ratio| {
        let path = match &named {
            Some(Ok(named)) => route::known_path(named.target.path()),
            _ => route::known_path(parts.uri.path()),
        };
        GatewayTrace::begin(&mut parts.headers, ratio, path, !shared.config.server.tls_cert.is_empty())
    });
    let mut flight = InFlightRequest::begin(
        shared.observer.clone(),
        shared.gauges.clone(),
        request_id.to_str().unwrap_or_default().to_owned(),
        peer.ip,
        (route::logged_method(&parts.method), parts.version),
        local.as_ref().map_or(route.name, LocalRoute::label),
        |record, at| {
            // Requests for the gateway's own routes are not listed: they are answered at once, and health
            // probes are frequent.
            if local.is_some() {
                return (None, ProgressHandle::default());
            }
            let (ticket, progress) = shared.requests.begin(&request_start(record, route, at), &conn);
            (Some(ticket), progress)
        },
    );
    flight.record.trace = trace;
    flight.record.user_agent = headers::user_agent(&parts.headers);
    let origin = parts.headers.get(ORIGIN).cloned();
    let exchange = HttpExchange {
        shared,
        live,
        drop_in,
        conn,
        route,
        request_id,
        origin,
        flight,
        body: None,
        budget: None,
        name_rules: None,
        conversation: None,
    };
    (exchange, ReceivedRequest { parts, body, seen, is_outside, local, named, held: peer.held })
}

/// Returns whether the request is for the operators' page, and the page is enabled.
fn has_page(shared: &GatewayShared, live: &LiveConfig, parts: &Parts) -> bool {
    page::is_page_request(parts)
        && shared.page.is_some()
        && live.keys.as_ref().is_some_and(ApiKeys::has_operators)
}

/// Builds the part of a request's entry in the operators' list that is known from its head.
fn request_start(record: &RequestRecord, route: RequestRoute, at: Instant) -> RequestStart<'_> {
    RequestStart {
        request_id: &record.request_id,
        peer: record.peer,
        method: &record.method,
        protocol: record.protocol,
        route: record.route,
        generates: route.generates,
        at,
    }
}

/// Admits a request by everything known before its body is read. Requests for own routes are answered.
fn admit(exchange: &mut HttpExchange, received: ReceivedRequest) -> Result<AdmittedRequest, RefusedRequest> {
    let ReceivedRequest { parts, body, seen, is_outside, local, named, held } = received;
    let config = &exchange.shared.config.server;
    let unframed = |refusal| ClientBody::Unframed.with_refusal(refusal);
    if head_bytes(&parts) > config.header_bytes.in_memory() || parts.headers.len() > config.header_count {
        // If the request line is too long as well, report that, which is more specific.
        let too_large = RequestRefusal::HeadTooLarge { limit: config.header_bytes.in_memory() };
        return Err(unframed(check_request_line(&parts).err().unwrap_or(too_large)));
    }
    if is_outside {
        return Err(unframed(RequestRefusal::NoPrefix(config.api_prefix.clone())));
    }
    wire::check_request(&parts, &body, seen).map_err(|fault| unframed(RequestRefusal::Wire(fault)))?;
    let unread = ClientBody::before_reading(&body);
    let access =
        check_access(exchange, &parts, local.as_ref()).map_err(|refusal| unread.with_refusal(refusal))?;
    if let (Some(LocalRoute::Page), Some(page)) = (&local, exchange.shared.page.clone()) {
        let asker = PageClient::from_parts(
            &parts,
            exchange.flight.record.peer,
            exchange.shared.config.tls().is_some(),
        );
        let request = Request::from_parts(*parts, body);
        return Ok(AdmittedRequest::Page(Box::new(PageRequest { page, request, asker })));
    }
    if let Some(local) = local {
        return local_routes::answer_locally(exchange, &access, &parts, &local)
            .map(AdmittedRequest::Answered);
    }
    let asked = ForwardRequest { parts, body, named, held, access };
    Ok(match RouterCall::from_request(exchange, &asked) {
        Some(call) => AdmittedRequest::Router(call, asked),
        None => AdmittedRequest::Forward(asked),
    })
}

/// Identifies the client and checks its rights.
fn check_access(
    exchange: &mut HttpExchange,
    parts: &Parts,
    local: Option<&LocalRoute>,
) -> Result<ClientAccess, RequestRefusal> {
    let live = &exchange.live;
    // Health probes may use any host name; they reveal nothing.
    if !matches!(local, Some(LocalRoute::Health)) {
        host_check::check_host(&live.names, parts)?;
        csrf::check_origin(&live.cors.origins, parts)?;
    }
    let Some(keys) = live.keys.as_ref().filter(|_| !local.is_some_and(LocalRoute::is_open)) else {
        return Ok(ClientAccess::default());
    };
    let access = ClientAccess::from_headers(keys, &parts.headers)?;
    exchange.flight.record.key = access.name();
    exchange.flight.progress.set_key(exchange.flight.record.key.as_ref());
    // The gateway's own answers do not count against a key's limits.
    if local.is_none() {
        exchange.flight.pass = access.take_pass()?;
    }
    Ok(access)
}

/// Returns the size of a request head in bytes. hyper checks its limit only while a head is incomplete, so
/// hyper accepts a larger head if it arrives in few large pieces.
fn head_bytes(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields: usize = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    target + fields
}
