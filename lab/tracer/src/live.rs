//! Table of counted live blocks and handles, so that their free is counted, too.
//!
//! ```text
//!   BUCKET_COUNT lines of 8 keys | two words for each key | two lists of ranges
//! ```
//!
//! The hash of a key selects the only bucket in which it may be, so a look-up costs one cache line. Nearly
//! all blocks that a program frees were never counted, so a small table that stays in the cache is read
//! first: it holds an upper limit of the keys in a pair of buckets. Inserting claims a free slot by one
//! compare-exchange. Only one thread removes a key, because a block is freed once. Nothing blocks.

use core::sync::atomic::{AtomicU8, Ordering};

use crate::layout::AllocationKind;
use crate::state::private_u64;

/// Keys per bucket, which fills a cache line.
const BUCKET_KEYS: usize = 8;
/// A heap of 16 GiB at the default interval fills half of the slots.
const BUCKET_COUNT: usize = 1 << 16;
const KEY_BYTES: usize = BUCKET_COUNT * BUCKET_KEYS * 8;
const VALUE_BYTES: usize = KEY_BYTES * 2;
pub(crate) const PRIVATE_BYTES: usize = KEY_BYTES + VALUE_BYTES + crate::ranges::LISTS_BYTES;
pub(crate) const RANGES_OFFSET: usize = KEY_BYTES + VALUE_BYTES;

/// Key of a slot that is being written.
const CLAIMED_KEY: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveEntry {
    pub(crate) site: u32,
    pub(crate) bytes: u64,
    /// Weight in allocations, in 256ths.
    pub(crate) count: u32,
}

/// Returns the key of an address or handle. The key includes the kind: two kinds may use the same number.
#[inline]
pub(crate) fn key(kind: AllocationKind, handle: usize) -> u64 {
    (handle as u64) ^ ((kind as u64) << 56)
}

#[inline]
fn bucket(key: u64) -> usize {
    let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize & (BUCKET_COUNT - 1)
}

/// Keys per pair of buckets, at most 16; never too low, because a key is counted before it is inserted.
static PRESENT_KEYS: [AtomicU8; BUCKET_COUNT / 2] = [const { AtomicU8::new(0) }; BUCKET_COUNT / 2];

#[inline]
fn present(bucket: usize) -> &'static AtomicU8 {
    PRESENT_KEYS.get(bucket / 2).unwrap_or(&PRESENT_KEYS[0])
}

/// Inserts a key; returns false if its bucket is full.
pub(crate) fn insert(key: u64, entry: LiveEntry) -> bool {
    if key <= CLAIMED_KEY {
        return false;
    }
    let bucket = bucket(key);
    for way in bucket * BUCKET_KEYS..(bucket + 1) * BUCKET_KEYS {
        let Some(place) = private_u64(way * 8) else { return false };
        if place.load(Ordering::Relaxed) != 0
            || place.compare_exchange(0, CLAIMED_KEY, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            continue;
        }
        let value = KEY_BYTES + way * 16;
        let (Some(bytes), Some(rest)) = (private_u64(value), private_u64(value + 8)) else { return false };
        bytes.store(entry.bytes, Ordering::Relaxed);
        rest.store(u64::from(entry.site) << 32 | u64::from(entry.count), Ordering::Relaxed);
        present(bucket).fetch_add(1, Ordering::Relaxed);
        place.store(key, Ordering::Release);
        return true;
    }
    false
}

#[inline]
pub(crate) fn take(key: u64) -> Option<LiveEntry> {
    let bucket = bucket(key);
    if present(bucket).load(Ordering::Relaxed) == 0 { None } else { take_from_bucket(key, bucket) }
}

fn take_from_bucket(key: u64, bucket: usize) -> Option<LiveEntry> {
    if key <= CLAIMED_KEY {
        return None;
    }
    for way in bucket * BUCKET_KEYS..(bucket + 1) * BUCKET_KEYS {
        let place = private_u64(way * 8)?;
        if place.load(Ordering::Relaxed) == key {
            return take_slot(way, key);
        }
    }
    None
}

#[cold]
fn take_slot(way: usize, key: u64) -> Option<LiveEntry> {
    let place = private_u64(way * 8)?;
    if place.load(Ordering::Acquire) != key {
        return None;
    }
    let value = KEY_BYTES + way * 16;
    let (bytes, rest) =
        (private_u64(value)?.load(Ordering::Relaxed), private_u64(value + 8)?.load(Ordering::Relaxed));
    // A concurrent double free is the program's bug; only one of the two is counted.
    place.compare_exchange(key, 0, Ordering::Release, Ordering::Relaxed).ok()?;
    present(way / BUCKET_KEYS).fetch_sub(1, Ordering::Relaxed);
    #[expect(clippy::cast_possible_truncation, reason = "two halves of a word")]
    Some(LiveEntry { site: (rest >> 32) as u32, bytes, count: rest as u32 })
}
