//! Accepted host names, against DNS rebinding: an attacker lets the name of a web page's own host resolve to
//! this machine, so that the page's requests count as same-origin. Addresses and `localhost` are always
//! accepted, because no attacker controls their resolution.

// Address types only: this module opens no connection.
use core::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::words::one_or_several;

/// Accepted host names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostNames {
    /// All names if that is safe, else only addresses and `localhost`; see [`Self::resolve`].
    #[default]
    Auto,
    /// All names.
    Any,
    /// Only the listed names, and always addresses and `localhost`.
    Only(Vec<HostPattern>),
}

/// A host name, or `*.` and a suffix that matches all names with this suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPattern(String);

impl HostNames {
    /// Resolves `Auto`. `exposed`: a page whose host name resolves to this machine could use the models.
    #[must_use]
    pub fn resolve(self, exposed: bool) -> Self {
        match self {
            Self::Auto if exposed => Self::Only(Vec::new()),
            Self::Auto => Self::Any,
            decided => decided,
        }
    }

    /// Returns true if the host of a request (the text sent by the client, without the port) is accepted.
    pub fn allow(&self, host: &str) -> bool {
        let Self::Only(known) = self else { return true };
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        is_address(&host)
            || host == "localhost"
            // RFC 6761 section 6.3: these names mean this machine, and browsers do not ask DNS for them.
            || host.ends_with(".localhost")
            || known.iter().any(|name| name.matches(&host))
    }

    /// Parses a single keyword (`auto` and the like) or several names.
    ///
    /// # Errors
    /// A text is no host name.
    pub fn parse(texts: &[&str]) -> Result<Self, HostNameError> {
        match texts {
            ["auto"] => Ok(Self::Auto),
            ["any"] => Ok(Self::Any),
            several => several.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Self::Only),
        }
    }
}

/// Returns true for an IP address. Browsers convert other spellings (`0x7f.1`) to the usual one.
fn is_address(host: &str) -> bool {
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().is_ok(),
        None => host.parse::<Ipv4Addr>().is_ok(),
    }
}

impl HostPattern {
    fn matches(&self, host: &str) -> bool {
        match self.0.strip_prefix('*') {
            // Requires at least one character before the dot.
            Some(end) => host.len() > end.len() && host.ends_with(end),
            None => self.0 == host,
        }
    }
}

/// A text that is no host name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no host name: write it without scheme, port and path, like `llm.example` or `*.example`; \
     \"any\" takes every name, \"auto\" decides by what else is configured"
)]
pub struct HostNameError {
    text: String,
}

impl FromStr for HostPattern {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, HostNameError> {
        let name = text.trim().to_ascii_lowercase();
        let plain = name.strip_prefix("*.").unwrap_or(&name);
        let is_label = |label: &str| {
            !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
        };
        let is_word = ["auto", "any"].contains(&name.as_str());
        if is_word || !plain.split('.').all(is_label) {
            return Err(HostNameError { text: text.to_owned() });
        }
        Ok(Self(name))
    }
}

impl Serialize for HostNames {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Any => serializer.serialize_str("any"),
            Self::Only(known) => serializer.collect_seq(known.iter().map(|name| &name.0)),
        }
    }
}

impl<'de> Deserialize<'de> for HostNames {
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
    fn addresses_and_localhost_are_always_right_and_other_names_only_if_they_are_known() {
        let names = HostNames::parse(&["LLM.example", "*.home.arpa"]).unwrap();
        for (host, allowed) in [
            ("127.0.0.1", true),
            ("[::1]", true),
            ("192.168.1.7", true),
            ("localhost", true),
            ("LocalHost.", true),
            ("app.localhost", true),
            ("llm.example", true),
            ("llm.EXAMPLE.", true),
            ("box.home.arpa", true),
            ("a.b.home.arpa", true),
            ("home.arpa", false),
            (".home.arpa", false),
            ("evilhome.arpa", false),
            ("evil.example", false),
            ("llm.example.evil", false),
            ("localhost.evil", false),
            ("evillocalhost", false),
            ("127.0.0.1.evil", false),
            ("::1", false),
            ("[::1", false),
            ("1", false),
            ("", false),
        ] {
            assert_eq!(names.allow(host), allowed, "{host}");
        }
        assert!(HostNames::Any.allow("evil.example"));
    }

    #[test]
    fn auto_is_strict_only_where_it_matters() {
        assert!(!HostNames::Auto.resolve(true).allow("evil.example"));
        assert!(HostNames::Auto.resolve(false).allow("evil.example"));
        assert_eq!(HostNames::Any.resolve(true), HostNames::Any);
        let some = HostNames::parse(&["a.example"]).unwrap();
        assert_eq!(some.clone().resolve(false), some);
    }

    #[test]
    fn what_is_no_name_is_told_with_one_that_is() {
        for text in
            ["*", "https://a.example", "a.example:80", "a/b", "", "a..b", "*.", "a.*.b", "[::1]", "a b"]
        {
            let error = HostNames::parse(&[text]).unwrap_err().to_string();
            assert!(error.contains("like `llm.example`"), "{error}");
        }
        assert!(HostNames::parse(&["a.example", "any"]).is_err(), "a word is no name");
    }
}
