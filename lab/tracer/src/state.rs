//! Addresses of the maps, and the switch for counting.
//!
//! The switch is in a page that the kernel wipes in a forked child, so a child is never counted. A child
//! shares the maps with its parent, and locks may be held by threads that do not exist in the child.

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::layout::{FILE, header};

/// Page with the switch; null before the start.
static GATE: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static FILE_AT: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
/// Private map: the tables of live allocations.
static PRIVATE_AT: AtomicPtr<AtomicU64> = AtomicPtr::new(core::ptr::null_mut());
/// Mean bytes between samples.
static INTERVAL: AtomicUsize = AtomicUsize::new(0);

/// Page size in bytes.
static PAGE: AtomicUsize = AtomicUsize::new(4096);

/// Multiple of the interval from which every allocation is counted.
const LARGE: usize = 4;

/// Returns true if this process is counted.
#[inline]
pub(crate) fn on() -> bool {
    let gate = GATE.load(Ordering::Acquire);
    // SAFETY: not null means the page that `open` was given, which is never unmapped.
    !gate.is_null() && unsafe { (*gate).load(Ordering::Relaxed) } == 1
}

/// Mean bytes between samples.
pub(crate) fn interval() -> usize {
    INTERVAL.load(Ordering::Relaxed)
}

/// Sets the page size: 4 KiB, or 16 or 64 KiB on some Arm processors.
pub(crate) fn set_page(bytes: usize) {
    if bytes.is_power_of_two() {
        PAGE.store(bytes, Ordering::Relaxed);
    }
}

/// Rounds up to whole pages, as the kernel maps them.
pub(crate) fn paged(bytes: usize) -> usize {
    let last = PAGE.load(Ordering::Relaxed) - 1;
    bytes.saturating_add(last) & !last
}

/// Size in bytes from which every allocation is counted.
#[inline]
pub(crate) fn large() -> usize {
    INTERVAL.load(Ordering::Relaxed) * LARGE
}

/// Starts counting.
///
/// # Safety
/// `file` is [`FILE`] bytes, `private` is [`crate::live::BYTES`] bytes, both zero, mapped shared and never unmapped; `gate` is
/// a page that a fork wipes.
pub(crate) unsafe fn open(file: *mut c_void, private: *mut c_void, gate: *mut c_void, interval: usize) {
    FILE_AT.store(file.cast(), Ordering::Relaxed);
    PRIVATE_AT.store(private.cast(), Ordering::Relaxed);
    INTERVAL.store(interval, Ordering::Relaxed);
    // SAFETY: the caller's promise; a page is large enough and aligned.
    unsafe { (*gate.cast::<AtomicU32>()).store(1, Ordering::Relaxed) };
    GATE.store(gate.cast(), Ordering::Release);
}

/// A 64-bit number in the published file. Only valid while [`on`].
#[inline]
pub(crate) fn word(offset: usize) -> Option<&'static AtomicU64> {
    let base = FILE_AT.load(Ordering::Relaxed);
    if base.is_null() || offset > FILE - 8 || !offset.is_multiple_of(8) {
        return None;
    }
    // SAFETY: within the mapping, aligned, and only ever used as an atomic.
    Some(unsafe { &*base.add(offset / 8) })
}

/// A 32-bit number in the published file.
pub(crate) fn half(offset: usize) -> Option<&'static AtomicU32> {
    let base = FILE_AT.load(Ordering::Relaxed);
    if base.is_null() || offset > FILE - 4 || !offset.is_multiple_of(4) {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { &*base.cast::<AtomicU32>().add(offset / 4) })
}

/// A 64-bit number in the private tables.
#[inline]
pub(crate) fn private(offset: usize) -> Option<&'static AtomicU64> {
    let base = PRIVATE_AT.load(Ordering::Relaxed);
    if base.is_null() || offset > crate::live::BYTES - 8 || !offset.is_multiple_of(8) {
        return None;
    }
    // SAFETY: as above.
    Some(unsafe { &*base.add(offset / 8) })
}

/// Increments a counter of the header.
pub(crate) fn count(offset: usize) {
    if let Some(counter) = word(offset) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

const _: () = assert!(header::EXE + 256 <= crate::layout::HEADER, "the path has room");
