//! Ends an exchange by a backend's answer, an answer of the gateway, or a refusal.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION};
use http::{Method, Response, StatusCode, Version};
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;

use super::forward::WaitingStream;
use super::local_routes::LocalAnswer;
use super::state::{AnsweredRequest, HttpExchange};
use crate::access::cors;
use crate::answer::{
    AnswerBody, AnswerFormat, AnswerRelay, ContinuationTerms, EventTerms, InterimBody, LoadingNotifier,
    RelayTerms, WatchedContent,
};
use crate::backend::RelayedAnswer;
use crate::body::HeldPieces;
use crate::observe::RequestOutcome;
use crate::protocol::{ConnBusy, headers, wire};
use crate::refusal::RequestRefusal;
use crate::route::RequestRoute;

const fn watched_content(route: RequestRoute, is_watched: bool) -> WatchedContent {
    match route.kind {
        LeaseKind::Slot if !is_watched => WatchedContent::Unwatched,
        LeaseKind::Slot if route.generates => WatchedContent::Text,
        LeaseKind::Slot => WatchedContent::Numbers,
        _ => WatchedContent::Unwatched,
    }
}

/// Returns the terms for continuing a streamed answer of this route on another server.
fn continuation_terms(route: RequestRoute, most: usize) -> Option<ContinuationTerms> {
    let kind = route.shape.and_then(AnswerFormat::from_shape)?;
    Some(ContinuationTerms { kind, max_bytes: most, fills_in: route.name == "infill" })
}

