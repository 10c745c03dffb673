//! The C library's heap, as programs call it. Each function calls the real one and counts.
//!
//! While the real ones are being looked up, which may allocate, a few blocks come out of an arena and are never freed.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::count::{allocated, freeing, kept};
use crate::layout::{Kind, number_of};
use crate::real::Real;
use crate::sys;

const MALLOC: u32 = number_of("malloc");
const CALLOC: u32 = number_of("calloc");
const REALLOC: u32 = number_of("realloc");
const MEMALIGN: u32 = number_of("memalign");
const ALIGNED_ALLOC: u32 = number_of("aligned_alloc");
const POSIX_MEMALIGN: u32 = number_of("posix_memalign");

static REAL_MALLOC: Real = Real::new(c"malloc");
static REAL_CALLOC: Real = Real::new(c"calloc");
static REAL_REALLOC: Real = Real::new(c"realloc");
static REAL_FREE: Real = Real::new(c"free");
static REAL_MEMALIGN: Real = Real::new(c"memalign");
static REAL_ALIGNED_ALLOC: Real = Real::new(c"aligned_alloc");
static REAL_POSIX_MEMALIGN: Real = Real::new(c"posix_memalign");
static REAL_VALLOC: Real = Real::new(c"valloc");
static REAL_PVALLOC: Real = Real::new(c"pvalloc");

type One = unsafe extern "C" fn(usize) -> *mut c_void;
type Two = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type Resize = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);
type Aligned = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;

/// Bytes of the arena.
const ARENA: usize = 64 * 1024;

#[repr(C, align(16))]
struct Arena(core::cell::UnsafeCell<[u8; ARENA]>);

// SAFETY: parts of it are handed out once each, by an atomic counter, and nobody else touches them.
unsafe impl Sync for Arena {}

static ARENA_BYTES: Arena = Arena(core::cell::UnsafeCell::new([0; ARENA]));
static ARENA_USED: AtomicUsize = AtomicUsize::new(0);

/// Looks up what is behind ours, while nobody waits for it: the first call may come where the loader's locks are held.
pub(crate) fn prepare() {
    let most = [&REAL_MALLOC, &REAL_CALLOC, &REAL_REALLOC, &REAL_FREE, &REAL_POSIX_MEMALIGN];
    let rest = [&REAL_MEMALIGN, &REAL_ALIGNED_ALLOC, &REAL_VALLOC, &REAL_PVALLOC];
    for real in most.into_iter().chain(rest) {
        real.get();
    }
}

/// Zeroed bytes of the arena; null when it is used up.
#[cold]
fn from_arena(bytes: usize) -> *mut c_void {
    let wanted = bytes.max(1).saturating_add(15) & !15;
    let Ok(at) = ARENA_USED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
        used.checked_add(wanted).filter(|end| *end <= ARENA)
    }) else {
        return core::ptr::null_mut();
    };
    // SAFETY: `at` is within the arena.
    unsafe { ARENA_BYTES.0.get().cast::<u8>().add(at).cast() }
}

/// The bytes from a block of the arena to its end, or `None` for any other block.
#[inline]
fn arena_rest(block: *mut c_void) -> Option<usize> {
    let at = block.addr().wrapping_sub(ARENA_BYTES.0.get().addr());
    if at < ARENA { Some(ARENA - at) } else { None }
}

/// As in the C library.
///
/// # Safety
/// As in the C library; so for all of the functions here.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    let real = REAL_MALLOC.get();
    if real.is_null() {
        return from_arena(bytes);
    }
    // SAFETY: the function behind ours, of this signature.
    let block = unsafe { core::mem::transmute::<*mut c_void, One>(real)(bytes) };
    allocated(block, bytes, MALLOC);
    block
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    let real = REAL_CALLOC.get();
    if real.is_null() {
        return count.checked_mul(bytes).map_or(core::ptr::null_mut(), from_arena);
    }
    // SAFETY: the function behind ours, of this signature.
    let block = unsafe { core::mem::transmute::<*mut c_void, Two>(real)(count, bytes) };
    allocated(block, count.wrapping_mul(bytes), CALLOC);
    block
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    if let Some(rest) = arena_rest(block) {
        // SAFETY: our own; the block has at most `rest` bytes, all of them ours to read.
        return unsafe {
            let new = malloc(bytes);
            if !new.is_null() {
                core::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast::<u8>(), rest.min(bytes));
            }
            new
        };
    }
    let real = REAL_REALLOC.get();
    if real.is_null() {
        // Only a block of the arena can exist by now.
        return if block.is_null() { from_arena(bytes) } else { core::ptr::null_mut() };
    }
    // Before: as soon as it is freed another thread may be given the same address.
    let before = freeing(block);
    // SAFETY: the function behind ours, of this signature.
    let new = unsafe { core::mem::transmute::<*mut c_void, Resize>(real)(block, bytes) };
    if !new.is_null() {
        allocated(new, bytes, REALLOC);
    } else if bytes != 0
        && let Some(before) = before
    {
        kept(Kind::Heap, block.addr(), before);
    }
    new
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn reallocarray(block: *mut c_void, count: usize, bytes: usize) -> *mut c_void {
    if let Some(bytes) = count.checked_mul(bytes) {
        // SAFETY: the caller's promise.
        return unsafe { realloc(block, bytes) };
    }
    // SAFETY: the C library's own place for this thread's error.
    unsafe { *sys::__errno_location() = sys::ENOMEM };
    core::ptr::null_mut()
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() || arena_rest(block).is_some() {
        return;
    }
    let real = REAL_FREE.get();
    if real.is_null() {
        // Lost: nobody frees what he allocated before there was a `free`.
        return;
    }
    freeing(block);
    // SAFETY: the function behind ours, of this signature.
    unsafe { core::mem::transmute::<*mut c_void, Free>(real)(block) }
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { aligned(&REAL_MEMALIGN, alignment, bytes, MEMALIGN) }
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { aligned(&REAL_ALIGNED_ALLOC, alignment, bytes, ALIGNED_ALLOC) }
}

unsafe fn aligned(real: &Real, alignment: usize, bytes: usize, function: u32) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: the function behind ours, of this signature.
    let block = unsafe { core::mem::transmute::<*mut c_void, Two>(real)(alignment, bytes) };
    allocated(block, bytes, function);
    block
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
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
    // SAFETY: the function behind ours, of this signature.
    let error = unsafe { core::mem::transmute::<*mut c_void, Aligned>(real)(out, alignment, bytes) };
    if error == 0 {
        // SAFETY: it has just been written there.
        allocated(unsafe { *out }, bytes, POSIX_MEMALIGN);
    }
    error
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { paged(&REAL_VALLOC, bytes) }
}

/// As in the C library.
///
/// # Safety
/// See [`malloc`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { paged(&REAL_PVALLOC, bytes) }
}

unsafe fn paged(real: &Real, bytes: usize) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: the function behind ours, of this signature.
    let block = unsafe { core::mem::transmute::<*mut c_void, One>(real)(bytes) };
    allocated(block, bytes, MEMALIGN);
    block
}
