//! A client's bytes with TLS or without, and the handshake in between. It runs in the connection's own task, so that a
//! slow or hostile one holds up nobody but itself.

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

/// RFC 8446 section 5.1: the type of the first record of every TLS connection.
const HANDSHAKE: u8 = 22;

/// What a client's bytes come through.
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

    /// Whether a close has to be announced: RFC 8446 section 6.1, so that a cut is not taken for the end.
    pub(crate) fn says_goodbye(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Whether the client chose HTTP/2.
    pub(crate) fn chose_h2(&self) -> bool {
        matches!(self, Self::Tls(stream) if stream.get_ref().1.alpn_protocol() == Some(b"h2"))
    }
}

impl From<TcpStream> for ClientStream {
    fn from(stream: TcpStream) -> Self {
        Self::Plain(stream)
    }
}

/// What became of a handshake.
pub(crate) enum Entered {
    Tls(ClientStream),
    /// The client speaks something else, probably HTTP.
    NotTls(TcpStream),
    /// It did not end in time.
    Slow,
    /// It failed, or the client left.
    Failed(io::Error),
}

pub(crate) async fn enter(config: Arc<ServerConfig>, stream: TcpStream, limit: Duration) -> Entered {
    let shake = async {
        let mut first = [0];
        match stream.peek(&mut first).await {
            Ok(1) if first[0] != HANDSHAKE => return Entered::NotTls(stream),
            Ok(1) => {}
            Ok(_) => return Entered::Failed(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => return Entered::Failed(error),
        }
        match TlsAcceptor::from(config).accept(stream).await {
            Ok(stream) => Entered::Tls(ClientStream::Tls(Box::new(stream))),
            Err(error) => Entered::Failed(error),
        }
    };
    timeout(limit, shake).await.unwrap_or(Entered::Slow)
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
