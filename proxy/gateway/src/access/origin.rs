//! CSRF protection. A browser sends form-like requests of any page without a preflight, and only hides the
//! answers from the page. llama-server accepts a body of any content type, so it would execute them. If
//! `cors` lists pages, the gateway refuses requests of other pages, by headers that browsers set and pages
//! cannot. With `"mirror"` every page is allowed.
//!
//! ```text
//!   POST and the like --Sec-Fetch-Site: same-origin, none--> pass
//!      |  another --> is its Origin listed in `cors`? --> pass, or refused
//!      |  none (a browser that uses plain HTTP to an address, or no browser)
//!      +---- no Origin, one listed in `cors`, or the requested host --> pass; else refused
//! ```

use http::Version;
use http::header::{HOST, HeaderName, HeaderValue, ORIGIN};
use http::request::Parts;
use http::uri::Authority;
use warden_policies::{AllowedOrigins, HostNames};

use crate::refusal::RequestRefusal;

/// Header set by browsers; a page cannot change it.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

pub(crate) fn check_origin(origins: &AllowedOrigins, parts: &Parts) -> Result<(), RequestRefusal> {
    if *origins == AllowedOrigins::Mirror || parts.method.is_safe() {
        return Ok(());
    }
    let origin = parts.headers.get(ORIGIN);
    let is_known =
        || origin.and_then(|origin| origin.to_str().ok()).is_some_and(|origin| origins.allow(origin));
    let is_ours = match parts.headers.get(SEC_FETCH_SITE).map(HeaderValue::as_bytes) {
        Some(site) => matches!(site, b"same-origin" | b"none"),
        None => origin.is_none_or(|origin| is_same_host(origin, parts)),
    };
    if is_ours || is_known() { Ok(()) } else { Err(RequestRefusal::Origin) }
}

fn is_same_host(origin: &HeaderValue, parts: &Parts) -> bool {
    let host = requested_host(parts);
    let page = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|page| page.1.as_bytes());
    page.zip(host).is_some_and(|(page, host)| page.eq_ignore_ascii_case(host))
}

/// Returns the requested host as the client wrote it. An absolute target takes precedence over `Host` (RFC
/// 9112 section 3.2.2); requests in which the two differ were refused before.
pub(crate) fn requested_host(parts: &Parts) -> Option<&[u8]> {
    match parts.uri.authority() {
        Some(authority) => Some(authority.as_str().as_bytes()),
        None => parts.headers.get(HOST).map(HeaderValue::as_bytes),
    }
}

/// Refuses a request for an unlisted host. A request without a host cannot come from a browser and passes.
pub(crate) fn check_host(names: &HostNames, parts: &Parts) -> Result<(), RequestRefusal> {
    if *names == HostNames::Any {
        return Ok(());
    }
    match requested_host(parts).and_then(|host| Authority::try_from(host).ok()) {
        Some(host) if names.allow(host.host()) => Ok(()),
        Some(host) => Err(RequestRefusal::Name(host.host().to_owned())),
        None if parts.version < Version::HTTP_11 && !parts.headers.contains_key(HOST) => Ok(()),
        None => Err(RequestRefusal::Host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn passes(cors: &[&str], method: &str, fields: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().method(method).uri("/completion").header("host", "h:8080");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        check_origin(&AllowedOrigins::parse(cors).unwrap(), &parts).is_ok()
    }

    #[test]
    fn what_a_page_that_may_not_call_sends_unasked_is_refused() {
        let evil = ("origin", "https://evil.example");
        let listed = ("origin", "https://app.example");
        let own = ("origin", "http://h:8080");
        let site = |site| ("sec-fetch-site", site);
        for cors in [&["https://app.example"][..], &["off"]] {
            let is_list = cors != ["off"];
            for (fields, passed) in [
                (&[][..], true),
                (&[evil], false),
                (&[("origin", "null")], false),
                (&[own], true),
                (&[("origin", "http://h:8081")], false),
                (&[listed], is_list),
                (&[listed, site("cross-site")], is_list),
                (&[evil, site("cross-site")], false),
                (&[evil, site("same-site")], false),
                (&[site("cross-site")], false),
                // A proxy sends another host than the browser's.
                (&[("origin", "https://llm.example"), site("same-origin")], true),
                (&[site("none")], true),
            ] {
                for method in ["POST", "PUT", "DELETE"] {
                    assert_eq!(passes(cors, method, fields), passed, "{cors:?} {method} {fields:?}");
                }
                assert!(passes(cors, "GET", fields) && passes(cors, "OPTIONS", fields));
            }
        }
        assert!(passes(&["mirror"], "POST", &[evil, site("cross-site")]));
    }
}
