//! Forks all children on the main thread, which also reaps orphans and removes unused control groups.
//!
//! When the *thread* that forked a child ends, the kernel sends the parent-death signal to the child. Pool
//! threads may end at any time, so the main thread forks all children.
//!
//! ```text
//!   main thread:  Nursery::run <---- orders ---- NurseryHandle::spawn  (any task)
//!                      |  fork, exec                    ^
//!                      +--------- the child ------------+
//! ```
//!
//! A successor lets the main thread of the first instance fork for it: see `process::root`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::error::SpawnError;
use crate::process::child::ChildProcess;
use crate::process::control_group::ControlGroups;
use crate::process::group::ProcessExit;
use crate::process::kinship::{self, OrphanReaper};
use crate::process::root::client::RootClient;
use crate::process::root::family::{InstanceOrder, RootFamily};
use crate::process::root::{SuccessorProgram, desk};
use crate::process::spawn::{SpawnedChild, spawn, spawn_successor};
use crate::spec::SpawnRequest;

enum ForkOrder {
    Spawn(Box<SpawnRequest>, oneshot::Sender<Result<SpawnedChild, SpawnError>>),
    Succeed(Box<(SuccessorProgram, [OwnedFd; 2])>, oneshot::Sender<Result<SpawnedChild, SpawnError>>),
    Stop,
}

/// Receives fork requests; run it on the main thread.
#[derive(Debug)]
pub struct ProcessNursery {
    orders: mpsc::Receiver<ForkOrder>,
    /// True if this process is a subreaper and gets orphaned descendants as children.
    is_root: bool,
}

/// Sends requests to create processes.
#[derive(Clone, Debug)]
pub struct NurseryHandle {
    orders: mpsc::Sender<ForkOrder>,
    forks: ForkPlace,
}

#[derive(Clone, Debug)]
enum ForkPlace {
    Here(Arc<RootFamily>),
    Root(Arc<RootClient>),
}

/// Interval for reaping orphans. A zombie is reaped when seen twice, so that a waiting task comes first.
const REAP_INTERVAL: Duration = Duration::from_secs(5);

/// Creates a nursery and its handle. Makes this process a subreaper, so that a server whose wrapper has
/// ended can be found and stopped.
pub fn nursery_channel() -> (ProcessNursery, NurseryHandle) {
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        tracing::warn!(%error, "servers that leave their wrapper cannot be stopped: no subreaper on this kernel");
    }
    let (sender, receiver) = mpsc::channel();
    (
        ProcessNursery { orders: receiver, is_root: true },
        NurseryHandle { orders: sender, forks: ForkPlace::Here(Arc::default()) },
    )
}

/// Creates a nursery and its handle for a successor: the root forks, and the main thread has nothing to do.
///
/// # Errors
///
/// No thread can be started.
pub fn root_nursery(root: UnixStream) -> io::Result<(ProcessNursery, NurseryHandle)> {
    let (sender, receiver) = mpsc::channel();
    let forks = ForkPlace::Root(RootClient::connect(root)?);
    Ok((ProcessNursery { orders: receiver, is_root: false }, NurseryHandle { orders: sender, forks }))
}

