//! Usage of a key: its rates, its requests in flight, its counters. Usage survives a reload of the key file.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::WorkDone;
use warden_policies::rate::{RateLimit, RateNanos, as_nanos};

use super::ApiKey;
use crate::body::{ClientShare, add_within_limit};

/// Assumed bytes per token without a token count: the ratio of English with today's vocabularies.
pub(crate) const BYTES_PER_TOKEN: u64 = 4;

#[derive(Debug)]
pub(super) struct KeyUsage {
    /// Origin of the times below.
    base: Instant,
    requests_until: AtomicU64,
    tokens_until: AtomicU64,
    pub(super) running: AtomicUsize,
    pub(super) requests: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) output_tokens: AtomicU64,
    pub(super) held: Arc<ClientShare>,
    pub(super) rejected: [AtomicU64; KeyLimit::ALL.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyLimit {
    Rate,
    Tokens,
    Concurrency,
    Model,
}

impl KeyLimit {
    pub(crate) const ALL: [Self; 4] = [Self::Rate, Self::Tokens, Self::Concurrency, Self::Model];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Tokens => "tokens",
            Self::Concurrency => "concurrency",
            Self::Model => "model",
        }
    }
}

impl KeyUsage {
    pub(super) fn new() -> Self {
        Self {
            base: Instant::now(),
            requests_until: AtomicU64::new(0),
            tokens_until: AtomicU64::new(0),
            running: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            output_tokens: AtomicU64::new(0),
            held: Arc::default(),
            rejected: Default::default(),
        }
    }

    fn now(&self) -> RateNanos {
        as_nanos(self.base.elapsed())
    }

    pub(super) fn take_request(&self, rate: RateLimit) -> Result<(), Duration> {
        let now = self.now();
        let mut used = self.requests_until.load(Relaxed);
        loop {
            let next = rate.take_unit(used, now)?;
            match self.requests_until.compare_exchange_weak(used, next, Relaxed, Relaxed) {
                Ok(_) => return Ok(()),
                Err(changed) => used = changed,
            }
        }
    }

    /// Checks that tokens are left. The error is the time to wait.
    pub(super) fn has_tokens(&self, rate: RateLimit) -> Result<(), Duration> {
        rate.check(self.tokens_until.load(Relaxed), self.now())
    }

    fn charge_tokens(&self, rate: RateLimit, tokens: u64) {
        let now = self.now();
        let mut used = self.tokens_until.load(Relaxed);
        while let Err(newer) =
            self.tokens_until.compare_exchange_weak(used, rate.charge(used, now, tokens), Relaxed, Relaxed)
        {
            used = newer;
        }
    }

    pub(super) fn count_rejection(&self, limit: KeyLimit) {
        self.rejected[limit as usize].fetch_add(1, Relaxed);
    }
}

/// One of a key's concurrent requests; counts until this value is dropped.
#[derive(Debug)]
pub(crate) struct ConcurrencyPass(Arc<ApiKey>);

impl ConcurrencyPass {
    /// Counts a request; `None` if the key has reached its concurrency limit.
    pub(super) fn try_new(key: &Arc<ApiKey>) -> Option<Self> {
        let most = key.spec.concurrency.unwrap_or(usize::MAX);
        add_within_limit(&key.usage.running, 1, most)?;
        Some(Self(key.clone()))
    }

    /// Charges an ended request to its key; `untold` is the text in bytes that no answer counted.
    pub(crate) fn charge_request(self, work: WorkDone, untold: u64) {
        let usage = &self.0.usage;
        usage.requests.fetch_add(1, Relaxed);
        usage.prompt_tokens.fetch_add(work.prompt_tokens, Relaxed);
        usage.output_tokens.fetch_add(work.output_tokens, Relaxed);
        if let Some(rate) = self.0.spec.tokens {
            let told = work.prompt_tokens.saturating_add(work.output_tokens);
            usage.charge_tokens(rate, told.saturating_add(untold / BYTES_PER_TOKEN));
        }
    }
}

impl Drop for ConcurrencyPass {
    fn drop(&mut self) {
        self.0.usage.running.fetch_sub(1, Relaxed);
    }
}
