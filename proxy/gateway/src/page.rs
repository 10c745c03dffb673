//! A page for operators beside the models: who answers it, and what it is told of who asks. It is there as long as a key has the
//! right to it ([`crate::KeySpec::operator`]); without one its paths are llama-server's, as all that we do not know. What it says,
//! and to whom, is its own.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;

use crate::access::host_check;

/// Where it is.
const ROOT: &str = "/page";

/// An answer that comes.
pub type Answering = Pin<Box<dyn Future<Output = Response<UnsyncBoxBody<Bytes, Infallible>>> + Send>>;

/// What answers all paths below `/page`.
pub trait Page: Send + Sync {
    /// Answers one request. It judges itself who asks: no key has been looked at.
    fn answer(self: Arc<Self>, request: Request<Incoming>, asker: Asker) -> Answering;
}

/// Who asks, as far as the connection tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asker {
    /// Its address.
    pub peer: IpAddr,
    /// The host that it named, with its port; empty if that is no text.
    pub host: String,
    /// Whether it speaks TLS with us.
    pub tls: bool,
}

impl Asker {
    pub(crate) fn of(parts: &Parts, peer: IpAddr, tls: bool) -> Self {
        let host = host_check::named(parts).and_then(|host| std::str::from_utf8(host).ok());
        Self { peer, host: host.unwrap_or_default().to_owned(), tls }
    }
}

/// Whether a request is for the page, where there is one. What asks for leave or for a tunnel is answered as everywhere.
pub(crate) fn is_for(parts: &Parts) -> bool {
    let rest = parts.uri.path().strip_prefix(ROOT);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        && !matches!(parts.method, Method::OPTIONS | Method::CONNECT | Method::TRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_route_of_llama_server_is_one_of_the_page() {
        for path in crate::paths().filter(|path| !path.is_empty()) {
            let (parts, ()) = Request::get(path).body(()).unwrap().into_parts();
            assert!(!is_for(&parts), "{path}");
        }
        for (method, path, is) in [
            ("GET", "/page", true),
            ("POST", "/page/act?x", true),
            ("GET", "/pages", false),
            ("GET", "/v1/page/", false),
            ("GET", "/%70age/", false),
            ("OPTIONS", "/page/", false),
        ] {
            let (parts, ()) = Request::builder().method(method).uri(path).body(()).unwrap().into_parts();
            assert_eq!(is_for(&parts), is, "{method} {path}");
        }
    }
}
