//! Looks up the real functions, which the program would call without this library.
//!
//! The look-up uses `dlsym(RTLD_NEXT)`, so that another preloaded library (an allocator, a fault injector) is
//! still called. This library replaces `dlsym`, so `dlvsym` finds the real one.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::local::thread_state;
use crate::sys;

pub(crate) struct RealFunction {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    /// True if the function may be in a library outside the program's global scope.
    anywhere: bool,
}

impl RealFunction {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(core::ptr::null_mut()), anywhere: false }
    }

    /// Creates an entry for a function in a library that may have been opened locally.
    pub(crate) const fn anywhere(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(core::ptr::null_mut()), anywhere: true }
    }

    /// Returns the function's address; null if there is none, or while this thread is looking the function
    /// up.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        let at = self.address.load(Ordering::Acquire);
        if at.is_null() { self.look_up() } else { at }
    }

    #[cold]
    fn look_up(&self) -> *mut c_void {
        let local = thread_state();
        if local.resolving.replace(true) {
            return core::ptr::null_mut();
        }
        // SAFETY: `RTLD_NEXT` is always valid.
        let mut found = unsafe { dlsym(sys::RTLD_NEXT, self.name) };
        if self.anywhere {
            if found.is_null() {
                found = crate::loaded::find_function(self.name);
            } else if !crate::loaded::keep_loaded(found) {
                // The library is being unloaded at this moment.
                found = core::ptr::null_mut();
            }
        }
        local.resolving.set(false);
        if found.is_null() {
            // Another thread may have received the function from the driver meanwhile.
            return self.address.load(Ordering::Acquire);
        }
        // The first address stays: `adopt` may have stored one of another library, and calls to it may be in
        // progress.
        self.get_or_set(found)
    }

    /// Makes `address` the real function, unless another is known: if two libraries have the function, a call
    /// must not reach the wrong one.
    pub(crate) fn adopt(&self, address: *mut c_void) -> bool {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return known == address;
        }
        // The caller may unload its library, while code linked to this library's name would still call into
        // it.
        if !crate::loaded::keep_loaded(address) {
            return false;
        }
        self.get_or_set(address) == address
    }

    /// Returns the known address; if there is none, makes `address` the known one.
    fn get_or_set(&self, address: *mut c_void) -> *mut c_void {
        match self.address.compare_exchange(
            core::ptr::null_mut(),
            address,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => address,
            Err(known) => known,
        }
    }

    pub(crate) fn name(&self) -> &'static CStr {
        self.name
    }
}

type DlsymFn = unsafe extern "C" fn(*mut c_void, *const core::ffi::c_char) -> *mut c_void;

/// Address of the real `dlsym`; `dynamic.rs` jumps to it.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Replaces a missing `dlsym`, so every look-up fails.
unsafe extern "C" fn no_dlsym(_: *mut c_void, _: *const core::ffi::c_char) -> *mut c_void {
    core::ptr::null_mut()
}

pub(crate) fn find_dlsym() -> *mut c_void {
    let known = DLSYM.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    // glibc 2.34 moved `dlsym` from libdl. Older releases export it with the version of glibc's first release
    // for the processor.
    let versions =
        [c"GLIBC_2.34", if cfg!(target_arch = "aarch64") { c"GLIBC_2.17" } else { c"GLIBC_2.2.5" }];
    let mut found: *mut c_void = core::ptr::null_mut();
    for version in versions {
        if found.is_null() {
            // SAFETY: both names are C strings; for an unknown version `dlvsym` returns null.
            found = unsafe { sys::dlvsym(sys::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        }
    }
    if found.is_null() {
        found = no_dlsym as DlsymFn as *mut c_void;
    }
    DLSYM.store(found, Ordering::Release);
    found
}

/// Calls the real `dlsym` from here, so `RTLD_NEXT` finds functions after this library's.
///
/// # Safety
/// `handle` belongs to an open library, or is one of the `RTLD_` constants.
pub(crate) unsafe fn dlsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    let at = find_dlsym();
    // SAFETY: `find_dlsym` returns the C library's `dlsym`, or `no_dlsym` with the same signature.
    let real: DlsymFn = unsafe { core::mem::transmute::<*mut c_void, DlsymFn>(at) };
    // SAFETY: the caller passes a valid handle; the name is a C string.
    unsafe { real(handle, name.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_adopted_while_it_was_looked_up_stays() {
        let real = RealFunction::new(c"getpid");
        let other = no_dlsym as DlsymFn as *mut c_void;
        assert!(real.adopt(other) && real.adopt(other));
        assert_eq!([real.look_up(), real.get()], [other, other]);
        assert!(!real.adopt(RealFunction::new(c"getpid").get()), "of another library");
    }
}
