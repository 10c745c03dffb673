//! What is configured: two sections of the configuration. It reads no file and no environment.

use std::path::PathBuf;

use warden_policies::ByteSize;
use warden_policies::defaults::{Server, Upstream};

/// Address, limits and deadlines. The reason for each default is in `defaults.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayConfig {
    /// What clients meet. `api_prefix` begins with a slash and does not end with one, or is empty.
    pub server: Server,
    /// What backends meet.
    pub upstream: Upstream,
    /// Requests are noted for traces: the share of those that begin here, 0 to 1. `None`: none is, and what clients send of
    /// their traces passes on as it is.
    pub traces: Option<f64>,
}

impl GatewayConfig {
    /// From two sections of a configuration.
    pub fn new(server: &Server, upstream: &Upstream) -> Self {
        let server = Server { api_prefix: prefix(&server.api_prefix), ..server.clone() };
        Self { server, upstream: upstream.clone(), traces: None }
    }

    /// Notes requests for traces, this share of those that begin here.
    #[must_use]
    pub fn traced(self, ratio: f64) -> Self {
        Self { traces: Some(ratio), ..self }
    }

    /// Certificate and key, for TLS.
    pub(crate) fn tls(&self) -> Option<TlsFiles> {
        TlsFiles::of(&self.server.tls_cert, &self.server.tls_key)
    }
}

/// Certificate and key, for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM: the certificate, then those that lead to its authority.
    pub cert: PathBuf,
    /// PEM: its private key, as PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
}

impl TlsFiles {
    /// From two keys of a configuration; `None` if both are empty, which means no TLS.
    pub fn of(cert: &str, key: &str) -> Option<Self> {
        let is_set = !cert.is_empty() || !key.is_empty();
        is_set.then(|| Self { cert: cert.into(), key: key.into() })
    }
}

/// A size where 32 bits are all there is.
pub(crate) fn narrow(size: ByteSize) -> u32 {
    u32::try_from(size.0).unwrap_or(u32::MAX)
}

/// RFC 9113 section 6.9.1: a window is at most 2^31-1.
pub(crate) fn window(size: ByteSize) -> u32 {
    narrow(size).min(0x7fff_ffff)
}

/// However it is written: `llm`, `/llm`, `/llm/`.
fn prefix(text: &str) -> String {
    match text.trim().trim_matches('/') {
        "" => String::new(),
        inner => format!("/{inner}"),
    }
}
