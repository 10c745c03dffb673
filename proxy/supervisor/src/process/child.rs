//! A running child: its output and its end. This process forked the child, or the root did on our request.
//!
//! A wrapper may move its server out of the process group or end before the server. Then more processes
//! belong to the child than its leader (the forked process):
//!
//! ```text
//!     leader runs -- ends with 0 or after a stop request, and its server or a possible one runs --> outlived
//!      |   \                                                                                        |
//!      |    `-- its server outside of the group ends --.            the server, or everything, ends --'
//!      v                                               v                                        v
//!     ends ---------------> everything left, in the group or not, is killed; the leader is reaped last
//! ```
//!
//! The leader is reaped last, so that no other process gets its PID, by which the group is signalled.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout, timeout_at};
use warden_sensors::RelatedProcess;

use crate::error::SpawnError;
use crate::process::control_group::ControlGroup;
use crate::process::group::{
    ProcessExit, ProcessGroup, WatchedProcess, has_ended, until_pidfd_ends, watch_pidfd,
};
use crate::process::kinship::{self, ChildRelatives, ChildState, RELATIVES_LIMIT};
use crate::process::root::ChildId;
use crate::process::root::client::RootClient;
use crate::process::server_place::{ChildServer, StopRequest, outlives_leader};
use crate::process::spawn::SpawnedChild;
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_briefly, run_job};

const REAP_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Time for a leader to end after its server outside of the group. `setsid --wait` ends at once;
/// `podman run` removes its container first.
const LEADER_EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Time for killed processes outside of the group to end. A hanging driver can keep one alive.
const KILLED_LIMIT: Duration = Duration::from_secs(10);

/// A running child. Dropping it kills the process group, unless the child was handed over.
#[derive(Debug)]
pub struct ChildProcess {
    leader: ChildLeader,
    pidfd: AsyncFd<OwnedFd>,
    kinship: Arc<ChildRelatives>,
    output: Mutex<Option<(pipe::Receiver, pipe::Receiver)>>,
}

#[derive(Debug)]
enum ChildLeader {
    Own(ProcessGroup),
    OfRoot(RootChild),
}

#[derive(Debug)]
pub(crate) struct RootChild {
    id: ChildId,
    leader: Pid,
    client: Arc<RootClient>,
    exit: Mutex<Option<ProcessExit>>,
    handed_over: AtomicBool,
}

impl RootChild {
    pub(crate) fn new(id: ChildId, leader: Pid, client: Arc<RootClient>) -> Self {
        Self { id, leader, client, exit: Mutex::default(), handed_over: AtomicBool::new(false) }
    }
}

impl ChildProcess {
    /// Must be called in a tokio runtime. `mark`: a unique `NAME=VALUE` in the child's environment; without
    /// it, processes that leave the group are not found.
    pub(crate) fn watch(spawned: SpawnedChild, mark: Option<String>) -> Result<Self, SpawnError> {
        let SpawnedChild { group, control, stdout, stderr } = spawned;
        let pidfd = rustix::process::pidfd_open(group.leader, PidfdFlags::empty());
        let pid = group.id();
        let pidfd = pidfd.map_err(|errno| SpawnError::Watch { pid, source: errno.into() })?;
        Self::new(ChildLeader::Own(group), pidfd, stdout.zip(stderr), ChildRelatives::new(pid, mark, control))
    }

    /// Must be called in a tokio runtime.
    pub(crate) fn of_root(
        child: RootChild,
        pidfd: OwnedFd,
        output: Option<(OwnedFd, OwnedFd)>,
        mark: Option<String>,
    ) -> Result<Self, SpawnError> {
        let leader = ChildLeader::OfRoot(child);
        let pid = leader.pid();
        let control = ControlGroup::of_child(pid).map(Arc::new);
        let child = Self::new(leader, pidfd, output, ChildRelatives::new(pid, mark, control))?;
        if child.leader_has_ended() {
            // The leader may have ended before the handover and left processes.
            let kinship = Arc::clone(&child.kinship);
            let look = run_briefly(WorkKind::Kernel, RELATIVES_LIMIT, move || kinship.relatives());
            let relatives = look.unwrap_or_default();
            child.kinship.set_outlived(relatives.iter().any(|one| !one.is_zombie));
        }
        Ok(child)
    }

