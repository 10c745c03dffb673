//! What the old program and the new one say to each other. They are of different versions: what is added has to be optional, and
//! what changes otherwise needs another number.

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
use warden_supervisor::{Gate, Refused, WorkKind, run_job, wire};

use crate::config::resolve::Resolved;

/// The number of this conversation.
pub(super) const PROTOCOL: u32 = 1;

/// The new one's first word.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Hello {
    /// It has read its configuration and could take over.
    Comes { protocol: u32, version: String, place: Place },
    /// It could not, for this reason.
    #[serde(rename = "cannot")]
    CannotCome { message: String },
}

/// Where an instance is: the same for both, or the new one would be another instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::serve) struct Place {
    state_dir: PathBuf,
    runtime_dir: PathBuf,
    admin_socket: PathBuf,
    admin_address: bool,
}

impl Place {
    /// By a configuration.
    pub(in crate::serve) fn of(resolved: &Resolved) -> Self {
        Self {
            state_dir: resolved.dirs.state.clone(),
            runtime_dir: resolved.dirs.runtime.clone(),
            admin_socket: resolved.admin_socket.clone(),
            admin_address: resolved.admin_address.is_some(),
        }
    }
}

/// What the new one gets first. The files: public sockets, admin socket, admin address if there is one, those for probes and
/// balancers, the directory's lock.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::serve) struct Legacy {
    pub(in crate::serve) public: usize,
    pub(in crate::serve) pieces: usize,
    /// The admin socket was made by whoever started the first program.
    #[serde(default)]
    pub(in crate::serve) admin_given: bool,
    /// How many sockets there are for probes and balancers.
    #[serde(default)]
    pub(in crate::serve) probes: usize,
    /// It leaves a group of instances.
    #[serde(default)]
    pub(in crate::serve) leaves: bool,
}

/// The new one's further words.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Word {
    /// All is there and answers: it only needs to be told to go.
    Ready,
    /// It cannot, for this reason.
    Cannot { message: String },
    /// It serves.
    Serves,
}

/// The new one's last words, whenever that changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Gates {
    pub(super) gates: Vec<Gate>,
    /// Models whose callers were turned away: those who wait on the other side are among them.
    #[serde(default)]
    pub(super) refusals: Vec<Refused>,
}

/// A conversation, whose words are waited for beside everything else.
#[derive(Clone, Debug)]
pub(super) struct Talk(Arc<UnixStream>);

impl Talk {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self(Arc::new(stream))
    }

    /// Says no more, and hears no more: the other side notices, whoever else still waits here.
    pub(super) fn end(&self) {
        if let Err(error) = self.0.shutdown(Shutdown::Both) {
            tracing::debug!(%error, "the other side was gone before");
        }
    }

    fn copy(&self) -> io::Result<UnixStream> {
        self.0.try_clone()
    }

    /// Says something, with files.
    pub(super) async fn say<T>(&self, message: T, files: Vec<OwnedFd>, until: Instant) -> io::Result<()>
    where
        T: Serialize + Send + 'static,
    {
        let stream = self.copy()?;
        beside(until, move |left| {
            stream.set_write_timeout(Some(left))?;
            let files: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
            wire::send(&stream, &message, &files)
        })
        .await
    }

    /// Waits for a word.
    pub(super) async fn hear<T>(&self, until: Instant) -> io::Result<(T, Vec<OwnedFd>)>
    where
        T: DeserializeOwned + Send + 'static,
    {
        let stream = self.copy()?;
        beside(until, move |left| {
            stream.set_read_timeout(Some(left))?;
            wire::receive(&stream)
        })
        .await
    }
}

/// Runs what blocks on a thread for that, with the time that is left.
async fn beside<T: Send + 'static>(
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
