//! Terms of the quarantine: fingerprints, settings and standings of requests.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A keyed hash of a request: requests can be compared, but nothing else is revealed without the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestFingerprint(pub u128);

impl std::fmt::Display for RequestFingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for RequestFingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestFingerprint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u128::from_str_radix(&text, 16).map(Self).map_err(serde::de::Error::custom)
    }
}

/// Settings of the quarantine. `defaults.toml`, section `[quarantine]`, gives the reasons.
pub type QuarantinePolicy = crate::defaults::Quarantine;

/// Treatment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStanding {
    /// No death is held against the request.
    Clear,
    /// A server died while the request was in flight: it must be tried alone.
    Suspect,
    /// A server died while the request ran alone.
    Refused {
        /// Remaining time of the refusal.
        left: Duration,
    },
}

/// Circumstances of an unexplained death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerDeath {
    /// Number of requests in flight besides the one on trial, or in total without a trial.
    pub others: u32,
    /// Time for which the server had hung on the request that caused its death; zero if it did not hang.
    pub hung: Duration,
    /// The death is evidence against a request that ran alone.
    pub proves: bool,
}

/// Consequences of a death.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeathResult {
    /// Requests that are suspects now.
    pub suspects: Vec<RequestFingerprint>,
    /// Request that is refused from now on.
    pub refused: Option<RequestFingerprint>,
}

/// A request in the list of quarantined requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedRequest {
    /// Fingerprint of the request.
    pub fingerprint: RequestFingerprint,
    /// True if refused, false if a suspect.
    pub refused: bool,
    /// Seconds until the request is forgotten.
    pub left_s: u64,
    /// Number of servers that died while the request was in flight.
    pub deaths: u32,
    /// Number of refusals.
    pub refusals: u64,
}
