//! Errors that keep the gateway from serving: addresses, certificates, threads.

use std::io;
use std::net::SocketAddr;

use crate::client::TlsError;

/// Error that keeps the gateway from listening.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum GatewayError {
    #[error(
        "cannot listen on {host}:{port}: the host name does not resolve ({source}); use an address of \
         this machine, like 127.0.0.1, or 0.0.0.0 for all of them"
    )]
    Resolve { host: String, port: u16, source: io::Error },
    #[error(
        "cannot listen on {address}: another program already does; stop it (`ss -ltnp sport = :{}` shows \
         it) or choose another port with --port", address.port()
    )]
    InUse { address: SocketAddr },
    #[error(
        "cannot listen on {address}: it is not an address of this machine; choose another with --host \
         (`ip addr` lists them)"
    )]
    NotOurs { address: SocketAddr },
    #[error(
        "cannot listen on {address}: not permitted; ports below 1024 need CAP_NET_BIND_SERVICE, choose a \
         higher one with --port"
    )]
    NotPermitted { address: SocketAddr },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("cannot take over the predecessor's listening sockets: {0}")]
    Inherit(io::Error),
    #[error("cannot listen on {address}: {source}; choose another address with --host and --port")]
    Listen { address: SocketAddr, source: io::Error },
    /// A socket passed by the starting program (socket activation) is unusable.
    #[error(
        "cannot serve on the socket that was handed over: {0}; start without it (`LISTEN_FDS`), or see to \
         it that it is a TCP socket that listens"
    )]
    Given(io::Error),
    #[error("cannot start {threads} threads to serve with: {source}; set fewer with `server.threads`")]
    Threads { threads: usize, source: io::Error },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_the_gateway_from_serving_is_said_with_the_way_out() {
        let source = || io::Error::other("the kernel said no");
        let address: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        let (cert, key) = (std::path::PathBuf::from("cert.pem"), std::path::PathBuf::from("key.pem"));
        let expired = |since| TlsError::Expired { cert: cert.clone(), since };
        let tls = [
            TlsError::OneOnly,
            TlsError::Read { what: "certificate", path: cert.clone(), source: source() },
            TlsError::Nothing { what: "private key", path: key.clone(), begin: "PRIVATE KEY" },
            TlsError::Pem { path: cert.clone(), reason: "an illegal section start".into() },
            TlsError::Mismatch { key: key.clone(), cert: cert.clone() },
            TlsError::Unusable { key, cert: cert.clone(), reason: "an unknown kind".into() },
            expired(1800),
            expired(7200),
            expired(400_000),
            TlsError::NotYet { cert: cert.clone(), seconds: 90 },
        ];
        let others = [
            GatewayError::Resolve { host: "nowhere.example".into(), port: 8080, source: source() },
            GatewayError::InUse { address },
            GatewayError::NotOurs { address },
            GatewayError::NotPermitted { address },
            GatewayError::Inherit(source()),
            GatewayError::Listen { address, source: source() },
            GatewayError::Given(source()),
            GatewayError::Threads { threads: 64, source: source() },
        ];
        let told = others.into_iter().chain(tls.map(GatewayError::from));
        insta::assert_snapshot!(told.map(|error| error.to_string() + "\n").collect::<String>());
    }
}
