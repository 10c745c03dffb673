//! Allowed origins of web pages (CORS). Compares text only; the caller handles headers.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::words::one_or_several;

/// Web pages whose requests are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Pages of any origin: the origin is repeated in the CORS header, as llama-server does.
    #[default]
    Mirror,
    /// No pages: CORS headers are not sent.
    Off,
    /// Pages of these origins.
    Only(Vec<WebOrigin>),
}

/// An origin as sent by browsers: `https://app.example`, with a port unless it is the scheme's default.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WebOrigin(String);

impl AllowedOrigins {
    /// Returns true if requests from pages of this origin are allowed.
    pub fn allow(&self, origin: &str) -> bool {
        match self {
            Self::Mirror => true,
            Self::Off => false,
            Self::Only(known) => known.iter().any(|known| known.0 == origin),
        }
    }

    /// Parses a single keyword or several origins.
    ///
    /// # Errors
    /// A text is not an origin.
    pub fn parse(texts: &[&str]) -> Result<Self, OriginError> {
        match texts {
            ["mirror"] => Ok(Self::Mirror),
            ["off"] => Ok(Self::Off),
            several => several.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Self::Only),
        }
    }
}

/// A text that is not an origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an origin: write scheme and host without a path, like `https://app.example` or \
     `http://localhost:3000`; \"mirror\" lets all pages call, \"off\" none"
)]
pub struct OriginError {
    text: String,
}

impl FromStr for WebOrigin {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        let error = || OriginError { text: text.to_owned() };
        let (scheme, rest) = text.trim().split_once("://").ok_or_else(error)?;
        let is_scheme = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        // Reject a path or user info, which a text copied from an address bar may contain.
        let is_host =
            !rest.is_empty() && rest.chars().all(|c| c.is_ascii_alphanumeric() || ".-:[]_".contains(c));
        if !is_scheme || !is_host {
            return Err(error());
        }
        let (scheme, host) = (scheme.to_ascii_lowercase(), rest.to_ascii_lowercase());
        let own_port = match scheme.as_str() {
            "http" => ":80",
            "https" => ":443",
            _ => "",
        };
        let host = host.strip_suffix(own_port).unwrap_or(&host);
        Ok(Self(format!("{scheme}://{host}")))
    }
}

impl fmt::Display for WebOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for AllowedOrigins {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Mirror => serializer.serialize_str("mirror"),
            Self::Off => serializer.serialize_str("off"),
            Self::Only(known) => serializer.collect_seq(known.iter().map(|origin| &origin.0)),
        }
    }
}

impl<'de> Deserialize<'de> for AllowedOrigins {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let several = one_or_several(deserializer)?;
        let texts: Vec<&str> = several.iter().map(String::as_str).collect();
        Self::parse(&texts).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_or_a_list_of_origins_is_taken() {
        assert_eq!(AllowedOrigins::parse(&["mirror"]), Ok(AllowedOrigins::Mirror));
        assert_eq!(AllowedOrigins::parse(&["off"]), Ok(AllowedOrigins::Off));
        let some =
            AllowedOrigins::parse(&["https://App.example:443", "http://[::1]:3000", "app://local"]).unwrap();
        for (origin, allowed) in [
            ("https://app.example", true),
            ("http://[::1]:3000", true),
            ("app://local", true),
            ("http://app.example", false),
            ("https://app.example.evil", false),
            ("https://sub.app.example", false),
            ("null", false),
            ("", false),
        ] {
            assert_eq!(some.allow(origin), allowed, "{origin}");
        }
        assert!(AllowedOrigins::Mirror.allow("null") && !AllowedOrigins::Off.allow("https://app.example"));
    }

    #[test]
    fn what_is_no_origin_is_told_with_one_that_is() {
        for text in ["*", "app.example", "https://app.example/", "https://u@h", "https://", "://h", "mirrors"]
        {
            let error = AllowedOrigins::parse(&[text]).unwrap_err().to_string();
            assert!(error.contains("like `https://app.example`"), "{error}");
        }
        assert!(AllowedOrigins::parse(&["https://a", "off"]).is_err(), "a word is no origin");
    }
}
