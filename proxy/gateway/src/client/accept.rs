//! The beginning of a connection: decides whether it is admitted, uses TLS, and speaks HTTP/1.1 or HTTP/2.
//!
//! ```text
//!   accepted --TLS configured--> handshake --ALPN h2--------------> h2
//!      |                            +--------ALPN http/1.1, none--> connection
//!      |--HTTP/2 by prior knowledge allowed here--> preface? -----> h2
//!      |                                               +-no-------> connection
//!      +-------------------------------------------------------> connection
//!
//!   too many connections --> one short answer that says so, unless too many are being refused like that
//! ```

use std::net::IpAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::body::budget::ClientPeer;
use crate::client::admission::{AdmittedConnection, ConnectionAdmission};
use crate::client::client_io::ClientIo;
use crate::client::tls::{self, ClientStream, HandshakeResult};
use crate::client::tls_files::TlsState;
use crate::client::{connection, h2};
use crate::config::{GatewayConfig, saturate_u32};
use crate::limits::GatewayLimit;
use crate::protocol::conn_state::ConnState;
use crate::refusal::{HeadLimits, not_tls_answer};
use crate::shared::GatewayShared;

/// First bytes of every HTTP/2 connection (RFC 9113 section 3.4).
const H2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// State that all new connections share.
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

    /// Takes a connection and counts it.
    pub(crate) fn accept(self: &Arc<Self>, stream: TcpStream, ip: IpAddr) -> AcceptedConnection {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        AcceptedConnection { acceptor: self.clone(), stream, ip, admitted: self.admission.admit(ip) }
    }
}

/// A connection, with its place in the count if it was admitted.
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
        let peer = admitted.as_ref().map(|admitted| admitted.peer().clone());
        let peer = peer.unwrap_or_else(|| ClientPeer { ip, held: Arc::default() });
        serve(&acceptor, peer, stream, admitted.is_some()).await;
    }
}

/// Serves a connection until it ends; if it was refused, sends the client the reason.
async fn serve(acceptor: &ConnectionAcceptor, peer: ClientPeer, stream: TcpStream, admitted: bool) {
    let shared = &acceptor.shared;
    let config = &shared.config;
    let limited = &shared.gauges.limited;
    let refusal = if admitted { None } else { Some(acceptor.refusals.try_acquire()) };
    if matches!(refusal, Some(Err(_))) {
        return limited.note(GatewayLimit::Refusals);
    }
    // Limit unsent bytes. Otherwise the kernel would buffer for a stalled client as much as the connection
    // could carry when it was fastest.
    if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(saturate_u32(config.server.unsent_bytes))
    {
        tracing::debug!(%error, "cannot set TCP_NOTSENT_LOWAT");
    }
    let stream = match &acceptor.tls {
        None => ClientStream::from(stream),
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
                    return http1_io(shared, stream.into())
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
    if stream.chose_h2() {
        return h2::serve_http2(shared.clone(), peer, h2_io(shared, stream, Bytes::new())).await;
    }
    let sniffs = config.server.h2c && peer.ip.is_loopback() && !stream.announces_close();
    let (stream, before) = match stream {
        ClientStream::Plain(mut stream) if sniffs => {
            let sniffed = tokio::select! {
                sniffed = sniff_preface(&mut stream, config) => sniffed,
                () = shared.hang_up.cancelled() => return,
            };
            match sniffed {
                SniffedProtocol::H2(before) => {
                    return h2::serve_http2(shared.clone(), peer, h2_io(shared, stream.into(), before)).await;
                }
                SniffedProtocol::Other(before) => (stream.into(), before),
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
    let GatewayConfig { server, .. } = config;
    let (bytes, count) = (server.header_bytes.in_memory(), server.header_count);
    HeadLimits { bytes, count, retry_after: server.retry_after }
}

fn http1_io(shared: &GatewayShared, stream: ClientStream) -> ClientIo {
    ClientIo::http1(stream, Bytes::new(), ConnState::new(), head_limits(&shared.config))
}

fn h2_io(shared: &GatewayShared, stream: ClientStream, before: Bytes) -> (ClientIo, Arc<ConnState>) {
    let state = ConnState::new();
    (ClientIo::http2(stream, before, state.clone(), head_limits(&shared.config)), state)
}

enum SniffedProtocol {
    /// The connection begins with the preface. Holds the bytes read.
    H2(Bytes),
    /// The connection begins with other bytes. Holds the bytes read.
    Other(Bytes),
    /// The client sent a part of the preface and did not complete it in time.
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
        // Read no further than the preface: the HTTP/2 library reads the rest.
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
