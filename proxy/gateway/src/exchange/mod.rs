//! One request's life.
//!
//! ```text
//!   Received -> [ ours? ] -> answered here                      `local_routes`
//!      | head sound, client may ask (Access)
//!   Admitted -> body taken in, model known, rules applied        `forward`
//!      |     -> lease (waits in the model's queue; the body is read ahead meanwhile)
//!      |        the model is not loaded, and a stream was asked for -> begun, the rest in its body   `reply`, `answer/interim`
//!   Leased   -> connection, reused or new ---- refused -------------------------+
//!            -> request sent ----------------- handed back unsent --------------+-> next attempt
//!            -> head ------------------------- ended before any byte of a       |   (new lease)
//!      |                                       stream's answer, body still held +
//!      |         anything else that fails here: 502, executed maybe
//!   Answered -> relayed, or put together                        `reply`
//! ```
//!
//! Each state is a type that holds what is known in it. Whatever ends the request before it is answered is [`Refused`], with
//! what its client may still send. From the lease to the head: [`crate::backend::attempts`].
//!
//! The whole life is one future. Dropping it, which is what happens when the client leaves, gives back the place in the
//! queue, the lease, the held bytes, and closes the connection to the backend.

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

use self::forward::Forwarded;
use self::local_routes::Words;
use self::router::RouterCall;
use crate::access::keys::{Access, Keys};
use crate::access::{csrf, host_check};
use crate::answer::answer_body::AnswerBody;
use crate::answer::assemble::Kind;
use crate::answer::flight::Flight;
use crate::answer::remember::Remember;
use crate::backend::again::Again;
use crate::backend::attempts::Relayed;
use crate::backend::line_limits::fits_line;
use crate::body::budget::{Budget, Peer, Share};
use crate::body::intake::Intake;
use crate::body::sent::Sent;
use crate::live::Live;
use crate::observe::Record;
use crate::page::{self, Asker, Page};
use crate::protocol::conn_state::ConnState;
use crate::protocol::raw_head::Seen;
use crate::protocol::{headers, prefix, wire};
use crate::refusal::Refusal;
use crate::requests::{Begun, Progress};
use crate::route::target::{self, ModelPath};
use crate::route::{self, LocalRoute, Route};
use crate::rules::ModelRules;
use crate::shared::Shared;
use crate::trace::Trace;

/// What lasts from a request's head to the head of its answer.
struct Exchange {
    shared: Arc<Shared>,
    /// What was configured when the request began.
    live: Arc<Live>,
    /// We stand in the place of a single llama-server.
    drop_in: bool,
    conn: Arc<ConnState>,
    route: Route,
    request_id: HeaderValue,
    origin: Option<HeaderValue>,
    flight: Box<Flight>,
    /// What has come of its body, once some of it is taken in.
    body: Option<Arc<Sent>>,
    /// What is held for its client counts here, once it is known who that is.
    budget: Option<Budget>,
    /// The rules of the name under which the model is asked for, if it has its own.
    renamed: Option<Arc<ModelRules>>,
    /// What its conversation is known by, if its client or a balancer wants to know.
    conversation: Option<HeaderValue>,
}

/// A head has come, of which only the target has been read.
struct Received {
    parts: Box<Parts>,
    body: Incoming,
    /// What the reader beside hyper made of the head.
    seen: Option<Seen>,
    /// It is not under the path under which all routes are.
    is_outside: bool,
    /// What of us answers it.
    local: Option<LocalRoute>,
    /// The model that its path names, if it is of the kind that does.
    named: Option<Result<ModelPath, Refusal>>,
    /// What is held of the bodies of this client.
    held: Arc<Share>,
}

/// The head is sound, and its client may ask.
enum Admitted {
    /// For us: headers and body of the answer.
    Here(Words),
    /// For the page for operators.
    Page(Box<ForPage>),
    /// What llama-server's router answers.
    Router(RouterCall, Asked),
    Forward(Asked),
}

/// A request for the page, and who answers it.
struct ForPage {
    page: Arc<dyn Page>,
    request: Request<Incoming>,
    asker: Asker,
}

/// A request for a backend, of whose body nothing has been read.
struct Asked {
    parts: Box<Parts>,
    body: Incoming,
    named: Option<Result<ModelPath, Refusal>>,
    held: Arc<Share>,
    access: Access,
}

/// A backend's answer has begun.
struct Answered {
    relayed: Relayed,
    rest: ClientBody,
    /// The answer is put together from a stream of this dialect.
    assemble: Option<Kind>,
    /// What a success has set in the backend: the route and the body.
    sets: Option<(String, Bytes)>,
    /// To be executed once more if its server dies before anything of the answer is with the client.
    again: Option<Box<Again>>,
    /// For the process that follows.
    remember: Option<Box<Remember>>,
}

/// Why a request ends without a backend's answer.
struct Refused {
    refusal: Refusal,
    rest: ClientBody,
}

