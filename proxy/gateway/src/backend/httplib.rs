//! Protection against two faults of cpp-httplib, llama-server's HTTP library. By either fault, a backend
//! reads parts of one request as another: another client's, or one that bypasses keys and rules.
//!
//! cpp-httplib 0.30 to 0.53 answers a head that it cannot read with 400, then reads the rest of the head and
//! the body as further requests. The gateway sends such a head to no backend. [`crate::route`] handles the
//! heads that llama-server can read, including those with unknown methods.
//!
//! Before 0.40, cpp-httplib reads a request body that llama-server has left unread as the next request:
//!
//! | request | action |
//! |---|---|
//! | `GET`, `HEAD`, `OPTIONS` | sent without its body, which llama-server does not need |
//! | any other method with a body, to a build known to discard unread bodies | sent unchanged |
//! | any other method with a body, to another build | sent with `Connection: close`: nothing is read after it |

use http::header::{CONNECTION, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Method, Request};
use http_body::Body;
use warden_policies::ServerFacts;

use crate::refusal::RequestRefusal;

/// Maximum number of bytes of a request target (`CPPHTTPLIB_REQUEST_URI_MAX_LENGTH`).
const TARGET_BYTES: usize = 8192;
/// Maximum number of bytes of a header line with its line end (`CPPHTTPLIB_HEADER_MAX_LENGTH`).
const LINE_BYTES: usize = 8192;
/// Maximum number of header fields of a request (`CPPHTTPLIB_HEADER_MAX_COUNT`).
const MAX_FIELDS: usize = 100;
/// Maximum number of fields added later: body length, `Connection`, trace context, endpoint key.
const ADDED_FIELDS: usize = 4;

/// Checks that llama-server accepts this request target.
pub(crate) fn check_request_line(parts: &Parts) -> Result<(), RequestRefusal> {
    // A target that begins with its query gets a slash in front.
    let target = parts.uri.path_and_query().map_or(1, |target| {
        let text = target.as_str();
        text.len() + usize::from(!text.starts_with('/'))
    });
    if target > TARGET_BYTES {
        return Err(RequestRefusal::TargetTooLong { limit: TARGET_BYTES });
    }
    Ok(())
}

/// Checks the lines of the head that the backend gets.
pub(crate) fn check_lines(parts: &Parts) -> Result<(), RequestRefusal> {
    check_request_line(parts)?;
    // A line has 4 bytes more than name and value: `: ` and the line end.
    let longest = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).max();
    if longest.is_some_and(|longest| longest > LINE_BYTES) {
        return Err(RequestRefusal::LineTooLong { limit: LINE_BYTES });
    }
    if parts.headers.len() + ADDED_FIELDS > MAX_FIELDS {
        return Err(RequestRefusal::TooManyFields { limit: MAX_FIELDS });
    }
    Ok(())
}

pub(crate) fn is_sent_without_body(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Makes a request the last on its connection, if the backend may read its unread body as another request.
pub(crate) fn close_after_unread_body<B: Body>(request: &mut Request<B>, facts: ServerFacts) {
    if facts.may_read_body_as_request() && !request.body().is_end_stream() {
        request.headers_mut().insert(CONNECTION, CONNECTION_CLOSE);
    }
}

pub(crate) fn ends_connection(headers: &HeaderMap) -> bool {
    headers.get(CONNECTION).is_some_and(|value| *value == CONNECTION_CLOSE)
}

/// The only spelling of the value that cpp-httplib recognises.
const CONNECTION_CLOSE: HeaderValue = HeaderValue::from_static("close");

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue, Request};

    fn parts(target: &str, fields: usize, value: usize) -> Parts {
        let mut parts = Request::get(target).body(()).unwrap().into_parts().0;
        for nth in 0..fields {
            let name = HeaderName::from_bytes(format!("x-{nth}").as_bytes()).unwrap();
            parts.headers.insert(name, HeaderValue::from_bytes(&vec![b'a'; value]).unwrap());
        }
        parts
    }

    #[test]
    fn a_head_that_llama_server_cannot_read_is_refused_with_the_limit_that_it_passes() {
        let long = |length: usize| format!("/{}", "a".repeat(length - 1));
        assert!(check_lines(&parts(&long(8192), 1, 1)).is_ok());
        let refused = |parts: &Parts| check_lines(parts).unwrap_err();
        assert!(matches!(refused(&parts(&long(8193), 1, 1)), RequestRefusal::TargetTooLong { limit: 8192 }));
        // `x-0: ` and the line end.
        assert!(check_lines(&parts("/", 1, 8192 - 7)).is_ok());
        assert!(matches!(refused(&parts("/", 1, 8192 - 6)), RequestRefusal::LineTooLong { limit: 8192 }));
        assert!(check_lines(&parts("/", 96, 1)).is_ok());
        assert!(matches!(refused(&parts("/", 97, 1)), RequestRefusal::TooManyFields { limit: 100 }));
    }
}

#[cfg(test)]
mod body_tests {
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
