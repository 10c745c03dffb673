//! Listeners and connections, which behave as llama-server's.
//!
//! A socket file is neither removed on exit nor before a bind, so a stale one makes the start fail, as with
//! llama-server.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hyper::header::{CONNECTION, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

use crate::engine::Engine;
use crate::wire::{Tap, Wire};
use crate::{routes, say};

/// Longest wait of a connection for its next request.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The answer with this number says `Connection: close`.
const LAST_ANSWER: u32 = 100;

/// llama-server's line for an address that cannot be bound.
pub(crate) fn cannot_bind(host: &str, port: u16) -> String {
    format!(
        "0.00.002.383 E srv         start: couldn't bind HTTP server socket, hostname: {host}, port: {port}"
    )
}

/// Binds every `--host` and serves them all.
///
/// # Errors
/// The line that llama-server prints for an address that cannot be bound.
pub(crate) async fn bind_all(engine: &Arc<Engine>) -> Result<(), String> {
    for host in &engine.args.hosts {
        let failed = |_: io::Error| cannot_bind(host, engine.args.port);
        if Path::new(host).extension().is_some_and(|end| end == "sock") {
            if engine.script().no_unix {
                return Err(cannot_bind(host, engine.args.port));
            }
            let listener = UnixListener::bind(host).map_err(failed)?;
            say::err(&format!("0.00.003.100 I srv  llama_server: listening on unix://{host}"));
            let served = Arc::clone(engine);
            engine.tasks.spawn(async move {
                while let Some(Ok((socket, _))) = unless_refusing(&served, listener.accept()).await {
                    serve(&served, socket);
                }
            });
        } else {
            let listener = TcpListener::bind((host.as_str(), engine.args.port)).await.map_err(failed)?;
            let port = listener.local_addr().map_or(engine.args.port, |address| address.port());
            say::err(&format!("0.00.003.100 I srv  llama_server: listening on http://{host}:{port}"));
            let served = Arc::clone(engine);
            engine.tasks.spawn(async move {
                while let Some(Ok((socket, _))) = unless_refusing(&served, listener.accept()).await {
                    let _ignored = socket.set_nodelay(true);
                    serve(&served, socket);
                }
            });
        }
    }
    Ok(())
}

/// Returns the result of `accept`, or `None` when listening must end; dropping the listener refuses new
/// connections.
async fn unless_refusing<T>(engine: &Engine, accept: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = engine.refusing.wait() => None,
        accepted = accept => Some(accepted),
    }
}

fn serve<S>(engine: &Arc<Engine>, socket: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let engine = Arc::clone(engine);
    let tasks = engine.tasks.clone();
    tasks.spawn(async move {
        let wire = Wire::default();
        let answers = AtomicU32::new(0);
        let service = service_fn(|request| {
            let nth = answers.fetch_add(1, Ordering::Relaxed) + 1;
            let (engine, wire) = (Arc::clone(&engine), wire.clone());
            async move {
                let mut reply = routes::answer(engine, wire, request).await;
                if nth == LAST_ANSWER {
                    reply.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(reply)
            }
        });
        let connection = http1::Builder::new()
            .auto_date_header(false)
            .title_case_headers(true)
            .timer(TokioTimer::new())
            .header_read_timeout(KEEP_ALIVE)
            .serve_connection(TokioIo::new(Tap::new(socket, wire.clone())), service);
        let mut connection = pin!(connection);
        let mut closing = false;
        loop {
            tokio::select! {
                _ended = connection.as_mut() => break,
                () = wire.asked_to_close(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = engine.stopping.wait(), if !closing => {
                    closing = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    });
}
