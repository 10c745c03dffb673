//! Finds the process that answers at a child's endpoint: the child itself, a member of its process group, or
//! a process outside of the group, as with `setsid` or a container tool.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;
use warden_sensors::RelatedProcess;

use crate::process::child::ChildProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::group::{ProcessExit, WatchedProcess};
use crate::process::kinship::RELATIVES_LIMIT;
use crate::worker_threads::{WorkKind, run_job};

#[derive(Clone, Debug)]
pub(crate) enum ChildServer {
    Leader,
    Member(Arc<WatchedProcess>),
    /// A process outside of the group, which is measured, watched and stopped together with the child.
    Outside {
        server: Arc<WatchedProcess>,
        /// False if the process is no descendant and has no mark, but answers at the endpoint.
        is_relative: bool,
    },
    Unmeasured(UnmeasuredServer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum UnmeasuredServer {
    /// The process has no PID in our namespace.
    OtherNamespace,
    /// The process has ended, or `/proc` hides it.
    Hidden,
    OtherUser,
    Older,
    /// The PID that called `listen` now belongs to another process.
    OtherSocket,
}

impl UnmeasuredServer {
    /// Sentence without its full stop.
    pub(crate) fn sentence(self) -> String {
        let why = match self {
            Self::OtherNamespace => "the server runs in a container whose processes are not visible here",
            Self::Hidden => "the process that answers for it is not visible in /proc",
            Self::OtherUser => "the server runs as another user",
            Self::Older => "the process that answers for it was running before it was started",
            Self::OtherSocket => "the process that began to listen for it does not have the socket any more",
        };
        format!("the server's memory is not measured, so no memory policy acts on it: {why}")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AnsweringProcess {
    /// PID, or 0 for a process without a PID in our namespace.
    pid: u32,
    /// Process and effective user; `None` if unreadable.
    entry: Option<(RelatedProcess, u32)>,
    /// True if the process has the socket open. Otherwise its PID may have been reused.
    has_socket: bool,
}

#[derive(Clone, Copy, Debug)]
struct ChildFacts<'a> {
    leader: u32,
    /// Start time in clock ticks since boot.
    started: Option<u64>,
    relatives: &'a [RelatedProcess],
    user: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerPlace {
    Leader,
    Member(RelatedProcess),
    Outside { server: RelatedProcess, is_relative: bool },
    Unmeasured(UnmeasuredServer),
}

/// Decides where the answering process is. A process that is no descendant has to run as our user, be younger
/// than the child and have the socket open: an unrelated process must not be measured or stopped.
fn server_place(answering: AnsweringProcess, child: ChildFacts<'_>) -> ServerPlace {
    use UnmeasuredServer::{Hidden, Older, OtherNamespace, OtherSocket, OtherUser};
    if answering.pid == 0 {
        return ServerPlace::Unmeasured(OtherNamespace);
    }
    if answering.pid == child.leader {
        return ServerPlace::Leader;
    }
    let Some((server, user)) = answering.entry.filter(|(server, _)| !server.is_zombie) else {
        return ServerPlace::Unmeasured(Hidden);
    };
    if server.group == child.leader {
        return ServerPlace::Member(server);
    }
    // Another user's process may be readable, but it cannot be signalled.
    if user != child.user && child.user != 0 {
        return ServerPlace::Unmeasured(OtherUser);
    }
    let is_relative = child.relatives.iter().any(|relative| relative.process == server.process);
    let is_younger = child.started.is_some_and(|started| server.process.started >= started);
    match (is_relative, user == child.user, is_younger) {
        (false, false, _) => ServerPlace::Unmeasured(OtherUser),
        (false, true, false) => ServerPlace::Unmeasured(Older),
        (false, true, true) if !answering.has_socket => ServerPlace::Unmeasured(OtherSocket),
        (true, _, _) | (false, true, true) => ServerPlace::Outside { server, is_relative },
    }
}

const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// Finds and records the answering process. Must be called in a tokio runtime. Returns false if the search
/// was impossible at present.
///
/// Source: `SO_PEERCRED` in `unix(7)`. The credentials are those of the process that called `listen`.
pub(crate) async fn find_server(child: &ChildProcess, endpoint: &ListenAddress) -> bool {
    let peer = match endpoint {
        ListenAddress::Unix(path) => {
            let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, UnixStream::connect(path)).await else {
                return false;
            };
            let Ok(credentials) = stream.peer_cred() else { return false };
            // A process without a PID in our namespace is reported as 0.
            Some(credentials.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0))
        }
        ListenAddress::Tcp(_) => None,
    };
    let (leader, kinship, endpoint) = (child.pid(), Arc::clone(child.kinship()), endpoint.clone());
    let look = move || {
        let relatives = kinship.relatives();
        let pid = match &endpoint {
            ListenAddress::Unix(_) => peer,
            ListenAddress::Tcp(address) => {
                let pids = relatives.iter().map(|relative| relative.process.pid);
                warden_sensors::port_owner(std::iter::once(leader).chain(pids), *address)
            }
        }?;
        let facts = ChildFacts {
            leader,
            started: kinship.started(),
            relatives: &relatives,
            user: rustix::process::geteuid().as_raw(),
        };
        let has_socket = match &endpoint {
            _ if pid == leader => true,
            ListenAddress::Unix(path) => {
                // A wrapper may have replaced the socket by a link.
                let listening = path.canonicalize().unwrap_or_else(|_| path.clone());
                listening.file_name().is_none_or(|name| warden_sensors::has_unix_listener(pid, name))
            }
            ListenAddress::Tcp(_) => true,
        };
        // Read last, so that it describes the process that has the socket.
        let seen = RelatedProcess::with_pid(pid).zip(warden_sensors::user_of(pid));
        Some(server_place(AnsweringProcess { pid, entry: seen, has_socket }, facts))
    };
    // Reads of /proc may block.
    let place = match timeout(RELATIVES_LIMIT, run_job(WorkKind::Kernel, look)).await {
        Ok(Ok(Some(place))) => place,
        Ok(Ok(None)) => return true,
        // A process may hang in the kernel. Requests are served anyway, and the search is repeated.
        Ok(Err(_)) | Err(_) => return false,
    };
    let watch = |server: RelatedProcess| match WatchedProcess::open(server.process) {
        Ok(watched) => watched.map(Arc::new),
        Err(error) => {
            tracing::error!(pid = server.process.pid, %error, "cannot watch the server of a process");
            None
        }
    };
    let server = match place {
        ServerPlace::Leader => Some(ChildServer::Leader),
        ServerPlace::Member(server) => watch(server).map(ChildServer::Member),
        ServerPlace::Outside { server, is_relative } => {
            tracing::info!(
                pid = leader,
                server = server.process.pid,
                "the server has left the process group: it is measured and stopped by its own process id"
            );
            watch(server).map(|server| ChildServer::Outside { server, is_relative })
        }
        ServerPlace::Unmeasured(why) => {
            tracing::warn!(pid = leader, "{}", why.sentence());
            Some(ChildServer::Unmeasured(why))
        }
    };
    let Some(server) = server else { return false };
    child.kinship().note_server(server);
    true
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StopRequest {
    #[default]
    No,
    Terminate,
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemainingProcesses {
    pub(crate) server: KnownServer,
    pub(crate) in_group: bool,
    pub(crate) outside: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KnownServer {
    Unknown,
    Runs,
    /// The server has ended, cannot be watched, or was the leader.
    Gone,
}

/// True if a child outlives its leader in a server, or in a process that may become one. Processes of a
/// failed wrapper do not count.
pub(crate) fn outlives_leader(leader: ProcessExit, asked: StopRequest, left: RemainingProcesses) -> bool {
    let meant = match asked {
        StopRequest::No => leader == ProcessExit::Code(0),
        // Processes of a child that was asked to end may take their time.
        StopRequest::Terminate => true,
        StopRequest::Kill => false,
    };
    meant
        && match left.server {
            KnownServer::Runs => true,
            KnownServer::Gone => false,
            KnownServer::Unknown => left.outside || (left.in_group && asked == StopRequest::No),
        }
}

/// True if a zombie is an orphan that no task waits for. Our own children are in our session, and in our
/// group or the leader of their own.
pub(crate) fn is_adopted_orphan(child: &RelatedProcess, ours: &RelatedProcess) -> bool {
    let is_forked_by_us =
        child.session == ours.session && (child.group == ours.group || child.group == child.process.pid);
    child.is_zombie && child.parent == ours.process.pid && !is_forked_by_us
}

#[cfg(test)]
mod tests {
    use warden_sensors::StartedProcess;

    use super::*;

    const LEADER: u32 = 100;
    const WITHOUT_SOCKET: u32 = 500;

    fn process(pid: u32, group: u32, started: u64) -> RelatedProcess {
        let process = StartedProcess { pid, started };
        RelatedProcess { process, parent: 1, group, session: group, is_zombie: false }
    }

    fn place(pid: u32, seen: Option<(RelatedProcess, u32)>, user: u32) -> ServerPlace {
        let relatives = [process(300, 300, 50)];
        let child = ChildFacts { leader: LEADER, started: Some(50), relatives: &relatives, user };
        server_place(AnsweringProcess { pid, entry: seen, has_socket: pid != WITHOUT_SOCKET }, child)
    }

    #[test]
    fn the_process_that_answers_is_the_childs_if_it_descends_from_it_or_is_younger_and_of_our_user() {
        assert_eq!(place(LEADER, None, 1000), ServerPlace::Leader);
        let member = process(200, LEADER, 60);
        assert_eq!(place(200, Some((member, 0)), 1000), ServerPlace::Member(member));
        let left = process(300, 300, 50);
        assert_eq!(
            place(300, Some((left, 1000)), 1000),
            ServerPlace::Outside { server: left, is_relative: true }
        );
        let other = process(400, 400, 50);
        assert_eq!(
            place(400, Some((other, 1000)), 1000),
            ServerPlace::Outside { server: other, is_relative: false }
        );
        // Root may signal its descendants under any user.
        assert_eq!(
            place(300, Some((left, 1000)), 0),
            ServerPlace::Outside { server: left, is_relative: true }
        );
    }

    #[test]
    fn what_cannot_be_seen_and_what_is_a_strangers_is_not_measured() {
        use UnmeasuredServer::{Hidden, Older, OtherNamespace, OtherSocket, OtherUser};
        let dead = RelatedProcess { is_zombie: true, ..process(300, 300, 50) };
        for (pid, seen, user, why) in [
            (0, None, 1000, OtherNamespace),
            (300, None, 1000, Hidden),
            (300, Some((dead, 1000)), 1000, Hidden),
            (300, Some((process(300, 300, 50), 0)), 1000, OtherUser),
            (400, Some((process(400, 400, 90), 33)), 0, OtherUser),
            (400, Some((process(400, 400, 49), 1000)), 1000, Older),
            (WITHOUT_SOCKET, Some((process(WITHOUT_SOCKET, 500, 60), 1000)), 1000, OtherSocket),
            // The PID of a former relative was reused.
            (300, Some((process(300, 300, 49), 1000)), 1000, Older),
        ] {
            assert_eq!(place(pid, seen, user), ServerPlace::Unmeasured(why), "{pid}");
            assert!(why.sentence().starts_with("the server's memory is not measured"));
        }
    }

    #[test]
    fn a_child_outlives_a_leader_that_succeeded_or_was_told_to_end_as_long_as_its_server_runs() {
        use KnownServer::{Gone, Runs, Unknown};
        use StopRequest::{Kill, No, Terminate};
        let left = |server, in_group, outside| RemainingProcesses { server, in_group, outside };
        let (well, badly) = (ProcessExit::Code(0), ProcessExit::Code(1));
        assert!(outlives_leader(well, No, left(Runs, true, true)));
        assert!(outlives_leader(well, No, left(Unknown, true, false)), "it may be loading");
        assert!(outlives_leader(well, No, left(Unknown, false, true)));
        assert!(!outlives_leader(well, No, left(Unknown, false, false)));
        assert!(!outlives_leader(well, No, left(Gone, true, true)), "helpers alone are no server");
        assert!(!outlives_leader(badly, No, left(Runs, true, true)));
        assert!(!outlives_leader(ProcessExit::Signal(9), No, left(Runs, true, true)));
        assert!(outlives_leader(ProcessExit::Signal(15), Terminate, left(Runs, true, false)));
        assert!(outlives_leader(ProcessExit::Signal(15), Terminate, left(Unknown, false, true)));
        assert!(!outlives_leader(ProcessExit::Signal(15), Terminate, left(Unknown, true, false)));
        assert!(!outlives_leader(well, Kill, left(Runs, true, true)));
    }

    #[test]
    fn only_zombies_that_another_process_forked_are_reaped_for_nobody() {
        let ours = RelatedProcess { process: StartedProcess { pid: 10, started: 1 }, ..process(10, 5, 1) };
        let ours = RelatedProcess { session: 5, ..ours };
        let zombie = |pid, group, session| RelatedProcess {
            parent: 10,
            session,
            is_zombie: true,
            ..process(pid, group, 2)
        };
        assert!(!is_adopted_orphan(&zombie(20, 5, 5), &ours), "started by the runtime");
        assert!(!is_adopted_orphan(&zombie(20, 20, 5), &ours), "a model's child, or a build");
        assert!(is_adopted_orphan(&zombie(21, 20, 5), &ours), "left in the group of a child");
        assert!(is_adopted_orphan(&zombie(21, 21, 21), &ours), "left the session");
        assert!(!is_adopted_orphan(&RelatedProcess { is_zombie: false, ..zombie(21, 21, 21) }, &ours));
        assert!(
            !is_adopted_orphan(&RelatedProcess { parent: 20, ..zombie(21, 21, 21) }, &ours),
            "waits for its parent"
        );
    }
}
