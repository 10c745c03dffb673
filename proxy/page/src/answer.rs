//! Answers of the page and their security headers: only the page's own scripts run, only its own files
//! load, and no site may frame the page. A browser stores only files that never change.

use std::fmt::Display;
use std::sync::LazyLock;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use warden_admin::response::AdminBody;
use warden_admin::series::answer::MemoryData;

use crate::files::{self, PageFile, gzip};
use crate::guard::FETCH_SITE;
use crate::hub::RenderedView;
use crate::memory;

/// Allows the page's own inline style, its script, its event stream, and an inline icon.
static PAGE_CSP: LazyLock<String> = LazyLock::new(|| {
    let style = &files::page_files().style.digest;
    format!(
        "default-src 'none'; script-src 'self'; style-src '{style}'; img-src 'self' data:; connect-src 'self'; \
         form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
});
/// Content security policy of a self-contained file: only its inline style; it is isolated from the page's
/// origin.
const FILE_CSP: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'; \
                        base-uri 'none'";

/// Header that separates the page from the window that opened it; a browser then starts another process.
const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");

/// Least size in bytes of an answer that is compressed.
const MIN_COMPRESSED_BYTES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageContent {
    Page,
    File,
    Json,
    Text,
    Stream,
}

impl PageContent {
    const fn media_type(self) -> &'static str {
        match self {
            Self::Page | Self::File => "text/html; charset=utf-8",
            Self::Json => "application/json",
            Self::Text => "text/plain; charset=utf-8",
            Self::Stream => "text/event-stream",
        }
    }
}

/// Limits the referrer to the page; with `no-referrer`, browsers would send forms without their origin.
fn set_security_headers(headers: &mut HeaderMap, policy: &'static str) {
    let all: [(HeaderName, &'static str); 6] = [
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "same-origin"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (OPENER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in all {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

pub(crate) fn page_response(status: StatusCode, kind: PageContent, body: AdminBody) -> Response<AdminBody> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind.media_type()));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    set_security_headers(headers, if kind == PageContent::File { FILE_CSP } else { &PAGE_CSP });
    response
}

/// Builds an answer that browsers do not store. `asked`: request headers, if compression is allowed.
pub(crate) fn uncached_response(
    status: StatusCode,
    kind: PageContent,
    body: Bytes,
    asked: Option<&HeaderMap>,
) -> Response<AdminBody> {
    let small = asked.is_some_and(accepts_gzip) && body.len() > MIN_COMPRESSED_BYTES;
    let body = if small { gzip(&body, flate2::Compression::fast()) } else { body };
    let mut response = page_response(status, kind, full_body(body));
    if let Some(asked) = asked {
        let headers = response.headers_mut();
        headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
        if kind == PageContent::Page && !is_cross_site(asked) {
            headers.remove(OPENER_POLICY);
        }
    }
    if small {
        response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

pub(crate) fn download_response(data: &MemoryData) -> Response<AdminBody> {
    let mut response =
        uncached_response(StatusCode::OK, PageContent::File, memory::memory_file(data).into(), None);
    let name = format!("attachment; filename=\"{}\"", memory::memory_file_name(data));
    if let Ok(name) = HeaderValue::try_from(name) {
        response.headers_mut().insert(header::CONTENT_DISPOSITION, name);
    }
    response
}

/// Builds the answer with a view's refreshed part; the body is empty if the browser has this part.
pub(crate) fn part_response(part: &RenderedView, asked: &HeaderMap) -> Response<AdminBody> {
    let tag = format!("\"{}\"", part.tag);
    let has = asked.get(header::IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let small = accepts_gzip(asked);
    let mut response = if has {
        page_response(StatusCode::NOT_MODIFIED, PageContent::Page, full_body(Bytes::new()))
    } else {
        page_response(
            StatusCode::OK,
            PageContent::Page,
            full_body(if small { part.gzip.clone() } else { part.plain.clone() }),
        )
    };
    let headers = response.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if small && !has {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    if let Ok(tag) = HeaderValue::try_from(tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

/// Builds the answer with a file that never changes, because its name contains a hash of its content.
pub(crate) fn file_response(file: &PageFile, asked: &HeaderMap) -> Response<AdminBody> {
    let small = accepts_gzip(asked);
    let mut response = Response::new(full_body(if small { file.gzip.clone() } else { file.plain.clone() }));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(file.kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=31536000, immutable"));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if small {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    set_security_headers(headers, &PAGE_CSP);
    response
}

/// Redirects to another path of the page, to be requested by GET.
pub(crate) fn redirect(to: &str) -> Response<AdminBody> {
    let mut response = page_response(StatusCode::SEE_OTHER, PageContent::Text, full_body(Bytes::new()));
    let to = HeaderValue::try_from(to).unwrap_or_else(|_| HeaderValue::from_static("/page/"));
    response.headers_mut().insert(header::LOCATION, to);
    response
}

pub(crate) fn refusal_response(status: StatusCode, why: &dyn Display) -> Response<AdminBody> {
    uncached_response(status, PageContent::Text, format!("{why}\n").into(), None)
}

fn full_body(body: Bytes) -> AdminBody {
    Full::new(body).boxed_unsync()
}

/// Returns whether a browser accepts gzip (RFC 9110 section 12.5.3).
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let all = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut codings = all.flat_map(|value| value.split(','));
    codings.any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let none = weight.trim().strip_prefix("q=").is_some_and(|q| q.trim_matches(['0', '.']).is_empty());
        name.trim().eq_ignore_ascii_case("gzip") && !none
    })
}

/// A browser sends `none` for a typed address or a bookmark; old browsers and programs send no header.
fn is_cross_site(asked: &HeaderMap) -> bool {
    let site = asked.get(FETCH_SITE).map(HeaderValue::as_bytes);
    !matches!(site, Some(b"none" | b"same-origin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_leaves_its_opener_unless_nobody_led_to_it() {
        for (site, leaves) in [
            (Some("none"), false),
            (Some("same-origin"), false),
            (Some("same-site"), true),
            (Some("cross-site"), true),
            (Some("None"), true),
            (None, true),
        ] {
            let asked: HeaderMap = site
                .map(|site| ("sec-fetch-site".parse().unwrap(), site.parse().unwrap()))
                .into_iter()
                .collect();
            let has = |kind, asked| {
                uncached_response(StatusCode::OK, kind, Bytes::new(), asked)
                    .headers()
                    .contains_key(OPENER_POLICY)
            };
            assert_eq!(has(PageContent::Page, Some(&asked)), leaves, "{site:?}");
            assert!(has(PageContent::Page, None) && has(PageContent::File, Some(&asked)), "{site:?}");
        }
    }

    #[test]
    fn a_browser_says_whether_it_takes_gzip() {
        for (value, takes) in [
            ("gzip, deflate, br", true),
            ("GZIP", true),
            ("br;q=1.0, gzip;q=0.5", true),
            ("gzip;q=0", false),
            ("gzip;q=0.000", false),
            ("identity", false),
            ("xgzip", false),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT_ENCODING, HeaderValue::from_static(value))]);
            assert_eq!(accepts_gzip(&headers), takes, "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }
}
