//! Finds the process that answers at a child's endpoint: by the credentials of its Unix socket, or by the
//! owner of the port.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;
use warden_sensors::RelatedProcess;

use crate::process::child::ChildProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::kinship::RELATIVES_LIMIT;
use crate::process::server_place::{AnsweringProcess, ChildFacts, ChildServer, ServerPlace, server_place};
use crate::process::watched_process::WatchedProcess;
use crate::worker_threads::{WorkKind, run_job};

/// Time limit for connecting to a socket whose server has just answered.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// Finds the process that answers, and records it. Must be called in a tokio runtime. Returns false if the
/// search was impossible at present.
///
/// Source: `SO_PEERCRED` in `unix(7)`. The credentials are those of the process that called `listen`.
pub(crate) async fn find_server(child: &ChildProcess, endpoint: &ListenAddress) -> bool {
    let peer = match endpoint {
        ListenAddress::Unix(path) => {
            let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, UnixStream::connect(path)).await else {
                return false;
            };
            let Ok(credentials) = stream.peer_cred() else { return false };
            // A process that has no PID in our namespace is reported as 0.
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
                // Follow a link: a wrapper may have put one in place of the socket.
                let listening = path.canonicalize().unwrap_or_else(|_| path.clone());
                listening.file_name().is_none_or(|name| warden_sensors::has_unix_listener(pid, name))
            }
            ListenAddress::Tcp(_) => true,
        };
        // Read this after the check of the socket, so that it describes the process that has the socket.
        let seen = RelatedProcess::with_pid(pid).zip(warden_sensors::user_of(pid));
        Some(server_place(AnsweringProcess { pid, entry: seen, has_socket }, facts))
    };
    // Reads of /proc are small, but may block; use a worker thread.
    let place = match timeout(RELATIVES_LIMIT, run_job(WorkKind::Kernel, look)).await {
        Ok(Ok(Some(place))) => place,
        Ok(Ok(None)) => return true,
        // Some process may hang in the kernel. Requests are served anyway, and the search is repeated later.
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
