//! The beginning of a connection: admits it or not, with TLS or without.
//!
//! ```text
//!   accepted --TLS configured--> handshake --> connection
//!      +-------------------------------------> connection
//!
//!   too many connections --> one short answer with the reason, unless too many are being refused like that
//! ```

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_util::either::Either;
use warden_policies::client_network;

use crate::body::{ClientPeer, ClientShare};
use crate::client::{ClientIo, ClientStream, HandshakeResult, TlsState, connection, tls};
use crate::config::{GatewayConfig, saturate_u32};
use crate::observe::{GatewayGauges, GatewayLimit};
use crate::protocol::{ConnState, LEAST_BUFFER};
use crate::refusal::{HeadLimits, not_tls_answer};
use crate::shared::GatewayShared;

pub(crate) struct ConnectionAcceptor {
    shared: Arc<GatewayShared>,
    tls: Option<Arc<TlsState>>,
    admission: Arc<ConnectionAdmission>,
    refusals: Semaphore,
}

impl ConnectionAcceptor {
    pub(crate) fn new(shared: Arc<GatewayShared>, tls: Option<Arc<TlsState>>) -> Self {
        let admission = ConnectionAdmission::new(&shared.config, shared.gauges.clone());
        let refusals = Semaphore::new(shared.config.server.refusals);
        Self { shared, tls, admission, refusals }
    }

    pub(crate) fn accept(self: &Arc<Self>, stream: TcpStream, ip: IpAddr) -> AcceptedConnection {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        AcceptedConnection { acceptor: self.clone(), stream, ip, admitted: self.admission.admit(ip) }
    }
}

/// A connection, with its place in the count if the gateway admits it.
pub(crate) struct AcceptedConnection {
    acceptor: Arc<ConnectionAcceptor>,
    stream: TcpStream,
    ip: IpAddr,
    admitted: Option<AdmittedConnection>,
}

impl AcceptedConnection {
    /// Serves the connection until it ends. A connection beyond the limit gets a short answer and is closed.
    pub(crate) async fn serve_connection(self) {
        let Self { acceptor, stream, ip, admitted } = self;
        let peer = admitted.as_ref().map(|admitted| admitted.peer.clone());
        let peer = peer.unwrap_or_else(|| ClientPeer { ip, held: Arc::default() });
        serve(&acceptor, peer, stream, admitted.is_some()).await;
    }
}

async fn serve(acceptor: &ConnectionAcceptor, peer: ClientPeer, stream: TcpStream, admitted: bool) {
    let shared = &acceptor.shared;
    let config = &shared.config;
    let limited = &shared.gauges.limited;
    let refusal = if admitted { None } else { Some(acceptor.refusals.try_acquire()) };
    if matches!(refusal, Some(Err(_))) {
        return limited.note(GatewayLimit::Refusals);
    }
    // For a stalled client, the kernel would buffer as much as the connection carried when fastest.
    if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(saturate_u32(config.server.unsent_bytes))
    {
        tracing::debug!(%error, "cannot set TCP_NOTSENT_LOWAT");
    }
    let stream = match &acceptor.tls {
        None => Either::Left(stream),
        Some(tls) => {
            let entered = tokio::select! {
                entered = tls::shake_hands(tls.serve_config(), stream, config.server.tls_handshake_timeout) => entered,
                () = shared.hang_up.cancelled() => return,
            };
            match entered {
                HandshakeResult::Tls(stream) => stream,
                HandshakeResult::NotTls(stream) => {
                    limited.note(GatewayLimit::Handshake);
                    return client_io(shared, Either::Left(stream))
                        .0
                        .send_and_close(&not_tls_answer(), config.server.linger)
                        .await;
                }
                HandshakeResult::Slow => return limited.note(GatewayLimit::HandshakeTime),
                HandshakeResult::Failed(error) => {
                    tracing::debug!(%error, peer = %peer.ip, "a TLS handshake failed");
                    return limited.note(GatewayLimit::Handshake);
                }
            }
        }
    };
    if !admitted {
        return client_io(shared, stream).0.refuse(503, config.server.linger).await;
    }
    let (io, state) = client_io(shared, stream);
    connection::serve_http1(shared.clone(), state, peer, io).await;
}

