//! API keys: who may send requests, to which models, how many. Keys are known by their hashes only; a key in clear text
//! exists here no longer than the head of the request that brings it, and never goes upstream.
//!
//! ```text
//!   head -> [ open to all? ] -> yes: on
//!      | no
//!   any key of the file? -- no --> 401
//!      | yes
//!   place among those at a time -- none --> 429      (the place is given back when the exchange ends)
//!      | tokens left, rate left -- no --> 429 with the exact time to wait
//!      v
//!   body is read, model is known -- not the key's --> 404, as if it did not exist
//! ```

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use http::HeaderMap;
use warden_policies::{ModelName, QuickMap, Rate};

use crate::refusal::Refusal;

mod access;
mod hash;
mod presented;
mod usage;

pub(crate) use access::Access;
pub use hash::KeyHash;
pub(crate) use presented::strip;
pub(crate) use usage::BYTES_PER_TOKEN;
use usage::Limit;
pub(crate) use usage::Pass;
use usage::Usage;

/// One key of the file.
#[derive(Clone, Debug)]
pub struct KeySpec {
    /// Its name, for logs and metrics.
    pub name: Arc<str>,
    /// Its hash.
    pub hash: KeyHash,
    /// The models that it may use; `None`: all.
    pub models: Option<HashSet<ModelName>>,
    /// Requests in a time.
    pub rate: Option<Rate>,
    /// Tokens in a time, evaluated and generated. What a request takes is known when it has ended; one that begins
    /// while tokens are left may take more, and the next ones wait for it.
    pub tokens: Option<Rate>,
    /// Requests at a time.
    pub concurrency: Option<usize>,
    /// Whether it opens the page for operators.
    pub operator: bool,
}

#[cfg(test)]
impl KeySpec {
    /// One that may do all that clients may, without limits.
    pub(crate) fn unlimited(name: &str, key: &str) -> Self {
        let hash = KeyHash::of(key.as_bytes());
        Self {
            name: name.into(),
            hash,
            models: None,
            rate: None,
            tokens: None,
            concurrency: None,
            operator: false,
        }
    }
}

/// A key and what it has used.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) spec: KeySpec,
    usage: Arc<Usage>,
}

/// All keys. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Keys(Arc<Ring>);

#[derive(Debug, Default)]
struct Ring {
    /// In the order of the file.
    all: Vec<Arc<Key>>,
    /// Where the key with a hash is in `all`.
    by_hash: QuickMap<KeyHash, usize>,
    /// One of them opens the page for operators.
    has_operators: bool,
}

impl FromIterator<Arc<Key>> for Keys {
    fn from_iter<T: IntoIterator<Item = Arc<Key>>>(keys: T) -> Self {
        let all: Vec<_> = keys.into_iter().collect();
        let mut by_hash = QuickMap::default();
        for (at, key) in all.iter().enumerate() {
            // Of two that are the same the first counts.
            by_hash.entry(key.spec.hash).or_insert(at);
        }
        let has_operators = all.iter().any(|key| key.spec.operator);
        Self(Arc::new(Ring { all, by_hash, has_operators }))
    }
}

/// What a key has used since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyCounts {
    /// Its name.
    pub name: Arc<str>,
    /// Requests that went to a backend, or would have, and have ended.
    pub requests: u64,
    /// Requests under way.
    pub running: u64,
    /// Prompt tokens evaluated.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Requests refused, by the limit that they met.
    pub rejected: Vec<(&'static str, u64)>,
}

impl Keys {
    /// Keys that have used nothing yet.
    pub fn new(specs: Vec<KeySpec>) -> Self {
        specs.into_iter().map(|spec| Arc::new(Key { spec, usage: Arc::new(Usage::new()) })).collect()
    }

    /// The same, with what keys of the same names have used.
    pub(crate) fn after(&self, old: &Self) -> Self {
        let one = |key: &Arc<Key>| {
            let before = old.0.all.iter().find(|old| old.spec.name == key.spec.name);
            let usage = before.map_or(&key.usage, |old| &old.usage).clone();
            Arc::new(Key { spec: key.spec.clone(), usage })
        };
        self.0.all.iter().map(one).collect()
    }

    /// What each has used.
    pub fn counts(&self) -> Vec<KeyCounts> {
        let one = |key: &Arc<Key>| KeyCounts {
            name: key.spec.name.clone(),
            requests: key.usage.requests.load(Relaxed),
            running: key.usage.running() as u64,
            prompt_tokens: key.usage.prompt_tokens.load(Relaxed),
            output_tokens: key.usage.output_tokens.load(Relaxed),
            rejected: Limit::ALL.map(|limit| (limit.as_str(), key.usage.rejected(limit))).into(),
        };
        self.0.all.iter().map(one).collect()
    }

    /// Whether one of them opens the page for operators.
    pub(crate) fn has_operators(&self) -> bool {
        self.0.has_operators
    }

    /// The key of this hash.
    pub(crate) fn known(&self, hash: &KeyHash) -> Option<&KeySpec> {
        self.with_hash(hash).map(|key| &key.spec)
    }

    /// The hashes of all keys that a request brings.
    pub fn presented(headers: &HeaderMap) -> Vec<KeyHash> {
        presented::presented(headers).map(|key| KeyHash::of(&key)).collect()
    }

    /// The key that a request brings.
    fn find(&self, headers: &HeaderMap) -> Result<&Arc<Key>, Refusal> {
        let mut refusal = Refusal::NoKey;
        for given in presented::presented(headers) {
            if let Some(key) = self.with_hash(&KeyHash::of(&given)) {
                return Ok(key);
            }
            refusal = Refusal::WrongKey;
        }
        Err(refusal)
    }

    /// Where it is looked for hangs on a secret of this process beside the hash, and what is there is compared in constant
    /// time: how long it takes says nothing about how near a guess was.
    fn with_hash(&self, given: &KeyHash) -> Option<&Arc<Key>> {
        self.0.all.get(*self.0.by_hash.get(given)?)
    }
}

impl Key {
    fn may_use(&self, model: &ModelName) -> bool {
        self.spec.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// Takes what one request needs.
    fn admit(self: &Arc<Self>) -> Result<Pass, Refusal> {
        let refuse = |limit, refusal| {
            self.usage.reject(limit);
            Err(refusal)
        };
        let key = || self.spec.name.clone();
        let Some(pass) = Pass::try_new(self) else {
            let most = self.spec.concurrency.unwrap_or_default();
            return refuse(Limit::Concurrency, Refusal::KeyBusy { key: key(), most });
        };
        if let Some(rate) = self.spec.tokens
            && let Err(wait) = self.usage.has_tokens(rate)
        {
            return refuse(Limit::Tokens, Refusal::KeySpent { key: key(), what: "tokens", rate, wait });
        }
        if let Some(rate) = self.spec.rate
            && let Err(wait) = self.usage.take(rate)
        {
            return refuse(Limit::Rate, Refusal::KeySpent { key: key(), what: "requests", rate, wait });
        }
        Ok(pass)
    }
}

#[cfg(test)]
mod tests;
