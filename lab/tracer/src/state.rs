//! Addresses of the maps, and the switch for counting.
//!
//! The kernel wipes the page with the switch in a forked child, so a child is never counted: it shares the
//! maps with its parent, and threads that do not exist in the child may hold locks.

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::layout::{FILE_BYTES, header};

/// Page with the switch; null before the start.
static GATE_PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static PUBLIC_MAP: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
static PRIVATE_MAP: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
static SAMPLE_INTERVAL: AtomicUsize = AtomicUsize::new(0);

static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);

/// Allocations from this many intervals on are all counted.
const LARGE_INTERVALS: usize = 4;

#[inline]
pub(crate) fn is_on() -> bool {
    let gate = GATE_PAGE.load(Ordering::Acquire);
    // SAFETY: a non-null address is that of the page passed to `start_counting`, which is never unmapped.
    !gate.is_null() && unsafe { (*gate).load(Ordering::Relaxed) } == 1
}

pub(crate) fn interval() -> usize {
    SAMPLE_INTERVAL.load(Ordering::Relaxed)
}

/// Sets the page size: 4 KiB, or 16 or 64 KiB on some Arm processors.
pub(crate) fn set_page(bytes: usize) {
    if bytes.is_power_of_two() {
        PAGE_BYTES.store(bytes, Ordering::Relaxed);
    }
}

pub(crate) fn round_to_pages(bytes: usize) -> usize {
    let last = PAGE_BYTES.load(Ordering::Relaxed) - 1;
    bytes.saturating_add(last) & !last
}

#[inline]
pub(crate) fn large_bytes() -> usize {
    SAMPLE_INTERVAL.load(Ordering::Relaxed) * LARGE_INTERVALS
}

/// # Safety
/// `file` has [`FILE_BYTES`] bytes and `private` has [`crate::live::PRIVATE_BYTES`] bytes; both are zero,
/// mapped shared and never unmapped. `gate` is a page that a fork wipes.
pub(crate) unsafe fn start_counting(
    file: *mut c_void,
    private: *mut c_void,
    gate: *mut c_void,
    interval: usize,
) {
    PUBLIC_MAP.store(file.cast(), Ordering::Relaxed);
    PRIVATE_MAP.store(private.cast(), Ordering::Relaxed);
    SAMPLE_INTERVAL.store(interval, Ordering::Relaxed);
    // SAFETY: the caller passes a page, which is large enough and aligned.
    unsafe { (*gate.cast::<AtomicU32>()).store(1, Ordering::Relaxed) };
    GATE_PAGE.store(gate.cast(), Ordering::Release);
}

/// Returns a 64-bit number of the published file; only valid while [`is_on`].
#[inline]
pub(crate) fn public_u64(offset: usize) -> Option<&'static AtomicU64> {
    let base = PUBLIC_MAP.load(Ordering::Relaxed);
    if base.is_null() || offset > FILE_BYTES - 8 || !offset.is_multiple_of(8) {
        return None;
    }
    // SAFETY: the address is within the mapping and aligned, and the number is only accessed as an atomic.
    Some(unsafe { &*base.add(offset / 8) })
}

pub(crate) fn public_u32(offset: usize) -> Option<&'static AtomicU32> {
    let base = PUBLIC_MAP.load(Ordering::Relaxed);
    if base.is_null() || offset > FILE_BYTES - 4 || !offset.is_multiple_of(4) {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { &*base.cast::<AtomicU32>().add(offset / 4) })
}

#[inline]
pub(crate) fn private_u64(offset: usize) -> Option<&'static AtomicU64> {
    let base = PRIVATE_MAP.load(Ordering::Relaxed);
    if base.is_null() || offset > crate::live::PRIVATE_BYTES - 8 || !offset.is_multiple_of(8) {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { &*base.add(offset / 8) })
}

pub(crate) fn increment(offset: usize) {
    if let Some(counter) = public_u64(offset) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

const _: () = assert!(header::EXE + 256 <= crate::layout::HEADER_BYTES, "the path has room");
