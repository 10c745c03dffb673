//! A connection to somebody else's endpoint, encrypted where its address says so. Who it is is checked by the authorities that this
//! machine trusts; `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Origin;

/// After so long without a word of its host a connection is asked whether it still is one.
const SILENT: Duration = Duration::from_secs(30);

/// Both ends of a conversation with an endpoint.
#[derive(Debug)]
pub enum Wire {
    /// As it is.
    Plain(TcpStream),
    /// Encrypted.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Wire {
    /// Connects.
    ///
    /// # Errors
    ///
    /// The host is not known or does not answer, or is not who it should be.
    pub async fn connect(origin: &Origin) -> io::Result<Self> {
        let (host, port) = origin.peer();
        let stream = TcpStream::connect((host, port)).await?;
        // Without it, an answer to a small request waits for an acknowledgement.
        stream.set_nodelay(true)?;
        // Who vanishes without a word would be waited for as long as an answer may take.
        let socket = SockRef::from(&stream);
        let alive = TcpKeepalive::new().with_time(SILENT).with_interval(SILENT / 3).with_retries(3);
        socket.set_tcp_keepalive(&alive)?;
        socket.set_tcp_user_timeout(Some(SILENT * 2))?;
        if !origin.is_encrypted() {
            return Ok(Self::Plain(stream));
        }
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let stream = TlsConnector::from(trusted()?).connect(name, stream).await?;
        Ok(Self::Tls(Box::new(stream)))
    }
}

/// Whom this machine trusts, read once.
fn trusted() -> io::Result<Arc<ClientConfig>> {
    static TRUSTED: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(known) = TRUSTED.get() {
        return Ok(Arc::clone(known));
    }
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (taken, _) = roots.add_parsable_certificates(found.certs);
    if taken == 0 {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        let message = format!("this machine trusts no authority (Debian has them in `ca-certificates`){why}");
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_root_certificates(roots);
    let mut config = config.with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::clone(TRUSTED.get_or_init(|| Arc::new(config))))
}

/// Calls a function of the stream that it is.
macro_rules! either {
    ($wire:expr, $stream:ident => $call:expr) => {
        match $wire.get_mut() {
            Wire::Plain($stream) => $call,
            Wire::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(context))
    }
}
