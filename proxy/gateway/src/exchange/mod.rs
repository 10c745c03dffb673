//! The life of one request.
//!
//! ```text
//!   Received -> [ gateway's own route? ] -> answered here        `local_routes`
//!      | head valid, client has access
//!   Admitted -> body read, model resolved, rules applied         `forward`
//!      |     -> lease (waits in the model's queue; the body is read ahead meanwhile)
//!      |        model not loaded, stream requested -> head sent, then its body  `reply`, `answer/loading`
//!   Leased   -> connection, reused or new ---- refused -------------------------+
//!            -> request sent ----------------- handed back unsent --------------+-> next attempt
//!            -> head ------------------------- ended before any byte of a       |   (new lease)
//!      |                                       stream's answer, body still held +
//!      |         any other failure here: 502, possibly executed
//!   Answered -> relayed                                          `reply`
//! ```
//!
//! Each state is a type with the data known in it. A request without a backend's answer ends with a
//! [`RequestRefusal`]. [`crate::backend::attempts`] has the steps from the lease to the head of the answer.
//!
//! The whole life is one future, which hyper drops when the client leaves. The drop frees the place in the
//! queue, the lease and the held bytes, and closes the backend's connection.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;

use http::header::ORIGIN;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::time::Instant;

use self::forward::ForwardResult;
use self::local_routes::LocalAnswer;
use self::router::RouterCall;
use self::state::{ClientBody, ForwardRequest, HttpExchange};
use crate::access::{ApiKeys, ClientAccess, origin};
use crate::answer::{AnswerBody, InFlightRequest};
use crate::backend::check_request_line;
use crate::body::{ClientPeer, ClientShare};
use crate::observe::RequestRecord;
use crate::page::{self, OperatorPage, PageClient};
use crate::protocol::{ConnState, HeadResult, headers, query, wire};
use crate::refusal::RequestRefusal;
use crate::requests::{ProgressHandle, RequestStart};
use crate::route::target::{self, ModelPath};
use crate::route::{self, LocalRoute, RequestRoute};
use crate::shared::{GatewayShared, LiveConfig};
use crate::trace::GatewayTrace;

mod conversation;
mod forward;
pub(crate) mod local_routes;
mod naming;
mod prompt_size;
mod reply;
mod router;
mod state;
mod tried;

/// A received request, of which only the target was examined.
struct ReceivedRequest {
    parts: Box<Parts>,
    body: Incoming,
    /// Result of the second reader, which checks the framing independently of hyper.
    seen: HeadResult,
    is_outside: bool,
    /// The gateway's own route that answers the request.
    local: Option<LocalRoute>,
    /// The model in the path, if the path has the form that names one.
    named: Option<Result<ModelPath, RequestRefusal>>,
    held: Arc<ClientShare>,
}

/// A request with a valid head from a client with access.
enum AdmittedRequest {
    /// The gateway has already built the answer.
    Answered(LocalAnswer),
    Page(Box<PageRequest>),
    Router(RouterCall, ForwardRequest),
    Forward(ForwardRequest),
}

struct PageRequest {
    page: Arc<dyn OperatorPage>,
    request: Request<Incoming>,
    asker: PageClient,
}

/// Answers one request and never fails. Inlined, so that its future is built in place.
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
            let forwarded = {
                let mut forwarding = pin!(forward::forward(&mut exchange, asked));
                poll_fn(|context| busy.unless_cancelled(forwarding.as_mut(), context)).await
            };
            match forwarded {
                Some(Ok(ForwardResult::Answered(answered))) => {
                    return Ok(reply::relay(exchange, answered, busy));
                }
                Some(Ok(ForwardResult::Waiting(waits))) => {
                    return Ok(reply::begin_stream(exchange, *waits, busy));
                }
                Some(Err(refusal)) => Err(refusal),
                None => Err(exchange.cancelled_refusal()),
            }
        }
        Ok(AdmittedRequest::Page(asked)) => {
            let PageRequest { page, request, asker } = *asked;
            let answer = page.answer(request, asker).await;
            return Ok(reply::reply_with_page(exchange, answer, busy));
        }
        // Boxed because router calls are rare, and the future of every request would grow.
        Ok(AdmittedRequest::Router(call, asked)) => {
            Box::pin(router::answer_router_call(&mut exchange, call, asked)).await
        }
        Ok(AdmittedRequest::Answered(words)) => Ok(words),
        Err(refusal) => Err(refusal),
    };
    Ok(match ended {
        Ok(words) => reply::reply_locally(exchange, words, busy),
        Err(refusal) => reply::refuse(exchange, &refusal, busy),
    })
}

