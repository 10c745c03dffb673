//! Anonymous mappings that programs ask for themselves (the heap's own are the C library's business and not seen here).
//!
//! A range that is only reserved (no right to write) is no memory and is not counted; neither is one of a file.

use core::ffi::{c_int, c_long, c_void};

use crate::count::{mapped_here, unmapping};
use crate::layout::number_of;
use crate::ranges::List;
use crate::real::Real;
use crate::sys;

const MMAP: u32 = number_of("mmap");
const MREMAP: u32 = number_of("mremap");

static REAL_MMAP: Real = Real::new(c"mmap");
static REAL_MMAP64: Real = Real::new(c"mmap64");
static REAL_MUNMAP: Real = Real::new(c"munmap");
static REAL_MREMAP: Real = Real::new(c"mremap");

pub(crate) type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, c_long) -> *mut c_void;
type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;

/// The real `mmap`.
pub(crate) fn real_mmap() -> Option<Mmap> {
    let real = REAL_MMAP.get();
    // SAFETY: the function behind ours, of this signature.
    if real.is_null() { None } else { Some(unsafe { core::mem::transmute::<*mut c_void, Mmap>(real) }) }
}

/// As in the C library.
///
/// # Safety
/// As in the C library; so for all of the functions here.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { map(&REAL_MMAP, address, bytes, access, flags, file, offset) }
}

/// As in the C library.
///
/// # Safety
/// See [`mmap`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { map(&REAL_MMAP64, address, bytes, access, flags, file, offset) }
}

unsafe fn map(
    real: &Real,
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        // SAFETY: the C library's own place for this thread's error.
        unsafe { *sys::__errno_location() = sys::ENOMEM };
        return sys::MAP_FAILED;
    }
    if flags & sys::MAP_FIXED != 0 {
        // What was there goes.
        unmapping(List::Host, address.addr(), bytes);
    }
    // SAFETY: the function behind ours, of this signature; the arguments are the caller's.
    let at = unsafe {
        core::mem::transmute::<*mut c_void, Mmap>(real)(address, bytes, access, flags, file, offset)
    };
    let counts = flags & sys::MAP_ANONYMOUS != 0 && access & sys::PROT_WRITE != 0;
    if at != sys::MAP_FAILED && counts {
        mapped_here(at.addr(), bytes, MMAP);
    }
    at
}

/// As in the C library.
///
/// # Safety
/// See [`mmap`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    let real = REAL_MUNMAP.get();
    if real.is_null() {
        return -1;
    }
    unmapping(List::Host, address.addr(), bytes);
    // SAFETY: the function behind ours, of this signature.
    unsafe { core::mem::transmute::<*mut c_void, Munmap>(real)(address, bytes) }
}

/// As in the C library, where the last argument is only there with some flags; on our processors it is then in a register
/// that nobody reads.
///
/// # Safety
/// See [`mmap`].
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mremap(
    address: *mut c_void,
    bytes: usize,
    new_bytes: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    let real = REAL_MREMAP.get();
    if real.is_null() {
        return sys::MAP_FAILED;
    }
    let mut counted = false;
    if let Some(_busy) = crate::count::entered() {
        crate::ranges::remove(List::Host, address.addr(), bytes, |site, bytes, count| {
            counted = true;
            crate::sites::remove(site, bytes, count);
        });
    }
    // SAFETY: the function behind ours, of this signature; the arguments are the caller's.
    let at = unsafe {
        core::mem::transmute::<*mut c_void, Mremap>(real)(address, bytes, new_bytes, flags, new_address)
    };
    if counted {
        let (start, bytes) = if at == sys::MAP_FAILED { (address, bytes) } else { (at, new_bytes) };
        mapped_here(start.addr(), bytes, MREMAP);
    }
    at
}
