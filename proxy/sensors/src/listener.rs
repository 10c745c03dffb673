//! Identifies the process that listens on a TCP port of this machine. An answer from the port does not prove
//! that the backend listens there: another program may have taken the port first. Never connects to anything.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;

use procfs::net::{TcpNetEntries, TcpNetEntry, TcpState, UnixState};
use procfs::process::{FDTarget, Process};
use procfs::{FromBufReadSI as _, ProcError, ProcResult};

use crate::host::group_members;

/// Kind of process that listens on an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortListener {
    /// Only processes of the given group listen.
    Group,
    /// Another process listens, alone or in addition to the group.
    Other,
    /// No process listens.
    Nobody,
}

/// Returns who listens on `address`: only the process group that `leader` leads, another process too, or
/// no process. Returns `None` if that is unknown, for example because `/proc` hides the files of a process.
/// `outside` returns processes that count as members of the group without being in it; it is called only if
/// the group does not own all sockets.
///
/// Source: `Documentation/networking/proc_net_tcp.rst` of the kernel for the tables, `proc(5)` for
/// `/proc/PID/fd`.
pub fn port_listener(
    leader: u32,
    outside: impl FnOnce() -> Vec<u32>,
    address: SocketAddr,
) -> Option<PortListener> {
    let all = listening_entries().ok()?;
    let sockets = listening_sockets(&all, address);
    if sockets.is_empty() {
        return Some(PortListener::Nobody);
    }
    let mut left = sockets;
    let mut hidden = false;
    for pid in group_members(Path::new("/proc"), leader) {
        let files = match Process::new(pid).and_then(|process| process.fd()) {
            Ok(files) => files,
            Err(error) => {
                hidden |= is_hidden(pid, &error);
                continue;
            }
        };
        for file in files {
            match file.map(|file| file.target) {
                Ok(FDTarget::Socket(inode)) => drop(left.remove(&inode)),
                Ok(_) => {}
                Err(error) => hidden |= is_hidden(pid, &error),
            }
        }
        if left.is_empty() {
            return Some(PortListener::Group);
        }
    }
    if hidden {
        return None;
    }
    // A program that shares the port by SO_REUSEPORT gets some connections, so check each socket.
    for pid in outside() {
        for inode in sockets_of(pid) {
            left.remove(&inode);
        }
    }
    Some(if left.is_empty() { PortListener::Group } else { PortListener::Other })
}

/// Returns the process that listens on `address`; `None` also if its files are hidden from us.
pub fn port_owner(pids: impl IntoIterator<Item = u32>, address: SocketAddr) -> Option<u32> {
    let sockets = listening_sockets(&listening_entries().ok()?, address);
    pids.into_iter().find(|pid| sockets_of(*pid).any(|inode| sockets.contains(&inode)))
}

/// Returns whether a process has a listening Unix socket whose path ends in this name. The pid that the
/// kernel stores with the socket is not used, because another process may have that pid by now.
///
/// Source: `proc(5)` for `/proc/PID/net/unix`, which shows the process's own network namespace.
pub fn has_unix_listener(pid: u32, name: &OsStr) -> bool {
    let Ok(process) = i32::try_from(pid).map_err(drop).and_then(|pid| Process::new(pid).map_err(drop)) else {
        return false;
    };
    let all = process.unix().unwrap_or_default().into_iter();
    let named = all.filter(|one| {
        let is_named = one.path.as_deref().and_then(Path::file_name) == Some(name);
        // Accepted connections have the same path.
        is_named && one.state == UnixState::UNCONNECTED
    });
    let named: HashSet<u64> = named.map(|one| one.inode).collect();
    !named.is_empty() && sockets_of(pid).any(|inode| named.contains(&inode))
}

/// Lists the sockets that a process has open; empty if its files are hidden from us.
fn sockets_of(pid: u32) -> impl Iterator<Item = u64> {
    let files = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).and_then(|one| one.fd()).ok());
    files.into_iter().flatten().filter_map(|file| match file.map(|file| file.target) {
        Ok(FDTarget::Socket(inode)) => Some(inode),
        _ => None,
    })
}

/// A process that has just ended, or has closed the file, does not count as hidden.
fn is_hidden(pid: i32, error: &ProcError) -> bool {
    let lives = || Process::new(pid).and_then(|process| process.stat()).is_ok_and(|stat| stat.state != 'Z');
    matches!(error, ProcError::PermissionDenied(_)) && lives()
}

fn listening_entries() -> ProcResult<Vec<TcpNetEntry>> {
    let mut all = read_table(Path::new("/proc/net/tcp"))?;
    // A kernel without IPv6 lacks this table.
    all.extend(read_table(Path::new("/proc/net/tcp6")).unwrap_or_default());
    Ok(all)
}

/// Reads only the listening sockets, which come first; thousands of connections may follow.
fn read_table(path: &Path) -> ProcResult<Vec<TcpNetEntry>> {
    let mut listening = String::new();
    for (number, line) in BufReader::new(File::open(path)?).lines().enumerate() {
        let line = line?;
        // The first line has the column names.
        if number > 0 && line.split_whitespace().nth(3) != Some(TCP_LISTEN_STATE) {
            break;
        }
        listening.push_str(&line);
        listening.push('\n');
    }
    Ok(TcpNetEntries::from_buf_read(listening.as_bytes(), procfs::current_system_info())?.0)
}

