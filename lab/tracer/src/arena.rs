//! A few blocks for allocations made while the real allocation functions are being looked up. They are
//! never freed.
//!
//! ```text
//!   size of the block, padding (16 bytes) | block | size of the next one, …
//! ```

use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Size of the arena in bytes.
const ARENA: usize = 64 * 1024;
/// Bytes before each block: its size, and padding for malloc's alignment.
const HEAD: usize = 16;

#[repr(C, align(16))]
struct Arena(core::cell::UnsafeCell<[u8; ARENA]>);

// SAFETY: parts of it are handed out once each, by an atomic counter, and nobody else touches them.
unsafe impl Sync for Arena {}

static ARENA_BYTES: Arena = Arena(core::cell::UnsafeCell::new([0; ARENA]));
static ARENA_USED: AtomicUsize = AtomicUsize::new(0);

/// Allocates zeroed bytes in the arena; returns null when it is full.
#[cold]
pub(crate) fn from_arena(bytes: usize) -> *mut c_void {
    let wanted = (bytes.max(1).saturating_add(15) & !15).saturating_add(HEAD);
    let mut at = ARENA_USED.load(Ordering::Relaxed);
    loop {
        let Some(end) = at.checked_add(wanted).filter(|end| *end <= ARENA) else {
            return core::ptr::null_mut();
        };
        match ARENA_USED.compare_exchange_weak(at, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break,
            Err(used) => at = used,
        }
    }
    // SAFETY: `wanted` bytes from `at` are within the arena and nobody else's, and a multiple of 16 is aligned for a size.
    unsafe {
        let head = ARENA_BYTES.0.get().cast::<c_void>().byte_add(at);
        head.cast::<usize>().write(bytes);
        head.byte_add(HEAD)
    }
}

/// Returns true for a block of the arena.
#[inline]
pub(crate) fn is_of_arena(block: *mut c_void) -> bool {
    block.addr().wrapping_sub(ARENA_BYTES.0.get().addr()) < ARENA
}

/// Copies the content of an arena block to a new block of `bytes` bytes, if `new` is not null.
///
/// # Safety
/// The block came out of the arena, and the new one is another, wherever it came from.
#[cold]
pub(crate) unsafe fn moved(block: *mut c_void, new: *mut c_void, bytes: usize) -> *mut c_void {
    if !new.is_null() {
        // SAFETY: the head of a block was written before anybody got the block. Two blocks share no byte, also not two of the
        // arena, and both have the bytes that are copied.
        unsafe {
            let size = block.byte_sub(HEAD).cast::<usize>().read();
            core::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast::<u8>(), size.min(bytes));
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{free, realloc};

    #[test]
    fn blocks_of_the_arena_share_nothing_and_keep_what_they_hold_when_they_move() {
        let sizes = [0, 1, 15, 16, 17, 100];
        let blocks = sizes.map(from_arena);
        for (block, size) in blocks.into_iter().zip(sizes) {
            assert!(!block.is_null() && block.addr().is_multiple_of(16) && is_of_arena(block));
            // SAFETY: a block of this size.
            unsafe { block.cast::<u8>().write_bytes(u8::try_from(size).unwrap(), size) };
        }
        for (block, size) in blocks.into_iter().zip(sizes) {
            for bytes in [size / 2 + 1, size + 100] {
                let is_kept = |new: *mut c_void, count: usize| {
                    // SAFETY: it has so many bytes.
                    let bytes = unsafe { core::slice::from_raw_parts(new.cast::<u8>(), count) };
                    let (kept, rest) = bytes.split_at(size.min(count));
                    kept.iter().all(|byte| usize::from(*byte) == size) && rest.iter().all(|byte| *byte == 0)
                };
                // SAFETY: of the arena, which keeps it; what comes of it is new, and given back.
                unsafe {
                    let new = realloc(block, bytes);
                    assert!(!new.is_null() && !is_of_arena(new) && is_kept(new, size.min(bytes)));
                    free(new);
                    assert!(
                        is_kept(moved(block, from_arena(bytes), bytes), bytes),
                        "nothing of its neighbours"
                    );
                }
            }
        }
        assert!([usize::MAX, usize::MAX - 15, ARENA].map(from_arena).iter().all(|block| block.is_null()));
    }
}
