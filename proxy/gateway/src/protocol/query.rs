//! Request targets: percent-encoded text, and the path prefix of all routes.

use std::borrow::Cow;

use http::Uri;
use http::uri::PathAndQuery;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Characters that [`encode`] encodes.
const ENCODED_IN_VALUE: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

/// Returns the first value of `name`, decoded as in a form: `+` is a space. `None` if not UTF-8.
pub(crate) fn parameter(query: &str, name: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(key, true)? == name).then(|| decode(value, true)).flatten()
    })
}

/// Decodes one or several path segments, with encoded or plain slashes. `None` if two hexadecimal digits are
/// missing after a `%`, or the result is not UTF-8.
pub fn percent_decoded(text: &str) -> Option<String> {
    decode(text, false)
}

pub(crate) fn decoded_key(text: &str) -> Option<String> {
    decode(text, true)
}

/// Encodes a text as the value of a query: all but letters, digits and `-._~/` become `%XX`.
pub(crate) fn encode(text: &str) -> String {
    utf8_percent_encode(text, ENCODED_IN_VALUE).to_string()
}

/// Returns whether two hexadecimal digits follow each `%`. The library would leave any other `%` unchanged.
pub(crate) fn is_encoded(text: &[u8]) -> bool {
    memchr::memchr_iter(b'%', text)
        .all(|at| text.get(at + 1..at + 3).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)))
}

fn decode(text: &str, plus_is_space: bool) -> Option<String> {
    if !is_encoded(text.as_bytes()) {
        return None;
    }
    let text = if plus_is_space { Cow::Owned(text.replace('+', " ")) } else { Cow::Borrowed(text) };
    Some(percent_decode_str(&text).decode_utf8().ok()?.into_owned())
}

/// Removes the prefix from a target; `None` if the target has another beginning.
pub(crate) fn strip_prefix(uri: &Uri, prefix: &str) -> Option<Uri> {
    if prefix.is_empty() {
        return Some(uri.clone());
    }
    let rest = uri.path().strip_prefix(prefix)?;
    let path = match (rest, rest.starts_with('/')) {
        ("", _) => "/",
        (rest, true) => rest,
        _ => return None,
    };
    let target = match uri.query() {
        Some(query) => PathAndQuery::try_from(format!("{path}?{query}")),
        None => PathAndQuery::try_from(path),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_a_query_is_decoded() {
        for (query, model) in [
            ("model=a", Some("a")),
            ("x=1&model=org%2Fb+c&model=second", Some("org/b c")),
            ("mod%65l=a", Some("a")),
            ("model=", Some("")),
            ("model", Some("")),
            ("models=a", None),
            ("model=%zz", None),
            ("model=%+1", None),
            ("model=%ff", None),
            ("model=%f", None),
            ("", None),
        ] {
            assert_eq!(parameter(query, "model").as_deref(), model, "{query}");
        }
        assert_eq!(percent_decoded("org/a%2Bb+c").as_deref(), Some("org/a+b+c"));
    }
}

#[cfg(test)]
mod prefix_tests {
    use super::*;

    #[test]
    fn what_is_under_the_prefix_loses_it_and_nothing_else_is() {
        for (target, rest) in [
            ("/llm/v1/models?a=b", Some("/v1/models?a=b")),
            ("/llm", Some("/")),
            ("/llm?x", Some("/?x")),
            ("/llm/", Some("/")),
            ("/llm/llm/x", Some("/llm/x")),
            ("/llm//x%2Fy", Some("//x%2Fy")),
            ("/llms/v1", None),
            ("/v1/models", None),
            ("/", None),
            ("*", None),
            ("http://h:1/llm/props", Some("http://h:1/props")),
            ("http://h:1/props", None),
        ] {
            let stripped = strip_prefix(&target.parse().unwrap(), "/llm").map(|uri| uri.to_string());
            assert_eq!(stripped.as_deref(), rest, "{target}");
        }
        assert_eq!(strip_prefix(&"*".parse().unwrap(), "").unwrap().to_string(), "*");
    }
}
