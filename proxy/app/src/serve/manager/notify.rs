//! The socket to a service manager: one datagram for each message, which has `KEY=VALUE` lines
//! (`sd_notify(3)`, section "Well-known assignments").

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::Duration;

/// A busy manager has a full queue; a manager that does not read must not delay the program.
const SEND_ATTEMPTS: u32 = 50;
const SEND_RETRY_PAUSE: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct NotifySocket {
    from: UnixDatagram,
    to: SocketAddr,
}

impl NotifySocket {
    /// Opens the socket for a value of `NOTIFY_SOCKET`: a path, or an abstract name that begins with `@`.
    pub(super) fn open(name: &OsStr) -> io::Result<Self> {
        let to = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
            // Other addresses are used only for virtual machines, and no such manager starts this program.
            _ => return Err(io::Error::other("this is neither an absolute path nor a name after `@`")),
        };
        let from = UnixDatagram::unbound()?;
        from.set_nonblocking(true)?;
        Ok(Self { from, to })
    }

    /// Sends one message, and waits at most a second for a manager that does not read.
    pub(super) async fn send(&self, message: &str) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match self.from.send_to_addr(message.as_bytes(), &self.to) {
                Err(full) if full.kind() == io::ErrorKind::WouldBlock && tries < SEND_ATTEMPTS => {
                    tries += 1;
                    tokio::time::sleep(SEND_RETRY_PAUSE).await;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => return sent.map(drop),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_path_and_a_name_without_a_file_are_told_and_anything_else_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("llama-warden-test-{}", std::process::id());
        let bound = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).unwrap()),
            (
                format!("@{name}").into(),
                UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
            ),
        ];
        for (value, manager) in bound {
            NotifySocket::open(&value).unwrap().send("READY=1\nSTATUS=here").await.unwrap();
            let mut told = [0; 64];
            let bytes = manager.recv(&mut told).unwrap();
            assert_eq!(&told[..bytes], b"READY=1\nSTATUS=here", "{}", value.display());
        }
        for value in ["", "notify", "vsock:2:1", "@"] {
            assert!(value == "@" || NotifySocket::open(OsStr::new(value)).is_err(), "{value}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(NotifySocket::open(path.as_os_str()).unwrap().send("x").await.is_err());
    }

    #[tokio::test]
    async fn a_manager_that_does_not_read_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let socket = NotifySocket::open(path.as_os_str()).unwrap();
        // The queue of a socket is limited, and no process reads.
        for _ in 0..100_000 {
            if socket.send("STATUS=busy").await.is_err() {
                return;
            }
        }
        panic!("a queue without an end");
    }
}
