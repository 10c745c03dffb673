//! Forks all children on the main thread, which also reaps orphans and removes unused control groups.
//!
//! The kernel ties a parent-death signal to the *thread* that forked. A pool thread may end at any time and
//! would take the child with it. So all children are forked by the one thread that lives as long as the
//! process: main.
//!
//! ```text
//!   main thread:  Nursery::run <---- orders ---- NurseryHandle::spawn  (any task)
//!                      |  fork, exec                    ^
//!                      +--------- the child ------------+
//! ```
//!
//! A successor lets the main thread of the first instance fork: see `process::root`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::error::SpawnError;
use crate::process::child::ChildProcess;
use crate::process::control_group::ControlGroups;
use crate::process::group::ProcessExit;
use crate::process::kinship::{self, OrphanReaper};
use crate::process::root::ask::SuccessorProgram;
use crate::process::root::client::RootClient;
use crate::process::root::desk;
use crate::process::root::family::RootFamily;
use crate::process::root::orders;
use crate::process::spawn::{SpawnedChild, spawn, spawn_successor};
use crate::spec::SpawnRequest;

enum ForkOrder {
    Spawn(Box<SpawnRequest>, oneshot::Sender<Result<SpawnedChild, SpawnError>>),
    Succeed(Box<(SuccessorProgram, [OwnedFd; 2])>, oneshot::Sender<Result<SpawnedChild, SpawnError>>),
    Stop,
}

/// The forking side, run on the main thread.
#[derive(Debug)]
pub struct ProcessNursery {
    orders: mpsc::Receiver<ForkOrder>,
    /// This process gets orphans, as the subreaper.
    is_root: bool,
}

/// The requesting side.
#[derive(Clone, Debug)]
pub struct NurseryHandle {
    orders: mpsc::Sender<ForkOrder>,
    forks: ForkPlace,
}

#[derive(Clone, Debug)]
enum ForkPlace {
    /// Our main thread forks.
    Here(Arc<RootFamily>),
    /// The main thread of the first instance forks.
    Root(Arc<RootClient>),
}

/// Interval for reaping orphans. Each is reaped at its second sighting, because a task that waits for it is
/// faster.
const REAP_INTERVAL: Duration = Duration::from_secs(5);

/// Creates a nursery and its handle. From now on this process gets orphaned descendants (it is a
/// subreaper), so that a server whose wrapper has ended can be found, watched and stopped.
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

/// Same as [`nursery_channel`] for a successor: its main thread has nothing to do, and the handle asks the root to
/// fork.
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
    /// Serves until all handles are gone or [`NurseryHandle::stop`] is called. The children die when the
    /// calling thread ends, not when this returns. Processes that have left their groups are killed before
    /// this returns, because the kernel ties only the children themselves to us.
    pub fn run(self) {
        let (mut orphans, mut groups) = (OrphanReaper::default(), ControlGroups::default());
        loop {
            // A caller that left meanwhile drops the child, which kills it.
            match self.orders.recv_timeout(REAP_INTERVAL) {
                Ok(ForkOrder::Spawn(request, reply)) => {
                    groups.remove_unused();
                    // A child without a mark is no model: the next instance has children of its own.
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
    /// Creates a process on the main thread. Must be called within a tokio runtime with I/O.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or the main thread no longer takes orders.
    pub async fn spawn(&self, request: SpawnRequest) -> Result<ChildProcess, SpawnError> {
        if let ForkPlace::Root(root) = &self.forks {
            return root.spawn(request).await;
        }
        let (binary, mark) = (request.command.binary.clone(), kinship::command_mark(&request.command));
        let (reply, answer) = oneshot::channel();
        if self.orders.send(ForkOrder::Spawn(Box::new(request), reply)).is_err() {
            return Err(SpawnError::NurseryGone { binary });
        }
        let spawned = answer.await.map_err(|_| SpawnError::NurseryGone { binary })??;
        ChildProcess::watch(spawned, mark)
    }

    /// Creates the next instance, with its end of the handover connection. Dropping the child kills it,
    /// until it serves.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub async fn spawn_successor(
        &self,
        program: SuccessorProgram,
        handover: Option<OwnedFd>,
    ) -> Result<ChildProcess, SpawnError> {
        let failed = |source| SpawnError::Exec { binary: program.binary.clone(), source };
        let Some(handover) = handover else { return Err(failed(io::ErrorKind::InvalidInput.into())) };
        if let ForkPlace::Root(root) = &self.forks {
            return root.spawn_successor(program, Some(handover)).await;
        }
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let binary = program.binary.clone();
        let (reply, answer) = oneshot::channel();
        let order = ForkOrder::Succeed(Box::new((program, [theirs.into(), handover])), reply);
        if self.orders.send(order).is_err() {
            return Err(SpawnError::NurseryGone { binary });
        }
        let gone = |_| SpawnError::NurseryGone { binary: binary.clone() };
        let child = ChildProcess::watch(answer.await.map_err(gone)??, None)?;
        desk::serve_successor(ours, self.clone(), tokio::runtime::Handle::current())
            .map_err(|source| SpawnError::Exec { binary, source })?;
        Ok(child)
    }

    /// Records that the child made by [`Self::spawn_successor`] serves from now on. The child lives as long as the
    /// root does.
    pub fn note_serving(&self, child: ChildProcess) {
        match (&self.forks, child.root_id()) {
            (ForkPlace::Here(family), _) => {
                let id = family.keep(Arc::new(child));
                let _nobody = family.note_serving(id);
            }
            (ForkPlace::Root(root), Some(id)) => {
                child.hand_over();
                root.note_serving(id);
            }
            (ForkPlace::Root(_), None) => {}
        }
    }

    /// True if our main thread forks. This process then stays for its successors.
    pub fn is_root(&self) -> bool {
        matches!(self.forks, ForkPlace::Here(_))
    }

    /// Waits for the end of the serving successor. Never resolves without one.
    pub async fn successor_ended(&self) -> ProcessExit {
        match &self.forks {
            ForkPlace::Here(family) => family.until_serving_ends().await,
            ForkPlace::Root(_) => std::future::pending().await,
        }
    }

    /// Waits for the end of all successors that serve no more. Returns at once if this process is not the
    /// root.
    pub async fn retired_ended(&self) {
        if let Some(family) = self.family() {
            family.retired_ended().await;
        }
    }

    /// Tells all successors to end, including later ones.
    pub fn end_successors(&self) {
        self.pass_on(orders::InstanceOrder::End);
    }

    /// Tells the serving successor to reload its configuration, and retired ones to reopen their files.
    pub fn reload_successors(&self) {
        self.pass_on(orders::InstanceOrder::Reload);
    }

    /// Tells the serving successor to hand over to the program file now at its path.
    pub fn upgrade_successor(&self) {
        self.pass_on(orders::InstanceOrder::Upgrade);
    }

    fn pass_on(&self, order: orders::InstanceOrder) {
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
