//! Handles request bodies that a backend may leave unread in its connection. cpp-httplib before 0.40 reads
//! such a body as the next request: as another client's request, or as one that bypasses keys and rules.
//!
//! | request | action |
//! |---|---|
//! | `GET`, `HEAD`, `OPTIONS` | sent without its body, which llama-server does not need |
//! | any other method with a body, to a build known to discard unread bodies | sent unchanged |
//! | any other method with a body, to another build | sent with `Connection: close`: nothing is read after it |
//!
//! A backend that cannot read a head ignores `Connection: close` as well: see [`super::line_limits`].

use http::Method;
use http::Request;
use http::header::{CONNECTION, HeaderMap, HeaderValue};
use http_body::Body;
use warden_policies::ServerFacts;

/// Returns whether a request of this method is sent without its body.
pub(crate) fn is_sent_without_body(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Makes a request the last on its connection, if its backend may read an unread body as another request.
pub(crate) fn close_after_unread_body<B: Body>(request: &mut Request<B>, facts: ServerFacts) {
    if facts.may_read_body_as_request() && !request.body().is_end_stream() {
        request.headers_mut().insert(CONNECTION, CONNECTION_CLOSE);
    }
}

/// Returns whether a request with these headers is the last on its connection.
pub(crate) fn ends_connection(headers: &HeaderMap) -> bool {
    headers.get(CONNECTION).is_some_and(|value| *value == CONNECTION_CLOSE)
}

/// Value of `Connection` in the only spelling that cpp-httplib recognises.
const CONNECTION_CLOSE: HeaderValue = HeaderValue::from_static("close");

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{Empty, Full};

    #[test]
    fn only_a_build_that_is_known_to_discard_bodies_keeps_the_connection_of_one() {
        let ends = |discards_bodies, body: &'static str| {
            let mut request = Request::new(Full::new(bytes::Bytes::from_static(body.as_bytes())));
            close_after_unread_body(&mut request, ServerFacts { discards_bodies, ..ServerFacts::default() });
            ends_connection(request.headers())
        };
        assert!(ends(None, "x") && ends(Some(false), "x") && !ends(Some(true), "x"));
        assert!(!ends(None, "") && !ends(Some(false), ""), "nothing is left where there is nothing");
        let mut request = Request::new(Empty::<bytes::Bytes>::new());
        close_after_unread_body(&mut request, ServerFacts::default());
        assert!(!ends_connection(request.headers()));
    }
}
