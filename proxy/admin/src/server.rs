//! The admin listeners: a Unix socket that only its owner can open, and a loopback address if configured.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixSocket};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_supervisor::sync::lock;
use warden_supervisor::{PrivateDir, instance_pid, restore_directory};

use crate::error::AdminError;
use crate::query::QueryPairs;
use crate::response::{AdminBody, error_response};
use crate::route::{UPGRADE_PATH, foreign_host, has_browser_headers};
use crate::state::AdminState;

/// Most connections that may wait to be accepted, as in the standard library.
const ACCEPT_BACKLOG: u32 = 128;

const SOCKET_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// For the successor: a duplicate of the Unix socket, filled when the listener creates the socket again.
pub type RestoredSocket = Arc<Mutex<Option<OwnedFd>>>;

/// The listeners of the admin routes.
pub struct AdminListeners {
    path: PathBuf,
    /// Device and inode of the socket's file; `None` if the service manager made the socket.
    file: Option<(u64, u64)>,
    pause: Duration,
    unix: UnixListener,
    remade: RestoredSocket,
    tcp: Option<TcpListener>,
    /// Cancelled when the successor has the sockets. The socket's file is then not removed.
    handed_over: CancellationToken,
    pulse_sender: PulseSender,
    pulse_requests: UnboundedReceiver<oneshot::Sender<()>>,
}

/// Wraps the predecessor's sockets. `given`: the service manager made the Unix socket, and removes its file.
///
/// # Errors
/// A socket cannot be used.
pub fn inherit_listeners(
    unix: OwnedFd,
    tcp: Option<OwnedFd>,
    given: bool,
    pause: Duration,
) -> io::Result<AdminListeners> {
    let unix = UnixListener::from_std(unix.into())?;
    let tcp = tcp.map(|tcp| TcpListener::from_std(tcp.into())).transpose()?;
    let path = unix.local_addr()?.as_pathname().map(Path::to_owned).ok_or(io::ErrorKind::NotFound)?;
    let facts = std::fs::symlink_metadata(&path)?;
    let file = (!given).then_some((facts.dev(), facts.ino()));
    Ok(AdminListeners::new(path, file, unix, tcp, pause))
}

/// The web page, which the listeners serve next to the admin routes.
pub trait AdminPage: Send + Sync {
    /// Returns whether a path belongs to the page.
    fn has_path(&self, path: &str) -> bool;

    /// Answers a request whose path belongs to the page. `peer`: the client; `None` on the admin socket.
    fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        peer: Option<IpAddr>,
    ) -> BoxFuture<'static, Response<AdminBody>>;

    /// Keeps the page up to date until the instance ends.
    fn follow_fleet(self: Arc<Self>) -> BoxFuture<'static, ()>;

    /// Waits for the actions that were requested on the page. Called after the last answer.
    fn finish_actions(self: Arc<Self>) -> BoxFuture<'static, ()>;
}

/// Sockets that the service manager made.
#[derive(Debug, Default)]
pub struct GivenSockets {
    /// The Unix socket, and the path at which programs connect to it.
    pub unix: Option<(std::os::unix::net::UnixListener, PathBuf)>,
    /// The TCP listener.
    pub tcp: Option<std::net::TcpListener>,
}

/// Sends questions to an event loop, which a responsive loop answers at once.
#[derive(Clone, Debug)]
pub struct PulseSender(UnboundedSender<oneshot::Sender<()>>);

impl PulseSender {
    /// Creates the sender, and the receiver whose questions the loop must answer.
    pub fn new() -> (Self, UnboundedReceiver<oneshot::Sender<()>>) {
        let (asking, asked) = unbounded_channel();
        (Self(asking), asked)
    }

    /// Resolves when the loop answers; fails when the loop has ended.
    pub fn ask(&self) -> oneshot::Receiver<()> {
        let (question, answer) = oneshot::channel();
        drop(self.0.send(question));
        answer
    }
}

/// Binds the sockets that are not in `given`. `pause` is the wait after a failed accept. A socket file on
/// which no process listens is replaced.
///
/// # Errors
/// A socket cannot be bound, or another instance has it.
pub async fn bind_listeners(
    socket: &Path,
    address: Option<SocketAddr>,
    given: GivenSockets,
    pause: Duration,
) -> Result<AdminListeners, AdminError> {
    let unusable = |problem: io::Error| {
        AdminError::failed(format!(
            "cannot use the socket for the admin routes that was handed over: {problem}"
        ))
    };
    let (unix, path, file) = if let Some((unix, path)) = given.unix {
        unix.set_nonblocking(true).map_err(unusable)?;
        (UnixListener::from_std(unix).map_err(unusable)?, path, None)
    } else {
        let (unix, file) = bind_unix(socket).await?;
        (unix, socket.to_owned(), Some(file))
    };
    let tcp = match (given.tcp, address) {
        (Some(tcp), _) => {
            tcp.set_nonblocking(true).map_err(unusable)?;
            Some(TcpListener::from_std(tcp).map_err(unusable)?)
        }
        (None, None) => None,
        (None, Some(address)) => Some(TcpListener::bind(address).await.map_err(|problem| {
            AdminError::hinted(
                format!("cannot listen on {address} for the admin routes: {problem}"),
                "choose another `admin.address`",
            )
        })?),
    };
    Ok(AdminListeners::new(path, file, unix, tcp, pause))
}

