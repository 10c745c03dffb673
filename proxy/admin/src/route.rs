//! The admin routes: maps method and path to a route, or to the reason for a refusal. Pure.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, Method, header};
use warden_gateway::percent_decoded;

use crate::canary::CanaryOrder;
use crate::query::QueryPairs;
use crate::requests::{self, RequestFilter};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AdminRoute {
    Status,
    Metrics,
    /// `GET /series`, with its query.
    Series(Option<String>),
    Events {
        /// Wait for further events.
        follow: bool,
    },
    Logs {
        model: String,
        follow: bool,
        /// Show likely secrets, too.
        reveal: bool,
    },
    Restart(String),
    Drain(String),
    /// `POST /drain`: asks load balancers to avoid the whole instance.
    DrainInstance {
        /// Withdraws an earlier request to avoid the instance.
        undo: bool,
    },
    Reclaim(String),
    /// `POST /models/{name}/pin` (`true`: keep the model loaded) and `/unpin` (`false`).
    Pin(String, bool),
    /// `GET`, `POST` or `DELETE /models/{name}/canary`
    Canary(String, CanaryOrder),
    Requests(Result<RequestFilter, String>),
    CancelRequest {
        id: String,
        /// Number that selects one of several requests with this id.
        number: Result<Option<u64>, String>,
    },
    /// `POST /quarantine/release` for all requests, `POST /quarantine/release/{which}` for a model or a
    /// fingerprint.
    Release(Option<String>),
    /// `POST /upgrade`, with the path of the program and the time limit.
    Upgrade(Result<(Option<PathBuf>, Option<Duration>), String>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteError {
    NotFound,
    /// The route exists only for the given other method.
    Method(&'static str),
}

pub(crate) const UPGRADE_PATH: &str = "/upgrade";

/// Prefix of paths that release one model or one fingerprint.
const RELEASE_PREFIX: &str = "/quarantine/release/";

const REQUEST_PREFIX: &str = "/requests/";

pub(crate) const ROUTE_LIST: &str = "\
    GET /status, GET /metrics, GET /events[?follow=1], \
    GET /series[?model=NAME&range=6h or from=UNIX&to=UNIX&points=N], \
    GET /models/NAME/logs[?follow=1&reveal=1], POST /drain[?undo=1], POST /models/NAME/restart, \
    POST /models/NAME/drain, POST /models/NAME/reclaim, POST /models/NAME/pin, POST /models/NAME/unpin, \
    GET, POST or DELETE /models/NAME/canary[?build=ID or binary=PATH&share=0.1], \
    GET /requests[?model=NAME&state=STATE&limit=COUNT], \
    POST /requests/ID/cancel[?number=NUMBER], POST /quarantine/release[/MODEL or /FINGERPRINT], \
    POST /upgrade[?to=PROGRAM&wait=60s], and for browsers GET /page/";

/// Parses a request. A model's name may contain slashes, plain or percent-encoded.
pub(crate) fn parse_route(
    method: &Method,
    path: &str,
    query: Option<&str>,
) -> Result<AdminRoute, RouteError> {
    let switches = QueryPairs::lenient(query);
    let asks = |name: &str| switches.is_set(name);
    let follow = asks("follow");
    let reveal = asks("reveal");
    let (route, wanted) = match path {
        "/status" => (AdminRoute::Status, "GET"),
        "/metrics" => (AdminRoute::Metrics, "GET"),
        "/events" => (AdminRoute::Events { follow }, "GET"),
        "/series" => (AdminRoute::Series(query.map(str::to_owned)), "GET"),
        "/quarantine/release" | "/quarantine/release/" => (AdminRoute::Release(None), "POST"),
        UPGRADE_PATH => (AdminRoute::Upgrade(parse_upgrade(query)), "POST"),
        "/drain" => (AdminRoute::DrainInstance { undo: asks("undo") }, "POST"),
        "/requests" => (AdminRoute::Requests(RequestFilter::from_query(query)), "GET"),
        _ if path.starts_with(REQUEST_PREFIX) => {
            let id = path[REQUEST_PREFIX.len()..].strip_suffix("/cancel").ok_or(RouteError::NotFound)?;
            let id = percent_decoded(id).filter(|id| !id.is_empty()).ok_or(RouteError::NotFound)?;
            (AdminRoute::CancelRequest { id, number: requests::number_from_query(query) }, "POST")
        }
        _ if path.starts_with(RELEASE_PREFIX) => {
            let which = percent_decoded(&path[RELEASE_PREFIX.len()..]).ok_or(RouteError::NotFound)?;
            (AdminRoute::Release(Some(which)), "POST")
        }
        _ => {
            let rest = path.strip_prefix("/models/").ok_or(RouteError::NotFound)?;
            let (name, verb) = rest.rsplit_once('/').ok_or(RouteError::NotFound)?;
            let model = percent_decoded(name).filter(|name| !name.is_empty()).ok_or(RouteError::NotFound)?;
            match verb {
                "logs" => (AdminRoute::Logs { model, follow, reveal }, "GET"),
                "restart" => (AdminRoute::Restart(model), "POST"),
                "drain" => (AdminRoute::Drain(model), "POST"),
                "reclaim" => (AdminRoute::Reclaim(model), "POST"),
                "pin" => (AdminRoute::Pin(model, true), "POST"),
                "unpin" => (AdminRoute::Pin(model, false), "POST"),
                "canary" => {
                    let order = CanaryOrder::from_method(method, query);
                    let order = order.ok_or(RouteError::Method("GET, POST or DELETE"))?;
                    return Ok(AdminRoute::Canary(model, order));
                }
                _ => return Err(RouteError::NotFound),
            }
        }
    };
    if method.as_str() == wanted { Ok(route) } else { Err(RouteError::Method(wanted)) }
}

fn parse_upgrade(query: Option<&str>) -> Result<(Option<PathBuf>, Option<Duration>), String> {
    let mut given = QueryPairs::strict(query)?;
    let to = given.take("to").map(PathBuf::from);
    let time =
        |text: String| warden_policies::defaults::parse_duration(&text).map_err(|error| error.to_string());
    let wait = given.take("wait").map(time).transpose()?;
    match given.unknown_name() {
        Some(name) => Err(format!("there is no `{name}`: it is `to=PROGRAM` and `wait=60s`")),
        None => Ok((to, wait)),
    }
}

pub(crate) fn has_browser_headers(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site")
}

/// Returns the requested host, unless it is a loopback address or `localhost`; empty if the request names
/// none. Over TCP, a foreign host shows that a web page in a browser sent the request: a page can reach
/// loopback addresses under a host name of its own, and an API key would not prevent that.
pub(crate) fn foreign_host(headers: &HeaderMap) -> Option<&str> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, _)) => v6,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    let loopback = name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    (!loopback && name != "localhost").then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::canary::CanaryRequest;

    fn get(path: &str) -> Result<AdminRoute, RouteError> {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        parse_route(&Method::GET, path, query)
    }

    #[test]
    fn routes_are_read_and_names_may_hold_anything() {
        assert_eq!(get("/status"), Ok(AdminRoute::Status));
        assert_eq!(get("/events?follow=1"), Ok(AdminRoute::Events { follow: true }));
        assert_eq!(
            get("/models/org/a%20b/logs"),
            Ok(AdminRoute::Logs { model: "org/a b".into(), follow: false, reveal: false })
        );
        assert_eq!(
            get("/models/org%2Fa/logs?x=1&follow&reveal=1"),
            Ok(AdminRoute::Logs { model: "org/a".into(), follow: true, reveal: true })
        );
        assert_eq!(
            parse_route(&Method::POST, "/quarantine/release/org%2Fa", None),
            Ok(AdminRoute::Release(Some("org/a".into())))
        );
        assert_eq!(
            parse_route(&Method::POST, "/models/org%2Fa/unpin", None),
            Ok(AdminRoute::Pin("org/a".into(), false))
        );
        assert_eq!(get("/models/a/pin"), Err(RouteError::Method("POST")));
        let canary = |method: &Method| parse_route(method, "/models/org%2Fa/canary", Some("build=x"));
        assert_eq!(canary(&Method::GET), Ok(AdminRoute::Canary("org/a".into(), CanaryOrder::Show)));
        assert_eq!(canary(&Method::DELETE), Ok(AdminRoute::Canary("org/a".into(), CanaryOrder::Stop)));
        let start = CanaryOrder::Start(CanaryRequest::from_query(Some("build=x")));
        assert_eq!(canary(&Method::POST), Ok(AdminRoute::Canary("org/a".into(), start)));
        assert_eq!(canary(&Method::PUT), Err(RouteError::Method("GET, POST or DELETE")));
        assert_eq!(parse_route(&Method::POST, "/quarantine/release", None), Ok(AdminRoute::Release(None)));
        assert_eq!(get("/requests"), Ok(AdminRoute::Requests(Ok(RequestFilter::default()))));
        let cancel = parse_route(&Method::POST, "/requests/a%2Fb/c/cancel", Some("number=5"));
        assert_eq!(cancel, Ok(AdminRoute::CancelRequest { id: "a/b/c".into(), number: Ok(Some(5)) }));
        assert_eq!(get("/requests/a/cancel"), Err(RouteError::Method("POST")));
        assert_eq!(
            parse_route(&Method::POST, "/models/restart/restart", None),
            Ok(AdminRoute::Restart("restart".into()))
        );
    }

    #[test]
    fn what_is_no_route_says_so_and_a_wrong_method_names_the_right_one() {
        assert_eq!(get("/models/a/restart"), Err(RouteError::Method("POST")));
        assert_eq!(parse_route(&Method::POST, "/status", None), Err(RouteError::Method("GET")));
        for path in [
            "/",
            "/models",
            "/models/a",
            "/models//logs",
            "/models/%zz/logs",
            "/models/%/logs",
            "/v1/models",
            "/requests//cancel",
            "/requests/a",
        ] {
            assert_eq!(get(path), Err(RouteError::NotFound), "{path}");
        }
    }

    #[test]
    fn a_page_in_a_browser_is_told_from_a_program() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            pairs
                .iter()
                .map(|(name, value)| {
                    (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
                })
                .collect()
        };
        for own in ["127.0.0.1:9090", "[::1]:9090", "localhost"] {
            assert_eq!(foreign_host(&headers(&[("host", own)])), None);
        }
        assert_eq!(foreign_host(&headers(&[("host", "evil.example:9090")])), Some("evil.example:9090"));
        assert_eq!(foreign_host(&headers(&[])), Some(""));
        assert!(has_browser_headers(&headers(&[("host", "localhost"), ("origin", "http://evil.example")])));
    }
}
