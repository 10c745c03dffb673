//! The address on which a process listens, and the flags that name it to llama-server.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warden_policies::ServerFacts;

use crate::spec::SocketMode;

/// Address on which a backend listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenAddress {
    /// Unix socket.
    Unix(PathBuf),
    /// Loopback port, open to all users of the machine.
    Tcp(SocketAddr),
}

/// Chooses the address for a new process. If another program takes the free port before the process does,
/// the start fails and the next start gets another port.
pub(crate) fn choose_endpoint(
    socket: SocketMode,
    facts: ServerFacts,
    path: &Path,
) -> io::Result<ListenAddress> {
    let unix = match socket {
        SocketMode::Auto => facts.unix_sockets != Some(false),
        SocketMode::Unix => true,
        SocketMode::Tcp => false,
    };
    if unix {
        return Ok(ListenAddress::Unix(path.to_owned()));
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.local_addr().map(ListenAddress::Tcp)
}

pub(crate) fn listen_flags(endpoint: &ListenAddress) -> Vec<String> {
    match endpoint {
        ListenAddress::Unix(path) => vec!["--host".to_owned(), path.to_string_lossy().into_owned()],
        ListenAddress::Tcp(address) => {
            let (host, port) = (address.ip().to_string(), address.port().to_string());
            vec!["--host".to_owned(), host, "--port".to_owned(), port]
        }
    }
}
