//! Certificate and key, read at the start and again when the files change. An invalid pair is reported and
//! never replaces the current pair.
//!
//! ```text
//!   load --invalid--> error with a remedy: the program does not start
//!     | valid
//!     v
//!   in use <---- valid ---- check: files changed? ---- invalid --> reported once, the old pair stays
//! ```
//!
//! Does not check the issuer of the certificate: clients decide whether they trust it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::ProducesTickets;
use webpki::{EndEntityCert, KeyUsage};

use crate::clock;
use crate::config::TlsFiles;

/// No certificate ends after the year 9999 (RFC 5280 section 4.1.2.5).
const BEYOND_ANY_CERTIFICATE: Duration = Duration::from_secs(253_402_300_800);

/// Error of certificate or key.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum TlsError {
    #[error("`server.tls_cert` and `server.tls_key` belong together; set both, or none for no TLS")]
    OneOnly,
    #[error("the TLS {what} {path} cannot be read: {source}", path = .path.display())]
    Read { what: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} holds no {what} in PEM; it should have a line `-----BEGIN {begin}-----`", path = .path.display())]
    Nothing { what: &'static str, path: PathBuf, begin: &'static str },
    #[error("{path} is not valid PEM: {reason}", path = .path.display())]
    Pem { path: PathBuf, reason: String },
    #[error(
        "the key {key} does not belong to the certificate {cert}; the first certificate of the file must \
         be the server's own", key = .key.display(), cert = .cert.display()
    )]
    Mismatch { key: PathBuf, cert: PathBuf },
    #[error(
        "the key {key} or the certificate {cert} cannot be used: {reason}; ECDSA (P-256, P-384), Ed25519 \
         and RSA from 2048 bits work", key = .key.display(), cert = .cert.display()
    )]
    Unusable { key: PathBuf, cert: PathBuf, reason: String },
    #[error("the certificate {cert} expired {ago}; renew it", cert = .cert.display(), ago = describe_age(*.since))]
    Expired { cert: PathBuf, since: u64 },
    #[error(
        "the certificate {cert} is not valid yet, for another {} s; is the clock right?",
        .seconds, cert = .cert.display()
    )]
    NotYet { cert: PathBuf, seconds: u64 },
}

fn describe_age(since: u64) -> String {
    match since {
        0..3600 => format!("{} minutes ago", since / 60),
        3600..172_800 => format!("{} hours ago", since / 3600),
        _ => format!("{} days ago", since / 86_400),
    }
}

/// Validity of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    /// End of validity in seconds since 1970; 0 if unreadable.
    pub not_after: u64,
}

impl CertificateInfo {
    /// Returns the remaining validity; `None` if unknown.
    pub fn left(self) -> Option<Duration> {
        let end = Some(self.not_after).filter(|end| *end > 0)?;
        Some(Duration::from_secs(end.saturating_sub(clock::unix_seconds())))
    }
}

struct TlsPair {
    serve: Arc<ServerConfig>,
    certificate: CertificateInfo,
}

/// The certificate in use. Checking the files for changes blocks for two reads.
pub struct TlsState {
    files: TlsFiles,
    now: ArcSwap<TlsPair>,
    tickets: Arc<dyn ProducesTickets>,
    seen: Mutex<TlsFileStamps>,
}

impl std::fmt::Debug for TlsState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsState").field("files", &self.files).finish_non_exhaustive()
    }
}

impl TlsState {
    /// Reads both files and checks that they are usable now.
    ///
    /// # Errors
    ///
    /// A file cannot be read or has no certificate or usable key, the two do not belong together, or the
    /// certificate is not valid now.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        // Take the stamps before reading, so that the next check notices a change during the read.
        let seen = Mutex::new(TlsFileStamps::from_files(&files));
        let tickets = ring::Ticketer::new().map_err(|error| unusable_pair(&files, &error))?;
        let pair = TlsPair::read(&files, &tickets)?;
        Ok(Self { files, now: ArcSwap::from_pointee(pair), tickets, seen })
    }

    /// Returns the paths of both files.
    pub fn files(&self) -> &TlsFiles {
        &self.files
    }

    /// Returns the validity of the certificate in use.
    pub fn certificate(&self) -> CertificateInfo {
        self.now.load().certificate
    }

    /// Uses the new pair if the files have changed and are valid; `None` without a change. Blocks.
    pub fn reload_if_changed(&self) -> Option<Result<CertificateInfo, TlsError>> {
        let stamps = TlsFileStamps::from_files(&self.files);
        let before =
            std::mem::replace(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner), stamps);
        (before != stamps).then(|| self.reload())
    }

    /// Reads the files even without a change, and uses the new pair if it is valid. Blocks.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`]; the current pair stays in use.
    pub fn reload(&self) -> Result<CertificateInfo, TlsError> {
        let pair = TlsPair::read(&self.files, &self.tickets)?;
        let certificate = pair.certificate;
        self.now.store(Arc::new(pair));
        Ok(certificate)
    }

    pub(crate) fn serve_config(&self) -> Arc<ServerConfig> {
        self.now.load().serve.clone()
    }
}

