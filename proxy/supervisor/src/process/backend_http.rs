//! Requests of the supervisor itself to a backend: probes, properties, counters.
//!
//! Another program may take the TCP port before the child listens or after the child ends. So each request
//! has its own connection and is sent only to the child: other programs must not get the API key.
//!
//! ```text
//!     connect --> does the child run? --> do only its group and relatives listen there? --> send
//!                   | no                    | no
//!                   `-----------------------+--> closed without sending a byte
//! ```
//!
//! For a Unix socket, the check is whether its directory still belongs to our user and is closed to others.
//! Another user may have created it again after a cleaner removed it.
//!
//! The check is made after connecting, because an earlier listener may be gone by then. A killed process
//! frees its port only after the kernel marks it as ending, so the check detects a program that took the
//! port.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONNECTION, CONTENT_TYPE};
use reqwest::{Method, RequestBuilder, StatusCode};
use tower::BoxError;
use tower::util::AndThenLayer;
use warden_sensors::PortListener;

use crate::process::child::ChildProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::private_dir;
use crate::worker_threads::{WorkKind, run_job};

/// Reason why a `GET` has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProbeFault {
    /// The time was over. A server with one thread accepts no connection while it works, so an attempt to
    /// connect may last that long too.
    TimedOut,
    /// The connection was refused or broken.
    Refused,
}

#[derive(Debug)]
pub(crate) struct BackendHttp {
    client: Option<reqwest::Client>,
    /// Host and port for URLs; unused on a Unix socket.
    authority: String,
    key: Option<String>,
}

impl BackendHttp {
    /// Makes a client without a connection pool, because llama-server closes an idle connection after 5 s.
    /// `port`: check that the child listens there.
    pub(crate) fn new(endpoint: &ListenAddress, key: Option<String>, port: Option<OwnPort>) -> Self {
        let builder = reqwest::Client::builder();
        let (builder, authority) = match endpoint {
            ListenAddress::Unix(socket) => (builder.unix_socket(socket.as_path()), "backend".to_owned()),
            ListenAddress::Tcp(address) => (builder, address.to_string()),
        };
        let builder = builder
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .pool_max_idle_per_host(0);
        let builder = match port {
            Some(port) => builder.connector_layer(AndThenLayer::new(move |connection| {
                OwnPort::keep_if_owned(port.clone(), connection)
            })),
            None => builder,
        };
        let client =
            builder.build().inspect_err(|error| tracing::error!(%error, "cannot make a client for probes"));
        Self { client: client.ok(), authority, key }
    }

    /// Returns `None` without an answer in time.
    pub(crate) async fn post(&self, path: &str, body: Bytes, timeout: Duration) -> Option<reqwest::Response> {
        let request = self.request(Method::POST, path, timeout)?;
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        // Close the connection: a server that does not read the body would parse the client's text as the
        // next request.
        let request = request.header(CONNECTION, "close");
        request.send().await.inspect_err(|error| tracing::debug!(path, %error, "no answer")).ok()
    }

    /// Returns `None` without an answer in time.
    pub(crate) async fn get(&self, path: &str, timeout: Duration) -> Option<reqwest::Response> {
        self.try_get(path, timeout).await.ok()
    }

    /// Sends a `GET`. The error distinguishes a missing answer from a refused connection.
    pub(crate) async fn try_get(
        &self,
        path: &str,
        timeout: Duration,
    ) -> Result<reqwest::Response, ProbeFault> {
        let request = self.request(Method::GET, path, timeout).ok_or(ProbeFault::Refused)?;
        request.send().await.map_err(|error| {
            tracing::trace!(path, %error, "probe lost");
            if error.is_timeout() { ProbeFault::TimedOut } else { ProbeFault::Refused }
        })
    }

    /// Returns `None` without an answer in time, or with a status other than 200.
    pub(crate) async fn get_ok(&self, path: &str, timeout: Duration) -> Option<reqwest::Response> {
        self.get(path, timeout).await.filter(|answer| answer.status() == StatusCode::OK)
    }

    fn request(&self, method: Method, path: &str, timeout: Duration) -> Option<RequestBuilder> {
        let url = format!("http://{}{path}", self.authority);
        let request = self.client.as_ref()?.request(method, url).timeout(timeout);
        match &self.key {
            // `/health` needs no key.
            Some(key) if path != "/health" => Some(request.bearer_auth(key)),
            _ => Some(request),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct OwnPort {
    place: PortPlace,
    /// Weak, because the child has to end when its owner drops it.
    child: Weak<ChildProcess>,
    logged: Arc<AtomicBool>,
}

#[derive(Clone, Debug)]
enum PortPlace {
    Port(SocketAddr),
    Directory(PathBuf),
}

impl OwnPort {
    /// Returns `None` for a socket without a directory.
    pub(crate) fn from_endpoint(endpoint: &ListenAddress, child: &Arc<ChildProcess>) -> Option<Self> {
        let place = match endpoint {
            ListenAddress::Tcp(address) => PortPlace::Port(*address),
            ListenAddress::Unix(socket) => PortPlace::Directory(socket.parent()?.to_owned()),
        };
        Some(Self { place, child: Arc::downgrade(child), logged: Arc::default() })
    }

    /// Closes a new connection without sending a byte if a program other than the child listens.
    async fn keep_if_owned<C>(self, connection: C) -> Result<C, BoxError> {
        if self.is_owned().await {
            return Ok(connection);
        }
        Err(io::Error::new(io::ErrorKind::ConnectionRefused, "the port is not its own").into())
    }

    /// True if the child runs and only its processes listen at the endpoint. Unknown facts count in the
    /// child's favour.
    async fn is_owned(&self) -> bool {
        let address = match &self.place {
            PortPlace::Port(address) => *address,
            PortPlace::Directory(directory) => return self.is_directory_private(directory),
        };
        let Some(child) = self.child.upgrade().filter(|child| child.is_running()) else { return false };
        let (group, kinship) = (child.pid(), Arc::clone(child.kinship()));
        drop(child);
        let look = move || {
            // A wrapper may have moved the server out of the group.
            let outside = || kinship.relatives().into_iter().map(|one| one.process.pid).collect();
            warden_sensors::port_listener(group, outside, address)
        };
        // Reads of /proc may block.
        match run_job(WorkKind::Kernel, look).await {
            Ok(Some(PortListener::Other)) => {
                if !self.logged.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        pid = group,
                        "another program listens on {address}, the port chosen for this process; no request goes there"
                    );
                }
                false
            }
            Ok(Some(PortListener::Nobody)) => false,
            Ok(Some(PortListener::Group) | None) | Err(_) => true,
        }
    }

    fn is_directory_private(&self, directory: &Path) -> bool {
        let is_private = private_dir::is_private(directory);
        if !is_private && !self.logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                directory = %directory.display(),
                "the directory for sockets was removed, or another user can change it; no request goes there"
            );
        }
        is_private
    }
}
