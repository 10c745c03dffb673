//! The socket on which a service manager is told how we are: a datagram for each message, `KEY=VALUE` lines in it
//! (`sd_notify(3)`, section "Well-known assignments").

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::time::Duration;

/// A manager that is busy has a queue; one that does not read at all must not hold us up.
const TRIES: u32 = 50;
const BETWEEN: Duration = Duration::from_millis(20);

/// Where messages go.
#[derive(Debug)]
pub(super) struct Socket {
    from: UnixDatagram,
    to: SocketAddr,
}

impl Socket {
    /// For the value of `NOTIFY_SOCKET`: a path, or a name without a file that begins with `@`.
    ///
    /// # Errors
    /// It is neither, or we can have no socket.
    pub(super) fn open(name: &OsStr) -> io::Result<Self> {
        let to = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
            // Managers of virtual machines name another kind of address, which nobody who starts us uses.
            _ => return Err(io::Error::other("this is neither an absolute path nor a name after `@`")),
        };
        let from = UnixDatagram::unbound()?;
        from.set_nonblocking(true)?;
        Ok(Self { from, to })
    }

    /// Sends one message, and waits a second at most for a manager that does not read.
    ///
    /// # Errors
    /// It could not be sent.
    pub(super) async fn send(&self, message: &str) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match self.from.send_to_addr(message.as_bytes(), &self.to) {
                Err(full) if full.kind() == io::ErrorKind::WouldBlock && tries < TRIES => {
                    tries += 1;
                    tokio::time::sleep(BETWEEN).await;
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
            Socket::open(&value).unwrap().send("READY=1\nSTATUS=here").await.unwrap();
            let mut told = [0; 64];
            let bytes = manager.recv(&mut told).unwrap();
            assert_eq!(&told[..bytes], b"READY=1\nSTATUS=here", "{}", value.display());
        }
        for value in ["", "notify", "vsock:2:1", "@"] {
            assert!(value == "@" || Socket::open(OsStr::new(value)).is_err(), "{value}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Socket::open(path.as_os_str()).unwrap().send("x").await.is_err());
    }

    #[tokio::test]
    async fn a_manager_that_does_not_read_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let socket = Socket::open(path.as_os_str()).unwrap();
        // The queue of a socket has an end; nobody reads.
        for _ in 0..100_000 {
            if socket.send("STATUS=busy").await.is_err() {
                return;
            }
        }
        panic!("a queue without an end");
    }
}
