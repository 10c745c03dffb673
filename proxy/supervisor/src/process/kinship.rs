//! Finds the processes of a child outside of its process group, and stores facts about its server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::WaitId;
use tokio::sync::watch;
use tokio::time::timeout;
use warden_sensors::{
    ChildAncestry, RelatedProcess, StartedProcess, children_of, marked_below, process_tree, relatives,
};

use crate::process::control_group::ControlGroup;
use crate::process::group::{ProcessExit, WatchedProcess, kill_process, reap_ended};
use crate::process::root::instance_pid;
use crate::process::server_place::{
    ChildServer, KnownServer, RemainingProcesses, StopRequest, is_adopted_orphan,
};
use crate::spec::ServerCommand;
use crate::worker_threads::{WorkError, WorkKind, run_briefly};

pub(crate) const MARK_VARIABLE: &str = "LLAMA_WARDEN_PROCESS";

/// Reads of `/proc` take milliseconds unless a process hangs in the kernel.
pub(crate) const RELATIVES_LIMIT: Duration = Duration::from_secs(2);

/// Facts about a child. A change wakes the task that waits for the child.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChildState {
    pub(crate) asked: StopRequest,
    /// Process that serves; `None` before the first answer, or if that process was not found.
    pub(crate) server: Option<ChildServer>,
}

#[derive(Debug)]
pub(crate) struct ChildRelatives {
    leader: u32,
    started: Option<u64>,
    /// `NAME=VALUE` in the child's environment; `None` for the next instance, which has its own children.
    mark: Option<String>,
    control: Option<Arc<ControlGroup>>,
    state: watch::Sender<ChildState>,
    /// True if the leader has ended, but a process that it left runs.
    is_outlived: AtomicBool,
    /// True if processes outside of the group got SIGTERM.
    is_terminated_outside: AtomicBool,
}

pub(crate) fn command_mark(command: &ServerCommand) -> Option<String> {
    command.own_variable(MARK_VARIABLE).map(|value| format!("{MARK_VARIABLE}={value}"))
}

impl ChildRelatives {
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

    pub(crate) fn server(&self) -> Option<ChildServer> {
        self.state.borrow().server.clone()
    }

    pub(crate) fn note_server(&self, server: ChildServer) {
        self.state.send_modify(|state| state.server = Some(server));
    }

    /// Wakes the waiting task to end the child. Later requests cannot weaken a SIGKILL.
    pub(crate) fn ask_to_end(&self, how: StopRequest) {
        self.state.send_modify(|state| state.asked = state.asked.max(how));
    }

    pub(crate) fn is_outlived(&self) -> bool {
        self.is_outlived.load(Ordering::SeqCst)
    }

    pub(crate) fn set_outlived(&self, is_outlived: bool) {
        self.is_outlived.store(is_outlived, Ordering::SeqCst);
    }

    /// True for the first caller, which alone may send SIGTERM outside of the group.
    pub(crate) fn first_to_terminate_outside(&self) -> bool {
        !self.is_terminated_outside.swap(true, Ordering::SeqCst)
    }

    /// The server, if its own end matters: it is outside of the group, or the leader has ended.
    pub(crate) fn watched_server(&self) -> Option<Arc<WatchedProcess>> {
        match self.server()? {
            ChildServer::Outside { server, .. } => Some(server),
            ChildServer::Member(server) if self.is_outlived() => Some(server),
            ChildServer::Leader | ChildServer::Member(_) | ChildServer::Unmeasured(_) => None,
        }
    }

    /// All processes except the leader, including zombies. May block on `/proc`.
    pub(crate) fn relatives(&self) -> Vec<RelatedProcess> {
        let Some(mark) = &self.mark else { return Vec::new() };
        let mut all = relatives(ChildAncestry { leader: self.leader, reaper: instance_pid(), mark });
        all.extend(self.members());
        if let Some(ChildServer::Outside { server, is_relative: false }) = self.server() {
            let found = process_tree(server.process());
            all.extend(found.into_iter().filter(|one| one.process.pid != self.leader));
        }
        all.sort_by_key(|one| one.process);
        all.dedup_by_key(|one| one.process);
        all
    }

    /// Kills the control group, so that none of its processes can fork, and returns the remaining processes.
    pub(crate) fn killed_relatives(&self) -> Vec<RelatedProcess> {
        if let Some(control) = &self.control {
            control.kill();
        }
        self.relatives()
    }

    fn members(&self) -> Vec<RelatedProcess> {
        let all = self.control.as_ref().map(|control| control.members()).unwrap_or_default();
        all.into_iter().filter(|one| one.process.pid != self.leader).collect()
    }