/// Binds the Unix socket. Returns the listener, and the device and inode of its file.
async fn bind_unix(socket: &Path) -> Result<(UnixListener, (u64, u64)), AdminError> {
    let shown = socket.display();
    let cannot = |problem: &io::Error| {
        AdminError::hinted(
            format!("cannot make the admin socket {shown}: {problem}"),
            "choose another `admin.socket`",
        )
    };
    if let Ok(facts) = std::fs::symlink_metadata(socket) {
        if !facts.file_type().is_socket() {
            return Err(AdminError::usage(
                format!("cannot make the admin socket {shown}: there is something else of that name"),
                "choose another `admin.socket`",
            ));
        }
        match tokio::net::UnixStream::connect(socket).await {
            Ok(_) => {
                return Err(AdminError::hinted(
                    format!("another llama-warden is already running on the admin socket {shown}"),
                    "stop it, or choose another `admin.socket`",
                ));
            }
            // No process will ever listen on this file again. After any other error it may be in use.
            Err(problem) if problem.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(socket).map_err(|problem| cannot(&problem))?;
            }
            Err(problem) => return Err(cannot(&problem)),
        }
    }
    let listener = bind_private(socket).map_err(|problem| cannot(&problem))?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))
        .map_err(|problem| cannot(&problem))?;
    let made = std::fs::symlink_metadata(socket).map_err(|problem| cannot(&problem))?;
    Ok((listener, (made.dev(), made.ino())))
}

/// Binds a socket that is private from the beginning: a client that connects before a later change of the
/// mode would be served. On Linux the file gets the mode of the descriptor.
fn bind_private(socket: &Path) -> io::Result<UnixListener> {
    let made = UnixSocket::new_stream()?;
    // Elsewhere the descriptor's mode has no effect; there the caller changes the mode after binding.
    let _elsewhere = rustix::fs::fchmod(&made, rustix::fs::Mode::from_raw_mode(0o600));
    made.bind(socket)?;
    made.listen(ACCEPT_BACKLOG)
}

impl AdminListeners {
    fn new(
        path: PathBuf,
        file: Option<(u64, u64)>,
        unix: UnixListener,
        tcp: Option<TcpListener>,
        pause: Duration,
    ) -> Self {
        let (pulse_sender, pulse_requests) = PulseSender::new();
        let handed_over = CancellationToken::new();
        let remade = RestoredSocket::default();
        Self { path, file, pause, unix, remade, tcp, handed_over, pulse_sender, pulse_requests }
    }

