//! Decides which requests may open the page. Any site that is open in the operator's browser can send
//! requests to the admin address. So the headers that the browser sets are checked before anything else.
//! Pure.
//!
//! ```text
//!   every request   Host is a name of this machine's loopback (against DNS names that point to us)
//!                   Origin, if there is one, is the page's own
//!   GET             Sec-Fetch-Site: none, same-origin; from other sites only navigations to a page in a tab:
//!                   a GET changes nothing, no frame may hold the page, and the opener cannot look into it
//!   POST            Origin is present and the page's own, and the form has the token of this instance
//! ```
//!
//! On the public listener every host is allowed that the gateway accepts, and a session or a key gives access
//! (`door`). All other rules apply there as well.
//!
//! The other admin routes are for programs: they refuse requests with browser headers
//! (`warden_admin`).

use http::{HeaderMap, Method, header};

/// A header that no script can set.
pub(crate) const FETCH_SITE: &str = "sec-fetch-site";
const FETCH_MODE: &str = "sec-fetch-mode";
const FETCH_DEST: &str = "sec-fetch-dest";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PageRefusal {
    #[error(
        "the page is served for addresses of this machine, and not for `{0}`: open it as \
         http://127.0.0.1:PORT/page/, for another machine through `ssh -L PORT:127.0.0.1:PORT`"
    )]
    Host(String),
    #[error("another web page sent this request: open the page itself, by its address")]
    Elsewhere,
    #[error("a page of another origin sent this form: nothing was done")]
    Origin,
    #[error(
        "the form does not have the token of this instance, which changes at each start: nothing was done; load \
         the page again"
    )]
    Token,
    #[error("this is done by POST, from the page")]
    Method,
}

/// Returns the host without its port; empty if the port is invalid.
fn host_name(host: &str) -> &str {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((v6, rest)) => (if v6.parse::<std::net::Ipv6Addr>().is_ok() { v6 } else { "" }, rest),
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = |port: &str| {
        port.strip_prefix(':').is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
    };
    if port.is_empty() || is_port(port) { name } else { "" }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    // Replace a value that is no text by one that equals no keyword.
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

/// Checks a request for the page. `document`: the request is for a whole page, which may be opened in a tab.
pub(crate) fn check_request(method: &Method, headers: &HeaderMap, document: bool) -> Result<(), PageRefusal> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok()).unwrap_or_default();
    if hosts.next().is_some() || !is_loopback(host_name(host)) {
        return Err(PageRefusal::Host(host.chars().take(100).collect()));
    }
    check_browser_headers(method, headers, document, host, &["http://"])
}

/// Checks a request for the page on the public listener. The gateway has already accepted `host`. The origin
/// may be an `https` address even without TLS here, because a proxy in front may terminate TLS.
pub(crate) fn check_public_request(
    method: &Method,
    headers: &HeaderMap,
    document: bool,
    host: &str,
    tls: bool,
) -> Result<(), PageRefusal> {
    let schemes: &[&str] = if tls { &["https://"] } else { &["http://", "https://"] };
    check_browser_headers(method, headers, document, host, schemes)
}

