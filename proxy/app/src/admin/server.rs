//! The admin listeners: a Unix socket that only its owner can open, and a loopback address if configured.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{Request, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio_util::task::TaskTracker;

use super::answer::{Admin, error};
use super::route::from_a_browser_page;
use crate::exit::Failure;

/// The listeners, bound.
pub(crate) struct Listeners {
    path: PathBuf,
    pause: Duration,
    unix: UnixListener,
    tcp: Option<TcpListener>,
}

/// Binds them. `pause` follows a failure to accept. A socket file that nobody listens on any more is replaced.
pub(crate) async fn bind(
    socket: &Path,
    address: Option<SocketAddr>,
    pause: Duration,
) -> Result<Listeners, Failure> {
    let unix = bind_unix(socket).await?;
    let tcp = match address {
        None => None,
        Some(address) => Some(TcpListener::bind(address).await.map_err(|problem| {
            Failure::hinted(
                format!("cannot listen on {address} for the admin routes: {problem}"),
                "choose another `admin.address`",
            )
        })?),
    };
    Ok(Listeners { path: socket.to_owned(), unix, tcp, pause })
}

async fn bind_unix(socket: &Path) -> Result<UnixListener, Failure> {
    let shown = socket.display();
    let cannot = |problem: &io::Error| {
        Failure::hinted(
            format!("cannot make the admin socket {shown}: {problem}"),
            "choose another `admin.socket`",
        )
    };
    if socket.exists() {
        if tokio::net::UnixStream::connect(socket).await.is_ok() {
            return Err(Failure::hinted(
                format!("another llama-warden is already running on the admin socket {shown}"),
                "stop it, or choose another `admin.socket`",
            ));
        }
        std::fs::remove_file(socket).map_err(|problem| cannot(&problem))?;
    }
    let listener = UnixListener::bind(socket).map_err(|problem| cannot(&problem))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))
        .map_err(|problem| cannot(&problem))?;
    Ok(listener)
}

impl Listeners {
    /// Answers until `admin.stop`; ends when the last answer has.
    pub(crate) async fn serve(self, admin: Admin) {
        let tasks = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                () = admin.stop.cancelled() => break,
                stream = self.unix.accept() => stream.map(|(stream, _)| {
                    tasks.spawn(connection(stream, admin.clone(), false));
                }),
                stream = accept(self.tcp.as_ref()) => stream.map(|stream| {
                    tasks.spawn(connection(stream, admin.clone(), true));
                }),
            };
            if let Err(problem) = accepted {
                tracing::warn!(%problem, "the admin listener cannot accept a connection");
                // Out of files, most likely: a busy loop would not free any.
                tokio::time::sleep(self.pause).await;
            }
        }
        // Whoever looks for a running instance should not find the file of one that has ended.
        drop(std::fs::remove_file(&self.path));
        tasks.close();
        tasks.wait().await;
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<tokio::net::TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(stream, _)| stream),
        None => std::future::pending().await,
    }
}

async fn connection<S>(stream: S, admin: Admin, tcp: bool)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stop = admin.stop.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let admin = admin.clone();
        async move {
            if tcp && from_a_browser_page(request.headers()) {
                let message = "requests from pages in a browser are refused: use a program, with the loopback address as host";
                return Ok::<_, Infallible>(error(StatusCode::FORBIDDEN, message));
            }
            let uri = request.uri();
            Ok(admin.answer(request.method(), uri.path(), uri.query()).await)
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new());
    let served = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(problem) = ended {
        tracing::debug!(%problem, "an admin connection broke");
    }
}