    /// Returns the TCP address, with the port that was bound.
    pub fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Duplicates the sockets for the successor, the Unix socket first.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated.
    pub fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let tcp = self.tcp.as_ref().map(|tcp| tcp.as_fd().try_clone_to_owned());
        std::iter::once(self.unix.as_fd().try_clone_to_owned()).chain(tcp).collect()
    }

    /// Returns whether the service manager made the Unix socket.
    pub fn given(&self) -> bool {
        self.file.is_none()
    }

    /// Returns the token to cancel when the successor has the sockets.
    pub fn handed_over(&self) -> CancellationToken {
        self.handed_over.clone()
    }

    /// Returns the place that gets a duplicate of the socket when the socket is created again.
    pub fn restored(&self) -> RestoredSocket {
        self.remade.clone()
    }

    /// Creates the socket again if its file is gone: cleaners of `/tmp` and the end of a login session remove
    /// it. A file that another program has put in its place is not touched.
    async fn restore(&mut self) {
        let is_gone =
            std::fs::symlink_metadata(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if self.file.is_none() || self.handed_over.is_cancelled() || !is_gone {
            return;
        }
        let own =
            self.path.parent().and_then(Path::parent).map(|base| PrivateDir::path_for(base, instance_pid()));
        if own.as_deref() == self.path.parent()
            && let Err(problem) = restore_directory(&self.path)
        {
            tracing::debug!(%problem, "the admin socket is gone, and its directory");
            return;
        }
        match bind_unix(&self.path).await {
            Ok((unix, file)) => {
                tracing::warn!(path = %self.path.display(), "the admin socket was removed; it is made again");
                *lock(&self.remade) = unix.as_fd().try_clone_to_owned().ok();
                (self.unix, self.file) = (unix, Some(file));
            }
            Err(failure) => tracing::debug!("the admin socket is gone: {}", failure.lines().join("; ")),
        }
    }

    /// Returns the path of the Unix socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the sender of questions to the loop that accepts connections.
    pub fn pulse(&self) -> PulseSender {
        self.pulse_sender.clone()
    }

    /// Serves until `admin.stop` is cancelled; returns after the last answer.
    pub async fn serve(mut self, admin: AdminState, page: Arc<dyn AdminPage>) {
        // Clients check which process listens. The service manager or the predecessor may have created the
        // socket; calling `listen` again makes this process the listener.
        if let Err(problem) = rustix::net::listen(&self.unix, ACCEPT_BACKLOG.cast_signed()) {
            tracing::debug!(%problem, "the admin socket is still that of the program that made it");
        }
        let tasks = TaskTracker::new();
        tasks.spawn(page.clone().follow_fleet());
        let mut look = tokio::time::interval(SOCKET_CHECK_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accepted = tokio::select! {
                () = admin.stop.cancelled() => break,
                _ = look.tick() => {
                    self.restore().await;
                    continue;
                }
                Some(question) = self.pulse_requests.recv() => {
                    // Sending fails if the asker has gone, which does not matter.
                    let _left = question.send(());
                    continue;
                }
                stream = self.unix.accept() => stream.map(|(stream, _)| {
                    let admin = admin.with_caller(&peer_name(&stream));
                    tasks.spawn(serve_connection(stream, admin, page.clone(), None));
                }),
                stream = accept_tcp(self.tcp.as_ref()) => stream.map(|(stream, peer)| {
                    let admin = admin.with_caller("a program (admin address)");
                    tasks.spawn(serve_connection(stream, admin, page.clone(), Some(peer.ip())));
                }),
            };
            if let Err(problem) = accepted {
                tracing::warn!(%problem, "the admin listener cannot accept a connection");
                // The process is probably out of file descriptors, and a busy loop would not free any.
                tokio::time::sleep(self.pause).await;
            }
        }
        // Remove the file, so that a search for running instances does not find it. Keep the file if the
        // socket was handed over, or if another program has put its own file there.
        let there = std::fs::symlink_metadata(&self.path).ok();
        if !self.handed_over.is_cancelled()
            && there.is_some_and(|facts| self.file == Some((facts.dev(), facts.ino())))
        {
            drop(std::fs::remove_file(&self.path));
        }
        tasks.close();
        tasks.wait().await;
        // The actions end, because the fleet ends first.
        page.finish_actions().await;
    }
}

/// Describes the process and user at the other end, as the kernel reports them.
fn peer_name(stream: &tokio::net::UnixStream) -> String {
    stream.peer_cred().map_or_else(
        |_| "unknown user (admin socket)".to_owned(),
        |peer| format!("uid {} (admin socket)", peer.uid()),
    )
}

