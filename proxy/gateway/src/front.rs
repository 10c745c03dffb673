//! A connection's first moments: refused or not, TLS or not, HTTP/1.1 or HTTP/2.
//!
//! ```text
//!   accepted --TLS configured--> handshake --ALPN h2--------------> h2
//!      |                            +--------ALPN http/1.1, none--> connection
//!      |--HTTP/2 by prior knowledge taken from here--> preface? --> h2
//!      |                                                  +-no----> connection
//!      +-------------------------------------------------------> connection
//!
//!   too many connections --> told so in one short answer, unless too many are being told already
//! ```

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::client_io::{ClientIo, ConnState, HeadLimits};
use crate::config::GatewayConfig;
use crate::connection;
use crate::errors::not_tls;
use crate::gateway::{Peer, Shared};
use crate::h2;
use crate::limits::Limit;
use crate::tls::{self, ClientStream, Entered};
use crate::tls_files::{Tls, TlsError};

/// RFC 9113 section 3.4: what every HTTP/2 connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What all connections share at their beginning.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) tls: Option<Arc<Tls>>,
    refusals: Semaphore,
}

impl Front {
    /// Reads certificate and key, if there are any.
    pub(crate) fn new(config: &GatewayConfig) -> Result<Self, TlsError> {
        let tls = config.tls.clone().map(|files| Tls::load(files, config.h2.over_tls)).transpose()?;
        Ok(Self { tls: tls.map(Arc::new), refusals: Semaphore::new(config.refusals) })
    }
}

/// Serves a connection to its end; if it was not admitted, says so.
pub(crate) async fn serve(shared: Arc<Shared>, peer: Peer, stream: TcpStream, admitted: bool) {
    let config = &shared.config;
    let limited = &shared.gauges.limited;
    let refusal = if admitted { None } else { Some(shared.front.refusals.try_acquire()) };
    if matches!(refusal, Some(Err(_))) {
        return limited.note(Limit::Refusals);
    }
    // A reader that stalls would else hold as much of the kernel's memory as its connection was ever fast.
    if let Err(error) = SockRef::from(&stream).set_tcp_notsent_lowat(config.unsent_bytes) {
        tracing::debug!(%error, "cannot set TCP_NOTSENT_LOWAT");
    }
    let stream = match &shared.front.tls {
        None => ClientStream::from(stream),
        Some(tls) => {
            let tls = if admitted { tls.serve() } else { tls.refuse() };
            let entered = tokio::select! {
                entered = tls::enter(tls, stream, config.tls_handshake_timeout) => entered,
                () = shared.stop.cancelled() => return,
            };
            match entered {
                Entered::Tls(stream) => stream,
                Entered::NotTls(stream) => {
                    limited.note(Limit::Handshake);
                    return io(&shared, stream.into()).say(&not_tls(), config.linger).await;
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
        return io(&shared, stream).refuse(503, config.linger).await;
    }
    if stream.chose_h2() {
        return h2::serve(shared.clone(), peer, h2_io(&shared, stream, Bytes::new())).await;
    }
    let sniffs = config.h2.prior_knowledge && peer.ip.is_loopback() && !stream.says_goodbye();
    let (stream, before) = match stream {
        ClientStream::Plain(mut stream) if sniffs => {
            let sniffed = tokio::select! {
                sniffed = sniff(&mut stream, config) => sniffed,
                () = shared.stop.cancelled() => return,
            };
            match sniffed {
                Sniffed::H2(before) => {
                    return h2::serve(shared.clone(), peer, h2_io(&shared, stream.into(), before)).await;
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
    HeadLimits { bytes: config.header_bytes, count: config.header_count }
}

fn io(shared: &Shared, stream: ClientStream) -> ClientIo {
    ClientIo::http1(stream, Bytes::new(), ConnState::new(), head_limits(&shared.config))
}

fn h2_io(shared: &Shared, stream: ClientStream, before: Bytes) -> (ClientIo, Arc<ConnState>) {
    let state = ConnState::new();
    (ClientIo::http2(stream, before, state.clone(), head_limits(&shared.config)), state)
}

enum Sniffed {
    /// What was read is the preface, at least.
    H2(Bytes),
    /// What was read is something else.
    Other(Bytes),
    /// The preface was begun and not ended.
    Slow,
    /// Nothing came.
    Idle,
    Gone,
}

/// Reads until it is clear whether the client begins with the preface.
async fn sniff(stream: &mut TcpStream, config: &GatewayConfig) -> Sniffed {
    let mut before = BytesMut::with_capacity(PREFACE.len());
    loop {
        let (limit, late) = if before.is_empty() {
            (config.keep_alive, Sniffed::Idle)
        } else {
            (config.header_timeout, Sniffed::Slow)
        };
        // Never more than the preface: what follows is for others to read.
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
