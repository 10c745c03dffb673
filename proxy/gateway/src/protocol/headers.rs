//! Filters message heads: decides which fields are passed on and which belong to one connection.
//!
//! hyper writes `Content-Length` and `Transfer-Encoding` itself, so that all readers agree on lengths.

use http::header::{self, CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};

/// With this header llama-server continues to generate after its client has left, so cancellation would fail.
pub(crate) const CONVERSATION_ID: HeaderName = HeaderName::from_static("x-conversation-id");

/// Returns whether a field always belongs to one connection, even if `Connection` does not name it. A
/// `match`, because looking up each field in a list took 1.5 % of the gateway's time for a request.
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            // Obsolete, but still sent by some clients.
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Returns whether a field of a client's head must not reach the backend.
fn is_client_only(name: &str) -> bool {
    matches!(name, "content-length" | "expect" | "x-conversation-id")
}

/// Removes fields by name. Checks each present name, which is cheaper than looking up all names to remove.
pub(crate) fn remove_fields(headers: &mut HeaderMap, goes: impl Fn(&HeaderName) -> bool) {
    // Most heads have at most one such field.
    while let Some(name) = headers.keys().find(|name| goes(name)).cloned() {
        headers.remove(name);
    }
}
pub(crate) const CONVERSATION: HeaderName = HeaderName::from_static("x-warden-conversation");

/// With the value `no`, this header makes a proxy pass each event on without buffering.
pub(crate) const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Header that identifies a request in client, gateway, log and backend.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header with `no` (nothing was executed, so the client may retry) or `maybe` (unknown).
pub(crate) const EXECUTED: HeaderName = HeaderName::from_static("x-warden-executed");

/// Header of an answer whose request was executed again because its first server died.
const CONTINUED: HeaderName = HeaderName::from_static("x-warden-continued");

pub(crate) fn mark_continued(headers: &mut HeaderMap, continued: bool) {
    if continued {
        headers.insert(CONTINUED, HeaderValue::from_static("1"));
    }
}

/// Removes instructions of a remote endpoint to browsers, which would apply them to the gateway's host.
pub(crate) fn strip_host_policies(headers: &mut HeaderMap) {
    let of_its_host = |name: &HeaderName| {
        matches!(
            name.as_str(),
            "alt-svc"
                | "clear-site-data"
                | "location"
                | "nel"
                | "openai-organization"
                | "openai-project"
                | "report-to"
                | "reporting-endpoints"
                | "set-cookie"
                | "strict-transport-security"
                | "www-authenticate"
        )
    };
    remove_fields(headers, of_its_host);
}

/// Removes the fields of one connection (RFC 9110 section 7.6.1), in both directions.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    strip_named(headers);
    remove_fields(headers, |name| is_hop_by_hop(name.as_str()));
}

fn strip_named(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
}

/// Prepares a client's head for the backend. Removes names with an underscore, too: some servers read it as a
/// dash, so that `Content_Length` would count as a length. llama-server uses no such name.
pub(crate) fn prepare_for_backend(headers: &mut HeaderMap, request_id: &HeaderValue) {
    strip_named(headers);
    remove_fields(headers, |name| {
        let name = name.as_str();
        is_hop_by_hop(name) || is_client_only(name) || name.contains('_')
    });
    // The host name that clients use means nothing to the backend.
    headers.insert(header::HOST, HeaderValue::from_static("localhost"));
    headers.insert(REQUEST_ID, request_id.clone());
}

/// Returns the id under which llama-server keeps a stream for later reading, and generates even after its
/// client has left. Only drop-in mode passes this id on.
pub(crate) fn stream_conversation_id(headers: &HeaderMap) -> Option<HeaderValue> {
    headers.get(CONVERSATION_ID).cloned()
}

/// Sets the id from [`stream_conversation_id`]. Call this after [`prepare_for_backend`].
pub(crate) fn set_stream_conversation_id(headers: &mut HeaderMap, conversation: Option<HeaderValue>) {
    if let Some(value) = conversation {
        headers.insert(CONVERSATION_ID, value);
    }
}

/// Prepares a backend's head for the client. An answer without a body keeps the resource's length.
pub(crate) fn prepare_for_client(headers: &mut HeaderMap, request_id: &HeaderValue, has_body: bool) {
    strip_hop_by_hop(headers);
    if has_body {
        headers.remove(CONTENT_LENGTH);
    }
    headers.insert(REQUEST_ID, request_id.clone());
}

/// Returns the client's request id if it has 1 to 128 visible ASCII characters, as logs and backends need.
pub(crate) fn given_request_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let value = headers.get(REQUEST_ID)?;
    let bytes = value.as_bytes();
    ((1..=128).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)).then(|| value.clone())
}

