//! The beginning of a connection: admitted or refused, TLS or not, HTTP/1.1 or HTTP/2.
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

use crate::body::budget::Peer;
use crate::client::admission::{Admission, Admitted};
use crate::client::client_io::ClientIo;
use crate::client::tls::{self, ClientStream, Entered};
use crate::client::tls_files::Tls;
use crate::client::{connection, h2};
use crate::config::{GatewayConfig, narrow};
use crate::limits::Limit;
use crate::protocol::conn_state::ConnState;
use crate::refusal::{HeadLimits, not_tls};
use crate::shared::Shared;

/// First bytes of every HTTP/2 connection (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// State that all new connections share.
pub(crate) struct Acceptor {
    shared: Arc<Shared>,
    tls: Option<Arc<Tls>>,
    admission: Arc<Admission>,
    refusals: Semaphore,
}

impl Acceptor {
    pub(crate) fn new(shared: Arc<Shared>, tls: Option<Arc<Tls>>) -> Self {
        let admission = Admission::new(&shared.config, shared.gauges.clone());
        let refusals = Semaphore::new(shared.config.server.refusals);
        Self { shared, tls, admission, refusals }
    }

    /// Takes a connection and counts it.
    pub(crate) fn accept(self: &Arc<Self>, stream: TcpStream, ip: IpAddr) -> Accepted {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        Accepted { acceptor: self.clone(), stream, ip, admitted: self.admission.admit(ip) }
    }
}

/// A connection, admitted or not.
pub(crate) struct Accepted {
    acceptor: Arc<Acceptor>,
    stream: TcpStream,
    ip: IpAddr,
    admitted: Option<Admitted>,
}

impl Accepted {
    /// Serves the connection to its end. A connection beyond the limit gets a short answer and is closed.
    pub(crate) async fn serve(self) {
        let Self { acceptor, stream, ip, admitted } = self;
        let peer = admitted.as_ref().map(|admitted| admitted.peer().clone());
        let peer = peer.unwrap_or_else(|| Peer { ip, held: Arc::default() });
        serve(&acceptor, peer, stream, admitted.is_some()).await;
    }
}

/// Serves a connection to its end; sends a refused client the reason.
async fn serve(acceptor: &Acceptor, peer: Peer, stream: TcpStream, admitted: bool) {
    let shared = &acceptor.shared;
    let config = &shared.config;
    let limited = &shared.gauges.limited;
    let refusal = if admitted { None } else { Some(acceptor.refusals.try_acquire()) };
    if matches!(refusal, Some(Err(_))) {
        return limited.note(Limit::Refusals);
    }
    // Otherwise the kernel would buffer as much for a stalled reader as its connection was ever fast enough
    // for.
    if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(narrow(config.server.unsent_bytes)) {
        tracing::debug!(%error, "cannot set TCP_NOTSENT_LOWAT");
    }
    let stream = match &acceptor.tls {
        None => ClientStream::from(stream),
        Some(tls) => {
            let tls = if admitted { tls.serve() } else { tls.refuse() };
            let entered = tokio::select! {
                entered = tls::enter(tls, stream, config.server.tls_handshake_timeout) => entered,
                () = shared.hang_up.cancelled() => return,
            };
            match entered {
                Entered::Tls(stream) => stream,
                Entered::NotTls(stream) => {
                    limited.note(Limit::Handshake);
                    return io(shared, stream.into()).say(&not_tls(), config.server.linger).await;
                }
                Entered::Slow => return limited.note(Limit::HandshakeTime),
                Entered::Failed(error) => {
                    tracing::debug!(%error, peer = %peer.ip, "a TLS handshake failed");
                    return limited.note(Limit::Handshake);
                }
            }
        }
    };
    if !admitted {
        return io(shared, stream).refuse(503, config.server.linger).await;
    }
    if stream.chose_h2() {
        return h2::serve(shared.clone(), peer, h2_io(shared, stream, Bytes::new())).await;
    }
    let sniffs = config.server.h2c && peer.ip.is_loopback() && !stream.says_goodbye();
    let (stream, before) = match stream {
        ClientStream::Plain(mut stream) if sniffs => {
            let sniffed = tokio::select! {
                sniffed = sniff(&mut stream, config) => sniffed,
                () = shared.hang_up.cancelled() => return,
            };
            match sniffed {
                Sniffed::H2(before) => {
                    return h2::serve(shared.clone(), peer, h2_io(shared, stream.into(), before)).await;
                }
                Sniffed::Other(before) => (stream.into(), before),
                Sniffed::Slow => return limited.note(Limit::HeadTime),
                Sniffed::Idle => return limited.note(Limit::KeepAlive),
                Sniffed::Gone => return,
            }
        }
        stream => (stream, Bytes::new()),
    };
    let state = ConnState::new();
    let io = ClientIo::http1(stream, before, state.clone(), head_limits(config));
    connection::serve(shared.clone(), state, peer, io).await;
}

fn head_limits(config: &GatewayConfig) -> HeadLimits {
    let GatewayConfig { server, .. } = config;
    let (bytes, count) = (server.header_bytes.in_memory(), server.header_count);
    HeadLimits { bytes, count, retry_after: server.retry_after }
}

fn io(shared: &Shared, stream: ClientStream) -> ClientIo {
    ClientIo::http1(stream, Bytes::new(), ConnState::new(), head_limits(&shared.config))
}

fn h2_io(shared: &Shared, stream: ClientStream, before: Bytes) -> (ClientIo, Arc<ConnState>) {
    let state = ConnState::new();
    (ClientIo::http2(stream, before, state.clone(), head_limits(&shared.config)), state)
}

enum Sniffed {
    /// Begins with the preface; the bytes read.
    H2(Bytes),
    /// Begins with something else; the bytes read.
    Other(Bytes),
    /// The preface was begun and not completed in time.
    Slow,
    Idle,
    Gone,
}

/// Reads until it is clear whether the client sends the preface.
async fn sniff(stream: &mut TcpStream, config: &GatewayConfig) -> Sniffed {
    let mut before = BytesMut::with_capacity(PREFACE.len());
    loop {
        let (limit, late) = if before.is_empty() {
            (config.server.keep_alive, Sniffed::Idle)
        } else {
            (config.server.header_timeout, Sniffed::Slow)
        };
        // Read no further than the preface: the rest is for the server.
        let mut rest = (&mut *stream).take((PREFACE.len() - before.len()) as u64);
        match timeout(limit, rest.read_buf(&mut before)).await {
            Err(_) => return late,
            Ok(Ok(0) | Err(_)) => return Sniffed::Gone,
            Ok(Ok(_)) if before == PREFACE => return Sniffed::H2(before.freeze()),
            Ok(Ok(_)) if PREFACE.starts_with(&before) => {}
            Ok(Ok(_)) => return Sniffed::Other(before.freeze()),
        }
    }
}
