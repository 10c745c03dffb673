//! Intercepts driver functions that a program looks up instead of linking: by `dlsym`, and by
//! `cuGetProcAddress`, which the CUDA runtime uses even if linked into the program.
//!
//! The result of `dlsym` depends on its caller's address (`RTLD_NEXT` is relative to the caller). Therefore
//! this library's `dlsym` leaves no frame: for names that are not replaced, it jumps to the real `dlsym` with
//! the caller's own return address.
//!
//! This library exports CUDA's names, so a search over all libraries finds them. If no library has the real
//! function, `dlsym` returns null, as without this library. Other look-ups differ: a weak reference to such a
//! name is not null, and `dlvsym` finds the exported function. So does a search over all libraries if only a
//! locally opened one has the real function. A call then fails as if CUDA did not work
//! (`cuda::MISSING_FUNCTION_ERROR`), or reaches the real function.

use core::ffi::{CStr, c_char, c_int, c_void};

use crate::count::enter_if_on;
use crate::cuda::{CudaHook, HOOKS, REAL_GET_PROC_ADDRESS, REAL_GET_PROC_ADDRESS_V2};
use crate::real::{self, RealFunction};
use crate::{registered, sys};

// About the assembly below. The stack pointer is a multiple of 16 bytes at every call. On x86-64 the return
// address, two arguments and 8 more bytes restore this alignment; on aarch64 it always holds. Only the
// arguments and, on aarch64, the return address are saved over the call: callers do not rely on the other
// caller-saved registers, and `choose_address` preserves the callee-saved ones. No unwind table is needed: no
// exception leaves `choose_address`, a stack walk from inside it stops here, and the real function is entered
// as if called directly.

/// # Safety
/// The caller keeps the rules of the C library's `dlsym`.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {choose}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jne 2f",
        "mov rax, qword ptr [rip + {real}]",
        "jmp rax",
        "2:",
        "ret",
        choose = sym choose_address,
        real = sym real::DLSYM,
    )
}

#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {choose}",
        "mov x16, x0",
        "mov x17, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbnz x17, 2f",
        "adrp x17, {real}",
        "ldr x17, [x17, :lo12:{real}]",
        "br x17",
        "2:",
        "mov x0, x16",
        "ret",
        choose = sym choose,
        real = sym real::DLSYM,
    )
}

/// Result of [`choose_address`], in the two return registers.
#[repr(C)]
struct LookupChoice {
    address: *mut c_void,
    /// Nonzero if `address` is the answer; 0 if the real `dlsym` must answer.
    is_answer: usize,
}

impl LookupChoice {
    const REAL: Self = Self { address: core::ptr::null_mut(), is_answer: 0 };

    fn answer(address: *mut c_void) -> Self {
        Self { address, is_answer: 1 }
    }
}

/// Returns the answer to a look-up, or leaves the answer to the real `dlsym`.
///
/// # Safety
/// The caller keeps the rules of the C library's `dlsym`.
unsafe extern "C" fn choose_address(handle: *mut c_void, name: *const c_char) -> LookupChoice {
    real::find_dlsym();
    if name.is_null() {
        return LookupChoice::REAL;
    }
    // SAFETY: a name is a C string.
    let name = unsafe { CStr::from_ptr(name) };
    registered::note_look_up(name);
    if !name.to_bytes().starts_with(b"cu") {
        return LookupChoice::REAL;
    }
    let Some(hook) = HOOKS.iter().find(|hook| hook.real.name() == name) else { return LookupChoice::REAL };
    let busy = enter_if_on();
    let found = if handle == sys::RTLD_NEXT {
        // The library after the caller is unknown here and may be this one, so keep this library's function.
        hook.ours()
    } else {
        // SAFETY: the caller passed a valid handle.
        unsafe { real::dlsym(handle, name) }
    };
    if found == hook.ours() && hook.real.get().is_null() {
        // SAFETY: `RTLD_NEXT` is always valid. No library after this one has the function, so `dlsym` returns
        // null and sets the error for `dlerror`.
        return LookupChoice::answer(unsafe { real::dlsym(sys::RTLD_NEXT, name) });
    }
    let ours = if busy.is_some() { replace_found(hook, found) } else { None };
    ours.map_or(LookupChoice::REAL, LookupChoice::answer)
}

/// Returns this library's function instead of the found one, if it can call the found one.
fn replace_found(hook: &CudaHook, found: *mut c_void) -> Option<*mut c_void> {
    let ours = hook.ours();
    (!found.is_null() && found != ours && hook.real.adopt(found)).then_some(ours)
}

type GetProcAddressFn =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_void) -> c_int;

/// Flag of `cuGetProcAddress` for per-thread default streams.
const PER_THREAD_STREAM_FLAG: u64 = 2;

/// # Safety
/// The caller keeps the driver's rules; also applies to `cuGetProcAddress_v2`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    rest: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes arguments as the driver requires.
    unsafe { look_up(&REAL_GET_PROC_ADDRESS, name, out, version, flags, rest) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    rest: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes arguments as the driver requires.
    unsafe { look_up(&REAL_GET_PROC_ADDRESS_V2, name, out, version, flags, rest) }
}

/// # Safety
/// `real` is `cuGetProcAddress` or `cuGetProcAddress_v2`, and the caller passes arguments as the driver
/// requires.
unsafe fn look_up(
    real: &RealFunction,
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    rest: *mut c_void,
) -> c_int {
    let real = real.get();
    if real.is_null() {
        return crate::cuda::MISSING_FUNCTION_ERROR;
    }
    // SAFETY: `real` is the driver's function. The older version ignores the register of the last argument.
    let error = unsafe {
        core::mem::transmute::<*mut c_void, GetProcAddressFn>(real)(name, out, version, flags, rest)
    };
    if error != 0 || name.is_null() || out.is_null() {
        return error;
    }
    let Some(_busy) = enter_if_on() else { return error };
    // SAFETY: a name is a C string, and the function has just written to `out`.
    let (name, found) = unsafe { (CStr::from_ptr(name).to_bytes(), *out) };
    let hook = HOOKS.iter().find(|hook| {
        let per_thread = flags & PER_THREAD_STREAM_FLAG != 0 && hook.is_stream_ordered();
        hook.match_lookup(name, version) == Some(per_thread)
    });
    if let Some(ours) = hook.and_then(|hook| replace_found(hook, found)) {
        // SAFETY: the function has just written to `out`.
        unsafe { *out = ours };
    }
    error
}