/// `TCP_LISTEN` of the kernel's `tcp_states.h`, as written in the table.
const TCP_LISTEN_STATE: &str = "0A";

/// Returns the sockets bound to `address`, or else those bound to all addresses.
fn listening_sockets(all: &[TcpNetEntry], address: SocketAddr) -> HashSet<u64> {
    let ip = address.ip().to_canonical();
    let of = |wanted: &dyn Fn(std::net::IpAddr) -> bool| -> HashSet<u64> {
        let listeners = all.iter().filter(|entry| {
            let local = entry.local_address;
            entry.state == TcpState::Listen
                && local.port() == address.port()
                && wanted(local.ip().to_canonical())
        });
        listeners.map(|entry| entry.inode).collect()
    };
    let exact = of(&|local| local == ip);
    if exact.is_empty() { of(&|local| local.is_unspecified()) } else { exact }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command, Stdio};

    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    fn sleeper(socket: Option<&TcpListener>) -> Child {
        let input = socket.map_or_else(Stdio::null, |socket| {
            Stdio::from(std::os::fd::OwnedFd::from(socket.try_clone().unwrap()))
        });
        Command::new("/bin/sleep").arg("60").process_group(0).stdin(input).spawn().unwrap()
    }

    fn end(mut child: Child) {
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn the_owner_of_a_port_is_told_from_everybody_else() {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let (owner, stranger) = (sleeper(Some(&socket)), sleeper(None));
        // This process and the owner both have the socket, so the result depends on the given group only.
        assert_eq!(port_listener(owner.id(), Vec::new, address), Some(PortListener::Group));
        assert_eq!(port_listener(stranger.id(), Vec::new, address), Some(PortListener::Other));
        drop(socket);
        assert_eq!(port_listener(owner.id(), Vec::new, address), Some(PortListener::Group));
        end(owner);
        // A child forked by another test also has the socket until its exec.
        let is_free = || {
            std::thread::yield_now();
            port_listener(stranger.id(), Vec::new, address) == Some(PortListener::Nobody)
        };
        assert!((0..100_000).any(|_| is_free()), "{:?}", port_listener(stranger.id(), Vec::new, address));
        end(stranger);
    }

    #[test]
    fn who_listens_on_all_addresses_listens_on_each() {
        let socket = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let address = (Ipv4Addr::LOCALHOST, socket.local_addr().unwrap().port()).into();
        let (owner, stranger) = (sleeper(Some(&socket)), sleeper(None));
        assert_eq!(port_listener(owner.id(), Vec::new, address), Some(PortListener::Group));
        assert_eq!(port_listener(stranger.id(), Vec::new, address), Some(PortListener::Other));
        end(owner);
        end(stranger);
    }

    #[test]
    fn a_process_outside_of_the_group_counts_with_it_and_who_shares_its_port_does_not() {
        let shared = |port: u16| {
            let (family, kind, flags) = (AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC);
            let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
            rustix::net::sockopt::set_socket_reuseport(&socket, true).unwrap();
            rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
            rustix::net::listen(&socket, 8).unwrap();
            TcpListener::from(socket)
        };
        let socket = shared(0);
        let address = socket.local_addr().unwrap();
        let (leader, outside) = (sleeper(None), sleeper(Some(&socket)));
        let outside_id = outside.id();
        assert_eq!(port_listener(leader.id(), Vec::new, address), Some(PortListener::Other));
        assert_eq!(port_listener(leader.id(), || vec![outside_id], address), Some(PortListener::Group));
        let _strangers = shared(address.port());
        assert_eq!(port_listener(leader.id(), || vec![outside_id], address), Some(PortListener::Other));
        assert_eq!(port_owner([leader.id(), outside_id], address), Some(outside_id));
        end(leader);
        end(outside);
    }

    #[test]
    fn only_who_has_a_unix_socket_of_that_name_listens_there() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m-1.sock");
        let socket = UnixListener::bind(&path).unwrap();
        let stranger = sleeper(None);
        let (own, name) = (std::process::id(), OsStr::new("m-1.sock"));
        // A child forked by another test also has the socket until its exec.
        let is_free = || {
            std::thread::yield_now();
            !has_unix_listener(stranger.id(), name)
        };
        assert!(has_unix_listener(own, name) && !has_unix_listener(own, OsStr::new("m-2.sock")));
        assert!((0..100_000).any(|_| is_free()));
        let _client = UnixStream::connect(&path).unwrap();
        let (_accepted, _) = socket.accept().unwrap();
        drop(socket);
        let is_closed = || {
            std::thread::yield_now();
            !has_unix_listener(own, name)
        };
        assert!((0..100_000).any(|_| is_closed()), "a connection is no listener");
        end(stranger);
    }

    #[test]
    fn a_connection_is_no_listener() {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let client = std::net::TcpStream::connect(address).unwrap();
        let stranger = sleeper(None);
        let port = client.local_addr().unwrap();
        assert_eq!(port_listener(stranger.id(), Vec::new, port), Some(PortListener::Nobody));
        end(stranger);
    }
}
