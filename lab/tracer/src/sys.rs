//! Declarations of the C library, for Linux with glibc on x86-64 and aarch64. Both have the same constants.

use core::ffi::{c_char, c_int, c_long, c_void};

pub(crate) const RTLD_DEFAULT: *mut c_void = core::ptr::null_mut();
pub(crate) const RTLD_NEXT: *mut c_void = -1_isize as *mut c_void;
pub(crate) const RTLD_LAZY: c_int = 1;
pub(crate) const RTLD_NOLOAD: c_int = 4;

pub(crate) const PROT_READ: c_int = 1;
pub(crate) const PROT_WRITE: c_int = 2;
pub(crate) const MAP_SHARED: c_int = 1;
pub(crate) const MAP_PRIVATE: c_int = 2;
pub(crate) const MAP_ANONYMOUS: c_int = 0x20;
pub(crate) const MAP_FIXED: c_int = 0x10;
pub(crate) const MREMAP_FIXED: c_int = 2;
pub(crate) const MAP_FAILED: *mut c_void = -1_isize as *mut c_void;
pub(crate) const MADV_WIPEONFORK: c_int = 18;
pub(crate) const MFD_CLOEXEC: u32 = 1;

pub(crate) const O_RDWR: c_int = 2;
pub(crate) const O_CREAT: c_int = 0o100;
pub(crate) const O_EXCL: c_int = 0o200;
pub(crate) const O_CLOEXEC: c_int = 0o2_000_000;
#[cfg(target_arch = "x86_64")]
pub(crate) const O_NOFOLLOW: c_int = 0o400_000;
#[cfg(target_arch = "aarch64")]
pub(crate) const O_NOFOLLOW: c_int = 0o100_000;

pub(crate) const CLOCK_REALTIME: c_int = 0;
pub(crate) const CLOCK_MONOTONIC_COARSE: c_int = 6;
pub(crate) const ENOMEM: c_int = 12;

#[repr(C)]
pub(crate) struct CTimespec {
    pub(crate) seconds: c_long,
    pub(crate) nanoseconds: c_long,
}

pub(crate) const RLIMIT_FSIZE: c_int = 1;

#[repr(C)]
pub(crate) struct ResourceLimit {
    pub(crate) now: u64,
    pub(crate) most: u64,
}

pub(crate) const AT_PAGESZ: core::ffi::c_ulong = 6;

pub(crate) const PT_LOAD: u32 = 1;
pub(crate) const PT_DYNAMIC: u32 = 2;
pub(crate) const DT_HASH: isize = 4;
pub(crate) const DT_STRTAB: isize = 5;
pub(crate) const DT_SYMTAB: isize = 6;
pub(crate) const DT_GNU_HASH: isize = 0x6fff_fef5;

/// The loader's description of an object (`struct dl_phdr_info`), as far as needed.
#[repr(C)]
pub(crate) struct LoadedObject {
    pub(crate) base: usize,
    pub(crate) name: *const c_char,
    pub(crate) segments: *const ProgramHeader,
    pub(crate) segment_count: u16,
}

#[repr(C)]
pub(crate) struct ProgramHeader {
    pub(crate) kind: u32,
    _flags: u32,
    _offset: u64,
    pub(crate) address: usize,
    _physical: u64,
    _bytes_in_file: u64,
    pub(crate) bytes_in_memory: usize,
    _alignment: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DynamicEntry {
    pub(crate) tag: isize,
    pub(crate) value: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ElfSymbol {
    pub(crate) name: u32,
    info: u8,
    other: u8,
    section: u16,
    pub(crate) value: usize,
    _bytes: u64,
}

impl ElfSymbol {
    /// Returns true for a function that is defined here, global or weak, and visible.
    pub(crate) fn is_function_for_others(&self) -> bool {
        const FUNCTION: u8 = 2;
        self.info & 15 == FUNCTION
            && matches!(self.info >> 4, 1 | 2)
            && matches!(self.other & 3, 0 | 3)
            && self.section != 0
            && self.value != 0
    }
}

pub(crate) type EachObject = unsafe extern "C" fn(*const LoadedObject, usize, *mut c_void) -> c_int;

pub(crate) enum UnwindContext {}

pub(crate) type UnwindStep = unsafe extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int;
pub(crate) const URC_NO_REASON: c_int = 0;
pub(crate) const URC_NORMAL_STOP: c_int = 4;

// SAFETY: these are the signatures of glibc and of the unwinder that the Rust standard library links.
unsafe extern "C" {
    pub(crate) fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
    pub(crate) fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    pub(crate) fn dl_iterate_phdr(each: EachObject, data: *mut c_void) -> c_int;
    pub(crate) fn getauxval(kind: core::ffi::c_ulong) -> core::ffi::c_ulong;
    pub(crate) fn sched_yield() -> c_int;
    pub(crate) fn unlink(path: *const c_char) -> c_int;
    pub(crate) fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    pub(crate) fn close(file: c_int) -> c_int;
    pub(crate) fn ftruncate(file: c_int, length: c_long) -> c_int;
    pub(crate) fn posix_fallocate(file: c_int, offset: c_long, length: c_long) -> c_int;
    pub(crate) fn memfd_create(name: *const c_char, flags: u32) -> c_int;
    pub(crate) fn madvise(start: *mut c_void, length: usize, advice: c_int) -> c_int;
    pub(crate) fn getrlimit(what: c_int, out: *mut ResourceLimit) -> c_int;
    pub(crate) fn getpid() -> c_int;
    pub(crate) fn getenv(name: *const c_char) -> *const c_char;
    pub(crate) fn readlink(path: *const c_char, out: *mut c_char, bytes: usize) -> isize;
    pub(crate) fn clock_gettime(clock: c_int, out: *mut CTimespec) -> c_int;
    pub(crate) fn __errno_location() -> *mut c_int;
    pub(crate) fn _Unwind_Backtrace(step: UnwindStep, data: *mut c_void) -> c_int;
    pub(crate) fn _Unwind_GetIP(context: *mut UnwindContext) -> usize;
}