    fn new(
        leader: ChildLeader,
        pidfd: OwnedFd,
        output: Option<(OwnedFd, OwnedFd)>,
        kinship: ChildRelatives,
    ) -> Result<Self, SpawnError> {
        let pid = leader.pid();
        let failed = |source| SpawnError::Watch { pid, source };
        let pidfd = watch_pidfd(pidfd).map_err(failed)?;
        let output = match output {
            Some((stdout, stderr)) => Some((
                pipe::Receiver::from_owned_fd(stdout).map_err(failed)?,
                pipe::Receiver::from_owned_fd(stderr).map_err(failed)?,
            )),
            None => None,
        };
        Ok(Self { leader, pidfd, kinship: Arc::new(kinship), output: Mutex::new(output) })
    }

    /// PID of the child and its process group.
    pub fn pid(&self) -> u32 {
        self.leader.pid()
    }

    /// Becomes readable when the leader has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// Number of the child at the root; `None` for a child that this process forked.
    pub(crate) fn root_id(&self) -> Option<ChildId> {
        match &self.leader {
            ChildLeader::Own(_) => None,
            ChildLeader::OfRoot(child) => Some(child.id),
        }
    }

    /// Records whether another instance takes the child over, so that it does not end with this one.
    pub(crate) fn set_handed_over(&self, is_handed_over: bool) {
        if let ChildLeader::OfRoot(child) = &self.leader {
            child.handed_over.store(is_handed_over, Ordering::SeqCst);
        }
    }

    /// Takes standard output and standard error; `None` after the first call. The output must be read,
    /// because a child blocks on a full pipe.
    pub fn take_output(&self) -> Option<(pipe::Receiver, pipe::Receiver)> {
        lock(&self.output).take()
    }

    /// True if the child's server runs and holds its files. [`Self::wait`] may resolve later.
    pub fn is_running(&self) -> bool {
        match self.kinship.watched_server() {
            Some(server) => server.is_running(),
            // The server is unknown: processes left by the leader may still be loading.
            None => !self.leader_has_ended() || self.kinship.is_outlived(),
        }
    }

    pub(crate) fn leader_has_ended(&self) -> bool {
        // The PID cannot be reused before the leader is reaped.
        if warden_sensors::is_ending(self.pid()) == Some(true) {
            return true;
        }
        has_ended(self.pidfd.get_ref())
    }

    pub(crate) fn kinship(&self) -> &Arc<ChildRelatives> {
        &self.kinship
    }

    /// Sends SIGTERM to the group; call it once. Processes outside of the group get SIGTERM only after the
    /// leader has ended: container tools forward it, and llama-server exits at once on a second one.
    pub fn terminate(&self) {
        match &self.leader {
            ChildLeader::Own(group) => group.signal(Signal::TERM),
            ChildLeader::OfRoot(child) => child.client.signal(child.id, false),
        }
        self.kinship.ask_to_end(StopRequest::Terminate);
    }

    /// Sends SIGKILL to the group and the server. [`Self::wait`] kills the other processes.
    pub fn kill(&self) {
        match &self.leader {
            ChildLeader::Own(group) => group.signal(Signal::KILL),
            ChildLeader::OfRoot(child) => child.client.signal(child.id, true),
        }
        if let Some(server) = self.kinship.watched_server() {
            server.signal(Signal::KILL);
        }
        self.kinship.ask_to_end(StopRequest::Kill);
    }

    /// Signals a child that this process forked.
    pub(crate) fn signal(&self, signal: Signal) {
        if let ChildLeader::Own(group) = &self.leader {
            group.signal(signal);
        }
    }

    /// Waits for the end of the child's server, kills the remaining processes, and reaps the leader. Cancel
    /// safe; may be called repeatedly.
    pub async fn wait(&self) -> ProcessExit {
        match &self.leader {
            ChildLeader::Own(group) => self.wait_for_own(group).await,
            ChildLeader::OfRoot(child) => {
                if let Some(exit) = *lock(&child.exit) {
                    return exit;
                }
                let ended = self.wait_for_root_child(child).await;
                *lock(&child.exit).get_or_insert(ended)
            }
        }
    }

    async fn until_leader_ends(&self) {
        until_pidfd_ends(&self.pidfd, self.pid()).await;
    }

