//! A remote endpoint: its address, connections, request heads and probe.
//!
//! For `https`, the certificate's authority must be trusted by this machine; `SSL_CERT_FILE` and
//! `SSL_CERT_DIR` name other authorities.

pub(crate) mod probe;

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use http::header::{ACCEPT_ENCODING, AUTHORIZATION, HOST, HeaderMap, HeaderValue, USER_AGENT, VIA};
use http::uri::{InvalidUri, Scheme};
use http::{Request, Uri};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use crate::worker_threads::resolve_host;

/// API version. A configured address may end with this path.
const VERSION_PREFIX: &str = "/v1";

/// Path endings of single requests, which no endpoint's address has.
const ROUTE_SUFFIXES: [&str; 4] = ["/completions", "/models", "/embeddings", "/messages"];

/// Client headers for the endpoint: those that affect the answer, and request ids that both sides log. Others
/// describe the client and are removed.
const PASSED_HEADERS: [&str; 13] = [
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "content-encoding",
    "content-length",
    "content-type",
    "idempotency-key",
    "openai-beta",
    "transfer-encoding",
    "traceparent",
    "tracestate",
    "via",
    "x-request-id",
];

const OUR_USER_AGENT: HeaderValue =
    HeaderValue::from_static(concat!("llama-warden/", env!("CARGO_PKG_VERSION")));

/// Our name in `Via`. Entries of other llama-wardens stay, so that each detects a loop.
const VIA_PREFIX: &str = "llama-warden-";

const KEEPALIVE_TIME: Duration = Duration::from_secs(30);

/// Connection to an endpoint.
pub type EndpointStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Remote endpoint with OpenAI's API. `Debug` hides the key.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RemoteOrigin {
    tls: bool,
    host: String,
    port: u16,
    authority: String,
    /// Prefix of each path: empty, or with a leading slash only.
    prefix: String,
    key: Option<String>,
}

impl RemoteOrigin {
    /// Parses an address such as `https://host/api/v1`. Each request sends `key`.
    ///
    /// # Errors
    ///
    /// A sentence about the error in the address or the key.
    pub fn parse(url: &str, key: Option<&str>) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|error: InvalidUri| format!("it is no address: {error}"))?;
        let tls = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            _ => return Err("it begins neither with `https://` nor with `http://`".to_owned()),
        };
        let authority = uri.authority().filter(|authority| !authority.host().is_empty());
        let authority = authority.ok_or("it names no host")?;
        if authority.as_str().contains('@') {
            return Err("it has a user in it: a key belongs into a file".to_owned());
        }
        if uri.query().is_some() {
            return Err("it has a `?` in it, and paths are added to its end".to_owned());
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let behind = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
        let port = match behind.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| "its port is none")?,
            None if tls => 443,
            None => 80,
        };
        let path = uri.path().trim_end_matches('/');
        if ROUTE_SUFFIXES.iter().any(|route| path.ends_with(route)) {
            return Err("it ends with a route: write what is before `/v1`, or with it".to_owned());
        }
        let prefix = path.strip_suffix(VERSION_PREFIX).unwrap_or(path).trim_end_matches('/').to_owned();
        if key.is_some_and(|key| HeaderValue::from_str(key).is_err()) {
            return Err("its key has characters that no header can have".to_owned());
        }
        let (authority, key) = (authority.as_str().to_owned(), key.map(str::to_owned));
        Ok(Self { tls, host, port, authority, prefix, key })
    }

    /// True if the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls
    }

    /// True if the endpoint is on this machine.
    pub fn is_local(&self) -> bool {
        let is_loopback = self.host.parse().is_ok_and(|address: IpAddr| address.is_loopback());
        is_loopback || self.host == "localhost"
    }

    /// Host to connect to.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// True if requests send a key.
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// Connects to the endpoint.
    ///
    /// # Errors
    ///
    /// The host is unknown, does not answer, or has an invalid certificate.
    pub async fn connect(&self) -> io::Result<EndpointStream> {
        let addresses = resolve_host(&self.host, self.port).await?;
        let stream = TcpStream::connect(&addresses[..]).await?;
        // Nagle's algorithm would delay the end of a small request.
        stream.set_nodelay(true)?;
        // A vanished peer would otherwise be noticed only at the time limit of the answer.
        let socket = SockRef::from(&stream);
        let alive =
            TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_TIME / 3).with_retries(3);
        socket.set_tcp_keepalive(&alive)?;
        socket.set_tcp_user_timeout(Some(KEEPALIVE_TIME * 2))?;
        if !self.tls {
            return Ok(Either::Left(stream));
        }
        let name = ServerName::try_from(self.host.clone())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let stream = TlsConnector::from(tls_config()?).connect(name, stream).await?;
        Ok(Either::Right(Box::new(stream)))
    }

    /// Rewrites a request made for llama-server: sets path, host and key of this endpoint, and removes the
    /// client's identity. The proxy reads the answer, so it must not be compressed.
    ///
    /// # Errors
    ///
    /// The resulting path is invalid.
    pub fn address_request<B>(&self, request: &mut Request<B>) -> Result<(), http::Error> {
        if !self.prefix.is_empty() {
            let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
            *request.uri_mut() = format!("{}{target}", self.prefix).parse()?;
        }
        let headers = request.headers_mut();
        while let Some(name) = headers.keys().find(|name| !PASSED_HEADERS.contains(&name.as_str())).cloned() {
            headers.remove(name);
        }
        keep_our_via(headers);
        headers.insert(USER_AGENT, OUR_USER_AGENT);
        headers.insert(HOST, HeaderValue::from_str(&self.authority)?);
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(key) = &self.key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(())
    }
}

