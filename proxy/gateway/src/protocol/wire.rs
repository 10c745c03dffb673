//! Duties of an HTTP intermediary (RFC 9110, RFC 9112) that hyper leaves to the application: refuse messages
//! that two readers could understand differently, and sign messages with `Via`. Only `raw_head` reads raw
//! bytes.
//!
//! | duty | where |
//! |---|---|
//! | one length or one coding, never both, never two; no bare LF; no fragment | `raw_head`, here |
//! | exactly one valid `Host`, equal to the host of an absolute target | here |
//! | `Expect`: only `100-continue`, and never passed on | here; `headers` |
//! | `Via`, and refusing a message that this process has already forwarded | here |
//! | fields of one connection, both ways | `headers` |
//! | `CONNECT`, `TRACE` | `route` |
//! | an unambiguous length of an answer | here |

use std::sync::LazyLock;

use http::header::{CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderValue, TRANSFER_ENCODING, VIA};
use http::request::Parts;
use http::uri::Scheme;
use http::{Method, StatusCode, Version};
use http_body::Body;

use crate::protocol::{BodyFraming, HeadResult, WireError};

/// Checks a request's head. `seen` is the second reader's result for the same bytes.
pub(crate) fn check_request<B: Body>(parts: &Parts, body: &B, seen: HeadResult) -> Result<(), WireError> {
    // Refuse a request whose framing hyper and the second reader see differently.
    let agreed = match seen? {
        BodyFraming::None => body.is_end_stream(),
        BodyFraming::Length(length) => body.size_hint().exact() == Some(length),
        BodyFraming::Chunked => body.size_hint().exact().is_none(),
    };
    if !agreed {
        return Err(WireError::Unseen);
    }
    check_target(parts)?;
    let is_asked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    if parts.version >= Version::HTTP_11 && !parts.headers.get_all(EXPECT).iter().all(is_asked) {
        return Err(WireError::Expectation);
    }
    if is_loop(&parts.headers) {
        return Err(WireError::Loop);
    }
    Ok(())
}

/// Checks target and `Host` (RFC 9112 sections 3.2 and 3.3).
fn check_target(parts: &Parts) -> Result<(), WireError> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() || (host.is_none() && parts.version == Version::HTTP_11) {
        return Err(WireError::HostCount);
    }
    if !host.is_none_or(|host| is_host(host.as_bytes())) {
        return Err(WireError::Host);
    }
    if parts.method == Method::CONNECT {
        return Ok(());
    }
    let uri = &parts.uri;
    let is_form = match uri.path() {
        "*" => parts.method == Method::OPTIONS && uri.query().is_none(),
        path => path.starts_with('/'),
    };
    if !is_form {
        return Err(WireError::Target);
    }
    let Some(authority) = uri.authority() else { return Ok(()) };
    let Some(scheme) = uri.scheme().filter(|scheme| **scheme == Scheme::HTTP || **scheme == Scheme::HTTPS)
    else {
        return Err(WireError::Target);
    };
    if !is_host(authority.as_str().as_bytes()) {
        return Err(WireError::Host);
    }
    let same = |host: &HeaderValue| {
        let port: &[u8] = if *scheme == Scheme::HTTPS { b":443" } else { b":80" };
        let plain = |name| <[u8]>::strip_suffix(name, port).unwrap_or(name).to_ascii_lowercase();
        plain(host.as_bytes()) == plain(authority.as_str().as_bytes())
    };
    if host.is_none_or(same) { Ok(()) } else { Err(WireError::HostDiffers) }
}

/// Checks for `host [":" port]`. Refuses a comma, which may join two `Host` fields.
fn is_host(bytes: &[u8]) -> bool {
    let (host, port) = match bytes.iter().rposition(|byte| *byte == b':') {
        Some(at) if !bytes[at..].contains(&b']') => (&bytes[..at], &bytes[at + 1..]),
        _ => (bytes, &[][..]),
    };
    let is_name = match host.strip_prefix(b"[") {
        Some(inner) => inner.strip_suffix(b"]").is_some_and(|inner| {
            !inner.is_empty()
                && inner.iter().all(|byte| byte.is_ascii_alphanumeric() || b":.-_~%".contains(byte))
        }),
        None => host.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+;=".contains(byte)),
    };
    !host.is_empty() && is_name && port.iter().all(u8::is_ascii_digit)
}

/// Name of this process in `Via`; random, so that instances may be chained.
static VIA_NAME: LazyLock<String> =
    LazyLock::new(|| format!("llama-warden-{:012x}", rand::random::<u64>() >> 16));

/// Values of `Via` for messages received as HTTP/1.0 and HTTP/1.1.
static VIA_VALUES: LazyLock<[HeaderValue; 2]> = LazyLock::new(|| {
    ["1.0", "1.1"].map(|version| {
        HeaderValue::from_str(&format!("{version} {}", *VIA_NAME))
            .unwrap_or_else(|_| HeaderValue::from_static("1.1 llama-warden"))
    })
});

/// Adds `Via` to a message received in this version (RFC 9110 section 7.6.3).
pub(crate) fn add_via(headers: &mut HeaderMap, version: Version) {
    let [old, usual] = &*VIA_VALUES;
    let signature = match version {
        Version::HTTP_10 => old,
        _ => usual,
    };
    headers.append(VIA, signature.clone());
}

/// Returns whether this process has already forwarded the message.
fn is_loop(headers: &HeaderMap) -> bool {
    let name = VIA_NAME.as_bytes();
    headers.get_all(VIA).iter().any(|via| memchr::memmem::find(via.as_bytes(), name).is_some())
}

/// Checks that a backend's answer can be passed on. It cannot if its end is ambiguous (RFC 9112 section 6.3),
/// or if it switches to another protocol, which no request asked for. The caller then closes the backend
/// connection.
pub(crate) fn check_answer(status: StatusCode, headers: &HeaderMap) -> Result<(), &'static str> {
    if status.is_informational() {
        return Err("it switched protocols");
    }
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    let length = lengths.next();
    if lengths.next().is_some() || length.is_some_and(|length| length.as_bytes().contains(&b',')) {
        return Err("it has more than one Content-Length");
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if length.is_some() {
            return Err("it has both Content-Length and Transfer-Encoding");
        }
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return Err("it has a Transfer-Encoding other than chunked");
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
