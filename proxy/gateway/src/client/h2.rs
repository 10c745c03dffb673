//! HTTP/2 connections: each stream gets the same service as an HTTP/1.1 request.
//!
//! ```text
//!   connection task: frames, pings, windows, time limits of the connection
//!      |  one task per stream: exchange -> head -> body, polled only while the stream has a window
//!      |     reset by the client ---------> exchange dropped: lease released, backend connection closed
//!      |     no window for `send_timeout` -> reset by the gateway
//!      |     cancelled, without a window to report that -> reset by the gateway
//!      |  more resets in `reset_window` than allowed --> GOAWAY; running streams finish, new ones are refused
//!      |  the gateway stops or retires ---------------> GOAWAY; running streams finish, new ones are refused
//!      +-- ends with the last stream
//! ```
//!
//! The HTTP/2 library resets malformed streams (connection-specific fields, a body of another length than
//! declared) before or during their exchange.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONNECTION, COOKIE, HeaderMap, HeaderValue};
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2::Builder;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_policies::defaults::Server;

use crate::answer::AnswerBody;
use crate::backend::BoxFuture;
use crate::body::ClientPeer;
use crate::client::{ClientIo, MIN_CHECK_INTERVAL, next_limit};
use crate::config::{h2_window, saturate_u32};
use crate::exchange;
use crate::observe::GatewayLimit;
use crate::protocol::ConnState;
use crate::shared::GatewayShared;

tokio::task_local! {
    static STREAM: Arc<H2Stream>;
}

struct H2Stream {
    conn: Arc<ConnState>,
    whole: AtomicBool,
}

struct H2Streams {
    counts: Mutex<H2StreamCounts>,
    too_many_resets: Notify,
}

struct H2StreamCounts {
    open: usize,
    idle_since: Instant,
    resets: usize,
    resets_since: Instant,
}

impl H2Streams {
    fn new() -> Arc<Self> {
        let now = Instant::now();
        let counts = H2StreamCounts { open: 0, idle_since: now, resets: 0, resets_since: now };
        Arc::new(Self { counts: Mutex::new(counts), too_many_resets: Notify::new() })
    }

    fn with<T>(&self, act: impl FnOnce(&mut H2StreamCounts) -> T) -> T {
        act(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn begin(&self) {
        self.with(|counts| counts.open += 1);
    }

    fn end(&self) {
        self.with(|counts| {
            counts.open -= 1;
            counts.idle_since = Instant::now();
        });
    }

    /// Returns the start of the time without streams; `None` while there is a stream.
    fn idle_since(&self) -> Option<Instant> {
        self.with(|counts| (counts.open == 0).then_some(counts.idle_since))
    }

    fn count_reset(&self, limits: &Server) {
        let too_many = self.with(|counts| {
            if counts.resets_since.elapsed() > limits.h2_reset_window {
                (counts.resets, counts.resets_since) = (0, Instant::now());
            }
            counts.resets += 1;
            counts.resets > limits.h2_resets
        });
        if too_many {
            self.too_many_resets.notify_one();
        }
    }
}

#[derive(Clone)]
struct H2Spawner {
    shared: Arc<GatewayShared>,
    streams: Arc<H2Streams>,
    tasks: TaskTracker,
    gone: CancellationToken,
}

impl<F> Executor<F> for H2Spawner
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let stream = Arc::new(H2Stream { conn: ConnState::new(), whole: AtomicBool::new(false) });
        let Self { shared, streams, gone, .. } = self.clone();
        streams.begin();
        // Boxed, so that the futures that contain it stay small.
        let future = Box::pin(future);
        self.tasks.spawn(async move {
            let cancelling = &stream.conn.cancelling;
            cancelling.register_task().await;
            let mut serving = pin!(STREAM.scope(stream.clone(), future));
            tokio::select! {
                biased;
                served = poll_fn(|context| {
                    cancelling.unless_stuck(|| stream.conn.after_poll(serving.as_mut().poll(context), context))
                }) => {
                    // An operator cancelled this stream, so the client did not abandon it.
                    if served.is_some() && !stream.whole.load(Ordering::Relaxed) {
                        streams.count_reset(&shared.config.server);
                    }
                }
                limit = wait_until_overdue(&stream.conn, &shared) => shared.gauges.limited.note(limit),
                () = gone.cancelled() => {}
            }
            streams.end();
        });
    }
}

/// Resolves when a stream exceeds a time limit because its client opens no window.
async fn wait_until_overdue(state: &ConnState, shared: &GatewayShared) -> GatewayLimit {
    let config = &shared.config;
    let look = config.server.send_timeout.max(MIN_CHECK_INTERVAL);
    let mut next = Instant::now() + look;
    loop {
        sleep_until(next).await;
        let now = Instant::now();
        let busy = next_limit(state, config)
            .filter(|due| !matches!(due.limit, GatewayLimit::KeepAlive | GatewayLimit::HeadTime));
        next = match busy {
            Some(due) if due.at <= now => return due.limit,
            Some(due) => due.at.min(now + look),
            None => now + look,
        };
    }
}

struct StreamService {
    shared: Arc<GatewayShared>,
    peer: ClientPeer,
}

