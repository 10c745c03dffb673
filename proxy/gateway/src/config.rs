//! The gateway's configuration: two sections of the whole. Reads no file and no environment variable.

use std::path::PathBuf;

use warden_policies::ByteSize;
use warden_policies::defaults::{Server, Upstream};

/// Address, limits and deadlines. The reason for each default is in `defaults.toml`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayConfig {
    /// Settings for clients. `api_prefix` is empty, or begins with a slash and ends without one.
    pub server: Server,
    /// Settings for backends.
    pub upstream: Upstream,
    /// Share of new requests that are traced, 0 to 1. With `None`, none is traced, and the trace context of
    /// clients is passed on unchanged.
    pub traces: Option<f64>,
}

impl GatewayConfig {
    /// Creates the configuration without tracing.
    pub fn new(server: &Server, upstream: &Upstream) -> Self {
        let server = Server { api_prefix: normalize_prefix(&server.api_prefix), ..server.clone() };
        Self { server, upstream: upstream.clone(), traces: None }
    }

    /// Traces this share of new requests, 0 to 1.
    #[must_use]
    pub fn with_traces(self, ratio: f64) -> Self {
        Self { traces: Some(ratio), ..self }
    }

    pub(crate) fn tls(&self) -> Option<TlsFiles> {
        TlsFiles::from_settings(&self.server.tls_cert, &self.server.tls_key)
    }
}

/// Certificate and key files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM file with the certificate, then the chain up to its authority.
    pub cert: PathBuf,
    /// PEM file with the private key, as PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
}

impl TlsFiles {
    /// Creates the paths from two settings; `None` if both are empty, which means no TLS.
    pub fn from_settings(cert: &str, key: &str) -> Option<Self> {
        let is_set = !cert.is_empty() || !key.is_empty();
        is_set.then(|| Self { cert: cert.into(), key: key.into() })
    }
}

pub(crate) fn saturate_u32(size: ByteSize) -> u32 {
    u32::try_from(size.0).unwrap_or(u32::MAX)
}

/// `llm`, `/llm` and `/llm/` are the same prefix.
fn normalize_prefix(text: &str) -> String {
    match text.trim().trim_matches('/') {
        "" => String::new(),
        inner => format!("/{inner}"),
    }
}
