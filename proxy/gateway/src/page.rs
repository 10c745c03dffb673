//! The interface to the operators' page. The page exists while any key may open it
//! ([`crate::KeySpec::operator`]); otherwise its paths are forwarded to llama-server, like all unknown paths.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;

use crate::access::origin;

const PAGE_ROOT: &str = "/page";

/// Future of the page's answer.
pub type PageAnswer = Pin<Box<dyn Future<Output = Response<UnsyncBoxBody<Bytes, Infallible>>> + Send>>;

/// Answers all paths below `/page`.
pub trait OperatorPage: Send + Sync {
    /// Answers a request. Must check the client's rights: the gateway has checked no key.
    fn answer(self: Arc<Self>, request: Request<Incoming>, asker: PageClient) -> PageAnswer;
}

/// Facts about a client from its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageClient {
    /// Address of the client.
    pub peer: IpAddr,
    /// Requested host with its port; empty if it is not UTF-8.
    pub host: String,
    /// True if the connection uses TLS.
    pub tls: bool,
}

impl PageClient {
    pub(crate) fn from_parts(parts: &Parts, peer: IpAddr, tls: bool) -> Self {
        let host = origin::requested_host(parts).and_then(|host| std::str::from_utf8(host).ok());
        Self { peer, host: host.unwrap_or_default().to_owned(), tls }
    }
}

/// The caller checks whether the page is enabled, and handles preflights, `CONNECT` and `TRACE`.
pub(crate) fn is_page_request(parts: &Parts) -> bool {
    let rest = parts.uri.path().strip_prefix(PAGE_ROOT);
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
            assert!(!is_page_request(&parts), "{path}");
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
            assert_eq!(is_page_request(&parts), is, "{method} {path}");
        }
    }
}
