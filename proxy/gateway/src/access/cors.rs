//! CORS (Fetch standard): which web pages may send requests, and the headers that browsers check.
//!
//! The gateway replaces a backend's own CORS headers, so that all answers have the same ones. With `mirror`
//! and without keys, the headers are exactly llama-server's. Otherwise a browser learns the methods that the
//! gateway serves, and never sends cookies or passwords by itself: the page has to know the key.

use std::time::Duration;

use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, HeaderMap, HeaderName, HeaderValue, ORIGIN, VARY,
};
use warden_policies::AllowedOrigins;

use crate::protocol::headers;

const REQUEST_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");

static CORS_HEADERS: [HeaderName; 7] = [
    ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_ALLOW_CREDENTIALS,
    ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_HEADERS,
    ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_MAX_AGE,
    ALLOW_PRIVATE_NETWORK,
];

/// Response headers that scripts may read, apart from the CORS-safelisted ones.
const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static(
    "x-request-id, retry-after, retry-after-ms, x-warden-executed, x-warden-continued, x-warden-conversation",
);
/// Allowed methods as llama-server lists them, used while the headers equal llama-server's.
const PLAIN_METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
/// Methods for which llama-server has routes.
const ALLOWED_METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, DELETE");
/// Allowed request headers for a preflight that lists none: those of usual clients.
const DEFAULT_ALLOWED_HEADERS: HeaderValue =
    HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id");

/// CORS settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorsConfig {
    /// Origins of the pages that may send requests.
    pub origins: AllowedOrigins,
    /// Time for which browsers may cache the answer to a preflight.
    pub max_age: Duration,
    /// Keys are required.
    pub with_keys: bool,
}

impl Default for CorsConfig {
    fn default() -> Self {
        Self { origins: AllowedOrigins::Mirror, max_age: Duration::ZERO, with_keys: false }
    }
}

impl CorsConfig {
    pub(crate) fn is_like_llama_server(&self) -> bool {
        self.origins == AllowedOrigins::Mirror && !self.with_keys
    }

    fn allows(&self, origin: &HeaderValue) -> bool {
        match &self.origins {
            AllowedOrigins::Mirror => true,
            origins => origin.to_str().is_ok_and(|origin| origins.allow(origin)),
        }
    }

    /// Adds the CORS headers to an answer. A backend's answer must go through [`strip_cors_headers`] first.
    pub(crate) fn add_headers(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        if self.origins == AllowedOrigins::Off {
            return;
        }
        // Caches must not reuse the answer to one origin for another.
        headers.append(VARY, HeaderValue::from_static("Origin"));
        if let Some(origin) = origin.filter(|origin| self.allows(origin)) {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
        }
    }

    /// Returns the headers of the answer to a preflight. A page that is not allowed learns nothing.
    pub(crate) fn preflight_headers(&self, asked: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if self.is_like_llama_server() {
            headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            headers.insert(ACCESS_CONTROL_ALLOW_METHODS, PLAIN_METHODS);
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("*"));
        } else if asked.get(ORIGIN).is_some_and(|origin| self.allows(origin)) {
            headers.insert(ACCESS_CONTROL_ALLOW_METHODS, ALLOWED_METHODS);
            // `*` does not cover Authorization, so list the headers.
            let wanted =
                asked.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned().unwrap_or(DEFAULT_ALLOWED_HEADERS);
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted);
            headers.append(VARY, HeaderValue::from_static("Access-Control-Request-Headers"));
            if matches!(self.origins, AllowedOrigins::Only(_)) && asked.contains_key(REQUEST_PRIVATE_NETWORK)
            {
                headers.insert(ALLOW_PRIVATE_NETWORK, HeaderValue::from_static("true"));
            }
        } else {
            return headers;
        }
        if !self.max_age.is_zero() {
            headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from(self.max_age.as_secs()));
        }
        headers
    }
}

pub(crate) fn strip_cors_headers(headers: &mut HeaderMap) {
    headers::remove_fields(headers, |name| CORS_HEADERS.contains(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(origins: &[&str], with_keys: bool) -> CorsConfig {
        CorsConfig {
            origins: AllowedOrigins::parse(origins).unwrap(),
            max_age: Duration::from_secs(600),
            with_keys,
        }
    }

    fn asking(origin: &'static str) -> HeaderMap {
        let fields = [
            (ORIGIN, origin),
            (ACCESS_CONTROL_REQUEST_HEADERS, "authorization,x-stainless-lang"),
            (REQUEST_PRIVATE_NETWORK, "true"),
        ];
        fields.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
    }

    fn answer(cors: &CorsConfig, origin: &'static str) -> HeaderMap {
        let asked = asking(origin);
        let mut headers = cors.preflight_headers(&asked);
        cors.add_headers(asked.get(ORIGIN), &mut headers);
        headers
    }

    fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
        headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    #[test]
    fn mirrored_without_keys_it_is_llama_servers_own_answer() {
        let headers = answer(&cors(&["mirror"], false), "https://any.example");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_ORIGIN), "https://any.example");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_CREDENTIALS), "true");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_METHODS), "GET, POST, DELETE, OPTIONS");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_HEADERS), "*");
        assert_eq!(text(&headers, &ACCESS_CONTROL_MAX_AGE), "600");
        assert_eq!(text(&headers, &VARY), "Origin");
    }

    #[test]
    fn with_keys_nothing_is_sent_by_a_browser_on_its_own() {
        let headers = answer(&cors(&["mirror"], true), "https://any.example");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_ORIGIN), "https://any.example");
        assert!(!headers.contains_key(ACCESS_CONTROL_ALLOW_CREDENTIALS));
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_HEADERS), "authorization,x-stainless-lang");
        assert!(!headers.contains_key(ALLOW_PRIVATE_NETWORK));
    }

    #[test]
    fn with_a_list_others_learn_nothing() {
        let cors = cors(&["https://app.example"], false);
        let headers = answer(&cors, "https://app.example");
        assert_eq!(text(&headers, &ACCESS_CONTROL_ALLOW_ORIGIN), "https://app.example");
        assert_eq!(text(&headers, &ALLOW_PRIVATE_NETWORK), "true");
        let headers = answer(&cors, "https://evil.example");
        assert_eq!(headers.keys().collect::<Vec<_>>(), [VARY]);
        let mut headers = HeaderMap::new();
        cors.add_headers(None, &mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), [VARY], "also for those who do not ask");
    }

    #[test]
    fn off_is_off_and_what_a_backend_says_goes() {
        assert!(answer(&cors(&["off"], true), "https://any.example").is_empty());
        let mut headers = answer(&cors(&["mirror"], false), "https://any.example");
        headers.insert("content-type", HeaderValue::from_static("x"));
        strip_cors_headers(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-type", "vary"]);
    }
}
