//! Counts allocations, each with a weight.
//!
//! Heap allocations are sampled by bytes: the number of bytes between two samples is random, exponentially
//! distributed with mean T (the interval). An allocation of n bytes is sampled with probability p = 1 -
//! exp(-n/T), and counts as n/p bytes and 1/p allocations. The sums are therefore right on average for any
//! sizes, as in the heap profilers of tcmalloc and jemalloc. Large allocations, CUDA allocations and mappings
//! are all counted, with their actual size.

use core::ffi::c_void;

use crate::layout::{AllocationKind, COUNT_UNIT, header};
use crate::live::{self, LiveEntry, key};
use crate::local::{ThreadState, TracerGuard, thread_state};
use crate::ranges::{self, PendingUnmap, RangeList};
use crate::state::{self, interval, is_on, large_bytes};
use crate::walk::StackWalk;
use crate::{sites, sys};

/// Weight of one allocation, in units of the counters.
const ONE_ALLOCATION: u32 = 256;
const _: () = assert!(ONE_ALLOCATION as u64 == COUNT_UNIT, "the same unit in both widths");

#[inline]
pub(crate) fn record_alloc(block: *mut c_void, bytes: usize, function: u32) {
    if block.is_null() || !is_on() {
        return;
    }
    let local = thread_state();
    if local.busy.get() {
        return;
    }
    if bytes < large_bytes() {
        let left = local.bytes_to_sample.get() - bytes.cast_signed() as i64;
        local.bytes_to_sample.set(left);
        if left >= 0 {
            return;
        }
    }
    record_sample(local, block, bytes, function);
}

#[cold]
#[inline(never)]
fn record_sample(local: &'static ThreadState, block: *mut c_void, bytes: usize, function: u32) {
    let Some(_busy) = TracerGuard::enter(local) else { return };
    let entry = if bytes >= large_bytes() {
        LiveEntry { site: 0, bytes: bytes as u64, count: ONE_ALLOCATION }
    } else {
        if local.random.get() == 0 {
            seed_random(local);
            let left = local.bytes_to_sample.get() - bytes.cast_signed() as i64;
            local.bytes_to_sample.set(left);
            if left >= 0 {
                return;
            }
        }
        local.bytes_to_sample.set(bytes_to_next_sample(local));
        sample_weight(bytes, interval())
    };
    let Some(site) = current_site(local, function) else { return };
    let entry = LiveEntry { site, ..entry };
    let key = key(AllocationKind::Heap, block.addr());
    // A stale entry belongs to an earlier block at this address whose free the tracer missed.
    if let Some(stale) = live::take(key) {
        sites::remove(stale.site, stale.bytes, u64::from(stale.count));
    }
    let followed = live::insert(key, entry);
    sites::add(site, entry.bytes, u64::from(entry.count), followed);
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an estimate of positive numbers far below 2^53"
)]
fn sample_weight(bytes: usize, interval: usize) -> LiveEntry {
    let bytes = bytes.max(1) as f64;
    let probability = -(-bytes / interval.max(1) as f64).exp_m1();
    let count = COUNT_UNIT as f64 / probability;
    LiveEntry { site: 0, bytes: (bytes / probability) as u64, count: count as u32 }
}