/// What a client may still send of the body of the request that is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientBody {
    /// The head is not sound, or asks for a tunnel: whatever follows is no request.
    Unframed,
    /// Some of it. It must not be taken for the next request.
    Coming,
    /// Nothing, or what is left to hyper.
    Over,
}

impl Answered {
    /// What is passed on as it is.
    fn alone(relayed: Relayed, rest: ClientBody) -> Self {
        Self { relayed, rest, assemble: None, sets: None, again: None, remember: None }
    }
}

impl ClientBody {
    /// Before anything of the body is read.
    fn unread(body: &Incoming) -> Self {
        if body.is_end_stream() { Self::Over } else { Self::Coming }
    }

    /// Once some of it is taken in.
    fn behind(intake: &Intake) -> Self {
        if intake.is_whole() { Self::Over } else { Self::Coming }
    }

    /// A refusal, with what the client may still send.
    fn refused(self, refusal: Refusal) -> Refused {
        Refused { refusal, rest: self }
    }
}

impl Exchange {
    /// Tells what its conversation is known by, in the head of a success: nothing is bound to an instance that refused it.
    fn tell_conversation(&self, status: StatusCode, headers: &mut HeaderMap) {
        if let Some(word) = self.conversation.clone().filter(|_| status.is_success()) {
            headers.insert(headers::CONVERSATION, word);
        }
    }

    /// An operator has ended it: whatever was done for it is given up, as when its client leaves. `rest` is what was to come of its
    /// body when that was looked at last; all of it may have come since.
    fn cancelled(&self, rest: ClientBody) -> Refused {
        let has_come = self.body.as_ref().is_some_and(|body| body.print().is_some());
        let rest = if has_come { ClientBody::Over } else { rest };
        rest.refused(Refusal::Cancelled { executed: self.flight.progress.is_sent() })
    }
}

/// Answers one request, always: hyper wants to hear of errors, and there are none. Inlined, so that its future is made where it stays.
#[inline]
pub(crate) async fn answer(
    shared: Arc<Shared>,
    conn: Arc<ConnState>,
    peer: Peer,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, Infallible> {
    let busy = conn.begin();
    let (mut exchange, received) = receive(shared, conn, peer, request);
    let ended = match admit(&mut exchange, received) {
        Ok(Admitted::Forward(asked)) => {
            let rest = ClientBody::unread(&asked.body);
            let forwarded = {
                let mut forwarding = pin!(forward::forward(&mut exchange, asked));
                poll_fn(|context| busy.unless_cancelled(forwarding.as_mut(), context)).await
            };
            match forwarded {
                Some(Ok(Forwarded::Answered(answered))) => {
                    return Ok(reply::deliver(exchange, answered, busy).await);
                }
                Some(Ok(Forwarded::Waits(waits))) => return Ok(reply::begin(exchange, *waits, busy)),
                Some(Err(refused)) => Err(refused),
                None => Err(exchange.cancelled(rest)),
            }
        }
        Ok(Admitted::Page(asked)) => {
            let ForPage { page, request, asker } = *asked;
            let rest = ClientBody::unread(request.body());
            let answer = page.answer(request, asker).await;
            return Ok(reply::page(exchange, answer, rest, busy));
        }
        // Rare: not a part of every request's future.
        Ok(Admitted::Router(call, asked)) => Box::pin(router::answer(&mut exchange, call, asked)).await,
        Ok(Admitted::Here(words)) => Ok(words),
        Err(refused) => Err(refused),
    };
    Ok(match ended {
        Ok(words) => reply::words(exchange, words, busy),
        Err(refused) => reply::refuse(exchange, &refused, busy),
    })
}

/// What a request asks for, by its target.
fn receive(
    shared: Arc<Shared>,
    conn: Arc<ConnState>,
    peer: Peer,
    request: Request<Incoming>,
) -> (Exchange, Received) {
    let seen = conn.next_head();
    let (parts, body) = request.into_parts();
    // Boxed, as the flight is.
    let mut parts = Box::new(parts);
    let is_outside = if shared.config.server.api_prefix.is_empty() {
        false
    } else {
        prefix::strip(&parts.uri, &shared.config.server.api_prefix).map(|uri| parts.uri = uri).is_none()
    };
    let request_id = headers::given_request_id(&parts.headers).unwrap_or_else(headers::fresh_request_id);
    let (backends, live) = (&*shared.upstream.backends, shared.live.now());
    let more = live.by_name.keys().map(String::as_str);
    let named = target::is_upstream(parts.uri.path())
        .then(|| target::upstream(&parts.uri, &backends.view(), &more, backends.takes_any_name()));
    let route = match &named {
        // Rules would not leave the body as it is.
        Some(Ok(named)) => Route { shape: None, ..route::route(&parts.method, named.target.path()) },
        _ => route::route(&parts.method, parts.uri.path()),
    };
    let local = match &named {
        Some(Ok(named)) if named.is_bare && parts.method == Method::GET => {
            Some(LocalRoute::Bare(named.name.clone()))
        }
        _ if has_page(&shared, &live, &parts) => Some(LocalRoute::Page),
        _ => route::local(&parts.method, parts.uri.path()),
    };
    let drop_in = dropin::is(&shared);
    let local = local.filter(|local| !drop_in || dropin::is_ours(&shared, local, live.keys.is_some()));
    let traces = shared.config.traces.filter(|_| local.is_none());
    let trace = traces.map(|ratio| {
        let path = match &named {
            Some(Ok(named)) => route::known(named.target.path()),
            _ => route::known(parts.uri.path()),
        };
        Trace::begin(&mut parts.headers, ratio, path, !shared.config.server.tls_cert.is_empty())
    });
    let mut flight = Flight::begin(
        shared.observer.clone(),
        shared.gauges.clone(),
        request_id.to_str().unwrap_or_default().to_owned(),
        peer.ip,
        (route::named(&parts.method), parts.version),
        local.as_ref().map_or(route.name, LocalRoute::label),
        |record, at| {
            // What we answer ourselves is over at once, and probes come all the time.
            if local.is_some() {
                return (None, Progress::default());
            }
            let (ticket, progress) = shared.requests.begin(&begun(record, route, at), &conn);
            (Some(ticket), progress)
        },
    );
    flight.record.trace = trace;
    flight.record.user_agent = headers::user_agent(&parts.headers);
    let origin = parts.headers.get(ORIGIN).cloned();
    let exchange = Exchange {
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
        renamed: None,
        conversation: None,
    };
    (exchange, Received { parts, body, seen, is_outside, local, named, held: peer.held })
}

/// Whether it is the page for operators that is asked for, and there is one.
fn has_page(shared: &Shared, live: &Live, parts: &Parts) -> bool {
    page::is_for(parts) && shared.page.is_some() && live.keys.as_ref().is_some_and(Keys::has_operators)
}

/// What an operator sees of a request by its head.
fn begun(record: &Record, route: Route, at: Instant) -> Begun<'_> {
    Begun {
        request_id: &record.request_id,
        peer: record.peer,
        method: &record.method,
        protocol: record.protocol,
        route: record.route,
        generates: route.generates,
        at,
    }
}

