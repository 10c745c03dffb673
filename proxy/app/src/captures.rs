//! The latest requests of models with `record_requests`, as recorded, that is without their texts. For an
//! operator who inspects one request; in memory only, and lost when the instance ends.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::sync::lock;

/// Limit of kept requests of all models together.
const MOST: usize = 100;
/// Limit in bytes of one request; the rest is cut.
const LONGEST: usize = 64 << 10;
/// Limit in bytes of all requests together.
const ALL: usize = 2 << 20;

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capture {
    /// Its `X-Request-Id`.
    pub(crate) id: String,
    /// A line of JSON with method, path and redacted body, possibly cut.
    pub(crate) line: String,
    /// Length of the uncut line in bytes.
    pub(crate) bytes: usize,
}

/// The latest recorded requests. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Captures(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    all: VecDeque<Capture>,
    bytes: usize,
}

impl Captures {
    /// Adds a request; beyond the limits the oldest ones are dropped.
    pub(crate) fn keep(&self, id: &str, line: &str) {
        let mut end = line.len().min(LONGEST);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let new = Capture { id: id.to_owned(), line: line[..end].to_owned(), bytes: line.len() };
        let mut kept = lock(&self.0);
        kept.bytes += cost(&new);
        kept.all.push_back(new);
        while kept.all.len() > MOST || kept.bytes > ALL {
            let Some(oldest) = kept.all.pop_front() else { return };
            kept.bytes -= cost(&oldest);
        }
    }

    /// The latest request with this id, if it is still kept.
    pub(crate) fn of(&self, id: &str) -> Option<Capture> {
        lock(&self.0).all.iter().rev().find(|one| one.id == id).cloned()
    }

    /// Ids of the kept requests.
    pub(crate) fn ids(&self) -> Vec<String> {
        lock(&self.0).all.iter().map(|one| one.id.clone()).collect()
    }
}

/// Bytes counted for one request. The gateway bounds the id, which a client chooses.
fn cost(one: &Capture) -> usize {
    one.line.len() + one.id.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_in_bounds() {
        let captures = Captures::default();
        assert_eq!((captures.of("a"), captures.ids().len()), (None, 0));
        for n in 0..1000 {
            captures.keep(&format!("r-{n}"), "{}");
        }
        assert_eq!(
            (captures.ids().len(), captures.of("r-899"), captures.of("r-999").is_some()),
            (MOST, None, true)
        );
        let long = "ä".repeat(LONGEST);
        for n in 0..100 {
            captures.keep(&format!("long-{n}"), &long);
        }
        let kept = lock(&captures.0);
        assert!(kept.bytes <= ALL && kept.all.len() > 20, "{} of {}", kept.all.len(), kept.bytes);
        assert!(kept.all.iter().all(|one| one.line.len() <= LONGEST && one.bytes == long.len()));
        assert_eq!(kept.bytes, kept.all.iter().map(cost).sum::<usize>());
    }

    #[test]
    fn of_two_with_one_id_the_last_counts() {
        let captures = Captures::default();
        captures.keep("a", "1");
        captures.keep("a", "2");
        assert_eq!(captures.of("a").map(|one| one.line).as_deref(), Some("2"));
    }
}
