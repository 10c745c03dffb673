//! The address on which a process listens, and its place in the command line.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warden_policies::ServerFacts;

use crate::spec::{PORT_PLACEHOLDER, SOCKET_PLACEHOLDER, ServerCommand, SocketMode};

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

/// Writes the address into a command: as flags of llama-server, or in place of the placeholders of another
/// program.
pub(crate) fn set_endpoint(command: &mut ServerCommand, endpoint: &ListenAddress) {
    if command.kind.is_llama_server() {
        command.args.extend(listen_flags(endpoint));
        return;
    }
    let (placeholder, value) = match endpoint {
        ListenAddress::Unix(path) => (SOCKET_PLACEHOLDER, path.to_string_lossy().into_owned()),
        ListenAddress::Tcp(address) => (PORT_PLACEHOLDER, address.port().to_string()),
    };
    let words = command.args.iter_mut().chain(command.env.iter_mut().map(|(_, value)| value));
    for word in words.filter(|word| word.contains(placeholder)) {
        *word = word.replace(placeholder, &value);
    }
}

fn listen_flags(endpoint: &ListenAddress) -> Vec<String> {
    match endpoint {
        ListenAddress::Unix(path) => vec!["--host".to_owned(), path.to_string_lossy().into_owned()],
        ListenAddress::Tcp(address) => {
            let (host, port) = (address.ip().to_string(), address.port().to_string());
            vec!["--host".to_owned(), host, "--port".to_owned(), port]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ReadyCheck, ServerKind};

    fn told(args: &[&str], env: &[(&str, &str)], kind: ServerKind, endpoint: &ListenAddress) -> String {
        let mut command = ServerCommand {
            args: args.iter().map(|&word| word.to_owned()).collect(),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            kind,
            ..ServerCommand::from_binary("server".into())
        };
        set_endpoint(&mut command, endpoint);
        let env = command.env.into_iter().map(|(name, value)| name + "=" + &value);
        command.args.into_iter().chain(env).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_address_is_told_by_flags_or_in_the_words_of_the_command() {
        let other = || ServerKind::OtherProgram(ReadyCheck { path: "/".to_owned(), needs_success: false });
        let port = ListenAddress::Tcp(([127, 0, 0, 1], 9000).into());
        let socket = ListenAddress::Unix("/run/m.sock".into());
        assert_eq!(told(&["-c", "1"], &[], ServerKind::LlamaServer, &socket), "-c 1 --host /run/m.sock");
        let words = ["--bind=127.0.0.1:${PORT}", "${PORT}", "$PORT"];
        assert_eq!(
            told(&words, &[("HTTP_PORT", "${PORT}")], other(), &port),
            "--bind=127.0.0.1:9000 9000 $PORT HTTP_PORT=9000"
        );
        assert_eq!(told(&["--uds", "${SOCKET}"], &[], other(), &socket), "--uds /run/m.sock");
    }

    #[test]
    fn a_named_check_needs_success_and_any_answer_of_a_working_server_meets_the_other() {
        let other = |needs_success| {
            ServerKind::OtherProgram(ReadyCheck { path: "/health".to_owned(), needs_success })
        };
        let ready = |kind: &ServerKind| [200, 204, 302, 404, 500, 503].map(|status| kind.is_ready(status));
        assert_eq!(ready(&ServerKind::LlamaServer), [true, false, false, false, false, false]);
        assert_eq!(ready(&other(true)), [true, true, false, false, false, false]);
        assert_eq!(ready(&other(false)), [true, true, true, true, false, false]);
    }
}
