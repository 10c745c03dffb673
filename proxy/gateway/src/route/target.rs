//! Reads the model name in a request target: in the path `/upstream/<model>/...`, whose remainder is passed
//! on unchanged, or in the query parameter `model`. Changes nothing but the model name.
//!
//! ```text
//!   /upstream/org/name/v1/chat/completions?x=1   ->  model `org/name`,  /v1/chat/completions?x=1
//!   /upstream/org%2Fname/slots/0                 ->  model `org/name`,  /slots/0
//! ```
//!
//! A name may have slashes, so the longest name or alias that matches whole segments counts.

use http::Uri;
use http::uri::{InvalidUri, PathAndQuery};
use warden_supervisor::FleetView;

use crate::protocol::query;
use crate::refusal::RequestRefusal;

const UPSTREAM_PREFIX: &str = "/upstream/";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModelPath {
    /// Requested name or alias.
    pub(crate) name: String,
    /// Target for the backend: path and query after the name.
    pub(crate) target: PathAndQuery,
    /// True if nothing follows the name, not even a slash.
    pub(crate) is_bare: bool,
}

pub(crate) fn is_upstream(path: &str) -> bool {
    path.starts_with(UPSTREAM_PREFIX)
}

/// Returns the target for a backend: path and query. An absolute target may have a query without a path,
/// which means `/` (RFC 9110 section 4.2.3). The gateway itself answers targets such as `OPTIONS *`.
pub(crate) fn origin_form(uri: &Uri) -> Result<Uri, InvalidUri> {
    let target = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    match target.as_bytes().first() {
        Some(b'/') => Uri::try_from(target),
        Some(b'?') => Uri::try_from(format!("/{target}")),
        _ => Ok(Uri::from_static("/")),
    }
}

/// Returns the model that a path names, and the target for the backend. `any_name` accepts the first segment
/// if nothing else matches. `more` has further names of models.
pub(crate) fn parse_upstream<'a>(
    uri: &Uri,
    fleet: &'a FleetView,
    more: &(impl Iterator<Item = &'a str> + Clone),
    any_name: bool,
) -> Result<ModelPath, RequestRefusal> {
    let raw = uri.path().strip_prefix(UPSTREAM_PREFIX).unwrap_or_default();
    let names = || {
        let models = fleet.models.iter().flat_map(|model| model.names());
        models.chain(more.clone())
    };
    // A percent-encoded byte takes three bytes.
    let longest = names().map(str::len).max().unwrap_or(0) * 3;
    let ends = raw.match_indices('/').map(|(at, _)| at).chain(std::iter::once(raw.len()));
    let found = ends
        .take_while(|end| *end <= longest)
        .filter_map(|end| Some((query::percent_decoded(&raw[..end])?, end)))
        .filter(|(name, _)| names().any(|known| known == name))
        .last();
    let first = || {
        let end = raw.find('/').unwrap_or(raw.len());
        query::percent_decoded(&raw[..end])
            .filter(|name| any_name && !name.is_empty())
            .map(|name| (name, end))
    };
    let Some((name, end)) = found.or_else(first) else {
        let known = fleet.models.iter().map(|model| model.name.to_string()).collect();
        return Err(RequestRefusal::Upstream { known });
    };
    let rest = &raw[end..];
    let target = match (rest, uri.query()) {
        ("", None) => "/".to_owned(),
        ("", Some(query)) => format!("/?{query}"),
        (rest, None) => rest.to_owned(),
        (rest, Some(query)) => format!("{rest}?{query}"),
    };
    let target = PathAndQuery::try_from(target).map_err(|_| RequestRefusal::Host)?;
    Ok(ModelPath { name, target, is_bare: rest.is_empty() })
}

/// Appends a slash to a path: without it, a browser resolves relative links wrongly.
pub(crate) fn with_slash(uri: &Uri) -> String {
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    format!("{}/{query}", uri.path())
}

/// Replaces the value of each `model` in the query of a target; everything else keeps its spelling.
pub(crate) fn with_model(target: &PathAndQuery, model: &str) -> Option<PathAndQuery> {
    let query = target.query()?;
    let is_model = |pair: &str| {
        query::decoded_key(pair.split_once('=').map_or(pair, |pair| pair.0)) == Some("model".to_owned())
    };
    if !query.split('&').any(is_model) {
        return None;
    }
    let pairs = query.split('&').map(|pair| {
        if is_model(pair) {
            let key = pair.split_once('=').map_or(pair, |pair| pair.0);
            format!("{key}={}", query::encode(model))
        } else {
            pair.to_owned()
        }
    });
    PathAndQuery::try_from(format!("{}?{}", target.path(), pairs.collect::<Vec<_>>().join("&"))).ok()
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
