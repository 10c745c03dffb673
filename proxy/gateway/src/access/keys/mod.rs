//! API keys: which clients may send requests, to which models, and how many. The gateway stores only hashes.
//! A key in clear text is held no longer than the head of its request, and is never sent upstream.
//!
//! ```text
//!   head -> [ route open to all? ] -> yes: admitted
//!      | no
//!   a key of the file? -- no --> 401
//!      | yes
//!   concurrency left? -- no --> 429                  (a request counts until its exchange ends)
//!      | yes
//!   tokens left, rate left? -- no --> 429 with the exact time to wait
//!      | yes
//!   body is read, model is known -- not the key's --> 404, as if it did not exist
//! ```

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use self::usage::{KeyLimit, KeyUsage};
use http::HeaderMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use warden_policies::{ModelName, QuickMap, RateLimit};

use crate::refusal::RequestRefusal;

pub(crate) use self::usage::{BYTES_PER_TOKEN, ConcurrencyPass};
pub(crate) use access::ClientAccess;
pub(crate) use presented::strip_key_headers;

mod access;
mod presented;
mod usage;

/// A key of the key file.
#[derive(Clone, Debug)]
pub struct KeySpec {
    /// Name of the key, for logs and metrics.
    pub name: Arc<str>,
    /// Hash of the key, as stored in the key file.
    pub hash: KeyHash,
    /// Models that the key may use; `None`: all.
    pub models: Option<HashSet<ModelName>>,
    /// Request rate limit.
    pub rate: Option<RateLimit>,
    /// Rate limit for tokens, evaluated and generated. A request's tokens are known only at its end, so a
    /// request that begins while tokens are left may exceed the limit. Later requests then wait longer.
    pub tokens: Option<RateLimit>,
    /// Maximum number of concurrent requests.
    pub concurrency: Option<usize>,
    /// The key opens the operators' page.
    pub operator: bool,
}

#[derive(Debug)]
pub(crate) struct ApiKey {
    pub(crate) spec: KeySpec,
    usage: Arc<KeyUsage>,
}

/// All keys.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys(Arc<KeyRing>);

#[derive(Debug, Default)]
struct KeyRing {
    all: Vec<Arc<ApiKey>>,
    by_hash: QuickMap<KeyHash, usize>,
    has_operators: bool,
}

impl FromIterator<Arc<ApiKey>> for ApiKeys {
    fn from_iter<T: IntoIterator<Item = Arc<ApiKey>>>(keys: T) -> Self {
        let all: Vec<_> = keys.into_iter().collect();
        let mut by_hash = QuickMap::default();
        for (at, key) in all.iter().enumerate() {
            // If two keys have the same hash, the first is used.
            by_hash.entry(key.spec.hash).or_insert(at);
        }
        let has_operators = all.iter().any(|key| key.spec.operator);
        Self(Arc::new(KeyRing { all, by_hash, has_operators }))
    }
}

/// Usage of a key since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyCounts {
    /// Name of the key.
    pub name: Arc<str>,
    /// Number of ended requests that were admitted for a backend.
    pub requests: u64,
    /// Number of requests in flight.
    pub running: u64,
    /// Number of prompt tokens evaluated.
    pub prompt_tokens: u64,
    /// Number of tokens generated.
    pub output_tokens: u64,
    /// Number of refused requests by limit.
    pub rejected: Vec<(&'static str, u64)>,
}

impl ApiKeys {
    /// Creates keys without usage.
    pub fn new(specs: Vec<KeySpec>) -> Self {
        specs.into_iter().map(|spec| Arc::new(ApiKey { spec, usage: Arc::new(KeyUsage::new()) })).collect()
    }

    /// Returns these keys with the usage of the equally named keys in `old`.
    pub(crate) fn with_usage_of(&self, old: &Self) -> Self {
        let one = |key: &Arc<ApiKey>| {
            let before = old.0.all.iter().find(|old| old.spec.name == key.spec.name);
            let usage = before.map_or(&key.usage, |old| &old.usage).clone();
            Arc::new(ApiKey { spec: key.spec.clone(), usage })
        };
        self.0.all.iter().map(one).collect()
    }

