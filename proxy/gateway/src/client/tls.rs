//! A client's byte stream with or without TLS. The handshake runs in the connection's own task.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// Type of the first record of every TLS connection (RFC 8446 section 5.1).
const HANDSHAKE_RECORD_TYPE: u8 = 22;

pub(crate) type ClientStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

pub(crate) fn tcp_stream(stream: &ClientStream) -> &TcpStream {
    match stream {
        Either::Left(stream) => stream,
        Either::Right(stream) => stream.get_ref().0,
    }
}

/// A client must be able to distinguish the end from a broken connection (RFC 8446 section 6.1).
pub(crate) fn announces_close(stream: &ClientStream) -> bool {
    matches!(stream, Either::Right(_))
}

pub(crate) enum HandshakeResult {
    Tls(ClientStream),
    /// The first byte is not TLS, but probably HTTP.
    NotTls(TcpStream),
    Slow,
    /// The handshake failed, or the client left.
    Failed(io::Error),
}

pub(crate) async fn shake_hands(
    config: Arc<ServerConfig>,
    stream: TcpStream,
    limit: Duration,
) -> HandshakeResult {
    let shake = async {
        let mut first = [0];
        match stream.peek(&mut first).await {
            Ok(1) if first[0] != HANDSHAKE_RECORD_TYPE => return HandshakeResult::NotTls(stream),
            Ok(1) => {}
            Ok(_) => return HandshakeResult::Failed(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => return HandshakeResult::Failed(error),
        }
        match TlsAcceptor::from(config).accept(stream).await {
            Ok(stream) => HandshakeResult::Tls(Either::Right(Box::new(stream))),
            Err(error) => HandshakeResult::Failed(error),
        }
    };
    timeout(limit, shake).await.unwrap_or(HandshakeResult::Slow)
}