impl ProcessNursery {
    /// Forks until all handles are dropped or [`NurseryHandle::stop`] is called. Kills processes that have
    /// left their child's group, because the kernel ends only the children with this thread.
    pub fn run(self) {
        let (mut orphans, mut groups) = (OrphanReaper::default(), ControlGroups::default());
        loop {
            // If the caller has left, the created child is dropped and thereby killed.
            match self.orders.recv_timeout(REAP_INTERVAL) {
                Ok(ForkOrder::Spawn(request, reply)) => {
                    groups.remove_unused();
                    // A child without a mark gets no control group, nor does the next instance (`Succeed`),
                    // which has children of its own.
                    let is_marked = kinship::command_mark(&request.command).is_some();
                    let control = if is_marked { groups.make() } else { None };
                    drop(reply.send(spawn(&request, control)));
                }
                Ok(ForkOrder::Succeed(next, reply)) => drop(reply.send(spawn_successor(&next.0, &next.1))),
                Err(RecvTimeoutError::Timeout) if self.is_root => {
                    orphans.reap();
                    groups.remove_unused();
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(ForkOrder::Stop) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.is_root {
            groups.end();
            kinship::kill_all_marked();
        }
    }
}

impl NurseryHandle {
    /// Creates a process on the main thread or in the root. Must be called in a tokio runtime with I/O.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or the main thread no longer accepts requests.
    pub async fn spawn(&self, request: SpawnRequest) -> Result<ChildProcess, SpawnError> {
        if let ForkPlace::Root(root) = &self.forks {
            return root.spawn(request).await;
        }
        let (binary, mark) = (request.command.binary.clone(), kinship::command_mark(&request.command));
        let request = Box::new(request);
        let spawned = self.fork(&binary, |reply| ForkOrder::Spawn(request, reply)).await?;
        ChildProcess::watch(spawned, mark)
    }

    async fn fork(
        &self,
        binary: &Path,
        order: impl FnOnce(oneshot::Sender<Result<SpawnedChild, SpawnError>>) -> ForkOrder,
    ) -> Result<SpawnedChild, SpawnError> {
        let gone = || SpawnError::NurseryGone { binary: binary.to_owned() };
        let (reply, answer) = oneshot::channel();
        self.orders.send(order(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Creates the next instance, with one end of the handover connection. Dropping the child kills it,
    /// unless it already serves.
    ///
    /// # Errors
    ///
    /// The next instance cannot be started.
    pub async fn spawn_successor(
        &self,
        program: SuccessorProgram,
        handover: Option<OwnedFd>,
    ) -> Result<ChildProcess, SpawnError> {
        let failed = |source| SpawnError::Exec { binary: program.binary.clone(), source };
        let Some(handover) = handover else { return Err(failed(io::ErrorKind::InvalidInput.into())) };
        if let ForkPlace::Root(root) = &self.forks {
            return root.spawn_successor(program, handover).await;
        }
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let binary = program.binary.clone();
        let next = Box::new((program, [theirs.into(), handover]));
        let spawned = self.fork(&binary, |reply| ForkOrder::Succeed(next, reply)).await?;
        let child = ChildProcess::watch(spawned, None)?;
        desk::serve_successor(ours, self.clone(), tokio::runtime::Handle::current())
            .map_err(|source| SpawnError::Exec { binary, source })?;
        Ok(child)
    }

    /// Records that the successor now serves. Its process then lives as long as the root.
    pub fn note_serving(&self, child: ChildProcess) {
        match (&self.forks, child.root_id()) {
            (ForkPlace::Here(family), _) => {
                let id = family.keep(Arc::new(child));
                let _nobody = family.note_serving(id);
            }
            (ForkPlace::Root(root), Some(id)) => {
                child.set_handed_over(true);
                root.note_serving(id);
            }
            (ForkPlace::Root(_), None) => {}
        }
    }

    /// True if this process forks. Then it has to live as long as its successors.
    pub fn is_root(&self) -> bool {
        matches!(self.forks, ForkPlace::Here(_))
    }

    /// Waits for the end of the serving successor; never resolves without one.
    pub async fn successor_ended(&self) -> ProcessExit {
        match &self.forks {
            ForkPlace::Here(family) => family.until_serving_ends().await,
            ForkPlace::Root(_) => std::future::pending().await,
        }
    }

    /// Waits for the end of all successors that no longer serve. Returns at once outside of the root.
    pub async fn retired_ended(&self) {
        if let Some(family) = self.family() {
            family.retired_ended().await;
        }
    }

    /// Sends an order to the successors concerned. Does nothing outside of the root.
    pub fn pass_on(&self, order: InstanceOrder) {
        if let Some(family) = self.family() {
            family.pass_on(order);
        }
    }

    pub(crate) fn family(&self) -> Option<&Arc<RootFamily>> {
        match &self.forks {
            ForkPlace::Here(family) => Some(family),
            ForkPlace::Root(_) => None,
        }
    }

    pub(crate) fn root(&self) -> Option<&Arc<RootClient>> {
        match &self.forks {
            ForkPlace::Here(_) => None,
            ForkPlace::Root(root) => Some(root),
        }
    }

    /// Ends [`ProcessNursery::run`].
    pub fn stop(&self) {
        drop(self.orders.send(ForkOrder::Stop));
    }
}
