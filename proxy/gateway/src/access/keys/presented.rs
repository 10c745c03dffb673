//! Finds the key in a request's headers, and removes it before anything is sent upstream.
//!
//! | header | who sends it |
//! |---|---|
//! | `Authorization: Bearer KEY` | OpenAI's clients, llama-server's own |
//! | `x-api-key: KEY` | Anthropic's clients; llama-server accepts it, too |
//! | `api-key: KEY` | Azure's clients |
//! | `Authorization: Basic ...` | `curl -u :KEY`, or a URL with a password; the password is the key |
//! | `Authorization: KEY` | other clients; llama-server accepts this, too |

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, PROXY_AUTHORIZATION};

use crate::protocol::headers;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const API_KEY: HeaderName = HeaderName::from_static("api-key");
static KEY_HEADERS: [HeaderName; 4] = [AUTHORIZATION, PROXY_AUTHORIZATION, X_API_KEY, API_KEY];

/// Returns every key in the headers. Some clients send a placeholder in one header and the key in another.
pub(super) fn presented_keys(headers: &HeaderMap) -> impl Iterator<Item = Cow<'_, [u8]>> {
    let authorization = headers.get(AUTHORIZATION).and_then(|value| key_in_authorization(value.as_bytes()));
    let plain = [X_API_KEY, API_KEY]
        .into_iter()
        .filter_map(|name| headers.get(name))
        .map(|value| Cow::Borrowed(value.as_bytes().trim_ascii()));
    authorization.into_iter().chain(plain).filter(|key| !key.is_empty())
}

fn key_in_authorization(value: &[u8]) -> Option<Cow<'_, [u8]>> {
    let value = value.trim_ascii();
    let Some(space) = value.iter().position(|byte| *byte == b' ') else {
        // A scheme with nothing after it is not a key.
        let is_scheme = [&b"bearer"[..], b"basic"].iter().any(|scheme| value.eq_ignore_ascii_case(scheme));
        return (!is_scheme).then_some(Cow::Borrowed(value));
    };
    let scheme = &value[..space];
    let rest = value[space..].trim_ascii();
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(Cow::Borrowed(rest));
    }
    if scheme.eq_ignore_ascii_case(b"basic") {
        let mut pair = STANDARD.decode(rest).ok()?;
        let colon = pair.iter().position(|byte| *byte == b':')?;
        pair.drain(..=colon);
        return Some(Cow::Owned(pair));
    }
    None
}

pub(crate) fn strip_key_headers(headers: &mut HeaderMap) {
    headers::remove_fields(headers, |name| KEY_HEADERS.contains(name));
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::header::HeaderValue;

    fn found(fields: &[(&'static str, &str)]) -> Vec<String> {
        let headers: HeaderMap = fields
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect();
        presented_keys(&headers).map(|key| String::from_utf8(key.into_owned()).unwrap()).collect()
    }

    #[test]
    fn a_key_is_found_wherever_clients_put_it() {
        for (name, value, key) in [
            ("authorization", "Bearer k", "k"),
            ("authorization", "bearer   k ", "k"),
            ("authorization", "k", "k"),
            ("authorization", "Basic dXNlcjpwOnE=", "p:q"),
            ("authorization", "basic Oms=", "k"),
            ("x-api-key", "k", "k"),
            ("api-key", " k ", "k"),
        ] {
            assert_eq!(found(&[(name, value)]), [key], "{name}: {value}");
        }
    }

    #[test]
    fn several_are_all_looked_at_and_none_is_none() {
        let both = [("api-key", "c"), ("x-api-key", "b"), ("authorization", "Bearer a")];
        assert_eq!(found(&both), ["a", "b", "c"]);
        for value in ["Bearer", "Bearer ", "", "Digest x", "Basic !", "Basic dXNlcg=="] {
            assert_eq!(found(&[("authorization", value)]), Vec::<String>::new(), "{value}");
        }
        assert_eq!(found(&[("authorization", "Bearer "), ("x-api-key", "k")]), ["k"]);
    }

    #[test]
    fn nothing_that_may_hold_a_key_stays() {
        let mut headers = HeaderMap::new();
        for name in ["authorization", "proxy-authorization", "x-api-key", "api-key", "accept"] {
            headers.append(name, HeaderValue::from_static("k"));
            headers.append(name, HeaderValue::from_static("again"));
        }
        strip_key_headers(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
    }
}
