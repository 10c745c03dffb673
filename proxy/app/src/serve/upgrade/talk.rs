//! Messages between the old and the new program. The versions of the two may differ: additions must be
//! optional, and any other change needs another [`PROTOCOL`] number.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_config::resolve::ResolvedConfig;
use warden_supervisor::{ModelRefusal, OpenGate, WorkKind, run_job, wire};

pub(super) const PROTOCOL: u32 = 1;

/// First message of the new program.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum UpgradeHello {
    /// The new program has read its configuration and could take over.
    Comes { protocol: u32, version: String, place: InstancePlace },
    /// The new program cannot take over.
    #[serde(rename = "cannot")]
    CannotCome { message: String },
}

/// Both programs must have the same place, or the new one would be another instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::serve) struct InstancePlace {
    state_dir: PathBuf,
    runtime_dir: PathBuf,
    admin_socket: PathBuf,
    admin_address: bool,
}

impl InstancePlace {
    pub(in crate::serve) fn from_configuration(resolved: &ResolvedConfig) -> Self {
        Self {
            state_dir: resolved.dirs.state.clone(),
            runtime_dir: resolved.dirs.runtime.clone(),
            admin_socket: resolved.addresses.admin_socket.clone(),
            admin_address: resolved.addresses.admin.is_some(),
        }
    }
}

/// First message of the old program. Its files: public sockets, admin socket, socket of the admin address
/// if there is one, sockets for probes and balancers, lock of the directory.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::serve) struct HandoverHeader {
    pub(in crate::serve) public: usize,
    pub(in crate::serve) pieces: usize,
    /// True if the service manager made the admin socket.
    #[serde(default)]
    pub(in crate::serve) admin_given: bool,
    /// Number of sockets for probes and balancers.
    #[serde(default)]
    pub(in crate::serve) probes: usize,
    /// True if the instance is leaving a group of instances.
    #[serde(default)]
    pub(in crate::serve) leaves: bool,
}

/// Further messages of the new program.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SuccessorMessage {
    /// The new program has received everything, passes its self-test, and waits for `go`.
    Ready,
    /// The new program cannot take over.
    Cannot {
        message: String,
    },
    Serves,
}

/// Report of the new program at every change after the handover.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct GateReport {
    pub(super) gates: Vec<OpenGate>,
    /// Models that refuse requests, also requests that wait in the old program.
    #[serde(default)]
    pub(super) refusals: Vec<ModelRefusal>,
}

/// A connection between the old and the new program. Waiting for a message blocks no other task.
#[derive(Clone, Debug)]
pub(super) struct UpgradeChannel(Arc<UnixStream>);

impl UpgradeChannel {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self(Arc::new(stream))
    }

    /// Closes both directions: the other side notices, even while tasks here still wait.
    pub(super) fn close(&self) {
        if let Err(error) = self.0.shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the other side was gone before");
        }
    }

    fn copy(&self) -> io::Result<UnixStream> {
        self.0.try_clone()
    }

    pub(super) async fn send<T>(&self, message: T, files: Vec<OwnedFd>, until: Instant) -> io::Result<()>
    where
        T: Serialize + Send + 'static,
    {
        let stream = self.copy()?;
        run_blocking(until, move |left| {
            stream.set_write_timeout(Some(left))?;
            let files: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
            wire::send_message(&stream, &message, &files)
        })
        .await
    }

    pub(super) async fn receive<T>(&self, until: Instant) -> io::Result<(T, Vec<OwnedFd>)>
    where
        T: DeserializeOwned + Send + 'static,
    {
        let stream = self.copy()?;
        run_blocking(until, move |left| {
            stream.set_read_timeout(Some(left))?;
            wire::receive_message(&stream)
        })
        .await
    }
}

/// Runs blocking work on a thread, with the remaining time.
async fn run_blocking<T: Send + 'static>(
    until: Instant,
    work: impl FnOnce(Duration) -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match run_job(WorkKind::HandOver, move || work(left)).await? {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::TimedOut.into()),
        done => done,
    }
}