    /// Returns the usage of each key.
    pub fn counts(&self) -> Vec<KeyCounts> {
        let one = |key: &Arc<ApiKey>| KeyCounts {
            name: key.spec.name.clone(),
            requests: key.usage.requests.load(Relaxed),
            running: key.usage.running.load(Relaxed) as u64,
            prompt_tokens: key.usage.prompt_tokens.load(Relaxed),
            output_tokens: key.usage.output_tokens.load(Relaxed),
            rejected: KeyLimit::ALL
                .map(|limit| (limit.as_str(), key.usage.rejected[limit as usize].load(Relaxed)))
                .into(),
        };
        self.0.all.iter().map(one).collect()
    }

    pub(crate) fn has_operators(&self) -> bool {
        self.0.has_operators
    }

    pub(crate) fn find_spec(&self, hash: &KeyHash) -> Option<&KeySpec> {
        self.find_by_hash(hash).map(|key| &key.spec)
    }

    /// Returns the hashes of all keys in a request's headers, valid or not.
    pub fn presented_hashes(headers: &HeaderMap) -> Vec<KeyHash> {
        presented::presented_keys(headers).map(|key| KeyHash::from_key(&key)).collect()
    }

    /// Finds the first valid key in the headers.
    fn find(&self, headers: &HeaderMap) -> Result<&Arc<ApiKey>, RequestRefusal> {
        let mut refusal = RequestRefusal::NoKey;
        for given in presented::presented_keys(headers) {
            if let Some(key) = self.find_by_hash(&KeyHash::from_key(&given)) {
                return Ok(key);
            }
            refusal = RequestRefusal::WrongKey;
        }
        Err(refusal)
    }

    /// Finds a key by its hash. Timing does not reveal how close a guess was: the map is seeded with a
    /// secret, and the comparison takes constant time.
    fn find_by_hash(&self, given: &KeyHash) -> Option<&Arc<ApiKey>> {
        self.0.all.get(*self.0.by_hash.get(given)?)
    }
}

impl ApiKey {
    fn may_use(&self, model: &ModelName) -> bool {
        self.spec.models.as_ref().is_none_or(|models| models.contains(model))
    }

    fn admit(self: &Arc<Self>) -> Result<ConcurrencyPass, RequestRefusal> {
        let refuse = |limit, refusal| {
            self.usage.count_rejection(limit);
            Err(refusal)
        };
        let key = || self.spec.name.clone();
        let Some(pass) = ConcurrencyPass::try_new(self) else {
            let most = self.spec.concurrency.unwrap_or_default();
            return refuse(KeyLimit::Concurrency, RequestRefusal::KeyBusy { key: key(), most });
        };
        if let Some(rate) = self.spec.tokens
            && let Err(wait) = self.usage.has_tokens(rate)
        {
            return refuse(
                KeyLimit::Tokens,
                RequestRefusal::KeySpent { key: key(), what: "tokens", rate, wait },
            );
        }
        if let Some(rate) = self.spec.rate
            && let Err(wait) = self.usage.take_request(rate)
        {
            return refuse(
                KeyLimit::Rate,
                RequestRefusal::KeySpent { key: key(), what: "requests", rate, wait },
            );
        }
        Ok(pass)
    }
}

/// SHA-256 of a key. Keys are long and random, so the hash needs no salt.
#[derive(Clone, Copy)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Hashes a key in clear text.
    pub fn from_key(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// Parses 64 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let mut hash = [0; 32];
        hex::decode_to_slice(text, &mut hash).ok()?;
        Some(Self(hash))
    }

    /// Formats the hash as 64 hexadecimal digits, for the key file.
    pub fn to_hex(self) -> String {
        hex::encode(self.0)
    }
}

impl PartialEq for KeyHash {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for KeyHash {}

impl Hash for KeyHash {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(..)")
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod hash_tests {
    use super::*;

    #[test]
    fn a_hash_is_sha_256_and_does_not_show_itself() {
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let hash = KeyHash::from_key(b"abc");
        assert_eq!((hash.to_hex().as_str(), Some(hash)), (abc, KeyHash::from_hex(abc)));
        assert_eq!(format!("{hash:?}"), "KeyHash(..)");
        assert!(hash == KeyHash::from_key(b"abc") && hash != KeyHash::from_key(b"abd"));
        assert!(
            ["", "ba78", &abc[1..], &abc.replace('b', "g")].iter().all(|t| KeyHash::from_hex(t).is_none())
        );
    }
}
