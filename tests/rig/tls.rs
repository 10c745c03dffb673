//! Self-signed certificate of a test, its two files, and clients that trust only this certificate.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::{Context as _, Trouble};

/// Host name in every certificate.
pub const NAME: &str = "localhost";

const PATIENCE: Duration = Duration::from_secs(20);

/// Certificate and its key, not written to files yet.
#[derive(Clone, Debug)]
pub struct Identity {
    der: CertificateDer<'static>,
    /// The certificate as PEM.
    pub cert: String,
    /// Its private key as PEM.
    pub key: String,
}

impl Identity {
    /// Creates a certificate for `localhost`.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn new() -> Result<Self, Trouble> {
        let key = KeyPair::generate()?;
        let cert = CertificateParams::new(vec![NAME.to_owned()])?.self_signed(&key)?;
        Ok(Self { der: cert.der().clone(), cert: cert.pem(), key: key.serialize_pem() })
    }

    /// Writes the certificate and key in `folder` as renewals do: each file is written under another name and
    /// renamed. Returns both paths.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn put(&self, folder: &Path) -> Result<(PathBuf, PathBuf), Trouble> {
        let files = (folder.join("cert.pem"), folder.join("key.pem"));
        for (file, text) in [(&files.1, &self.key), (&files.0, &self.cert)] {
            let new = file.with_extension("new");
            std::fs::write(&new, text)?;
            std::fs::rename(&new, file).context(file.display())?;
        }
        Ok(files)
    }

    /// Connects to a server with this certificate; offers `protocols` by ALPN.
    ///
    /// # Errors
    /// The server has another certificate, or does not listen.
    pub async fn connect(
        &self,
        address: SocketAddr,
        protocols: &[&str],
    ) -> Result<TlsStream<TcpStream>, Trouble> {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let stream = TcpStream::connect(address).await.context(address)?;
        stream.set_nodelay(true)?;
        let shake = TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(NAME)?, stream);
        timeout(PATIENCE, shake).await?.context("the TLS handshake")
    }
}
