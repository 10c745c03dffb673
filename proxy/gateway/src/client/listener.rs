//! The listening sockets, one per configured host. Other modules count and serve the connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::task::Poll;

use tokio::net::{TcpListener, TcpStream};
use warden_supervisor::resolve_host;

use crate::client::GatewayError;

/// All listening sockets; at least one.
#[derive(Debug)]
pub(crate) struct GatewayListener {
    listeners: Vec<TcpListener>,
    /// Addresses in the order of the hosts, with the ports in use.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Index of the socket to try first, so that a busy socket does not starve the others.
    next: usize,
}

/// Largest backlog of a socket opened by tokio or the standard library.
const MAX_BACKLOG: usize = 1024;

impl GatewayListener {
    /// Opens a socket for each of `hosts`: names or addresses, separated by commas. With port 0, the kernel
    /// chooses the port of the first host, and the other hosts use the same port.
    ///
    /// # Errors
    /// A socket cannot be opened; then all sockets are closed again.
    pub(crate) async fn open(hosts: &str, mut port: u16) -> Result<Self, GatewayError> {
        let mut all = Self { listeners: Vec::new(), addresses: Vec::new(), next: 0 };
        for host in hosts.split(',') {
            let (listener, address) = open_one(host, port).await?;
            port = address.port();
            all.listeners.push(listener);
            all.addresses.push(address);
        }
        Ok(all)
    }

    /// Duplicates the sockets for another instance of llama-warden.
    pub(crate) fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        self.listeners.iter().map(|listener| listener.as_fd().try_clone_to_owned()).collect()
    }

    /// Takes listening sockets from another instance or the starting program; fails without any.
    pub(crate) fn adopt(sockets: Vec<std::net::TcpListener>) -> io::Result<Self> {
        let mut all = Self { listeners: Vec::new(), addresses: Vec::new(), next: 0 };
        for socket in sockets {
            socket.set_nonblocking(true)?;
            let listener = TcpListener::from_std(socket)?;
            all.addresses.push(listener.local_addr()?);
            all.listeners.push(listener);
        }
        if all.listeners.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(all) }
    }

    /// Accepts the next connection on any socket. Cancel safe.
    pub(crate) async fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        std::future::poll_fn(|context| {
            let all = self.listeners.len();
            for number in (0..all).map(|turn| (self.next + turn) % all) {
                if let Poll::Ready(accepted) = self.listeners[number].poll_accept(context) {
                    self.next = (number + 1) % all;
                    return Poll::Ready(accepted);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Closes the sockets. Returns the connections not yet accepted, which the kernel would reset.
    pub(crate) fn close_and_drain(&mut self) -> Vec<(TcpStream, SocketAddr)> {
        let mut all = Vec::new();
        for listener in std::mem::take(&mut self.listeners).into_iter().filter_map(|one| one.into_std().ok())
        {
            let accepted = std::iter::from_fn(|| listener.accept().ok()).take(MAX_BACKLOG);
            all.extend(accepted.filter_map(|(stream, peer)| {
                stream.set_nonblocking(true).ok()?;
                Some((TcpStream::from_std(stream).ok()?, peer))
            }));
        }
        all
    }
}

async fn open_one(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), GatewayError> {
    let host = host.trim().trim_start_matches('[').trim_end_matches(']');
    let unresolved = |source| GatewayError::Resolve { host: host.to_owned(), port, source };
    let mut addresses: Vec<SocketAddr> = resolve_host(host, port).await.map_err(unresolved)?;
    // `localhost` means ::1, too, but clients with a literal address mostly use 127.0.0.1.
    addresses.sort_by_key(SocketAddr::is_ipv6);
    let mut failure = unresolved(io::Error::from(io::ErrorKind::NotFound));
    for address in addresses {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                return Ok((listener, address));
            }
            Err(source) => failure = bind_error(address, source),
        }
    }
    Err(failure)
}

fn bind_error(address: SocketAddr, source: io::Error) -> GatewayError {
    match source.kind() {
        io::ErrorKind::AddrInUse => GatewayError::InUse { address },
        io::ErrorKind::AddrNotAvailable => GatewayError::NotOurs { address },
        io::ErrorKind::PermissionDenied => GatewayError::NotPermitted { address },
        _ => GatewayError::Listen { address, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_hosts_share_a_port_and_none_waits_behind_another() {
        let mut listener = GatewayListener::open("127.0.0.1, 127.0.0.2", 0).await.unwrap();
        let [first, second] = *listener.addresses else { panic!("{:?}", listener.addresses) };
        assert_eq!(
            (first.ip().to_string().as_str(), second.ip().to_string().as_str()),
            ("127.0.0.1", "127.0.0.2")
        );
        assert_eq!(first.port(), second.port());
        // Three connections wait at the first socket; the one at the second must be among the first two.
        let mut waiting = Vec::new();
        for address in [first, first, first, second] {
            waiting.push(TcpStream::connect(address).await.unwrap());
        }
        let mut taken = Vec::new();
        for _ in 0..4 {
            taken.push(listener.accept().await.unwrap().0.local_addr().unwrap());
        }
        assert!(taken[..2].contains(&second), "{taken:?}");
        assert_eq!(taken.iter().filter(|address| **address == first).count(), 3);
    }

    #[tokio::test]
    async fn sockets_that_were_opened_by_others_are_taken_with_who_waits_at_them() {
        let open = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = vec![open(), open()];
        let addresses: Vec<SocketAddr> = sockets.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let waiting = std::net::TcpStream::connect(addresses[1]).unwrap();
        let mut listener = GatewayListener::adopt(sockets).unwrap();
        assert_eq!(listener.addresses, addresses);
        assert_eq!(listener.accept().await.unwrap().1, waiting.local_addr().unwrap());
        assert_eq!(GatewayListener::adopt(Vec::new()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[tokio::test]
    async fn a_host_that_cannot_be_had_is_named_and_nothing_listens() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = GatewayListener::open("127.0.0.2,127.0.0.1", port).await.unwrap_err();
        assert!(
            matches!(error, GatewayError::InUse { address } if address == taken.local_addr().unwrap()),
            "{error}"
        );
        // Another test may hold this port by chance, and releases it soon.
        let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
        while let Err(error) = TcpListener::bind(("127.0.0.2", port)).await {
            assert!(tokio::time::Instant::now() < deadline, "{error}");
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        let error = GatewayListener::open("127.0.0.1,", 0).await.unwrap_err();
        assert!(matches!(error, GatewayError::Resolve { .. }), "{error}");
    }
}
