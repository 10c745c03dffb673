//! Counters of a model's requests for the page, and a histogram of times to first token with logarithmic
//! buckets. The metrics' code updates them, because it has already looked up the model.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use warden_gateway::RequestRecord;

/// Buckets per doubling of time: each bound is about a fifth above the previous one.
const BUCKETS_PER_OCTAVE: u32 = 4;
/// Number of buckets, from a millisecond to more than an hour.
const BUCKETS: usize = 22 * BUCKETS_PER_OCTAVE as usize;

/// Number of requests by their time to first token.
pub type BucketCounts = [u32; BUCKETS];

/// Counters of the requests of one model.
#[derive(Debug)]
pub struct RequestCounters {
    requests: AtomicU64,
    failed: AtomicU64,
    prompt_tokens: AtomicU64,
    output_tokens: AtomicU64,
    first: [AtomicU32; BUCKETS],
}

impl Default for RequestCounters {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            requests: zero(),
            failed: zero(),
            prompt_tokens: zero(),
            output_tokens: zero(),
            first: [const { AtomicU32::new(0) }; BUCKETS],
        }
    }
}

/// Values of the counters at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterValues {
    /// Number of requests.
    pub requests: u64,
    /// Part of `requests`: with a status of 500 or more, or without an answer for a waiting client.
    pub failed: u64,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of generated tokens.
    pub output_tokens: u64,
    /// Requests by their time to first token.
    pub first: BucketCounts,
}

impl Default for CounterValues {
    fn default() -> Self {
        Self { requests: 0, failed: 0, prompt_tokens: 0, output_tokens: 0, first: [0; BUCKETS] }
    }
}

impl RequestCounters {
    pub(crate) fn count_request(&self, record: &RequestRecord) {
        let add = |counter: &AtomicU64, more: u64| counter.fetch_add(more, Ordering::Relaxed);
        add(&self.requests, 1);
        let gone = record.outcome == warden_gateway::RequestOutcome::ClientGone;
        if !gone && (record.answer_status() >= 500 || record.outcome.as_str().starts_with("upstream")) {
            add(&self.failed, 1);
        }
        add(&self.prompt_tokens, record.work.prompt_tokens);
        add(&self.output_tokens, record.work.output_tokens);
        // The first byte of a non-streaming answer comes at its end, and a stream may begin with a comment.
        if let Some(first) = record.first_token
            && record.stream
            && record.answer_status() == 200
        {
            self.first[bucket_index(first)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the current values.
    pub fn snapshot(&self) -> CounterValues {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CounterValues {
            requests: of(&self.requests),
            failed: of(&self.failed),
            prompt_tokens: of(&self.prompt_tokens),
            output_tokens: of(&self.output_tokens),
            first: std::array::from_fn(|n| self.first[n].load(Ordering::Relaxed)),
        }
    }
}

fn bucket_index(time: Duration) -> usize {
    let octaves = (time.as_secs_f64() * 1e3).max(1.0).log2();
    let index = warden_policies::units::truncate_to_u64(octaves * f64::from(BUCKETS_PER_OCTAVE));
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// Returns a quantile of the times to first token (`share`: 0 to 1); `None` if there are no times.
pub fn quantile(first: &BucketCounts, share: f64) -> Option<Duration> {
    let all: u64 = first.iter().copied().map(u64::from).sum();
    if all == 0 {
        return None;
    }
    let wanted = share.clamp(0.0, 1.0) * warden_policies::units::as_f64(all);
    let mut below = 0.0;
    for (index, count) in (0_u32..).zip(first) {
        let count = f64::from(*count);
        if count > 0.0 && below + count >= wanted {
            let within = ((wanted - below) / count).clamp(0.0, 1.0);
            let ms = ((f64::from(index) + within) / f64::from(BUCKETS_PER_OCTAVE)).exp2();
            return Duration::try_from_secs_f64(ms / 1e3).ok();
        }
        below += count;
    }
    None
}

/// Returns the increase between two moments. The counters of a model created again restart at 0.
pub fn increase_since(now: &CounterValues, before: &CounterValues) -> CounterValues {
    CounterValues {
        requests: now.requests.saturating_sub(before.requests),
        failed: now.failed.saturating_sub(before.failed),
        prompt_tokens: now.prompt_tokens.saturating_sub(before.prompt_tokens),
        output_tokens: now.output_tokens.saturating_sub(before.output_tokens),
        // The counts may have wrapped around.
        first: std::array::from_fn(|n| now.first[n].wrapping_sub(before.first[n])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_within_a_fifth_of_what_was_counted() {
        assert_eq!(quantile(&CounterValues::default().first, 0.5), None);
        for ms in [1.0, 3.0, 80.0, 250.0, 4_000.0, 600_000.0] {
            let mut first = CounterValues::default().first;
            first[bucket_index(Duration::from_secs_f64(ms / 1e3))] = 1;
            for share in [0.0, 0.5, 0.99, 1.0] {
                let told = quantile(&first, share).unwrap().as_secs_f64() * 1e3;
                assert!(told > ms / 1.2 && told < ms * 1.2, "{told} for {ms}");
            }
        }
        let mut first = CounterValues::default().first;
        for _ in 0..98 {
            first[bucket_index(Duration::from_millis(100))] += 1;
        }
        first[bucket_index(Duration::from_secs(10))] += 2;
        assert!(quantile(&first, 0.5).unwrap() < Duration::from_millis(120));
        assert!(quantile(&first, 0.99).unwrap() > Duration::from_secs(8));
        // Extreme times are counted in the outer buckets.
        assert_eq!((bucket_index(Duration::ZERO), bucket_index(Duration::MAX)), (0, BUCKETS - 1));
    }
}
