//! Collects return addresses with the unwinder that also handles exceptions.
//!
//! The unwinder reads the unwind tables of libraries, and stops at a function without one. Three conditions
//! must hold:
//!
//! - **The thread is not inside the unwinder already.** The unwinder may hold a lock while it allocates, but
//!   it allocates only after tables were registered at run time; from then on there are no walks
//!   (`registered.rs`).
//! - **The tables are right.** The unwinder follows them as for an exception, but also from functions that
//!   never throw: assembly code with a wrong table may crash the program.
//! - **The unwinder is libgcc's**, which the compiler links. In a program that exports another unwinder under
//!   the same names, this library uses that one, too.
//!
//! Walks beyond [`MAX_WALKS_PER_SECOND`] are truncated, because more would be noticeable. Their allocations
//! are still counted in full, at a less precise place.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU64, Ordering};

use crate::layout::{MAX_FRAMES, header};
use crate::sys::{self, UnwindContext};
use crate::{registered, state};

/// A walk takes some 10 microseconds, so this is at most 2 % of one core.
const MAX_WALKS_PER_SECOND: u64 = 2000;
/// Return addresses of a truncated walk: some of the tracer, and some of the caller.
const TRUNCATED_FRAMES: usize = 8;

/// Return addresses, innermost first, beginning with addresses in the tracer.
pub(crate) struct StackWalk {
    addresses: [usize; MAX_FRAMES],
    count: usize,
    limit: usize,
}

impl StackWalk {
    #[inline(never)]
    pub(crate) fn current() -> Self {
        let mut walk = Self { addresses: [0; MAX_FRAMES], count: 0, limit: MAX_FRAMES };
        state::increment(header::WALKS);
        if registered::any_registered() {
            state::increment(header::SHORT_WALKS);
            return walk;
        }
        if !is_within_budget() {
            walk.limit = TRUNCATED_FRAMES;
        }
        // SAFETY: this thread is not inside the unwinder, and the unwind tables are right, as the module's
        // documentation says. `record_step` only writes to `walk`, which outlives the call.
        unsafe { sys::_Unwind_Backtrace(record_step, (&raw mut walk).cast()) };
        walk
    }

    pub(crate) fn addresses(&self) -> &[usize] {
        self.addresses.get(..self.count).unwrap_or_default()
    }
}

/// # Safety
/// `context` is the unwinder's own, and `data` is a [`StackWalk`] that no other code accesses.
unsafe extern "C" fn record_step(context: *mut UnwindContext, data: *mut c_void) -> c_int {
    // SAFETY: the unwinder passes its own context, and the walk that `current` passed to it.
    let (walk, address) = unsafe { (&mut *data.cast::<StackWalk>(), sys::_Unwind_GetIP(context)) };
    if address == 0 || walk.count >= walk.limit {
        return sys::URC_NORMAL_STOP;
    }
    if let Some(place) = walk.addresses.get_mut(walk.count) {
        *place = address;
        walk.count += 1;
    }
    sys::URC_NO_REASON
}

fn is_within_budget() -> bool {
    static SECOND: AtomicU64 = AtomicU64::new(0);
    static WALKS: AtomicU64 = AtomicU64::new(0);
    let mut now = sys::CTimespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: writes to `now`.
    unsafe { sys::clock_gettime(sys::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    let now = u64::try_from(now.seconds).unwrap_or(0);
    if SECOND.swap(now, Ordering::Relaxed) != now {
        WALKS.store(0, Ordering::Relaxed);
    }
    let within = WALKS.fetch_add(1, Ordering::Relaxed) < MAX_WALKS_PER_SECOND;
    if !within {
        state::increment(header::SHORT_WALKS);
    }
    within
}