fn check_browser_headers(
    method: &Method,
    headers: &HeaderMap,
    document: bool,
    host: &str,
    schemes: &[&str],
) -> Result<(), PageRefusal> {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let origin = origins.next();
    let is_own = |origin: &http::HeaderValue| {
        let page = origin
            .to_str()
            .ok()
            .and_then(|origin| schemes.iter().find_map(|scheme| origin.strip_prefix(scheme)));
        !host.is_empty() && page.is_some_and(|page| page.eq_ignore_ascii_case(host))
    };
    if origins.next().is_some() || origin.is_some_and(|origin| !is_own(origin)) {
        return Err(PageRefusal::Origin);
    }
    let reads = *method == Method::GET || *method == Method::HEAD;
    match header_text(headers, FETCH_SITE) {
        None | Some("none" | "same-origin") => {}
        Some(_) => {
            let opens = header_text(headers, FETCH_MODE) == Some("navigate")
                && header_text(headers, FETCH_DEST) == Some("document");
            if !(reads && document && opens) {
                return Err(if reads { PageRefusal::Elsewhere } else { PageRefusal::Origin });
            }
        }
    }
    if !reads && *method != Method::POST {
        return Err(PageRefusal::Method);
    }
    if !reads && origin.is_none() {
        return Err(PageRefusal::Origin);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: (&str, &str) = ("host", "127.0.0.1:9090");
    const OWN: (&str, &str) = ("origin", "http://127.0.0.1:9090");
    const SAME: (&str, &str) = (FETCH_SITE, "same-origin");

    fn judged(method: &str, fields: &[(&str, &str)]) -> Result<(), PageRefusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(http::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        check_request(&method.parse().unwrap(), &headers, true)
    }

    #[test]
    fn names_that_are_pointed_at_us_are_not_us() {
        for host in [
            "127.0.0.1:9090",
            "127.0.0.1",
            "127.1.2.3:1",
            "[::1]:9090",
            "[::1]",
            "localhost:9090",
            "LOCALHOST",
        ] {
            assert_eq!(judged("GET", &[("host", host)]), Ok(()), "{host}");
        }
        for host in [
            "evil.example:9090",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "127.0.0.1.",
            "",
            "[::2]:1",
            "10.0.0.1",
            "[::ffff:10.0.0.1]",
            "localhost@evil.example",
            "localhost:x@evil.example",
            "[::1].evil.example",
            "[localhost]",
            "[127.0.0.1]",
            "[::1]evil.example:80",
            "evil.example:9090@localhost",
            "0.0.0.0",
            "2130706433",
            "0x7f.1",
            "[::1",
            "localhost.",
        ] {
            assert!(matches!(judged("GET", &[("host", host)]), Err(PageRefusal::Host(_))), "{host}");
        }
        assert!(matches!(judged("GET", &[]), Err(PageRefusal::Host(_))));
        assert!(
            matches!(judged("GET", &[HOST, ("host", "evil.example")]), Err(PageRefusal::Host(_))),
            "two hosts"
        );
        assert!(matches!(judged("GET", &[HOST, HOST]), Err(PageRefusal::Host(_))), "also the same twice");
    }

    #[test]
    fn what_other_pages_ask_for_is_refused_but_a_tab_may_be_opened() {
        assert_eq!(judged("GET", &[HOST, (FETCH_SITE, "none")]), Ok(()));
        assert_eq!(judged("GET", &[HOST, SAME]), Ok(()));
        assert_eq!(judged("HEAD", &[HOST, SAME, OWN]), Ok(()));
        for site in ["cross-site", "same-site", "", "Same-Origin", "none, cross-site"] {
            let from = (FETCH_SITE, site);
            assert_eq!(judged("GET", &[HOST, from]), Err(PageRefusal::Elsewhere), "{site}");
            let (opens, tab) = ((FETCH_MODE, "navigate"), (FETCH_DEST, "document"));
            assert_eq!(judged("GET", &[HOST, from, opens, tab]), Ok(()), "{site}");
            for other in [
                (FETCH_DEST, "iframe"),
                (FETCH_DEST, "empty"),
                (FETCH_DEST, "script"),
                (FETCH_DEST, "object"),
            ] {
                assert_eq!(
                    judged("GET", &[HOST, from, opens, other]),
                    Err(PageRefusal::Elsewhere),
                    "{site} {other:?}"
                );
            }
            assert_eq!(
                judged("GET", &[HOST, from, (FETCH_MODE, "no-cors"), tab]),
                Err(PageRefusal::Elsewhere)
            );
            assert_eq!(judged("POST", &[HOST, from, opens, tab, OWN]), Err(PageRefusal::Origin), "{site}");
        }
    }

    #[test]
    fn outside_the_origin_is_the_host_that_was_named_and_under_tls_nothing_without() {
        let judged = |method: &str, origin: Option<&str>, site: &str, tls: bool| {
            let mut headers = HeaderMap::new();
            headers.extend(origin.map(|origin| (header::ORIGIN, origin.parse().unwrap())));
            headers.insert(FETCH_SITE, site.parse().unwrap());
            check_public_request(&method.parse().unwrap(), &headers, true, "llm.example", tls)
        };
        for (origin, tls, passes) in [
            (Some("https://llm.example"), true, true),
            (Some("https://llm.example"), false, true),
            (Some("http://llm.example"), false, true),
            (Some("http://llm.example"), true, false),
            (Some("https://llm.example:8443"), true, false),
            (Some("https://llm.example.evil"), true, false),
            (Some("null"), false, false),
            (Some(""), false, false),
            (None, true, false),
        ] {
            assert_eq!(judged("POST", origin, "same-origin", tls).is_ok(), passes, "{origin:?} {tls}");
        }
        assert_eq!(judged("POST", Some("http://llm.example"), "cross-site", false), Err(PageRefusal::Origin));
        assert_eq!(judged("GET", None, "same-site", true), Err(PageRefusal::Elsewhere));
        let mut nobody = HeaderMap::new();
        nobody.insert(header::ORIGIN, "https://".parse().unwrap());
        assert!(check_public_request(&Method::POST, &nobody, true, "", true).is_err());
    }

    #[test]
    fn what_is_done_is_done_from_our_own_origin_only() {
        assert_eq!(judged("POST", &[HOST, OWN]), Ok(()));
        assert_eq!(judged("POST", &[HOST, OWN, SAME]), Ok(()));
        assert_eq!(judged("POST", &[HOST, SAME]), Err(PageRefusal::Origin), "no browser leaves it out");
        for origin in [
            "null",
            "http://evil.example",
            "https://127.0.0.1:9090",
            "http://127.0.0.1:9091",
            "http://127.0.0.1",
            "http://localhost:9090",
            "http://127.0.0.1:9090.evil.example",
            "http://127.0.0.1:9090/",
            "",
        ] {
            assert_eq!(judged("POST", &[HOST, ("origin", origin)]), Err(PageRefusal::Origin), "{origin}");
            assert_eq!(judged("GET", &[HOST, ("origin", origin)]), Err(PageRefusal::Origin), "{origin}");
        }
        assert_eq!(judged("POST", &[HOST, OWN, ("origin", "http://evil.example")]), Err(PageRefusal::Origin));
        for method in ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"] {
            assert_eq!(judged(method, &[HOST, OWN]), Err(PageRefusal::Method), "{method}");
        }
    }
}
