//! What is said of requests that may kill their server: by what they are known, by which numbers, and how they stand.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A keyed hash of a request: it tells whether two are equal, and without the key nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub u128);

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for Fingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Fingerprint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u128::from_str_radix(&text, 16).map(Self).map_err(serde::de::Error::custom)
    }
}

/// The numbers. Reasons: `defaults.toml`, section `[quarantine]`.
pub type QuarantinePolicy = crate::defaults::Quarantine;

/// What is to be done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing is known against it.
    Clear,
    /// A server died with it in flight: it is to be tried alone.
    Suspect,
    /// A server died of it alone.
    Refused {
        /// For this long.
        left: Duration,
    },
}

/// A death, as far as it is not known otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// Requests in flight beside the one on trial, or in all.
    pub others: u32,
    /// For so long the server had been at work on nothing but what it died of: zero, but for one that hung.
    pub hung: Duration,
    /// Whether it says something about a request that was alone.
    pub proves: bool,
}

/// What a death led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Requests that are suspects now.
    pub suspects: Vec<Fingerprint>,
    /// The request that is refused from now on.
    pub refused: Option<Fingerprint>,
}

/// One request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Which.
    pub fingerprint: Fingerprint,
    /// Whether it is refused; else it is a suspect.
    pub refused: bool,
    /// Seconds until it is forgotten.
    pub left_s: u64,
    /// Servers that died with it in flight.
    pub deaths: u32,
    /// How often it was sent and refused.
    pub refusals: u64,
}
