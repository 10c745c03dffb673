//! A client connection: hyper reads and writes, and this module enforces the time limits.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::answer::AnswerBody;
use crate::backend::BoxFuture;
use crate::body::ClientPeer;
use crate::client::ClientIo;
use crate::config::GatewayConfig;
use crate::exchange::{self, local_routes};
use crate::observe::GatewayLimit;
use crate::protocol::{ConnPhase, ConnState, LEAST_BUFFER};
use crate::shared::GatewayShared;

const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// hyper's default limit for the header fields of a head.
const HYPER_HEADER_COUNT: usize = 100;

struct RequestService {
    shared: Arc<GatewayShared>,
    state: Arc<ConnState>,
    peer: ClientPeer,
}

impl Service<Request<Incoming>> for RequestService {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let shared = self.shared.clone();
        let state = self.state.clone();
        let peer = self.peer.clone();
        if shared.ends.retire.is_cancelled() || shared.ends.stop.is_cancelled() {
            // The answer announces the close, so that the client does not write into a closing connection.
            return Box::pin(async move {
                let mut answer = exchange::answer(shared, state, peer, request).await?;
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                Ok(answer)
            });
        }
        // Built in place on the heap: otherwise each request would copy it, or need its size twice.
        let place = Box::new_uninit();
        let future = Box::write(place, exchange::answer(shared, state, peer, request));
        Box::into_pin(future)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopProgress {
    No,
    /// No request is running. The connection stays open briefly for a request in transit.
    Soon,
    Now,
}

enum ConnectionEnd {
    Done(hyper::Result<()>),
    SlowHead,
    /// The client does not read.
    Stuck(GatewayLimit),
    /// The client does not read, and an operator has cancelled its request.
    Cancelled,
}

type Http1Connection = hyper::server::conn::http1::Connection<TokioIo<ClientIo>, RequestService>;

pub(crate) async fn serve_http1(
    shared: Arc<GatewayShared>,
    state: Arc<ConnState>,
    peer: ClientPeer,
    io: ClientIo,
) {
    let config = &shared.config.server;
    let ip = peer.ip;
    let service = RequestService { shared: shared.clone(), state: state.clone(), peer };
    let mut builder = Builder::new();
    if config.header_count != HYPER_HEADER_COUNT {
        // With a set number, even the default, hyper allocates memory for each request.
        builder.max_headers(config.header_count);
    }
    let mut connection = builder
        .max_buf_size(config.header_bytes.in_memory().max(LEAST_BUFFER))
        // llama-server writes header names in title case, and some programs compare them case-sensitively.
        .title_case_headers(local_routes::is_drop_in(&shared))
        // hyper has one limit for both heads and idle connections; the gateway has two.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(io), service);
    let end = watch_connection(&shared, &state, Pin::new(&mut connection)).await;
    let io = connection.into_parts().io.into_inner();
    let limited = &shared.gauges.limited;
    match end {
        ConnectionEnd::Done(result) => {
            if let Err(error) = result {
                tracing::debug!(%error, peer = %ip, "a client's connection ended");
                if error.is_parse_too_large() {
                    limited.note(GatewayLimit::HeadSize);
                } else if error.is_parse() {
                    limited.note(GatewayLimit::HeadInvalid);
                }
            }
            io.close(config.linger).await;
        }
        ConnectionEnd::SlowHead => {
            limited.note(GatewayLimit::HeadTime);
            io.refuse(408, config.linger).await;
        }
        ConnectionEnd::Stuck(limit) => {
            limited.note(limit);
            state.abort();
            tracing::debug!(peer = %ip, limit = limit.as_str(), "a client that does not read was cut");
        }
        ConnectionEnd::Cancelled => {
            state.abort();
            tracing::debug!(peer = %ip, "a client that does not read was cut: its request is cancelled");
        }
    }
}

/// Polls a connection to its end and enforces its time limits.
async fn watch_connection(
    shared: &GatewayShared,
    state: &ConnState,
    mut connection: Pin<&mut Http1Connection>,
) -> ConnectionEnd {
    let config = &shared.config;
    let server = &config.server;
    let look = server
        .header_timeout
        .min(server.keep_alive)
        .min(server.retired_keep_alive)
        .min(server.send_timeout)
        .max(MIN_CHECK_INTERVAL);
    let mut watch = pin!(sleep_until(Instant::now() + look));
    let mut stopping = StopProgress::No;
    let mut closing = false;
    let cancelling = &state.cancelling;
    cancelling.register_task().await;
    loop {
        tokio::select! {
            result = poll_fn(|context| {
                cancelling.unless_stuck(|| state.after_poll(connection.poll_without_shutdown(context), context))
            }) => return result.map_or(ConnectionEnd::Cancelled, ConnectionEnd::Done),
            () = shared.ends.stop.cancelled(), if stopping == StopProgress::No => {
                // An immediate close would lose a request in transit, so answer it first.
                if let ConnPhase::Busy(_) = state.phase() {
                    stopping = StopProgress::Now;
                    connection.as_mut().graceful_shutdown();
                } else {
                    stopping = StopProgress::Soon;
                }
            }
            () = shared.hang_up.cancelled(), if stopping == StopProgress::Soon => {
                stopping = StopProgress::Now;
                connection.as_mut().graceful_shutdown();
            }
            () = &mut watch => {
                let now = Instant::now();
                let keep_alive = idle_timeout(&shared.ends.retire, config);
                let due = next_limit(state, config, keep_alive);
                // Check often enough for a head that begins between two checks.
                watch.as_mut().reset(due.map_or(now + look, |due| due.at.min(now + look)));
                match due.filter(|due| due.at <= now).map(|due| due.limit) {
                    None => {}
                    Some(GatewayLimit::HeadTime) => return ConnectionEnd::SlowHead,
                    Some(GatewayLimit::KeepAlive) if !closing => {
                        closing = true;
                        shared.gauges.limited.note(GatewayLimit::KeepAlive);
                        watch.as_mut().reset(now + look);
                        connection.as_mut().graceful_shutdown();
                    }
                    // The shutdown began at an earlier check: the client does not read the rest of an answer.
                    Some(GatewayLimit::KeepAlive) => return ConnectionEnd::Stuck(GatewayLimit::Overdue),
                    Some(limit) => return ConnectionEnd::Stuck(limit),
                }
            }
        }
    }
}

/// The limit that a connection reaches next, and its time.
#[derive(Clone, Copy, Debug)]
struct DueLimit {
    at: Instant,
    limit: GatewayLimit,
}

fn idle_timeout(retire: &CancellationToken, config: &GatewayConfig) -> Duration {
    let usual = config.server.keep_alive;
    if retire.is_cancelled() { usual.min(config.server.retired_keep_alive) } else { usual }
}

fn next_limit(state: &ConnState, config: &GatewayConfig, keep_alive: Duration) -> Option<DueLimit> {
    let phase = match state.phase() {
        ConnPhase::Idle(since) => Some(DueLimit { at: since + keep_alive, limit: GatewayLimit::KeepAlive }),
        ConnPhase::Head(since) => {
            Some(DueLimit { at: since + config.server.header_timeout, limit: GatewayLimit::HeadTime })
        }
        ConnPhase::Busy(until) => until.map(|at| DueLimit { at, limit: GatewayLimit::Overdue }),
    };
    let stuck = state.blocked_since();
    let stuck =
        stuck.map(|since| DueLimit { at: since + config.server.send_timeout, limit: GatewayLimit::SendTime });
    [phase, stuck].into_iter().flatten().min_by_key(|due| due.at)
}
