//! The path prefix of all routes, like llama-server's `--api-prefix`. The prefix is removed before anything
//! else reads a request, so that all other code works without it.

use http::Uri;
use http::uri::PathAndQuery;

/// Returns a target without the prefix; `None` if it does not begin with the prefix.
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
