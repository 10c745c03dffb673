//! The beginning of a connection: admits it or not, and chooses TLS or none, HTTP/1.1 or HTTP/2.
//!
//! ```text
//!   accepted --TLS configured--> handshake --ALPN h2--------------> h2
//!      |                            +--------ALPN http/1.1, none--> connection
//!      |--HTTP/2 by prior knowledge allowed here--> preface? -----> h2
//!      |                                               +-no-------> connection
//!      +-------------------------------------------------------> connection
//!
//!   too many connections --> one short answer with the reason, unless too many are being refused like that
//! ```

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::either::Either;
use warden_policies::client_network;

use crate::body::{ClientPeer, ClientShare};
use crate::client::{ClientIo, ClientStream, HandshakeResult, TlsState, connection, h2, tls};
use crate::config::{GatewayConfig, saturate_u32};
use crate::observe::{GatewayGauges, GatewayLimit};
use crate::protocol::ConnState;
use crate::refusal::{HeadLimits, not_tls_answer};
use crate::shared::GatewayShared;

/// First bytes of every HTTP/2 connection (RFC 9113 section 3.4).
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

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
            let tls = if admitted { tls.serve_config() } else { tls.refuse_config() };
            let entered = tokio::select! {
                entered = tls::shake_hands(tls, stream, config.server.tls_handshake_timeout) => entered,
                () = shared.hang_up.cancelled() => return,
            };
            match entered {
                HandshakeResult::Tls(stream) => stream,
                HandshakeResult::NotTls(stream) => {
                    limited.note(GatewayLimit::Handshake);
                    return http1_io(shared, Either::Left(stream))
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
        return http1_io(shared, stream).refuse(503, config.server.linger).await;
    }
    if tls::chose_h2(&stream) {
        return h2::serve_http2(shared.clone(), peer, h2_io(shared, stream, Bytes::new())).await;
    }
    let sniffs = config.server.h2c && peer.ip.is_loopback() && !tls::announces_close(&stream);
    let (stream, before) = match stream {
        Either::Left(mut stream) if sniffs => {
            let sniffed = tokio::select! {
                sniffed = sniff_preface(&mut stream, config) => sniffed,
                () = shared.hang_up.cancelled() => return,
            };
            match sniffed {
                SniffedProtocol::H2(before) => {
                    return h2::serve_http2(
                        shared.clone(),
                        peer,
                        h2_io(shared, Either::Left(stream), before),
                    )
                    .await;
                }
                SniffedProtocol::Other(before) => (Either::Left(stream), before),
                SniffedProtocol::Slow => return limited.note(GatewayLimit::HeadTime),
                SniffedProtocol::Idle => return limited.note(GatewayLimit::KeepAlive),
                SniffedProtocol::Gone => return,
            }
        }
        stream => (stream, Bytes::new()),
    };
    let state = ConnState::new();
    let io = ClientIo::http1(stream, before, state.clone(), head_limits(config));
    connection::serve_http1(shared.clone(), state, peer, io).await;
}

fn head_limits(config: &GatewayConfig) -> HeadLimits {
    let server = &config.server;
    HeadLimits {
        bytes: server.header_bytes.in_memory(),
        count: server.header_count,
        retry_after: server.retry_after,
    }
}

fn http1_io(shared: &GatewayShared, stream: ClientStream) -> ClientIo {
    ClientIo::http1(stream, Bytes::new(), ConnState::new(), head_limits(&shared.config))
}

fn h2_io(shared: &GatewayShared, stream: ClientStream, before: Bytes) -> (ClientIo, Arc<ConnState>) {
    let state = ConnState::new();
    (ClientIo::http2(stream, before, state.clone(), head_limits(&shared.config)), state)
}

enum SniffedProtocol {
    /// The client has sent the preface. Holds the bytes read.
    H2(Bytes),
    Other(Bytes),
    /// The client sent a part of the preface, but did not complete it in time.
    Slow,
    Idle,
    Gone,
}

/// Reads until it is clear whether the client sends the preface.
async fn sniff_preface(stream: &mut TcpStream, config: &GatewayConfig) -> SniffedProtocol {
    let mut before = BytesMut::with_capacity(H2_PREFACE.len());
    loop {
        let (limit, late) = if before.is_empty() {
            (config.server.keep_alive, SniffedProtocol::Idle)
        } else {
            (config.server.header_timeout, SniffedProtocol::Slow)
        };
        // The HTTP/2 library reads everything after the preface.
        let mut rest = (&mut *stream).take((H2_PREFACE.len() - before.len()) as u64);
        match timeout(limit, rest.read_buf(&mut before)).await {
            Err(_) => return late,
            Ok(Ok(0) | Err(_)) => return SniffedProtocol::Gone,
            Ok(Ok(_)) if before == H2_PREFACE => return SniffedProtocol::H2(before.freeze()),
            Ok(Ok(_)) if H2_PREFACE.starts_with(&before) => {}
            Ok(Ok(_)) => return SniffedProtocol::Other(before.freeze()),
        }
    }
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
