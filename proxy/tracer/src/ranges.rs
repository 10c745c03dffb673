//! Mappings that were counted: they end in parts, or several at once, so a key is not enough.
//!
//! Two short lists under a lock that spins: mappings come and go some times a second, not some million times.

use core::sync::atomic::Ordering;

use crate::layout::COUNT_UNIT;
use crate::live::RANGES_AT;
use crate::state::private;

/// Ranges in a list.
const RANGES: usize = 8192;
/// Bytes of a list: lock, length, and three words for each range.
const LIST: usize = 16 + RANGES * 24;
/// Bytes of both lists.
pub(crate) const BYTES: usize = 2 * LIST;
/// Turns to wait for the lock before something is left uncounted: a thread that holds it may have been stopped.
const SPINS: u32 = 1 << 20;

/// Which list.
#[derive(Clone, Copy)]
pub(crate) enum List {
    /// Anonymous host memory.
    Host = 0,
    /// Device memory.
    Device = 1,
}

/// One range: where, how long, and its record.
type Range = (u64, u64, u64);

/// A list while we have its lock.
struct Held(usize);

impl Held {
    fn lock(list: List) -> Option<Self> {
        let base = RANGES_AT + list as usize * LIST;
        let lock = private(base)?;
        for _ in 0..SPINS {
            if lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Some(Self(base));
            }
            core::hint::spin_loop();
        }
        None
    }

    fn word(&self, index: usize) -> u64 {
        private(self.0 + index * 8).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn put(&self, index: usize, value: u64) {
        if let Some(word) = private(self.0 + index * 8) {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn len(&self) -> usize {
        usize::try_from(self.word(1)).unwrap_or(0).min(RANGES)
    }

    fn get(&self, index: usize) -> Range {
        let at = 2 + index * 3;
        (self.word(at), self.word(at + 1), self.word(at + 2))
    }

    fn set(&self, index: usize, (start, length, site): Range) {
        let at = 2 + index * 3;
        self.put(at, start);
        self.put(at + 1, length);
        self.put(at + 2, site);
    }

    fn push(&self, range: Range) -> bool {
        let len = self.len();
        if len == RANGES {
            return false;
        }
        self.set(len, range);
        self.put(1, len as u64 + 1);
        true
    }

    fn swap_remove(&self, index: usize) {
        let last = self.len().saturating_sub(1);
        self.set(index, self.get(last));
        self.put(1, last as u64);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(lock) = private(self.0) {
            lock.store(0, Ordering::Release);
        }
    }
}

/// Adds a range; false if it will not be followed.
pub(crate) fn add(list: List, start: usize, length: usize, site: u32) -> bool {
    Held::lock(list).is_some_and(|held| held.push((start as u64, length as u64, u64::from(site))))
}

/// Takes away whatever of the list lies in a range; tells `gone` the record, bytes, and how many whole ranges (in 256ths)
/// it was.
pub(crate) fn remove(list: List, start: usize, length: usize, mut gone: impl FnMut(u32, u64, u64)) {
    let Some(held) = Held::lock(list) else { return };
    let (begin, limit) = (start as u64, (start as u64).saturating_add(length as u64));
    let mut index = 0;
    while index < held.len() {
        let (start, bytes, site) = held.get(index);
        let end = start.saturating_add(bytes);
        let (first, stop) = (start.max(begin), end.min(limit));
        if first >= stop {
            index += 1;
            continue;
        }
        let record = u32::try_from(site).unwrap_or(u32::MAX);
        let whole = first == start && stop == end;
        gone(record, stop - first, if whole { COUNT_UNIT } else { 0 });
        if whole {
            held.swap_remove(index);
            continue;
        }
        if first == start {
            held.set(index, (stop, end - stop, site));
        } else {
            held.set(index, (start, first - start, site));
            if stop < end && !held.push((stop, end - stop, site)) {
                gone(record, end - stop, 0);
            }
        }
        index += 1;
    }
}