/// File metadata that changes when a renewal renames a new file into place or changes a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TlsFileStamps([Option<(SystemTime, u64, u64)>; 2]);

impl TlsFileStamps {
    fn from_files(files: &TlsFiles) -> Self {
        use std::os::unix::fs::MetadataExt;
        let stamp = |path: &Path| {
            let facts = std::fs::metadata(path).ok()?;
            Some((facts.modified().ok()?, facts.len(), facts.ino()))
        };
        Self([stamp(&files.cert), stamp(&files.key)])
    }
}

impl TlsPair {
    fn read(files: &TlsFiles, tickets: &Arc<dyn ProducesTickets>) -> Result<Self, TlsError> {
        if files.cert.as_os_str().is_empty() || files.key.as_os_str().is_empty() {
            return Err(TlsError::OneOnly);
        }
        let chain = certificates(&files.cert)?;
        let key = private_key(&files.key)?;
        let certificate = check_time(files, &chain)?;
        let provider = Arc::new(ring::default_provider());
        let mut serve = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable_pair(files, &error))?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| unusable_pair(files, &error))?;
        // With a ticket, which the client keeps, a returning client needs no new signature.
        serve.ticketer = tickets.clone();
        serve.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { serve: Arc::new(serve), certificate })
    }
}

fn unusable_pair(files: &TlsFiles, error: &rustls::Error) -> TlsError {
    let key = files.key.clone();
    let cert = files.cert.clone();
    match error {
        rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch) => {
            TlsError::Mismatch { key, cert }
        }
        error => TlsError::Unusable { key, cert, reason: error.to_string() },
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    const WHAT: &str = "certificate";
    let text = read(path, WHAT)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.map_err(|error| TlsError::Pem { path: path.to_owned(), reason: error.to_string() })?;
    if all.is_empty() {
        return Err(TlsError::Nothing { what: WHAT, path: path.to_owned(), begin: "CERTIFICATE" });
    }
    Ok(all)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = read(path, "key")?;
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            TlsError::Nothing { what: "private key", path: path.to_owned(), begin: "PRIVATE KEY" }
        }
        error => TlsError::Pem { path: path.to_owned(), reason: error.to_string() },
    })
}

fn read(path: &Path, what: &'static str) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { what, path: path.to_owned(), source })
}

fn check_time(files: &TlsFiles, chain: &[CertificateDer<'static>]) -> Result<CertificateInfo, TlsError> {
    let at = |time| {
        let own = EndEntityCert::try_from(chain.first()?).ok()?;
        let usage = KeyUsage::server_auth();
        // Without a trusted issuer the verification always fails, but it checks the time first.
        own.verify_for_usage(webpki::ALL_VERIFICATION_ALGS, &[], &[], time, usage, None, None).err()
    };
    let now = clock::unix_seconds();
    let cert = files.cert.clone();
    match at(UnixTime::since_unix_epoch(Duration::from_secs(now))) {
        Some(webpki::Error::CertExpired { not_after, .. }) => {
            return Err(TlsError::Expired { cert, since: now.saturating_sub(not_after.as_secs()) });
        }
        Some(webpki::Error::CertNotValidYet { not_before, .. }) => {
            return Err(TlsError::NotYet { cert, seconds: not_before.as_secs().saturating_sub(now) });
        }
        _ => {}
    }
    let not_after = match at(UnixTime::since_unix_epoch(BEYOND_ANY_CERTIFICATE)) {
        Some(webpki::Error::CertExpired { not_after, .. }) => not_after.as_secs(),
        _ => 0,
    };
    Ok(CertificateInfo { not_after })
}

#[cfg(test)]
#[path = "tls_files_tests.rs"]
mod tests;
