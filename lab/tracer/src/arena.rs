//! Provides memory for allocations made while the real allocation functions are being looked up. Blocks are
//! never freed.
//!
//! ```text
//!   size of the block, padding (16 bytes) | block | size of the next one, …
//! ```

use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering};

const ARENA_SIZE: usize = 64 * 1024;
/// Bytes before each block: its size, and padding for the alignment of `malloc`.
const BLOCK_HEAD_BYTES: usize = 16;

#[repr(C, align(16))]
struct ArenaBytes(core::cell::UnsafeCell<[u8; ARENA_SIZE]>);

// SAFETY: an atomic counter hands out each part of the array once, and only the receiver accesses that
// part.
unsafe impl Sync for ArenaBytes {}

static ARENA_BYTES: ArenaBytes = ArenaBytes(core::cell::UnsafeCell::new([0; ARENA_SIZE]));
static ARENA_USED: AtomicUsize = AtomicUsize::new(0);

/// Returns null when the arena is full.
#[cold]
pub(crate) fn arena_alloc(bytes: usize) -> *mut c_void {
    let wanted = (bytes.max(1).saturating_add(15) & !15).saturating_add(BLOCK_HEAD_BYTES);
    let mut at = ARENA_USED.load(Ordering::Relaxed);
    loop {
        let Some(end) = at.checked_add(wanted).filter(|end| *end <= ARENA_SIZE) else {
            return core::ptr::null_mut();
        };
        match ARENA_USED.compare_exchange_weak(at, end, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => break,
            Err(used) => at = used,
        }
    }
    // SAFETY: the `wanted` bytes from `at` are within the array, and no other caller gets them. The array
    // is 16-aligned and `at` is a multiple of 16, so the head is aligned for a size.
    unsafe {
        let head = ARENA_BYTES.0.get().cast::<c_void>().byte_add(at);
        head.cast::<usize>().write(bytes);
        head.byte_add(BLOCK_HEAD_BYTES)
    }
}

#[inline]
pub(crate) fn is_in_arena(block: *mut c_void) -> bool {
    block.addr().wrapping_sub(ARENA_BYTES.0.get().addr()) < ARENA_SIZE
}

/// Copies the content of an arena block to a new block of `bytes` bytes, if `new` is not null.
///
/// # Safety
/// `block` is in the arena; `new` is null or a different block of at least `bytes` bytes.
#[cold]
pub(crate) unsafe fn move_block(block: *mut c_void, new: *mut c_void, bytes: usize) -> *mut c_void {
    if !new.is_null() {
        // SAFETY: `arena_alloc` wrote the head of `block` before it returned the block. The two blocks do
        // not overlap, even if both are in the arena, and both have the bytes that are copied.
        unsafe {
            let size = block.byte_sub(BLOCK_HEAD_BYTES).cast::<usize>().read();
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
        let blocks = sizes.map(arena_alloc);
        for (block, size) in blocks.into_iter().zip(sizes) {
            assert!(!block.is_null() && block.addr().is_multiple_of(16) && is_in_arena(block));
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
                    assert!(!new.is_null() && !is_in_arena(new) && is_kept(new, size.min(bytes)));
                    free(new);
                    assert!(
                        is_kept(move_block(block, arena_alloc(bytes), bytes), bytes),
                        "nothing of its neighbours"
                    );
                }
            }
        }
        assert!(
            [usize::MAX, usize::MAX - 15, ARENA_SIZE].map(arena_alloc).iter().all(|block| block.is_null())
        );
    }
}
