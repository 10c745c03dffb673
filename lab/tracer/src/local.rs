//! Per-thread state: 64 bytes of static thread-local storage, initially zero.
//!
//! Rust's `thread_local!` would use `__tls_get_addr`, which may allocate after a library was loaded, and so
//! recurse without end. A preloaded library may use the initial-exec model: a fixed offset from the thread
//! pointer, read here in assembly.
//!
//! A signal handler shares this state with the code that it interrupts. If that code is in the tracer, the
//! handler's allocations and mappings are not counted; otherwise there is at worst one sample too many or too
//! few.

use core::cell::Cell;
use core::sync::atomic::{Ordering, compiler_fence};

/// All zero is a valid initial state.
#[repr(C, align(16))]
pub(crate) struct ThreadState {
    /// Bytes that this thread may allocate before the next sample; negative if one is due.
    pub(crate) bytes_to_sample: Cell<i64>,
    /// State of the thread's random number generator; 0 before the first use.
    pub(crate) random: Cell<u64>,
    /// True while the thread is in the tracer's code; its allocations are not counted.
    pub(crate) busy: Cell<bool>,
    /// True while the thread looks up real functions; its allocations come from the arena.
    pub(crate) resolving: Cell<bool>,
    /// Kind of the enclosing counted CUDA call, or 0.
    pub(crate) inside_kind: Cell<u8>,
    /// 1 + the record number of the enclosing counted CUDA call, or 0.
    pub(crate) inside_site: Cell<u32>,
}

const _: () = assert!(size_of::<ThreadState>() <= 64, "the storage below is 64 bytes");

core::arch::global_asm!(
    ".pushsection .tbss,\"awT\",%nobits",
    ".balign 16",
    ".globl warden_tracer_local",
    ".hidden warden_tracer_local",
    ".type warden_tracer_local, %object",
    ".size warden_tracer_local, 64",
    "warden_tracer_local:",
    ".zero 64",
    ".popsection",
);

#[inline]
pub(crate) fn thread_state() -> &'static ThreadState {
    let place: *const ThreadState;
    // SAFETY: the assembly only reads memory: it adds a constant that the loader has filled in to the thread
    // pointer.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "mov {place}, qword ptr [rip + warden_tracer_local@GOTTPOFF]",
            "add {place}, qword ptr fs:[0]",
            place = out(reg) place,
            options(pure, readonly, nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "mrs {place}, tpidr_el0",
            "adrp {offset}, :gottprel:warden_tracer_local",
            "ldr {offset}, [{offset}, :gottprel_lo12:warden_tracer_local]",
            "add {place}, {place}, {offset}",
            place = out(reg) place,
            offset = out(reg) _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    // SAFETY: the storage above has the size and alignment of a `ThreadState`, is initially zero, and lives
    // as long as the thread. Only this thread and its signal handlers have the address, so two accesses never
    // run in parallel, but a handler may run between any two. All fields are cells of numbers that the
    // processor reads and writes whole, and callers get only a shared reference.
    unsafe { &*place }
}

/// Marks the thread as inside the tracer; on drop removes the mark and restores `errno`.
pub(crate) struct TracerGuard {
    local: &'static ThreadState,
    error: core::ffi::c_int,
}

impl TracerGuard {
    /// Returns `None` if the thread is inside the tracer already.
    pub(crate) fn enter(local: &'static ThreadState) -> Option<Self> {
        if local.busy.replace(true) {
            return None;
        }
        // A signal handler of this thread must find the mark set during all guarded code, so the compiler
        // must not move that code before this fence, or behind the one on drop.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the C library's own place for this thread's error.
        Some(Self { local, error: unsafe { *crate::sys::__errno_location() } })
    }
}

impl Drop for TracerGuard {
    fn drop(&mut self) {
        // SAFETY: the C library's own place for this thread's error.
        unsafe { *crate::sys::__errno_location() = self.error };
        compiler_fence(Ordering::SeqCst);
        self.local.busy.set(false);
    }
}
