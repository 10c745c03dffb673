//! Finds the relatives of a child outside of its process group, and holds what is known of its server. The
//! child's own task acts on this state; others read it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, WaitId};
use tokio::sync::watch;
use tokio::time::timeout;
use warden_sensors::{
    Ancestry, Relative, StartedProcess, children_of, marked_below, process_tree, relatives,
};

use crate::process::control_group::ControlGroup;
use crate::process::group::Exit;
use crate::process::instance;
use crate::process::server_place::{AskedToEnd, KnownServer, LeftBehind, Server, is_handed_to_us};
use crate::process::watched_process::{self, WatchedProcess};
use crate::spec::Command;
use crate::worker_threads::{WorkError, WorkKind, run_briefly};

/// Variable that marks a child and its descendants.
pub(crate) const MARK: &str = "LLAMA_WARDEN_PROCESS";

/// Time limit for a look at `/proc`, which takes milliseconds unless a process hangs in the kernel.
pub(crate) const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// State that wakes a child's task.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChildState {
    pub(crate) asked: AskedToEnd,
    /// `None`: no answer yet, or its sender was not found.
    pub(crate) server: Option<Server>,
}

/// Relatives of a child, and its server.
#[derive(Debug)]
pub(crate) struct Kinship {
    leader: u32,
    started: Option<u64>,
    /// `NAME=VALUE`. A child without one has no relatives: the next instance, whose children are its own.
    mark: Option<String>,
    control: Option<Arc<ControlGroup>>,
    state: watch::Sender<ChildState>,
    /// The leader has ended, and a process that it left runs.
    is_outlived: AtomicBool,
    /// SIGTERM was sent to processes that have left the group.
    is_terminated_outside: AtomicBool,
}

/// Mark in a command's environment.
pub(crate) fn mark_of(command: &Command) -> Option<String> {
    let (_, value) = command.env.iter().rfind(|(name, _)| name == MARK)?;
    Some(format!("{MARK}={value}"))
}

impl Kinship {
    pub(crate) fn new(leader: u32, mark: Option<String>, control: Option<Arc<ControlGroup>>) -> Self {
        let started = StartedProcess::with_pid(leader).map(|leader| leader.started);
        Self {
            leader,
            started,
            mark,
            control,
            state: watch::Sender::default(),
            is_outlived: AtomicBool::default(),
            is_terminated_outside: AtomicBool::default(),
        }
    }

    /// Start time of the leader, in clock ticks since boot.
    pub(crate) fn started(&self) -> Option<u64> {
        self.started
    }

    pub(crate) fn has_relatives(&self) -> bool {
        self.mark.is_some()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<ChildState> {
        self.state.subscribe()
    }

    pub(crate) fn server(&self) -> Option<Server> {
        self.state.borrow().server.clone()
    }

    pub(crate) fn note_server(&self, server: Server) {
        self.state.send_modify(|state| state.server = Some(server));
    }

    /// Wakes the child's task. SIGKILL cannot be revoked.
    pub(crate) fn ask_to_end(&self, how: AskedToEnd) {
        self.state.send_modify(|state| state.asked = state.asked.max(how));
    }

    pub(crate) fn is_outlived(&self) -> bool {
        self.is_outlived.load(Ordering::SeqCst)
    }

    pub(crate) fn set_outlived(&self, is_outlived: bool) {
        self.is_outlived.store(is_outlived, Ordering::SeqCst);
    }

    /// Claims the single SIGTERM to processes that have left the group. Returns true for the first caller.
    pub(crate) fn first_to_terminate_outside(&self) -> bool {
        !self.is_terminated_outside.swap(true, Ordering::SeqCst)
    }

    /// The server, if its own end counts: it is outside of the group, or its leader has ended.
    pub(crate) fn watched_server(&self) -> Option<Arc<WatchedProcess>> {
        match self.server()? {
            Server::Outside { server, .. } => Some(server),
            Server::Member(server) if self.is_outlived() => Some(server),
            Server::Leader | Server::Member(_) | Server::Unmeasured(_) => None,
        }
    }

    /// All processes of the child except its leader, with zombies. Reads `/proc`: not for a runtime thread.
    pub(crate) fn relatives(&self) -> Vec<Relative> {
        let Some(mark) = &self.mark else { return Vec::new() };
        let mut all = relatives(Ancestry { leader: self.leader, reaper: instance::id(), mark });
        all.extend(self.members());
        if let Some(Server::Outside { server, is_relative: false }) = self.server() {
            let found = process_tree(server.process());
            all.extend(found.into_iter().filter(|one| one.process.pid != self.leader));
        }
        all.sort_by_key(|one| one.process);
        all.dedup_by_key(|one| one.process);
        all
    }

    /// Relatives after SIGKILL to the whole control group, so that none of them can start another process
    /// meanwhile.
    pub(crate) fn killed_relatives(&self) -> Vec<Relative> {
        if let Some(control) = &self.control {
            control.kill();
        }
        self.relatives()
    }

    /// Members of the control group except the leader.
    fn members(&self) -> Vec<Relative> {
        let all = self.control.as_ref().map(|control| control.members()).unwrap_or_default();
        all.into_iter().filter(|one| one.process.pid != self.leader).collect()
    }

    /// Processes measured besides the leader and its group: the control group, and all relatives if the
    /// server is outside of the process group. Reads `/proc`, as above.
    pub(crate) fn measured_outside(&self) -> Vec<u32> {
        let found = if self.watched_server().is_some() { self.relatives() } else { self.members() };
        // After the leader has ended, its group is not found from the top.
        let whole = self.is_outlived();
        let all = found.into_iter().filter(|one| !one.is_zombie);
        all.filter(|one| whole || one.group != self.leader).map(|one| one.process.pid).collect()
    }

    /// Classifies the remaining relatives by what is known of the server.
    pub(crate) fn left_behind(&self, relatives: &[Relative]) -> LeftBehind {
        let server = match self.server() {
            None => KnownServer::NotKnown,
            Some(Server::Member(server) | Server::Outside { server, .. }) if server.is_running() => {
                KnownServer::Runs
            }
            Some(_) => KnownServer::Gone,
        };
        let live = |in_group: bool| {
            relatives.iter().any(|one| !one.is_zombie && (one.group == self.leader) == in_group)
        };
        LeftBehind { server, in_group: live(true), outside: live(false) }
    }
}

/// Reaps zombies that are our own children: orphans that were handed to us. Returns the exit of the last one.
pub(crate) fn reap_zombies(relatives: &[Relative]) -> Option<Exit> {
    let own = std::process::id();
    let zombies = relatives.iter().filter(|one| one.is_zombie && one.parent == own);
    // Reap all of them: each call of `reap` removes one.
    zombies.filter_map(|zombie| reap(zombie.process.pid)).fold(None, |_, exit| Some(exit))
}

/// Reaps a zombie that is our child, so its PID cannot be reused before.
pub(crate) fn reap(pid: u32) -> Option<Exit> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    watched_process::reap(WaitId::Pid(pid))
}