/// Lets a request in, by all that can be said before its body is read. What is for us is answered.
fn admit(exchange: &mut Exchange, received: Received) -> Result<Admitted, Refused> {
    let Received { parts, body, seen, is_outside, local, named, held } = received;
    let config = &exchange.shared.config.server;
    let unframed = |refusal| ClientBody::Unframed.refused(refusal);
    if head_bytes(&parts) > config.header_bytes.in_memory() || parts.headers.len() > config.header_count {
        // Of both the narrower reason.
        let too_large = Refusal::HeadTooLarge { limit: config.header_bytes.in_memory() };
        return Err(unframed(fits_line(&parts).err().unwrap_or(too_large)));
    }
    if is_outside {
        return Err(unframed(Refusal::NoPrefix(config.api_prefix.clone())));
    }
    wire::check(&parts, &body, seen).map_err(|fault| unframed(Refusal::Wire(fault)))?;
    let unread = ClientBody::unread(&body);
    let access = access(exchange, &parts, local.as_ref()).map_err(|refusal| unread.refused(refusal))?;
    if let (Some(LocalRoute::Page), Some(page)) = (&local, exchange.shared.page.clone()) {
        let asker = Asker::of(&parts, exchange.flight.record.peer, exchange.shared.config.tls().is_some());
        let request = Request::from_parts(*parts, body);
        return Ok(Admitted::Page(Box::new(ForPage { page, request, asker })));
    }
    if let Some(local) = local {
        return local_routes::answer(exchange, &access, &parts, &local).map(Admitted::Here);
    }
    let asked = Asked { parts, body, named, held, access };
    Ok(match RouterCall::of(exchange, &asked) {
        Some(call) => Admitted::Router(call, asked),
        None => Admitted::Forward(asked),
    })
}

/// Who asks, and whether that client may.
fn access(exchange: &mut Exchange, parts: &Parts, local: Option<&LocalRoute>) -> Result<Access, Refusal> {
    let live = &exchange.live;
    // Probes come under any name, and learn nothing by it.
    if !matches!(local, Some(LocalRoute::Health)) {
        host_check::check(&live.names, parts)?;
        csrf::check(&live.cors.origins, parts)?;
    }
    let Some(keys) = live.keys.as_ref().filter(|_| !local.is_some_and(LocalRoute::is_open)) else {
        return Ok(Access::default());
    };
    let access = Access::by_key(keys, &parts.headers)?;
    exchange.flight.record.key = access.name();
    exchange.flight.progress.key(exchange.flight.record.key.as_ref());
    // Our own answers cost nobody anything.
    if local.is_none() {
        exchange.flight.pass = access.enter()?;
    }
    Ok(access)
}

/// Bytes of a request head. hyper looks at its limit only while a head is incomplete, so one that comes in few large
/// pieces passes there.
fn head_bytes(parts: &Parts) -> usize {
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields: usize = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    target + fields
}