pub(super) fn relay(
    mut exchange: HttpExchange,
    answered: AnsweredRequest,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    let AnsweredRequest {
        relayed: RelayedAnswer { response: answer, read_ahead, backend, .. },
        sets,
        again,
        remember,
    } = answered;
    let (mut parts, incoming) = answer.into_parts();
    let is_events = headers::is_events(&parts.headers);
    let version = parts.version;
    let config = &exchange.shared.config.upstream;
    let route = exchange.route;
    let has_body = exchange.flight.record.method != Method::HEAD && parts.status != StatusCode::NOT_MODIFIED;
    headers::prepare_for_client(&mut parts.headers, &exchange.request_id, has_body);
    exchange.add_conversation_header(parts.status, &mut parts.headers);
    // In drop-in mode without CORS settings, llama-server's own headers stay.
    let cors = &exchange.live.cors;
    if !(exchange.drop_in && cors.is_like_llama_server()) {
        cors::strip_cors_headers(&mut parts.headers);
        cors.add_headers(exchange.origin.as_ref(), &mut parts.headers);
    }
    wire::add_via(&mut parts.headers, version);
    let record = &mut exchange.flight.record;
    record.note_head(parts.status.as_u16(), is_events);
    headers::mark_continued(&mut parts.headers, record.continued);
    if is_events && route.is_endless() && record.method == Method::GET {
        backend.lease.mark_endless();
    }
    backend.lease.note_progress(0);
    backend.lease.note_answered(is_events, parts.status.is_success());
    if parts.status.is_success()
        && let Some((path, body)) = sets
    {
        backend.lease.note_setting(&path, body);
    }
    let terms = RelayTerms {
        tail_bytes: (route.kind == LeaseKind::Slot).then(|| config.tail_bytes.in_memory()),
        generates: route.generates,
        content: watched_content(route, backend.lease.watches_answers()),
        events: is_events.then(|| EventTerms {
            limit: config.event_bytes.in_memory(),
            max_silence: config.stream_idle,
            comment_interval: config.comment_interval,
            continuation: continuation_terms(route, config.continue_bytes.in_memory()),
        }),
        dialect: route.dialect,
        // After a stream or an error, llama-server closes even a connection announced as keep-alive.
        reusable: !is_events && parts.status.as_u16() < 400,
    };
    if !backend.sent.is_whole() {
        exchange.conn.must_linger();
        if !exchange.body.is_complete() {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
    }
    // Reading ahead frees a slot early, so a request without a slot does not need it.
    let unread = match route.kind {
        LeaseKind::Slot if is_events => config.unread_bytes.0,
        LeaseKind::Slot => u64::MAX,
        _ => 0,
    };
    let held = HeldPieces::new(exchange.budget.unwrap_or_else(|| exchange.shared.budget.clone()));
    let relay = AnswerRelay::new((incoming, read_ahead), exchange.flight, backend, again, remember, terms);
    response(parts.status, parts.headers, AnswerBody::relay(relay, held, unread, busy))
}

fn response(status: StatusCode, headers: HeaderMap, body: AnswerBody) -> Response<AnswerBody> {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    *answer.headers_mut() = headers;
    answer
}

/// Sends the head of a stream whose model is not loaded; the body then reports the progress of the load.
pub(super) fn begin_stream(
    mut exchange: HttpExchange,
    waits: WaitingStream,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // The model's own answer has this header, too: a buffering proxy would hold keep-alives back.
    headers.insert(headers::ACCEL_BUFFERING, HeaderValue::from_static("no"));
    wire::add_via(&mut headers, Version::HTTP_11);
    headers.insert(headers::REQUEST_ID, exchange.request_id.clone());
    exchange.add_conversation_header(StatusCode::OK, &mut headers);
    exchange.live.cors.add_headers(exchange.origin.as_ref(), &mut headers);
    let record = &mut exchange.flight.record;
    record.note_early_head();
    let teller = LoadingNotifier::new(
        exchange.shared.upstream.backends.clone(),
        waits.prepared.search.model.clone(),
        record.request_id.clone(),
        waits.manner,
        exchange.route.dialect,
        waits.since,
    );
    let every = waits.interval;
    let dialect = exchange.route.dialect;
    let conn = exchange.conn.clone();
    let answer = Box::pin(async move {
        let forwarded = {
            let mut forwarding = pin!(waits.forward(&mut exchange));
            poll_fn(|context| busy.unless_cancelled(forwarding.as_mut(), context)).await
        };
        let refusal = match forwarded {
            Some(Ok(answered)) => return relay(exchange, answered, busy),
            Some(Err(refusal)) => refusal,
            None => exchange.cancelled_refusal(),
        };
        refuse(exchange, &refusal, busy)
    });
    let body = AnswerBody::interim(InterimBody::new(answer, teller, every, dialect), conn);
    response(StatusCode::OK, headers, body)
}

pub(super) fn reply_locally(
    exchange: HttpExchange,
    (headers, body): LocalAnswer,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    let status = if headers.contains_key(LOCATION) { StatusCode::PERMANENT_REDIRECT } else { StatusCode::OK };
    reply(exchange, status, headers, body, RequestOutcome::Ok, busy)
}

pub(super) fn refuse(
    exchange: HttpExchange,
    refusal: &RequestRefusal,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    let request_id = &exchange.flight.record.request_id;
    tracing::debug!(request_id, refusal = refusal.to_string(), "refused");
    let answer = refusal.answer(exchange.route.dialect, exchange.shared.config.server.retry_after);
    let mut headers: HeaderMap = answer.headers.into_iter().collect();
    if !exchange.body.is_complete() {
        exchange.conn.must_linger();
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    reply(exchange, answer.status, headers, answer.body, refusal.outcome(), busy)
}

/// Sends an answer of the operators' page, without CORS headers even if other origins may call the models.
pub(super) fn reply_with_page(
    exchange: HttpExchange,
    answer: Response<UnsyncBoxBody<Bytes, Infallible>>,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    let HttpExchange { conn, request_id, body: asked, mut flight, .. } = exchange;
    let (mut parts, body) = answer.into_parts();
    parts.headers.insert(headers::REQUEST_ID, request_id);
    if !asked.is_complete() {
        conn.must_linger();
        parts.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    flight.record.status = parts.status.as_u16();
    flight.record.stream = headers::is_events(&parts.headers);
    if flight.record.stream {
        // A page can stay open for hours, so do not list it as a request in flight.
        flight.finish(RequestOutcome::Ok);
    }
    Response::from_parts(parts, AnswerBody::page(body, flight, busy))
}

fn reply(
    exchange: HttpExchange,
    status: StatusCode,
    mut headers: HeaderMap,
    body: Bytes,
    outcome: RequestOutcome,
    busy: ConnBusy,
) -> Response<AnswerBody> {
    exchange.add_conversation_header(status, &mut headers);
    let HttpExchange { shared, live, conn, request_id, origin, mut flight, .. } = exchange;
    headers.insert(headers::REQUEST_ID, request_id);
    live.cors.add_headers(origin.as_ref(), &mut headers);
    flight.record.note_head(status.as_u16(), false);
    // The gateway's own answers are short: by this deadline, a client that reads at all has read one.
    conn.set_deadline(Instant::now() + shared.config.server.send_timeout);
    response(status, headers, AnswerBody::fixed(body, flight, outcome, busy))
}