fn receive(
    shared: Arc<GatewayShared>,
    conn: Arc<ConnState>,
    peer: ClientPeer,
    request: Request<Incoming>,
) -> (HttpExchange, ReceivedRequest) {
    let seen = conn.next_head();
    let (parts, body) = request.into_parts();
    // Boxed, because each move would copy the parts.
    let mut parts = Box::new(parts);
    let is_outside = if shared.config.server.api_prefix.is_empty() {
        false
    } else {
        query::strip_prefix(&parts.uri, &shared.config.server.api_prefix).map(|uri| parts.uri = uri).is_none()
    };
    let request_id = headers::given_request_id(&parts.headers).unwrap_or_else(headers::fresh_request_id);
    let backends = &*shared.upstream.backends;
    let live = shared.live.current();
    let more = live.by_name.keys().map(String::as_str);
    let named = target::is_upstream(parts.uri.path())
        .then(|| target::parse_upstream(&parts.uri, &backends.view(), &more, backends.takes_any_name()));
    let route = match &named {
        Some(Ok(named)) => route_of_path(&live, &parts.method, named),
        _ => route::backend_route(&parts.method, parts.uri.path()),
    };
    let drop_in = local_routes::is_drop_in(&shared);
    let local = match &named {
        Some(Ok(named)) if named.is_bare && parts.method == Method::GET => {
            Some(LocalRoute::Bare(named.name.clone()))
        }
        _ if has_page(&shared, &live, &parts) => Some(LocalRoute::Page),
        _ => route::local_route(&parts.method, parts.uri.path()),
    };
    let local =
        local.filter(|local| !drop_in || local_routes::keeps_route(&shared, local, live.keys.is_some()));
    let trace = match shared.config.traces {
        Some(ratio) if local.is_none() => Some(begin_trace(&shared, &mut parts, named.as_ref(), ratio)),
        _ => None,
    };
    let mut flight = InFlightRequest::begin(
        shared.observer.clone(),
        shared.gauges.clone(),
        request_id.to_str().unwrap_or_default().to_owned(),
        peer.ip,
        (route::logged_method(&parts.method), parts.version),
        local.as_ref().map_or(route.name, LocalRoute::label),
        |record, at| {
            // Do not list requests for own routes: they end at once, and health probes are frequent.
            if local.is_some() {
                return (None, ProgressHandle::default());
            }
            let (ticket, progress) = shared.requests.begin(&request_start(record, route, at), &conn);
            (Some(ticket), progress)
        },
    );
    flight.record.trace = trace;
    flight.record.user_agent = headers::user_agent(&parts.headers);
    let exchange = HttpExchange {
        shared,
        live,
        drop_in,
        conn,
        route,
        request_id,
        origin: parts.headers.get(ORIGIN).cloned(),
        flight,
        body: ClientBody::Unread { is_complete: false },
        budget: None,
        name_rules: None,
        conversation: None,
    };
    (exchange, ReceivedRequest { parts, body, seen, is_outside, local, named, held: peer.held })
}

/// Returns the route of a request that names its model in the path. The model gets the body unchanged, so no rules
/// apply.
fn route_of_path(live: &LiveConfig, method: &Method, named: &ModelPath) -> RequestRoute {
    let route = RequestRoute { shape: None, ..route::backend_route(method, named.target.path()) };
    let rules = live.models.get(&warden_policies::ModelName::new(&named.name));
    if rules.is_some_and(|rules| rules.other_program) { route.at_other_program(method) } else { route }
}

fn begin_trace(
    shared: &GatewayShared,
    parts: &mut Parts,
    named: Option<&Result<ModelPath, RequestRefusal>>,
    ratio: f64,
) -> Box<GatewayTrace> {
    let path = match named {
        Some(Ok(named)) => route::known_path(named.target.path()),
        _ => route::known_path(parts.uri.path()),
    };
    GatewayTrace::begin(&mut parts.headers, ratio, path, !shared.config.server.tls_cert.is_empty())
}

fn has_page(shared: &GatewayShared, live: &LiveConfig, parts: &Parts) -> bool {
    page::is_page_request(parts)
        && shared.page.is_some()
        && live.keys.as_ref().is_some_and(ApiKeys::has_operators)
}

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

/// Admits a request by its head, or answers it if the gateway has its route.
fn admit(exchange: &mut HttpExchange, received: ReceivedRequest) -> Result<AdmittedRequest, RequestRefusal> {
    let ReceivedRequest { parts, body, seen, is_outside, local, named, held } = received;
    let config = &exchange.shared.config.server;
    if head_bytes(&parts) > config.header_bytes.in_memory() || parts.headers.len() > config.header_count {
        // A request line that is too long is a more specific reason.
        let too_large = RequestRefusal::HeadTooLarge { limit: config.header_bytes.in_memory() };
        return Err(check_request_line(&parts).err().unwrap_or(too_large));
    }
    if is_outside {
        return Err(RequestRefusal::NoPrefix(config.api_prefix.clone()));
    }
    wire::check_request(&parts, &body, seen)?;
    exchange.body = ClientBody::Unread { is_complete: body.is_end_stream() };
    let access = check_access(exchange, &parts, local.as_ref())?;
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
        // After `CONNECT`, a client may send tunnel bytes, which are no request, before it gets the refusal.
        exchange.body = ClientBody::Unread { is_complete: local != LocalRoute::Forbidden };
        return local_routes::answer_locally(exchange, &access, &parts, &local)
            .map(AdmittedRequest::Answered);
    }
    let asked = ForwardRequest { parts, body, named, held, access };
    Ok(match RouterCall::from_request(exchange, &asked) {
        Some(call) => AdmittedRequest::Router(call, asked),
        None => AdmittedRequest::Forward(asked),
    })
}

fn check_access(
    exchange: &mut HttpExchange,
    parts: &Parts,
    local: Option<&LocalRoute>,
) -> Result<ClientAccess, RequestRefusal> {
    let live = &exchange.live;
    // Health probes may use any host name; their answers reveal nothing.
    if !matches!(local, Some(LocalRoute::Health)) {
        origin::check_host(&live.names, parts)?;
        origin::check_origin(&live.cors.origins, parts)?;
    }
    let keys = match &live.keys {
        Some(keys) if !local.is_some_and(LocalRoute::is_open) => keys,
        _ => return Ok(ClientAccess::default()),
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

/// Returns the bytes of a head. hyper does not limit a head that arrives in few large pieces.
fn head_bytes(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields: usize = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    target + fields
}
