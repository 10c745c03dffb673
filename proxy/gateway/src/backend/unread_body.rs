//! Bodies that a backend may leave unread in its connection, where cpp-httplib before 0.40 reads them as the next
//! request: that of another client, or one past keys and rules.
//!
//! | request | what is done |
//! |---|---|
//! | `GET`, `HEAD`, `OPTIONS` | goes without its body: llama-server answers some of them in front of all routes, and needs none |
//! | another one with a body, to a build that is known to discard what it has not read | goes as it is |
//! | the same to any other build | says `Connection: close`, so that the backend reads nothing behind it |
//!
//! A head that the backend cannot read at all hides its `Connection: close` from it: [`super::line_limits`].

use http::Method;
use http::Request;
use http::header::{CONNECTION, HeaderMap, HeaderValue};
use http_body::Body;
use warden_policies::ServerFacts;

/// Whether a request of this method goes to a backend without its body.
pub(crate) fn goes_without_body(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Makes a request the last one of its connection, if its backend may read what it leaves of the body as another
/// request.
pub(crate) fn end_connection_behind<B: Body>(request: &mut Request<B>, facts: ServerFacts) {
    if facts.may_read_body_as_request() && !request.body().is_end_stream() {
        request.headers_mut().insert(CONNECTION, CLOSE);
    }
}

/// Whether a request with these fields is the last one of its connection.
pub(crate) fn ends_connection(headers: &HeaderMap) -> bool {
    headers.get(CONNECTION).is_some_and(|value| *value == CLOSE)
}

/// In this spelling alone cpp-httplib knows it.
const CLOSE: HeaderValue = HeaderValue::from_static("close");

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::{Empty, Full};

    #[test]
    fn only_a_build_that_is_known_to_discard_bodies_keeps_the_connection_of_one() {
        let ends = |discards_bodies, body: &'static str| {
            let mut request = Request::new(Full::new(bytes::Bytes::from_static(body.as_bytes())));
            end_connection_behind(&mut request, ServerFacts { discards_bodies, ..ServerFacts::default() });
            ends_connection(request.headers())
        };
        assert!(ends(None, "x") && ends(Some(false), "x") && !ends(Some(true), "x"));
        assert!(!ends(None, "") && !ends(Some(false), ""), "nothing is left where there is nothing");
        let mut request = Request::new(Empty::<bytes::Bytes>::new());
        end_connection_behind(&mut request, ServerFacts::default());
        assert!(!ends_connection(request.headers()));
    }
}
