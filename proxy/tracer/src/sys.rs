//! The little of the C library that the tracer calls itself, declared here because the crate has no dependencies.
//!
//! Linux with glibc on x86-64 and aarch64; the constants are the same on both.

use core::ffi::{c_char, c_int, c_long, c_void};

pub(crate) const RTLD_NEXT: *mut c_void = -1_isize as *mut c_void;
pub(crate) const RTLD_LAZY: c_int = 1;
pub(crate) const RTLD_NOLOAD: c_int = 4;

pub(crate) const PROT_READ: c_int = 1;
pub(crate) const PROT_WRITE: c_int = 2;
pub(crate) const MAP_SHARED: c_int = 1;
pub(crate) const MAP_PRIVATE: c_int = 2;
pub(crate) const MAP_ANONYMOUS: c_int = 0x20;
pub(crate) const MAP_FIXED: c_int = 0x10;
pub(crate) const MAP_FAILED: *mut c_void = -1_isize as *mut c_void;
pub(crate) const MADV_WIPEONFORK: c_int = 18;
pub(crate) const MFD_CLOEXEC: u32 = 1;

pub(crate) const O_RDWR: c_int = 2;
pub(crate) const O_CREAT: c_int = 0o100;
pub(crate) const O_TRUNC: c_int = 0o1000;
pub(crate) const O_CLOEXEC: c_int = 0o2_000_000;
#[cfg(target_arch = "x86_64")]
pub(crate) const O_NOFOLLOW: c_int = 0o400_000;
#[cfg(target_arch = "aarch64")]
pub(crate) const O_NOFOLLOW: c_int = 0o100_000;

pub(crate) const CLOCK_REALTIME: c_int = 0;
pub(crate) const CLOCK_MONOTONIC_COARSE: c_int = 6;
pub(crate) const ENOMEM: c_int = 12;

#[repr(C)]
pub(crate) struct Timespec {
    pub(crate) seconds: c_long,
    pub(crate) nanoseconds: c_long,
}

/// What the unwinder keeps about where it is.
pub(crate) enum UnwindContext {}

pub(crate) type UnwindStep = extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int;
/// Go on, in the words of the unwinder.
pub(crate) const URC_NO_REASON: c_int = 0;
/// No further.
pub(crate) const URC_NORMAL_STOP: c_int = 4;

// SAFETY: these are the signatures of glibc and of the unwinder that the Rust standard library links.
unsafe extern "C" {
    pub(crate) fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
    pub(crate) fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    pub(crate) fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    pub(crate) fn close(file: c_int) -> c_int;
    pub(crate) fn ftruncate(file: c_int, length: c_long) -> c_int;
    pub(crate) fn posix_fallocate(file: c_int, offset: c_long, length: c_long) -> c_int;
    pub(crate) fn memfd_create(name: *const c_char, flags: u32) -> c_int;
    pub(crate) fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
    pub(crate) fn getpid() -> c_int;
    pub(crate) fn getenv(name: *const c_char) -> *const c_char;
    pub(crate) fn readlink(path: *const c_char, out: *mut c_char, bytes: usize) -> isize;
    pub(crate) fn clock_gettime(clock: c_int, out: *mut Timespec) -> c_int;
    pub(crate) fn __errno_location() -> *mut c_int;
    pub(crate) fn _Unwind_Backtrace(step: UnwindStep, data: *mut c_void) -> c_int;
    pub(crate) fn _Unwind_GetIP(context: *mut UnwindContext) -> usize;
}
