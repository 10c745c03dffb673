//! A client's byte stream with or without TLS, and the TLS handshake. The handshake runs in the connection's
//! own task, so that a slow or hostile client delays no other client.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Type of the first record of every TLS connection (RFC 8446 section 5.1).
const HANDSHAKE_RECORD_TYPE: u8 = 22;

/// Byte stream of a client.
pub(crate) enum ClientStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl ClientStream {
    pub(crate) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Returns whether the end of the stream must be announced, so that the client can distinguish it from
    /// a broken connection (RFC 8446 section 6.1).
    pub(crate) fn announces_close(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Returns whether the client chose HTTP/2.
    pub(crate) fn chose_h2(&self) -> bool {
        matches!(self, Self::Tls(stream) if stream.get_ref().1.alpn_protocol() == Some(b"h2"))
    }
}

impl From<TcpStream> for ClientStream {
    fn from(stream: TcpStream) -> Self {
        Self::Plain(stream)
    }
}

/// Result of a handshake.
pub(crate) enum HandshakeResult {
    Tls(ClientStream),
    /// The first byte is not TLS, but probably HTTP.
    NotTls(TcpStream),
    /// The handshake did not complete in time.
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
            Ok(stream) => HandshakeResult::Tls(ClientStream::Tls(Box::new(stream))),
            Err(error) => HandshakeResult::Failed(error),
        }
    };
    timeout(limit, shake).await.unwrap_or(HandshakeResult::Slow)
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(context, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(context, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