    async fn wait_for_own(&self, group: &ProcessGroup) -> ProcessExit {
        let mut changes = self.kinship.changes();
        // Exit of the last orphan of the leader that this process reaped.
        let mut exit_behind = None;
        loop {
            if let Some(exit) = group.reaped_exit() {
                return exit;
            }
            let ChildState { asked, server } = changes.borrow_and_update().clone();
            let Some(leader) = group.leader_exit() else {
                let outside = match server {
                    Some(ChildServer::Outside { server, .. }) => Some(server),
                    _ => None,
                };
                tokio::select! {
                    () = self.until_leader_ends() => {}
                    () = until_end(outside.as_deref()) => {
                        let server_exit = outside.and_then(|server| server.reap());
                        if timeout(LEADER_EXIT_LIMIT, self.until_leader_ends()).await.is_err() {
                            group.signal(Signal::KILL);
                            return self.kill_and_reap(group, Some(server_exit.unwrap_or(ProcessExit::Unknown))).await;
                        }
                    }
                    _ = changes.changed() => {}
                }
                if self.leader_has_ended() && group.leader_exit().is_none() {
                    // waitid reports the end later than the pidfd only under a debugger.
                    tokio::time::sleep(REAP_RETRY_INTERVAL).await;
                }
                continue;
            };
            let relatives = self.list_relatives(ChildRelatives::relatives).await;
            // Another call of `wait` may have reaped the leader, so its PID may be reused already.
            if let Some(exit) = group.reaped_exit() {
                return exit;
            }
            exit_behind = kinship::reap_zombies(&relatives).or(exit_behind);
            if !outlives_leader(leader, asked, self.kinship.left_behind(&relatives)) {
                let is_outlived = self.kinship.is_outlived();
                let said = match server {
                    Some(ChildServer::Member(_) | ChildServer::Outside { .. }) if is_outlived => {
                        Some(exit_behind.unwrap_or(ProcessExit::Unknown))
                    }
                    Some(_) => None,
                    None => exit_behind,
                };
                let said = if leader == ProcessExit::Code(0) { said } else { None };
                return self.kill_and_reap(group, said).await;
            }
            self.kinship.set_outlived(true);
            if asked == StopRequest::Terminate {
                self.terminate_outside(&relatives, server.as_ref());
            }
            let watched = match &server {
                Some(ChildServer::Member(server) | ChildServer::Outside { server, .. }) => {
                    vec![Arc::clone(server)]
                }
                _ => kinship::watch_all(&relatives).into_iter().map(Arc::new).collect(),
            };
            tokio::select! {
                _ = changes.changed() => {}
                () = until_first_end(&watched) => {
                    exit_behind = watched.iter().find_map(|one| one.reap()).or(exit_behind);
                }
            }
        }
    }

    /// Sends SIGTERM once to processes outside of the group.
    fn terminate_outside(&self, relatives: &[RelatedProcess], server: Option<&ChildServer>) {
        if !self.kinship.first_to_terminate_outside() {
            return;
        }
        match server {
            Some(ChildServer::Outside { server, .. }) => server.signal(Signal::TERM),
            Some(_) => {}
            None => {
                let outside = relatives.iter().filter(|one| one.group != self.pid()).copied();
                let outside: Vec<RelatedProcess> = outside.collect();
                for one in kinship::watch_all(&outside) {
                    one.signal(Signal::TERM);
                }
            }
        }
    }

    /// Kills all remaining processes and reaps the leader. Waits for their end, so that the next process has
    /// their memory.
    async fn kill_and_reap(&self, group: &ProcessGroup, said: Option<ProcessExit>) -> ProcessExit {
        self.until_leader_ends().await;
        let limit = Instant::now() + KILLED_LIMIT;
        loop {
            group.signal(Signal::KILL);
            let relatives = self.list_relatives(ChildRelatives::killed_relatives).await;
            // After the leader was reaped, the list may contain other processes.
            if let Some(exit) = group.reaped_exit() {
                return exit;
            }
            let _exit = kinship::reap_zombies(&relatives);
            let left = kinship::watch_all(&relatives);
            for one in &left {
                one.signal(Signal::KILL);
            }
            if timeout_at(limit, future::join_all(left.iter().map(WatchedProcess::until_ended)))
                .await
                .is_err()
            {
                let pids: Vec<u32> = left.iter().map(|one| one.process().pid).collect();
                tracing::error!(
                    pid = self.pid(),
                    ?pids,
                    "processes that a child left behind still run although they were killed"
                );
                break;
            }
            for one in &left {
                let _exit = one.reap();
            }
            if left.is_empty() {
                break;
            }
        }
        self.kinship.set_outlived(false);
        loop {
            if let Some(exit) = group.reap(said) {
                return exit;
            }
            // waitid reports the end later than the pidfd only under a debugger.
            tokio::time::sleep(REAP_RETRY_INTERVAL).await;
        }
    }

