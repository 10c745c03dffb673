//! Connects to a remote endpoint, with TLS if its address says so. The certificate must be issued by an
//! authority that this machine trusts; `SSL_CERT_FILE` and `SSL_CERT_DIR` name other authorities.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use super::RemoteOrigin;
use crate::worker_threads::resolve_host;

/// Idle time after which TCP keepalive probes a connection.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);

/// Connection to an endpoint, plain or encrypted.
pub type EndpointStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

impl RemoteOrigin {
    /// Connects to the endpoint.
    ///
    /// # Errors
    ///
    /// The host is unknown, does not answer, or has an invalid certificate.
    pub async fn connect(&self) -> io::Result<EndpointStream> {
        let (host, port) = (self.host.as_str(), self.port);
        let addresses = resolve_host(host, port).await?;
        let stream = TcpStream::connect(&addresses[..]).await?;
        // Without this, the end of a small request would wait for an acknowledgement (Nagle's algorithm).
        stream.set_nodelay(true)?;
        // Without keepalive, we would wait for a vanished peer for the whole time limit of an answer.
        let socket = SockRef::from(&stream);
        let alive =
            TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_TIME / 3).with_retries(3);
        socket.set_tcp_keepalive(&alive)?;
        socket.set_tcp_user_timeout(Some(KEEPALIVE_TIME * 2))?;
        if !self.tls {
            return Ok(Either::Left(stream));
        }
        let name = ServerName::try_from(host.to_owned())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let stream = TlsConnector::from(tls_config()?).connect(name, stream).await?;
        Ok(Either::Right(Box::new(stream)))
    }
}

/// TLS configuration with the trusted authorities, which are read once.
fn tls_config() -> io::Result<Arc<ClientConfig>> {
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
