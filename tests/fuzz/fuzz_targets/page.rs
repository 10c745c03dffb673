//! Any request for the page: a line with method and target, and a header in each further line. An accepted
//! request named this machine and, to act, came from its own origin; no redirect leads to another origin.
//!
//! The checks are private to the crate of the page, so this target includes their source files.
#![no_main]
#![allow(dead_code)]

#[path = "../../../proxy/page/src/guard.rs"]
mod guard;
#[cfg(test)]
#[path = "../../../proxy/admin/tests/fixtures/mutated.rs"]
mod mutated;
#[path = "../../../proxy/admin/src/query.rs"]
mod query;
#[path = "../../../proxy/page/src/view.rs"]
mod view;

use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use query::QueryPairs;
use reqwest::Url;
use view::{PageRoute, is_page_address, parse_path};

fn headers<'a>(lines: impl Iterator<Item = &'a str>) -> HeaderMap {
    let pairs = lines.filter_map(|line| line.split_once(": "));
    pairs.filter_map(|(name, value)| Some((HeaderName::try_from(name).ok()?, HeaderValue::try_from(value).ok()?))).collect()
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Checks a request that the local listener accepted.
fn is_ours(method: &Method, headers: &HeaderMap) {
    let host = text(headers, &header::HOST);
    // Parse the host as a browser does.
    if let Ok(read) = Url::parse(&format!("http://{host}/")) {
        let name = read.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let ip = name.parse::<std::net::IpAddr>();
        assert!(name == "localhost" || ip.is_ok_and(|ip| ip.is_loopback()), "{host} is {name}");
    }
    if *method == Method::POST {
        let origin = text(headers, &header::ORIGIN);
        assert!(origin.eq_ignore_ascii_case(&format!("http://{host}")), "{origin} at {host}");
    } else {
        assert!(method == Method::GET || method == Method::HEAD, "{method}");
    }
}

libfuzzer_sys::fuzz_target!(|asked: &str| {
    let mut lines = asked.lines();
    let (method, target) = lines.next().and_then(|line| line.split_once(' ')).unwrap_or_default();
    let (path, query) = target.split_once('?').map_or((target, None), |(path, query)| (path, Some(query)));
    let (Ok(method), headers) = (Method::from_bytes(method.as_bytes()), headers(lines)) else { return };
    if let Some(route) = parse_path(path) {
        if guard::check_request(&method, &headers, route.is_document()).is_ok() {
            is_ours(&method, &headers);
        }
        if let PageRoute::View(view) = route {
            assert!(view.path() == path || path == "/page/memory.html", "{path}");
        }
    }
    let asked = QueryPairs::lenient(query);
    if let Some(back) = asked.get("back").filter(|back| is_page_address(back)) {
        let page = Url::parse("http://127.0.0.1:9090/page/").expect("a constant");
        let to = page.join(back).expect("an address");
        assert_eq!(to.origin(), page.origin(), "{back}");
    }
});
