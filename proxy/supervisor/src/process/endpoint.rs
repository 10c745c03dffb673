//! Where a process listens, and how it is told so.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warden_policies::ServerFacts;

use crate::spec::Socket;

/// Where a generation listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// A Unix socket: other users of the machine cannot reach the backend.
    Unix(PathBuf),
    /// A port of the loopback interface: any user of the machine can connect to it.
    Tcp(SocketAddr),
}

/// Where a new process is to listen, by what is wanted and what its binary can. A port is free now; if somebody else takes it before the process does, that is a
/// failed start like any other, and the next one gets another port.
pub(crate) fn endpoint(socket: Socket, facts: ServerFacts, path: &Path) -> io::Result<Endpoint> {
    let unix = match socket {
        Socket::Auto => facts.unix_sockets != Some(false),
        Socket::Unix => true,
        Socket::Tcp => false,
    };
    if unix {
        return Ok(Endpoint::Unix(path.to_owned()));
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.local_addr().map(Endpoint::Tcp)
}

/// llama-server's flags for it.
pub(crate) fn flags(endpoint: &Endpoint) -> Vec<String> {
    match endpoint {
        Endpoint::Unix(path) => vec!["--host".to_owned(), path.to_string_lossy().into_owned()],
        Endpoint::Tcp(address) => {
            let (host, port) = (address.ip().to_string(), address.port().to_string());
            vec!["--host".to_owned(), host, "--port".to_owned(), port]
        }
    }
}
