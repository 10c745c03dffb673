//! Replaces the C library's heap functions by functions that call the real ones and count.
//!
//! The look-up of the real functions may allocate; meanwhile blocks come from an arena (`arena.rs`).
//!
//! The real function is the next one of its name (`RTLD_NEXT`): the C library's, or that of another preloaded
//! library. `reallocarray` is omitted, because the C library's version calls `realloc`, and so reaches this
//! library's.

use core::ffi::{c_int, c_void};

use crate::arena::{arena_alloc, is_in_arena, move_block};
use crate::count::{record_alloc, restore_entry, take_entry};
use crate::layout::{AllocationKind, number_of};
use crate::real::RealFunction;
use crate::sys;

const MALLOC: u32 = number_of("malloc");
const CALLOC: u32 = number_of("calloc");
const REALLOC: u32 = number_of("realloc");
const MEMALIGN: u32 = number_of("memalign");
const ALIGNED_ALLOC: u32 = number_of("aligned_alloc");
const POSIX_MEMALIGN: u32 = number_of("posix_memalign");

static REAL_MALLOC: RealFunction = RealFunction::new(c"malloc");
static REAL_CALLOC: RealFunction = RealFunction::new(c"calloc");
static REAL_REALLOC: RealFunction = RealFunction::new(c"realloc");
static REAL_FREE: RealFunction = RealFunction::new(c"free");
static REAL_MEMALIGN: RealFunction = RealFunction::new(c"memalign");
static REAL_ALIGNED_ALLOC: RealFunction = RealFunction::new(c"aligned_alloc");
static REAL_POSIX_MEMALIGN: RealFunction = RealFunction::new(c"posix_memalign");
static REAL_VALLOC: RealFunction = RealFunction::new(c"valloc");
static REAL_PVALLOC: RealFunction = RealFunction::new(c"pvalloc");

type SizeFn = unsafe extern "C" fn(usize) -> *mut c_void;
type TwoSizesFn = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type ReallocFn = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type FreeFn = unsafe extern "C" fn(*mut c_void);
type PosixMemalignFn = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;

/// Looks up the real functions early: the first call may come while the dynamic loader's locks are held.
pub(crate) fn look_up_heap() {
    let most = [&REAL_MALLOC, &REAL_CALLOC, &REAL_REALLOC, &REAL_FREE, &REAL_POSIX_MEMALIGN];
    let rest = [&REAL_MEMALIGN, &REAL_ALIGNED_ALLOC, &REAL_VALLOC, &REAL_PVALLOC];
    for real in most.into_iter().chain(rest) {
        real.get();
    }
}

/// # Safety
/// The caller keeps the C library's rules; also applies to all functions of this file that replace one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let real = REAL_MALLOC.get();
    if real.is_null() {
        return arena_alloc(bytes);
    }
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let block = unsafe { core::mem::transmute::<*mut c_void, SizeFn>(real)(bytes) };
    record_alloc(block, bytes, MALLOC);
    block
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let real = REAL_CALLOC.get();
    if real.is_null() {
        return count.checked_mul(bytes).map_or(core::ptr::null_mut(), arena_alloc);
    }
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let block = unsafe { core::mem::transmute::<*mut c_void, TwoSizesFn>(real)(count, bytes) };
    record_alloc(block, count.wrapping_mul(bytes), CALLOC);
    block
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    if is_in_arena(block) {
        // SAFETY: `block` is a block of the arena, and the other block is new.
        return unsafe { move_block(block, malloc(bytes), bytes) };
    }
    let real = REAL_REALLOC.get();
    if real.is_null() {
        // Without the real `realloc`, all blocks are arena blocks.
        return if block.is_null() { arena_alloc(bytes) } else { core::ptr::null_mut() };
    }
    // Take the entry before the call: another thread may get the same address as soon as the block is freed.
    let before = take_entry(block);
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let new = unsafe { core::mem::transmute::<*mut c_void, ReallocFn>(real)(block, bytes) };
    if !new.is_null() {
        record_alloc(new, bytes, REALLOC);
    } else if bytes != 0
        && let Some(before) = before
    {
        restore_entry(AllocationKind::Heap, block.addr(), before);
    }
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() || is_in_arena(block) {
        return;
    }
    let real = REAL_FREE.get();
    if real.is_null() {
        // Leak the block: there is no real `free`.
        return;
    }
    take_entry(block);
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    unsafe { core::mem::transmute::<*mut c_void, FreeFn>(real)(block) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { alloc_aligned(&REAL_MEMALIGN, alignment, bytes, MEMALIGN) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { alloc_aligned(&REAL_ALIGNED_ALLOC, alignment, bytes, ALIGNED_ALLOC) }
}

/// # Safety
/// `real` is a function of this signature, and the caller keeps the C library's rules.
unsafe fn alloc_aligned(real: &RealFunction, alignment: usize, bytes: usize, function: u32) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let block = unsafe { core::mem::transmute::<*mut c_void, TwoSizesFn>(real)(alignment, bytes) };
    record_alloc(block, bytes, function);
    block
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> c_int {
    let real = REAL_POSIX_MEMALIGN.get();
    if real.is_null() {
        return sys::ENOMEM;
    }
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let error = unsafe { core::mem::transmute::<*mut c_void, PosixMemalignFn>(real)(out, alignment, bytes) };
    if error == 0 {
        // SAFETY: the successful call has just written the block's address to `out`.
        record_alloc(unsafe { *out }, bytes, POSIX_MEMALIGN);
    }
    error
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { alloc_paged(&REAL_VALLOC, bytes) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { alloc_paged(&REAL_PVALLOC, bytes) }
}

unsafe fn alloc_paged(real: &RealFunction, bytes: usize) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let block = unsafe { core::mem::transmute::<*mut c_void, SizeFn>(real)(bytes) };
    record_alloc(block, bytes, MEMALIGN);
    block
}
