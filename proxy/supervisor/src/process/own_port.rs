//! Protects requests on a TCP port that another program may take before the child listens or after the
//! child ends: data is sent to the child or not at all.
//!
//! ```text
//!     connect --> does the child run? --> do only its group and relatives listen there? --> send
//!                   | no                    | no
//!                   `-----------------------+--> closed without sending a byte
//! ```
//!
//! For a Unix socket, the directory is checked instead: no other user can enter it, and another user could
//! make it only after it was removed together with the directory above it.
//!
//! The check comes *after* the connection is made, because a program that listened before may be gone by
//! then. A killed process frees its port only after the kernel marks it as ending; so if a connection
//! reached another program that took the port, the check sees that mark.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use tower::{BoxError, Layer, Service};
use warden_sensors::PortListener;

use crate::process::child::ChildProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::private_dir;
use crate::worker_threads::{WorkKind, run_job};

/// A port, or the directory of a socket, and the child that is to listen there.
#[derive(Clone, Debug)]
pub(crate) struct OwnPort {
    place: PortPlace,
    /// The child. The reference is weak, because the child has to end when its owner drops it.
    child: Weak<ChildProcess>,
    /// True if it was logged that another program listens.
    logged: Arc<AtomicBool>,
}

#[derive(Clone, Debug)]
enum PortPlace {
    Port(SocketAddr),
    Directory(PathBuf),
}

impl OwnPort {
    /// Makes the check for an endpoint; `None` for a socket without a directory.
    pub(crate) fn from_endpoint(endpoint: &ListenAddress, child: &Arc<ChildProcess>) -> Option<Self> {
        let place = match endpoint {
            ListenAddress::Tcp(address) => PortPlace::Port(*address),
            ListenAddress::Unix(socket) => PortPlace::Directory(socket.parent()?.to_owned()),
        };
        Some(Self { place, child: Arc::downgrade(child), logged: Arc::default() })
    }

    /// True if the child runs, and only processes of the child listen at the endpoint. Facts that cannot be
    /// determined count in the child's favour.
    async fn is_owned(&self) -> bool {
        let address = match &self.place {
            PortPlace::Port(address) => *address,
            PortPlace::Directory(directory) => return self.is_directory_private(directory),
        };
        let Some(child) = self.child.upgrade().filter(|child| child.is_running()) else { return false };
        let (group, kinship) = (child.pid(), Arc::clone(child.kinship()));
        drop(child);
        let look = move || {
            // Include processes outside of the group: a wrapper may have moved the server there.
            let outside = || kinship.relatives().into_iter().map(|one| one.process.pid).collect();
            warden_sensors::port_listener(group, outside, address)
        };
        // Reads of /proc are small, but may block; use a worker thread.
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
}

impl OwnPort {
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

/// Connector layer that closes connections if another program than the child listens.
#[derive(Clone, Debug)]
pub(crate) struct OnlyToOwner {
    port: OwnPort,
}

impl OnlyToOwner {
    pub(crate) fn new(port: OwnPort) -> Self {
        Self { port }
    }
}

impl<S> Layer<S> for OnlyToOwner {
    type Service = ConnectToOwner<S>;

    fn layer(&self, connect: S) -> Self::Service {
        ConnectToOwner { connect, port: self.port.clone() }
    }
}

/// Connector made by [`OnlyToOwner`].
#[derive(Clone, Debug)]
pub(crate) struct ConnectToOwner<S> {
    connect: S,
    port: OwnPort,
}

impl<S, R> Service<R> for ConnectToOwner<S>
where
    S: Service<R, Error = BoxError>,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connect.poll_ready(context)
    }

    fn call(&mut self, to: R) -> Self::Future {
        let (connecting, port) = (self.connect.call(to), self.port.clone());
        Box::pin(async move {
            let connection = connecting.await?;
            if port.is_owned().await {
                return Ok(connection);
            }
            Err(io::Error::new(io::ErrorKind::ConnectionRefused, "the port is not its own").into())
        })
    }
}