/// Reads the trusted authorities once.
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

fn keep_our_via(headers: &mut HeaderMap) {
    let ours = |part: &str| {
        let mut words = part.split_whitespace();
        let (version, name) = words.next().zip(words.next())?;
        name.starts_with(VIA_PREFIX).then(|| format!("{version} {name}"))
    };
    let all = headers.get_all(VIA).iter().filter_map(|value| value.to_str().ok());
    let ours: Vec<String> = all.flat_map(|value| value.split(',')).filter_map(ours).collect();
    match HeaderValue::from_str(&ours.join(", ")) {
        Ok(ours) if !ours.is_empty() => drop(headers.insert(VIA, ours)),
        _ => drop(headers.remove(VIA)),
    }
}

impl fmt::Display for RemoteOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.prefix)
    }
}

impl fmt::Debug for RemoteOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteOrigin({self}, {})", if self.has_key() { "with a key" } else { "without a key" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addressed(url: &str, key: Option<&str>, target: &str) -> Request<()> {
        let mut request = Request::new(());
        *request.uri_mut() = target.parse().unwrap();
        for (name, value) in [
            ("authorization", "Bearer client"),
            ("x-api-key", "client"),
            ("api-key", "client"),
            ("cookie", "a=b"),
            ("origin", "http://page"),
            ("x-forwarded-for", "192.0.2.1"),
            ("user-agent", "secret-client/7 (alice's laptop)"),
            ("accept-language", "de-AT"),
            ("referer", "http://intern.example/plan"),
            ("via", "1.1 proxy.intern.example, 1.1 llama-warden-0123456789ab (a note)"),
            ("via", "1.1 llama-warden-ba9876543210"),
            ("content-type", "application/json"),
            ("x-request-id", "r1"),
        ] {
            request.headers_mut().append(name, HeaderValue::from_static(value));
        }
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        RemoteOrigin::parse(url, key).unwrap().address_request(&mut request).unwrap();
        request
    }

    #[test]
    fn an_address_is_taken_with_its_version_and_without_it() {
        for (url, target, wanted) in [
            ("https://a.example", "/v1/models", "/v1/models"),
            ("https://a.example/", "/v1/models", "/v1/models"),
            ("https://a.example/v1", "/v1/models?x=1", "/v1/models?x=1"),
            ("https://a.example/api/v1/", "/v1/models", "/api/v1/models"),
            ("http://a.example:8080/llm", "/props", "/llm/props"),
        ] {
            assert_eq!(addressed(url, None, target).uri(), wanted, "{url}");
        }
        let (plain, tls) = ("http://[::1]:81", "https://a.example");
        let peer = |url| RemoteOrigin::parse(url, None).map(|origin| (origin.host, origin.port)).unwrap();
        assert_eq!(peer(plain), ("::1".to_owned(), 81));
        assert_eq!(addressed(plain, None, "/").headers()[HOST], "[::1]:81");
        assert_eq!(peer(tls), ("a.example".to_owned(), 443));
        assert_eq!(
            RemoteOrigin::parse("https://a.example/api/v1", None).unwrap().to_string(),
            "https://a.example/api"
        );
    }

    #[test]
    fn what_a_client_says_of_itself_stays_here() {
        let with = addressed("https://a.example", Some("secret"), "/v1/chat/completions");
        assert_eq!(with.headers()[AUTHORIZATION], "Bearer secret");
        assert!(with.headers()[AUTHORIZATION].is_sensitive());
        let without = addressed("https://a.example", None, "/v1/chat/completions");
        assert!(!without.headers().contains_key(AUTHORIZATION));
        for request in [with, without] {
            let mut names: Vec<_> = request.headers().keys().map(http::HeaderName::as_str).collect();
            names.retain(|name| *name != "authorization");
            names.sort_unstable();
            let wanted = ["accept-encoding", "content-type", "host", "user-agent", "via", "x-request-id"];
            assert_eq!(names, wanted);
            assert_eq!(request.headers()[ACCEPT_ENCODING], "identity");
            assert_eq!(request.headers()[USER_AGENT], OUR_USER_AGENT);
            let via = "1.1 llama-warden-0123456789ab, 1.1 llama-warden-ba9876543210";
            assert_eq!(request.headers()[VIA], via);
        }
        let shown = format!("{:?}", RemoteOrigin::parse("https://a.example", Some("secret")).unwrap());
        assert_eq!(shown, "RemoteOrigin(https://a.example, with a key)");
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason() {
        for (url, key, word) in [
            ("a.example", None, "https://"),
            ("ftp://a.example", None, "https://"),
            ("https://", None, "no address"),
            ("https://user:password@a.example", None, "file"),
            ("https://a.example/?key=1", None, "?"),
            ("https://a.example:99999", None, "port"),
            ("https://a.example/v1/chat/completions", None, "route"),
            ("https://a.example", Some("two\nlines"), "key"),
        ] {
            let told = RemoteOrigin::parse(url, key).unwrap_err();
            assert!(told.contains(word), "{url}: {told}");
        }
    }
}