fn client_io(shared: &GatewayShared, stream: ClientStream) -> (ClientIo, Arc<ConnState>) {
    let server = &shared.config.server;
    let limits = HeadLimits {
        bytes: server.header_bytes.in_memory(),
        count: server.header_count,
        retry_after: server.retry_after,
    };
    let state = ConnState::new(limits.bytes.max(LEAST_BUFFER));
    (ClientIo::new(stream, state.clone(), limits), state)
}

/// Limits the number of connections, in total and per client address; an IPv6 network counts as one address.
#[derive(Debug)]
pub(crate) struct ConnectionAdmission {
    gauges: Arc<GatewayGauges>,
    connections: usize,
    connections_per_peer: usize,
    peers: Mutex<HashMap<IpAddr, KnownPeer>>,
}

#[derive(Debug, Default)]
struct KnownPeer {
    open: usize,
    held: Arc<ClientShare>,
}

#[derive(Debug)]
pub(crate) struct AdmittedConnection {
    admission: Arc<ConnectionAdmission>,
    peer: ClientPeer,
}

impl ConnectionAdmission {
    pub(crate) fn new(config: &GatewayConfig, gauges: Arc<GatewayGauges>) -> Arc<Self> {
        let (connections, connections_per_peer) =
            (config.server.connections, config.server.connections_per_peer);
        Arc::new(Self { gauges, connections, connections_per_peer, peers: Mutex::default() })
    }

    /// Counts a connection; `None` beyond a limit.
    pub(crate) fn admit(self: &Arc<Self>, ip: IpAddr) -> Option<AdmittedConnection> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let open = &self.gauges.connections;
        let network = client_network(ip);
        let of_peer = peers.get(&network).map_or(0, |known| known.open);
        if open.load(Ordering::Relaxed) >= self.connections {
            self.gauges.limited.note(GatewayLimit::Connections);
            return None;
        }
        if of_peer >= self.connections_per_peer {
            self.gauges.limited.note(GatewayLimit::ConnectionsPerPeer);
            return None;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let known = peers.entry(network).or_default();
        known.open += 1;
        let held = known.held.clone();
        drop(peers);
        Some(AdmittedConnection { admission: self.clone(), peer: ClientPeer { ip, held } })
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        self.admission.gauges.connections.fetch_sub(1, Ordering::Relaxed);
        let mut peers = self.admission.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let network = client_network(self.peer.ip);
        if let Some(known) = peers.get_mut(&network) {
            known.open -= 1;
            if known.open == 0 {
                peers.remove(&network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::defaults;

    use super::*;

    #[test]
    fn a_network_of_version_6_is_one_client_and_a_mapped_address_is_that_of_version_4() {
        let mut config = GatewayConfig::new(&defaults().server, &defaults().upstream);
        config.server.connections_per_peer = 2;
        let gauges = Arc::new(GatewayGauges::default());
        let admission = ConnectionAdmission::new(&config, gauges.clone());
        let admit = |address: &str| admission.admit(address.parse().unwrap());
        let (one, two) = (admit("2001:db8:0:1::1").unwrap(), admit("2001:db8:0:1:ffff::2").unwrap());
        assert!(Arc::ptr_eq(&one.peer.held, &two.peer.held), "one share of what is held");
        assert_eq!(two.peer.ip.to_string(), "2001:db8:0:1:ffff::2", "shown as it is");
        assert!(admit("2001:db8:0:1::3").is_none(), "the same network");
        assert!(admit("2001:db8:0:2::1").is_some(), "another one");
        let _both = (admit("10.0.0.1").unwrap(), admit("::ffff:10.0.0.1").unwrap());
        assert!(admit("10.0.0.1").is_none());
        assert!(admit("10.0.0.2").is_some(), "addresses of version 4 count each");
        drop(one);
        assert!(admit("2001:db8:0:1::3").is_some());
        assert_eq!(gauges.limited.count(GatewayLimit::ConnectionsPerPeer), 2);
    }
}