/// Watches those of these processes that run.
pub(crate) fn watch_all(relatives: &[Relative]) -> Vec<WatchedProcess> {
    let open = |one: &Relative| match WatchedProcess::open(one.process) {
        Ok(watched) => watched,
        Err(error) => {
            tracing::error!(pid = one.process.pid, %error, "cannot watch a process that a child of ours left behind");
            None
        }
    };
    relatives.iter().filter(|one| !one.is_zombie).filter_map(open).collect()
}

/// Sends a signal to all processes.
pub(crate) fn signal_all(processes: &[WatchedProcess], signal: Signal) {
    for process in processes {
        process.signal(signal);
    }
}

/// Kills all marked processes and their descendants, when the last of our children has to end. A look that
/// takes too long must not delay our exit.
pub(crate) fn kill_all_marked() {
    let look = || marked_below(std::process::id(), MARK);
    kill_found(run_briefly(WorkKind::Kernel, LOOK_LIMIT, look), std::process::id());
}

/// Kills the relatives found for `pid`; `None`: the look took too long.
pub(crate) fn kill_found(found: Option<Vec<Relative>>, pid: u32) {
    let Some(found) = found else { return tell_of_no_look(pid) };
    found.iter().filter(|one| !one.is_zombie).for_each(|one| watched_process::kill(one.process));
}

/// Relatives of `pid`; none if the look takes longer than [`LOOK_LIMIT`]. The kernel blocks a reader of the
/// environment of a process whose memory map is locked. One such process must not keep another child from
/// being stopped.
pub(crate) async fn found_in_time(
    pid: u32,
    look: impl Future<Output = Result<Vec<Relative>, WorkError>>,
) -> Vec<Relative> {
    if let Ok(Ok(found)) = timeout(LOOK_LIMIT, look).await {
        found
    } else {
        tell_of_no_look(pid);
        Vec::new()
    }
}

fn tell_of_no_look(pid: u32) {
    tracing::error!(
        pid,
        "cannot look for processes that left the group of this one: one that did runs on; does a process hang in the \
         kernel?"
    );
}

/// Orphans that were handed to us and have no waiting task: helpers of a wrapper or a build.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// Zombies at the last look.
    seen: Vec<StartedProcess>,
}

impl Orphans {
    /// Reaps zombies that were already there at the last look. Tasks that wait for a process are faster.
    pub(crate) fn reap(&mut self) {
        let Some(ours) = Relative::with_pid(std::process::id()) else { return };
        let children = children_of(ours.process.pid);
        let zombies = children.iter().filter(|child| is_handed_to_us(child, &ours)).map(|one| one.process);
        let (again, new): (Vec<_>, Vec<_>) = zombies.partition(|zombie| self.seen.contains(zombie));
        for zombie in again {
            let _exit = reap(zombie.pid);
        }
        self.seen = new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_that_hangs_is_given_up_and_finds_nothing() {
        assert_eq!(found_in_time(1, std::future::pending()).await, []);
        let own = Relative::with_pid(std::process::id()).unwrap();
        assert_eq!(found_in_time(1, std::future::ready(Ok(vec![own]))).await, [own]);
    }
}
