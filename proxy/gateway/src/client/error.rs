//! Why the gateway cannot serve: an address, a certificate, the threads.

use std::io;
use std::net::SocketAddr;

use crate::client::tls_files::TlsError;

/// Why the gateway cannot listen.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum GatewayError {
    /// The host name means nothing.
    #[error(
        "cannot listen on {host}:{port}: the host name does not resolve ({source}); use an address of this machine, like 127.0.0.1, or 0.0.0.0 for all of them"
    )]
    Resolve {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error(
        "cannot listen on {address}: another program already does; stop it (`ss -ltnp sport = :{}` shows it) or choose another port with --port", address.port()
    )]
    InUse {
        /// The address.
        address: SocketAddr,
    },
    /// The address is not this machine's.
    #[error(
        "cannot listen on {address}: it is not an address of this machine; choose another with --host (`ip addr` lists them)"
    )]
    NotOurs {
        /// The address.
        address: SocketAddr,
    },
    /// The port needs rights.
    #[error(
        "cannot listen on {address}: not permitted; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one with --port"
    )]
    NotPermitted {
        /// The address.
        address: SocketAddr,
    },
    /// Certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Anything else.
    #[error("cannot listen on {address}: {source}; choose another address with --host and --port")]
    Listen { address: SocketAddr, source: io::Error },
    /// No threads to serve with.
    #[error("cannot start {threads} threads to serve with: {source}; set fewer with `server.threads`")]
    Threads { threads: usize, source: io::Error },
}