fn seed_random(local: &ThreadState) {
    let mut now = sys::CTimespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: writes to `now`.
    unsafe { sys::clock_gettime(sys::CLOCK_REALTIME, &raw mut now) };
    let place = core::ptr::from_ref(local).addr() as u64;
    let time =
        now.seconds.cast_unsigned().wrapping_mul(1_000_000_007).wrapping_add(now.nanoseconds.cast_unsigned());
    local.random.set((place.rotate_left(32) ^ time) | 1);
    local.bytes_to_sample.set(bytes_to_next_sample(local));
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a random number")]
fn bytes_to_next_sample(local: &ThreadState) -> i64 {
    // xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled", 2016).
    let mut bits = local.random.get();
    bits ^= bits >> 12;
    bits ^= bits << 25;
    bits ^= bits >> 27;
    local.random.set(bits);
    let uniform = ((bits.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    (-uniform.ln() * interval() as f64) as i64
}

/// Returns the site of the enclosing counted CUDA call, or else that of the thread's stack.
fn current_site(local: &ThreadState, function: u32) -> Option<u32> {
    match local.inside_site.get() {
        0 => sites::find_or_create(function, 0, StackWalk::current().addresses()),
        parent => sites::find_or_create(function, parent, &[]),
    }
}

/// Removes the entry of a heap block before its free, if the block was counted.
#[inline]
pub(crate) fn take_entry(block: *mut c_void) -> Option<LiveEntry> {
    if block.is_null() || !is_on() {
        return None;
    }
    let entry = live::take(key(AllocationKind::Heap, block.addr()))?;
    sites::remove(entry.site, entry.bytes, u64::from(entry.count));
    Some(entry)
}

#[cold]
pub(crate) fn restore_entry(kind: AllocationKind, handle: usize, entry: LiveEntry) {
    if live::insert(key(kind, handle), entry) {
        // Only the live counters rise, not the totals: the allocation is not new.
        sites::restore_live(entry.site, entry.bytes, u64::from(entry.count));
    } else {
        state::increment(header::UNFOLLOWED);
    }
}

pub(crate) fn record_mapping(list: RangeList, start: usize, bytes: usize, site: u32) {
    let Some(_busy) = enter_if_on() else { return };
    add_range(list, start, bytes, site);
}

pub(crate) fn record_host_mapping(start: usize, bytes: usize, function: u32) {
    let Some(_busy) = enter_if_on() else { return };
    // Inside a CUDA call for pinned host memory, that call counts this memory.
    if thread_state().inside_kind.get() == AllocationKind::Pinned as u8 {
        return;
    }
    if let Some(site) = current_site(thread_state(), function) {
        add_range(RangeList::Host, start, bytes, site);
    }
}

fn add_range(list: RangeList, start: usize, bytes: usize, site: u32) {
    let followed = ranges::add_range(list, start, bytes, site, sites::remove);
    sites::add(site, bytes as u64, COUNT_UNIT, followed);
}

/// Marks the ranges that an unmapping may remove; `None` if none of the memory was counted.
pub(crate) fn begin_unmap(list: RangeList, start: usize, bytes: usize) -> Option<PendingUnmap> {
    let _busy = enter_if_on()?;
    ranges::mark_leaving(list, start, bytes)
}

/// Removes the marked ranges, or keeps them if the unmapping failed.
pub(crate) fn end_unmap(leaving: Option<PendingUnmap>, done: bool) {
    let Some(leaving) = leaving else { return };
    let Some(_busy) = enter_if_on() else { return };
    if done {
        leaving.complete(sites::remove);
    } else {
        leaving.cancel();
    }
}

pub(crate) fn enter_if_on() -> Option<TracerGuard> {
    if is_on() { TracerGuard::enter(thread_state()) } else { None }
}

/// Returns the site of a CUDA call that begins; `None` if an enclosing call of the same kind counts the
/// memory.
pub(crate) fn call_site(function: u32, kind: AllocationKind) -> Option<u32> {
    let _busy = enter_if_on()?;
    let local = thread_state();
    if local.inside_kind.get() == kind as u8 {
        return None;
    }
    current_site(local, function)
}

pub(crate) fn run_within<R>(site: Option<u32>, kind: AllocationKind, call: impl FnOnce() -> R) -> R {
    let Some(site) = site else { return call() };
    let local = thread_state();
    let (outer_site, outer_kind) =
        (local.inside_site.replace(site + 1), local.inside_kind.replace(kind as u8));
    let result = call();
    local.inside_site.set(outer_site);
    local.inside_kind.set(outer_kind);
    result
}

pub(crate) fn record_handle(kind: AllocationKind, handle: usize, bytes: usize, site: u32) {
    let Some(_busy) = enter_if_on() else { return };
    let entry = LiveEntry { site, bytes: bytes as u64, count: ONE_ALLOCATION };
    let key = key(kind, handle);
    if let Some(stale) = live::take(key) {
        sites::remove(stale.site, stale.bytes, u64::from(stale.count));
    }
    let followed = live::insert(key, entry);
    sites::add(site, entry.bytes, COUNT_UNIT, followed);
}

pub(crate) fn take_handle(kind: AllocationKind, handle: usize) -> Option<LiveEntry> {
    let _busy = enter_if_on()?;
    let entry = live::take(key(kind, handle))?;
    sites::remove(entry.site, entry.bytes, u64::from(entry.count));
    Some(entry)
}