async fn accept_tcp(listener: Option<&TcpListener>) -> io::Result<(tokio::net::TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// Returns why to refuse a request that a web page in a browser may have sent; `None` for others.
fn refused_origin(headers: &HeaderMap, over_tcp: bool) -> Option<String> {
    if has_browser_headers(headers) {
        let message =
            "requests from pages in a browser are refused: use a program; for browsers there is /page/";
        return Some(message.to_owned());
    }
    if !over_tcp {
        return None;
    }
    let host = foreign_host(headers)?;
    Some(format!(
        "`{host}` is not an address of this machine's loopback, and a page in a browser could choose such a name: ask \
         for http://127.0.0.1:PORT here. A scrape from elsewhere goes to `probe.address`, which serves /metrics under \
         every name"
    ))
}

/// Serves one connection. `peer`: the client's address, if it came over TCP.
async fn serve_connection<S>(stream: S, admin: AdminState, page: Arc<dyn AdminPage>, peer: Option<IpAddr>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stop = admin.stop.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let admin = admin.clone();
        let page = page.clone();
        async move {
            if page.has_path(request.uri().path()) {
                return Ok::<_, Infallible>(page.answer(request, peer).await);
            }
            // An operator may have forwarded the socket to an address that a browser can reach.
            if let Some(message) = refused_origin(request.headers(), peer.is_some()) {
                return Ok(error_response(StatusCode::FORBIDDEN, &message));
            }
            let uri = request.uri();
            if peer.is_some() && uri.path() == UPGRADE_PATH {
                let message = "the program is chosen on the admin socket, which only its owner can open";
                return Ok(error_response(StatusCode::FORBIDDEN, message));
            }
            // Only the admin socket is private to its owner, so a canary over TCP cannot name a program.
            if peer.is_some()
                && uri.path().ends_with("/canary")
                && QueryPairs::lenient(uri.query()).get("binary").is_some()
            {
                let message = "the program is chosen on the admin socket, which only its owner can open; over TCP \
                               a canary is a build of the store (`build=ID`)";
                return Ok(error_response(StatusCode::FORBIDDEN, message));
            }
            Ok(admin.answer(request.method(), uri.path(), uri.query(), request.headers()).await)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::tests::{admin, config};
    use crate::client::AdminClient;
    use crate::status::AdminStatus;

    const PAUSE: Duration = Duration::from_millis(1);

    /// A page without paths.
    struct NoPage;

    impl AdminPage for NoPage {
        fn has_path(&self, _path: &str) -> bool {
            false
        }

        fn answer(
            self: Arc<Self>,
            _request: Request<Incoming>,
            _peer: Option<IpAddr>,
        ) -> BoxFuture<'static, Response<AdminBody>> {
            unreachable!("no path belongs to the page")
        }

        fn follow_fleet(self: Arc<Self>) -> BoxFuture<'static, ()> {
            Box::pin(std::future::ready(()))
        }

        fn finish_actions(self: Arc<Self>) -> BoxFuture<'static, ()> {
            Box::pin(std::future::ready(()))
        }
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_a_living_one_is_not_and_only_its_owner_can_open_it() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("admin.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let living = bind_listeners(&socket, None, GivenSockets::default(), PAUSE).await.unwrap();
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let Err(failure) = bind_listeners(&socket, None, GivenSockets::default(), PAUSE).await else {
            panic!("bound twice")
        };
        assert!(failure.to_string().contains("already running"), "{failure}");
        drop(living);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_socket_is_its_owners_from_its_first_moment() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("admin.sock");
        let _listener = bind_private(&socket).unwrap();
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn the_client_gets_its_answers_and_the_end_ends_it_all() {
        let (admin, dir) = admin().await;
        let socket = dir.path().join("admin.sock");
        let (stop, fleet) = (admin.stop.clone(), admin.fleet.clone());
        let listeners = bind_listeners(&socket, None, GivenSockets::default(), PAUSE).await.unwrap();
        let serving = TaskTracker::new().spawn(listeners.serve(admin, Arc::new(NoPage)));
        let client = AdminClient::new(socket.clone());
        let status: AdminStatus = client.json(reqwest::Method::GET, &["status"]).await.unwrap();
        assert_eq!(status.instance.pid, 1);
        let failure = client
            .json::<AdminStatus>(reqwest::Method::POST, &["models", "no/body", "drain"])
            .await
            .unwrap_err();
        assert!(failure.to_string().contains("there is no model `no/body`"), "{failure}");
        fleet.apply_with(config(dir.path()), warden_supervisor::ApplyReport::default()).await.unwrap();
        let mut seen = Vec::new();
        let see = |line: &str, _: Option<serde_json::Value>| {
            seen.push(line.to_owned());
            stop.cancel();
            Ok::<(), AdminError>(())
        };
        client.lines(&["events"], &["follow"], see).await.unwrap();
        assert!(seen[0].contains("\"config_applied\""), "{seen:?}");
        serving.await.unwrap();
        assert!(!socket.exists());
    }

    #[tokio::test]
    async fn over_tcp_a_page_in_a_browser_gets_nothing() {
        let (admin, dir) = admin().await;
        let (stop, _guard) = (admin.stop.clone(), admin.stop.clone().drop_guard());
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners =
            bind_listeners(&dir.path().join("a.sock"), Some(address), GivenSockets::default(), PAUSE)
                .await
                .unwrap();
        let url = format!("http://{}/status", listeners.address().unwrap());
        let serving = TaskTracker::new().spawn(listeners.serve(admin, Arc::new(NoPage)));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        assert_eq!(client.get(&url).send().await.unwrap().status(), 200);
        let from_page = client.get(&url).header("origin", "http://evil.example");
        assert_eq!(from_page.send().await.unwrap().status(), 403);
        // A scrape under another host name gets advice, and is not called a browser.
        let scrape = client.get(&url).header("host", "warden.example:9090").send().await.unwrap();
        assert_eq!(scrape.status(), 403);
        let told = scrape.text().await.unwrap();
        assert!(told.contains("`warden.example:9090`") && told.contains("`probe.address`"), "{told}");
        stop.cancel();
        serving.await.unwrap();
    }
}