    /// Processes to measure besides the leader and its group: the control group, or all relatives of a server
    /// outside of the process group. May block on `/proc`.
    pub(crate) fn measured_relatives(&self) -> Vec<u32> {
        let found = if self.watched_server().is_some() { self.relatives() } else { self.members() };
        // Group members are otherwise found from the leader, which has ended.
        let whole = self.is_outlived();
        let all = found.into_iter().filter(|one| !one.is_zombie);
        all.filter(|one| whole || one.group != self.leader).map(|one| one.process.pid).collect()
    }

    pub(crate) fn left_behind(&self, relatives: &[RelatedProcess]) -> RemainingProcesses {
        let server = match self.server() {
            None => KnownServer::Unknown,
            Some(ChildServer::Member(server) | ChildServer::Outside { server, .. })
                if server.is_running() =>
            {
                KnownServer::Runs
            }
            Some(_) => KnownServer::Gone,
        };
        let live = |in_group: bool| {
            relatives.iter().any(|one| !one.is_zombie && (one.group == self.leader) == in_group)
        };
        RemainingProcesses { server, in_group: live(true), outside: live(false) }
    }
}

/// Reaps orphans that became our children. Returns the exit of the last one.
pub(crate) fn reap_zombies(relatives: &[RelatedProcess]) -> Option<ProcessExit> {
    let own = std::process::id();
    let zombies = relatives.iter().filter(|one| one.is_zombie && one.parent == own);
    // Each call of `reap` removes one zombie.
    zombies.filter_map(|zombie| reap(zombie.process.pid)).fold(None, |_, exit| Some(exit))
}

/// Reaps a zombie child. Nothing else reaps it, so its PID was not reused.
pub(crate) fn reap(pid: u32) -> Option<ProcessExit> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    reap_ended(WaitId::Pid(pid))
}

pub(crate) fn watch_all(relatives: &[RelatedProcess]) -> Vec<WatchedProcess> {
    let open = |one: &RelatedProcess| match WatchedProcess::open(one.process) {
        Ok(watched) => watched,
        Err(error) => {
            tracing::error!(pid = one.process.pid, %error, "cannot watch a process that a child of ours left behind");
            None
        }
    };
    relatives.iter().filter(|one| !one.is_zombie).filter_map(open).collect()
}

/// Kills all marked processes and their descendants before this process exits. Gives up if `/proc` is slow.
pub(crate) fn kill_all_marked() {
    let look = || marked_below(std::process::id(), MARK_VARIABLE);
    kill_found(run_briefly(WorkKind::Kernel, RELATIVES_LIMIT, look), std::process::id());
}

/// `found` is `None` if the search took too long.
pub(crate) fn kill_found(found: Option<Vec<RelatedProcess>>, pid: u32) {
    let Some(found) = found else { return log_no_relatives(pid) };
    found.iter().filter(|one| !one.is_zombie).for_each(|one| kill_process(one.process));
}

/// Waits for a search of relatives, at most [`RELATIVES_LIMIT`]. The kernel blocks readers of a process's
/// environment while its memory map is locked, which must not prevent another child's stop.
pub(crate) async fn relatives_in_time(
    pid: u32,
    look: impl Future<Output = Result<Vec<RelatedProcess>, WorkError>>,
) -> Vec<RelatedProcess> {
    if let Ok(Ok(found)) = timeout(RELATIVES_LIMIT, look).await {
        found
    } else {
        log_no_relatives(pid);
        Vec::new()
    }
}

fn log_no_relatives(pid: u32) {
    tracing::error!(
        pid,
        "cannot search for processes that left this group: any such process keeps running; does a process hang in the \
         kernel?"
    );
}

/// Reaps orphans that no task waits for: helpers of a wrapper or a build.
#[derive(Debug, Default)]
pub(crate) struct OrphanReaper {
    seen: Vec<StartedProcess>,
}

impl OrphanReaper {
    /// Reaps zombies that it sees for the second time: a task that waits for a process reaps it earlier.
    pub(crate) fn reap(&mut self) {
        let Some(ours) = RelatedProcess::with_pid(std::process::id()) else { return };
        let children = children_of(ours.process.pid);
        let zombies = children.iter().filter(|child| is_adopted_orphan(child, &ours)).map(|one| one.process);
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
        assert_eq!(relatives_in_time(1, std::future::pending()).await, []);
        let own = RelatedProcess::with_pid(std::process::id()).unwrap();
        assert_eq!(relatives_in_time(1, std::future::ready(Ok(vec![own]))).await, [own]);
    }
}
