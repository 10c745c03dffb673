//! The latest requests of models with `record_requests`, recorded without their texts, so that an operator
//! can inspect a request. Kept in memory only, and lost when the instance ends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use warden_supervisor::sync::lock;

/// Maximum number of requests kept, for all models together.
const MAX_CAPTURES: usize = 100;
/// Maximum number of bytes kept of one request; the rest is cut off.
const MAX_LINE_BYTES: usize = 64 << 10;
/// Maximum number of bytes kept of all requests together.
const MAX_TOTAL_BYTES: usize = 2 << 20;

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedRequest {
    /// `X-Request-Id` of the request.
    pub id: String,
    /// A line of JSON with method, path and redacted body, possibly cut.
    pub line: String,
    /// Length of the uncut line in bytes.
    pub bytes: usize,
}

/// Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct CaptureStore(Arc<Mutex<CaptureQueue>>);

#[derive(Debug, Default)]
struct CaptureQueue {
    requests: VecDeque<CapturedRequest>,
    bytes: usize,
}

impl CaptureStore {
    /// Adds a request. Beyond the limits the oldest requests are dropped.
    pub fn add(&self, id: &str, line: &str) {
        let mut end = line.len().min(MAX_LINE_BYTES);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let new = CapturedRequest { id: id.to_owned(), line: line[..end].to_owned(), bytes: line.len() };
        let mut kept = lock(&self.0);
        kept.bytes += capture_bytes(&new);
        kept.requests.push_back(new);
        while kept.requests.len() > MAX_CAPTURES || kept.bytes > MAX_TOTAL_BYTES {
            let Some(oldest) = kept.requests.pop_front() else { return };
            kept.bytes -= capture_bytes(&oldest);
        }
    }

    /// Returns the latest request with this id.
    pub fn find(&self, id: &str) -> Option<CapturedRequest> {
        lock(&self.0).requests.iter().rev().find(|one| one.id == id).cloned()
    }

    /// Returns the ids of all requests that are kept.
    pub fn ids(&self) -> Vec<String> {
        lock(&self.0).requests.iter().map(|one| one.id.clone()).collect()
    }
}

/// Counts the id, too: the client chooses it, and the gateway bounds it.
fn capture_bytes(one: &CapturedRequest) -> usize {
    one.line.len() + one.id.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_in_bounds() {
        let captures = CaptureStore::default();
        assert_eq!((captures.find("a"), captures.ids().len()), (None, 0));
        for n in 0..1000 {
            captures.add(&format!("r-{n}"), "{}");
        }
        assert_eq!(
            (captures.ids().len(), captures.find("r-899"), captures.find("r-999").is_some()),
            (MAX_CAPTURES, None, true)
        );
        let long = "ä".repeat(MAX_LINE_BYTES);
        for n in 0..100 {
            captures.add(&format!("long-{n}"), &long);
        }
        let kept = lock(&captures.0);
        assert!(
            kept.bytes <= MAX_TOTAL_BYTES && kept.requests.len() > 20,
            "{} of {}",
            kept.requests.len(),
            kept.bytes
        );
        assert!(kept.requests.iter().all(|one| one.line.len() <= MAX_LINE_BYTES && one.bytes == long.len()));
        assert_eq!(kept.bytes, kept.requests.iter().map(capture_bytes).sum::<usize>());
    }

    #[test]
    fn of_two_with_one_id_the_last_counts() {
        let captures = CaptureStore::default();
        captures.add("a", "1");
        captures.add("a", "2");
        assert_eq!(captures.find("a").map(|one| one.line).as_deref(), Some("2"));
    }
}
