//! Counts anonymous mappings made by programs. The C library maps its heap by internal calls, which are not
//! intercepted. Mappings of files are not counted, nor are ranges that are only reserved (not writable).

use core::ffi::{c_int, c_long, c_void};

use crate::count::{begin_unmap, end_unmap, record_host_mapping};
use crate::layout::number_of;
use crate::ranges::{PendingUnmap, RangeList};
use crate::real::RealFunction;
use crate::state::round_to_pages;
use crate::sys;

const MMAP: u32 = number_of("mmap");
const MREMAP: u32 = number_of("mremap");

static REAL_MMAP: RealFunction = RealFunction::new(c"mmap");
static REAL_MMAP64: RealFunction = RealFunction::new(c"mmap64");
static REAL_MUNMAP: RealFunction = RealFunction::new(c"munmap");
static REAL_MREMAP: RealFunction = RealFunction::new(c"mremap");

pub(crate) type MmapFn = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, c_long) -> *mut c_void;
type MunmapFn = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type MremapFn = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;

pub(crate) fn real_mmap() -> Option<MmapFn> {
    let real = REAL_MMAP.get();
    // SAFETY: `real` is the `mmap` that this library replaces, so it has this signature.
    if real.is_null() { None } else { Some(unsafe { core::mem::transmute::<*mut c_void, MmapFn>(real) }) }
}

/// # Safety
/// The caller keeps the C library's rules; also applies to all functions of this file that replace one.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { map_counted(&REAL_MMAP, address, bytes, access, flags, file, offset) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    // SAFETY: the caller passes arguments as the C library requires.
    unsafe { map_counted(&REAL_MMAP64, address, bytes, access, flags, file, offset) }
}

/// # Safety
/// `real` is a function of this signature, and the caller keeps the C library's rules.
unsafe fn map_counted(
    real: &RealFunction,
    address: *mut c_void,
    bytes: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: c_long,
) -> *mut c_void {
    let real = real.get();
    if real.is_null() {
        set_no_memory();
        return sys::MAP_FAILED;
    }
    // A fixed mapping replaces existing ones.
    let leaving = if flags & sys::MAP_FIXED != 0 { begin_host_unmap(address, bytes) } else { None };
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let at = unsafe {
        core::mem::transmute::<*mut c_void, MmapFn>(real)(address, bytes, access, flags, file, offset)
    };
    let done = at != sys::MAP_FAILED;
    end_unmap(leaving, done);
    if done && flags & sys::MAP_ANONYMOUS != 0 && access & sys::PROT_WRITE != 0 {
        record_host_mapping(at.addr(), round_to_pages(bytes), MMAP);
    }
    at
}

fn begin_host_unmap(address: *mut c_void, bytes: usize) -> Option<PendingUnmap> {
    begin_unmap(RangeList::Host, address.addr(), round_to_pages(bytes))
}

fn set_no_memory() {
    // SAFETY: the C library's own place for this thread's error.
    unsafe { *sys::__errno_location() = sys::ENOMEM };
}

pub(crate) fn look_up_mappings() {
    for real in [&REAL_MMAP, &REAL_MMAP64, &REAL_MUNMAP, &REAL_MREMAP] {
        real.get();
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> c_int {
    let real = REAL_MUNMAP.get();
    if real.is_null() {
        set_no_memory();
        return -1;
    }
    let leaving = begin_host_unmap(address, bytes);
    // SAFETY: `real` is the `munmap` that this library replaces, so it has this signature.
    let error = unsafe { core::mem::transmute::<*mut c_void, MunmapFn>(real)(address, bytes) };
    end_unmap(leaving, error == 0);
    error
}

/// Always reads the last argument, which callers pass only with some flags. Otherwise, on x86-64 and aarch64,
/// the argument comes from a register that the call does not use.
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
        set_no_memory();
        return sys::MAP_FAILED;
    }
    let moved = begin_host_unmap(address, bytes);
    let replaced =
        if flags & sys::MREMAP_FIXED != 0 { begin_host_unmap(new_address, new_bytes) } else { None };
    // SAFETY: `real` is a function of this name and signature; the caller passed valid arguments.
    let at = unsafe {
        core::mem::transmute::<*mut c_void, MremapFn>(real)(address, bytes, new_bytes, flags, new_address)
    };
    let done = at != sys::MAP_FAILED;
    end_unmap(moved, done);
    end_unmap(replaced, done);
    if done && moved.is_some() {
        record_host_mapping(at.addr(), round_to_pages(new_bytes), MREMAP);
    }
    at
}
