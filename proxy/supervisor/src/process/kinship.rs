//! What belongs to a child beside its process group, and what is known of its server. The child's own task asks and
//! acts; here is the state that others look at.

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

/// The variable that a child and whatever it starts is known by.
pub(crate) const MARK: &str = "LLAMA_WARDEN_PROCESS";

/// How long a look at `/proc` is waited for: it takes milliseconds, unless a process hangs in the kernel.
pub(crate) const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// What others tell a child's task.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChildState {
    pub(crate) asked: AskedToEnd,
    /// `None`: nothing has answered yet, or who it was could not be found.
    pub(crate) server: Option<Server>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Kinship {
    leader: u32,
    started: Option<u64>,
    /// `NAME=VALUE`. A child without one has no relatives: the instance after us, whose children are its own.
    mark: Option<String>,
    control: Option<Arc<ControlGroup>>,
    state: watch::Sender<ChildState>,
    /// The leader has ended, and what it left behind runs.
    is_outlived: AtomicBool,
    /// What has left the group was sent SIGTERM.
    is_terminated_outside: AtomicBool,
}

/// The mark in a command's environment.
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

    /// When the leader was started, in clock ticks since the boot.
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

    /// Wakes the child's task. SIGKILL is never taken back.
    pub(crate) fn ask_to_end(&self, how: AskedToEnd) {
        self.state.send_modify(|state| state.asked = state.asked.max(how));
    }

    pub(crate) fn is_outlived(&self) -> bool {
        self.is_outlived.load(Ordering::SeqCst)
    }

    pub(crate) fn set_outlived(&self, is_outlived: bool) {
        self.is_outlived.store(is_outlived, Ordering::SeqCst);
    }

    /// Whether nobody has sent SIGTERM to what has left the group; from now on somebody has.
    pub(crate) fn first_to_terminate_outside(&self) -> bool {
        !self.is_terminated_outside.swap(true, Ordering::SeqCst)
    }

    /// The server, where its own end counts: it is outside of the group, or its leader has ended.
    pub(crate) fn watched_server(&self) -> Option<Arc<WatchedProcess>> {
        match self.server()? {
            Server::Outside { server, .. } => Some(server),
            Server::Member(server) if self.is_outlived() => Some(server),
            Server::Leader | Server::Member(_) | Server::Unmeasured(_) => None,
        }
    }

    /// All that belongs to the child but for its leader; zombies, too. Reads `/proc`: not for a runtime thread.
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

    /// The same after SIGKILL to whatever is in the control group, so that nothing can start another process meanwhile.
    pub(crate) fn killed_relatives(&self) -> Vec<Relative> {
        if let Some(control) = &self.control {
            control.kill();
        }
        self.relatives()
    }

    /// The members of the control group but for the leader.
    fn members(&self) -> Vec<Relative> {
        let all = self.control.as_ref().map(|control| control.members()).unwrap_or_default();
        all.into_iter().filter(|one| one.process.pid != self.leader).collect()
    }

    /// The processes that are measured beside the leader and its group: all of the control group, and where the server
    /// is not in the process group, all relatives. Reads `/proc`, as above.
    pub(crate) fn measured_outside(&self) -> Vec<u32> {
        let found = if self.watched_server().is_some() { self.relatives() } else { self.members() };
        // Below a leader that has ended, its group is not found from the top.
        let whole = self.is_outlived();
        let all = found.into_iter().filter(|one| !one.is_zombie);
        all.filter(|one| whole || one.group != self.leader).map(|one| one.process.pid).collect()
    }

    /// What is left of these, by what is known of the server.
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

/// Reaps the zombies among these that are our own children: orphans that were handed to us. Returns how the last one
/// ended.
pub(crate) fn reap_zombies(relatives: &[Relative]) -> Option<Exit> {
    let own = std::process::id();
    let zombies = relatives.iter().filter(|one| one.is_zombie && one.parent == own);
    // All of them: each `reap` takes one away.
    zombies.filter_map(|zombie| reap(zombie.process.pid)).fold(None, |_, exit| Some(exit))
}

/// Reaps a zombie that is our child, so that its number is its own until here.
pub(crate) fn reap(pid: u32) -> Option<Exit> {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
    watched_process::reap(WaitId::Pid(pid))
}

/// Watches these processes, as far as they run.
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

/// Sends a signal to all of these.
pub(crate) fn signal_all(processes: &[WatchedProcess], signal: Signal) {
    for process in processes {
        process.signal(signal);
    }
}

/// Kills whatever carries a mark of ours, with its descendants: when the last of our children is to end. What cannot be
/// looked at within the limit must not hold up our exit.
pub(crate) fn kill_all_marked() {
    let look = || marked_below(std::process::id(), MARK);
    kill_found(run_briefly(WorkKind::Kernel, LOOK_LIMIT, look), std::process::id());
}

/// Kills what was found for `pid`; `None`: the look took too long.
pub(crate) fn kill_found(found: Option<Vec<Relative>>, pid: u32) {
    let Some(found) = found else { return tell_of_no_look(pid) };
    found.iter().filter(|one| !one.is_zombie).for_each(|one| watched_process::kill(one.process));
}

/// What a look for the relatives of `pid` found; none, if it takes longer than [`LOOK_LIMIT`]. The kernel holds up who
/// reads the environment of a process whose memory map is locked, and one such process must not keep another child
/// from being stopped.
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

/// Orphans that were handed to us and that no task waits for: helpers of a wrapper, or of a build.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// Zombies at the last look.
    seen: Vec<StartedProcess>,
}

impl Orphans {
    /// Reaps those that were there at the last look, too: tasks that wait for one of their own are faster.
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