    /// Waits for a child of the root. The root cannot know a server that was found only by its answer, so
    /// that server is watched here.
    async fn wait_for_root_child(&self, child: &RootChild) -> ProcessExit {
        let mut changes = self.kinship.changes();
        let reaped = async {
            self.until_leader_ends().await;
            let relatives = self.list_relatives(ChildRelatives::relatives).await;
            self.kinship.set_outlived(relatives.iter().any(|one| !one.is_zombie));
            child.client.reap(child.id).await
        };
        let mut reaped = std::pin::pin!(reaped);
        let mut is_server_gone = false;
        loop {
            let ChildState { asked, server } = changes.borrow_and_update().clone();
            let watched = if is_server_gone { None } else { self.kinship.watched_server() };
            if asked == StopRequest::Terminate
                && self.leader_has_ended()
                && let Some(ChildServer::Outside { server, is_relative: false }) = &server
                && self.kinship.first_to_terminate_outside()
            {
                server.signal(Signal::TERM);
            }
            tokio::select! {
                exit = &mut reaped => {
                    self.kinship.set_outlived(false);
                    if let Some(ChildServer::Outside { server, .. }) = &server {
                        server.signal(Signal::KILL);
                    }
                    let is_killed_by_us = is_server_gone && asked != StopRequest::Kill;
                    let is_ours = is_killed_by_us && exit == ProcessExit::Signal(libc::SIGKILL);
                    return if is_ours { ProcessExit::Unknown } else { exit };
                }
                () = until_end(watched.as_deref()) => {
                    is_server_gone = true;
                    if let Ok(exit) = timeout(LEADER_EXIT_LIMIT, &mut reaped).await {
                        self.kinship.set_outlived(false);
                        return exit;
                    }
                    child.client.signal(child.id, true);
                }
                _ = changes.changed() => {}
            }
        }
    }

    /// Processes of the child, without its leader.
    async fn list_relatives(&self, look: fn(&ChildRelatives) -> Vec<RelatedProcess>) -> Vec<RelatedProcess> {
        if !self.kinship.has_relatives() {
            return Vec::new();
        }
        let kinship = Arc::clone(&self.kinship);
        // Reads of /proc may block.
        kinship::relatives_in_time(self.pid(), run_job(WorkKind::Kernel, move || look(&kinship))).await
    }
}

/// Never resolves without a process.
async fn until_end(process: Option<&WatchedProcess>) {
    match process {
        Some(process) => process.until_ended().await,
        None => std::future::pending().await,
    }
}

/// Resolves when the first of these processes has ended. An empty list means that they have ended already.
async fn until_first_end(processes: &[Arc<WatchedProcess>]) {
    if processes.is_empty() {
        tokio::time::sleep(REAP_RETRY_INTERVAL).await;
        return;
    }
    future::select_all(processes.iter().map(|one| Box::pin(one.until_ended()))).await;
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let ChildLeader::Own(group) = &self.leader else { return };
        if group.reaped_exit().is_none() && self.kinship.has_relatives() {
            group.signal(Signal::KILL);
            let kinship = Arc::clone(&self.kinship);
            // `drop` cannot await, and the leader must not be reaped before the others are killed.
            let left = run_briefly(WorkKind::Kernel, RELATIVES_LIMIT, move || kinship.killed_relatives());
            kinship::kill_found(left, self.pid());
        }
    }
}

impl ChildLeader {
    fn pid(&self) -> u32 {
        match self {
            Self::Own(group) => group.id(),
            Self::OfRoot(child) => child.leader.as_raw_nonzero().get().unsigned_abs(),
        }
    }
}

impl Drop for RootChild {
    fn drop(&mut self) {
        if !self.handed_over.load(Ordering::SeqCst) {
            self.client.forget(self.id);
        }
    }
}
