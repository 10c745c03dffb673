//! One client connection, from its first byte to its close: hyper reads and writes, this task watches the clock.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;

use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep_until};

use crate::backends::BoxFuture;
use crate::client_io::{ClientIo, ConnState, Phase};
use crate::config::GatewayConfig;
use crate::exchange;
use crate::gateway::{LEAST_BUFFER, Shared};
use crate::relay::AnswerBody;

/// The clock is looked at no more often, whatever is configured.
const LEAST_LOOK: Duration = Duration::from_millis(10);

struct PerRequest {
    shared: Arc<Shared>,
    state: Arc<ConnState>,
    peer: IpAddr,
}

impl Service<Request<Incoming>> for PerRequest {
    type Response = Response<AnswerBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let answer = exchange::answer(self.shared.clone(), self.state.clone(), self.peer, request);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// Why the watch ended a connection.
enum End {
    /// hyper is done with it.
    Done(hyper::Result<()>),
    /// The request head did not arrive in time.
    SlowHead,
    /// A request is far beyond its deadline: its client does not read.
    Overdue,
}

/// Serves a connection to its end.
pub(crate) async fn serve(shared: Arc<Shared>, state: Arc<ConnState>, peer: IpAddr, io: ClientIo) {
    let config = shared.config.clone();
    let stop = shared.stop.clone();
    let service = PerRequest { shared, state: state.clone(), peer };
    let mut connection = Builder::new()
        .max_buf_size(config.header_bytes.max(LEAST_BUFFER))
        .max_headers(config.header_count)
        // The times of a head and of an idle connection differ, and hyper has one for both.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(io), service);
    let look = config.header_timeout.min(config.keep_alive).max(LEAST_LOOK);
    let watch = sleep_until(Instant::now() + look);
    tokio::pin!(watch);
    let (mut stopping, mut closing) = (false, false);
    let end = loop {
        tokio::select! {
            result = poll_fn(|context| connection.poll_without_shutdown(context)) => break End::Done(result),
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            () = &mut watch => {
                let now = Instant::now();
                let (phase, due) = due(&state, &config);
                // Looked at often enough for a head that begins between two looks.
                watch.as_mut().reset(due.map_or(now + look, |due| due.min(now + look)));
                if due.is_none_or(|due| now < due) {
                    continue;
                }
                match phase {
                    Phase::Head(_) => break End::SlowHead,
                    Phase::Busy(_) => break End::Overdue,
                    // Asked before, and still not closed: its client does not take the rest of an answer.
                    Phase::Idle(_) if closing => break End::Overdue,
                    Phase::Idle(_) => {
                        closing = true;
                        watch.as_mut().reset(now + look);
                        Pin::new(&mut connection).graceful_shutdown();
                    }
                }
            }
        }
    };
    let io = connection.into_parts().io.into_inner();
    match end {
        End::Done(result) => {
            if let Err(error) = result {
                tracing::debug!(%error, %peer, "a client's connection ended");
            }
            io.close(config.linger).await;
        }
        End::SlowHead => io.refuse(408, config.linger).await,
        End::Overdue => tracing::debug!(%peer, "a client that does not read was cut"),
    }
}

/// Where the connection is, and when that has lasted too long.
fn due(state: &ConnState, config: &GatewayConfig) -> (Phase, Option<Instant>) {
    let phase = state.phase();
    let due = match phase {
        Phase::Idle(since) => Some(since + config.keep_alive),
        Phase::Head(since) => Some(since + config.header_timeout),
        Phase::Busy(until) => until,
    };
    (phase, due)
}