const USER_AGENT_CHARS: usize = 200;

/// Returns the `User-Agent` for logs, shortened and without control characters.
pub(crate) fn user_agent(headers: &HeaderMap) -> Option<Box<str>> {
    let value = headers.get(header::USER_AGENT)?.as_bytes();
    // A character has at most four bytes.
    let text = String::from_utf8_lossy(&value[..value.len().min(4 * USER_AGENT_CHARS)]);
    let plain = |char: char| if char.is_control() { char::REPLACEMENT_CHARACTER } else { char };
    Some(text.chars().take(USER_AGENT_CHARS).map(plain).collect::<String>().into_boxed_str())
}

pub(crate) fn fresh_request_id() -> HeaderValue {
    let mut digits = [0; 32];
    // 16 bytes always have 32 digits, and digits are a valid value.
    let _fits = hex::encode_to_slice(rand::random::<u128>().to_be_bytes(), &mut digits);
    HeaderValue::from_bytes(&digits).unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

pub(crate) fn is_events(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.as_bytes().first_chunk::<17>());
    kind.is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        fields
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    #[test]
    fn what_belongs_to_the_connection_ends_with_it() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-Secret"),
            ("Connection", "x-other ,, te"),
            ("x-secret", "1"),
            ("x-other", "2"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("te", "trailers"),
            ("trailer", "x-sum"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("accept", "*/*"),
            ("x-kept", "3"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("accept", "*/*"), ("x-kept", "3")]));
    }

    #[test]
    fn the_backend_gets_our_host_and_id_and_no_framing() {
        let id = HeaderValue::from_static("r1");
        let mut headers = map(&[
            ("host", "evil.example"),
            ("host", "second.example"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("x-conversation-id", "c"),
            ("x-request-id", "theirs"),
            ("content_length", "7"),
            ("connection", "x-named"),
            ("x-named", "1"),
            ("keep-alive", "1"),
            ("authorization", "Bearer k"),
        ]);
        prepare_for_backend(&mut headers, &id);
        let expected = map(&[("authorization", "Bearer k"), ("host", "localhost"), ("x-request-id", "r1")]);
        assert_eq!(headers, expected);
    }

    #[test]
    fn the_length_stays_only_where_there_is_no_body() {
        let id = HeaderValue::from_static("r1");
        let mut headers = map(&[("content-length", "5"), ("connection", "close")]);
        prepare_for_client(&mut headers, &id, false);
        assert_eq!(headers, map(&[("content-length", "5"), ("x-request-id", "r1")]));
        prepare_for_client(&mut headers, &id, true);
        assert_eq!(headers, map(&[("x-request-id", "r1")]));
    }

    #[test]
    fn only_a_sane_request_id_is_taken_over() {
        for (given, taken) in
            [("abc-123", true), ("", false), ("a b", false), ("\u{fc}", false), (&"x".repeat(129), false)]
        {
            assert_eq!(given_request_id(&map(&[("x-request-id", given)])).is_some(), taken, "{given:?}");
        }
        assert_ne!(fresh_request_id(), fresh_request_id());
        assert_eq!(fresh_request_id().len(), 32);
    }

    #[test]
    fn what_a_client_calls_itself_is_kept_without_control_characters_and_not_at_any_length() {
        let kept = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(header::USER_AGENT, HeaderValue::from_bytes(value).unwrap());
            user_agent(&headers).unwrap().into_string()
        };
        assert_eq!(user_agent(&HeaderMap::new()), None);
        assert_eq!(kept(b"openai-python/1.0 \"x\""), "openai-python/1.0 \"x\"");
        // A tab, a C1 control character (such as the first of ESC [), and a byte that is not UTF-8.
        assert_eq!(kept(b"a\tb\xc2\x9b31m\xff"), "a\u{fffd}b\u{fffd}31m\u{fffd}");
        assert_eq!(kept(&[b'a'; 5000]).len(), 200);
        assert_eq!(kept("\u{1f600}".repeat(300).as_bytes()).chars().count(), 200);
    }

    proptest! {
        #[test]
        fn nothing_named_in_connection_survives(
            names in proptest::collection::vec("[a-z][a-z0-9-]{0,8}", 1..6), junk in "[ -~]{0,40}",
        ) {
            let mut headers = HeaderMap::new();
            for name in &names {
                headers.insert(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_static("v"));
            }
            let list = format!("{},{junk}", names.join(" , "));
            headers.insert(CONNECTION, HeaderValue::from_str(&list).unwrap());
            strip_hop_by_hop(&mut headers);
            for name in &names {
                prop_assert!(!headers.contains_key(name.as_str()), "{} in {}", name, list);
            }
        }
    }
}