impl Service<Request<Incoming>> for StreamService {
    type Response = Response<StreamBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let shared = self.shared.clone();
        let peer = self.peer.clone();
        Box::pin(async move {
            let stream = STREAM.with(Arc::clone);
            join_cookies(request.headers_mut());
            let Ok(answer) = exchange::answer(shared, stream.conn.clone(), peer, request).await;
            let mut answer = answer.map(|body| StreamBody { body, stream });
            // An HTTP/2 stream must not have a `Connection` field (RFC 9113 section 8.2.2).
            answer.headers_mut().remove(CONNECTION);
            Ok(answer)
        })
    }
}

/// Joins the cookies of several fields into one field (RFC 9113 section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let pieces: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if pieces.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&pieces.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Body of an answer; also records that the client is slow to read.
struct StreamBody {
    body: AnswerBody,
    stream: Arc<H2Stream>,
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.stream.conn.set_blocked(false);
        let frame = Pin::new(&mut self.body).poll_frame(context);
        // After a data frame, the library polls again only when the client has opened a window.
        self.stream.conn.set_blocked(matches!(frame, Poll::Ready(Some(Ok(_)))));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for StreamBody {
    fn drop(&mut self) {
        if self.body.is_end_stream() {
            self.stream.whole.store(true, Ordering::Relaxed);
        }
    }
}

pub(crate) async fn serve_http2(
    shared: Arc<GatewayShared>,
    peer: ClientPeer,
    (io, state): (ClientIo, Arc<ConnState>),
) {
    let config = &shared.config;
    let limits = &config.server;
    let streams = H2Streams::new();
    let tasks = TaskTracker::new();
    let gone = CancellationToken::new();
    let end_streams = gone.clone().drop_guard();
    let spawner = H2Spawner { shared: shared.clone(), streams: streams.clone(), tasks: tasks.clone(), gone };
    let mut builder = Builder::new(spawner);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.h2_streams)
        .initial_stream_window_size(h2_window(limits.h2_stream_window))
        .initial_connection_window_size(h2_window(limits.h2_connection_window))
        .max_send_buf_size(limits.h2_send_buffer.in_memory())
        .max_header_list_size(saturate_u32(config.server.header_bytes))
        .max_pending_accept_reset_streams(limits.h2_pending_resets)
        .max_local_error_reset_streams(limits.h2_local_resets)
        .keep_alive_interval(limits.h2_ping)
        .keep_alive_timeout(limits.h2_ping_timeout);
    let ip = peer.ip;
    let service = StreamService { shared: shared.clone(), peer };
    let mut connection = pin!(builder.serve_connection(TokioIo::new(io), service));
    let look = config.server.keep_alive.min(config.server.send_timeout).max(MIN_CHECK_INTERVAL);
    let mut watch = pin!(sleep_until(Instant::now() + look));
    // Set when the connection is to end: by a stop, a timeout or a flood of resets.
    let mut stopping = false;
    let mut closing = false;
    let limit = loop {
        tokio::select! {
            result = &mut connection => break result.err().and_then(|error| {
                tracing::debug!(%error, peer = %ip, "a client's HTTP/2 connection ended");
                limit_of_error(&error)
            }),
            () = shared.ends.any_cancelled(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = streams.too_many_resets.notified(), if !closing => {
                closing = true;
                shared.gauges.limited.note(GatewayLimit::H2Resets);
                tracing::debug!(peer = %ip, "a client cancels requests as fast as it sends them");
                connection.as_mut().graceful_shutdown();
            }
            () = &mut watch => {
                let now = Instant::now();
                watch.as_mut().reset(now + look);
                let overdue = |since: Option<Instant>, limit| since.is_some_and(|since| since + limit <= now);
                if overdue(state.blocked_since(), config.server.send_timeout) {
                    state.abort();
                    break Some(GatewayLimit::SendTime);
                }
                if overdue(streams.idle_since(), config.server.keep_alive) {
                    if closing || stopping {
                        state.abort();
                        break Some(GatewayLimit::Overdue);
                    }
                    closing = true;
                    shared.gauges.limited.note(GatewayLimit::KeepAlive);
                    connection.as_mut().graceful_shutdown();
                } else if let Some(since) = streams.idle_since() {
                    watch.as_mut().reset((since + config.server.keep_alive).min(now + look));
                }
            }
        }
    };
    if let Some(limit) = limit {
        shared.gauges.limited.note(limit);
    }
    drop(end_streams);
    tasks.close();
    tasks.wait().await;
}

fn limit_of_error(error: &hyper::Error) -> Option<GatewayLimit> {
    if error.is_timeout() {
        return Some(GatewayLimit::H2Ping);
    }
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let ours = error.is_library() || (error.is_go_away() && !error.is_remote());
            return match error.reason() {
                Some(h2::Reason::ENHANCE_YOUR_CALM) if ours => Some(GatewayLimit::H2Resets),
                Some(h2::Reason::NO_ERROR) | None => None,
                Some(_) if ours => Some(GatewayLimit::H2Invalid),
                Some(_) => None,
            };
        }
        source = error.source();
    }
    None
}
