//! Detects unwind tables registered at run time (`__register_frame`): by JIT compilers for their code, and by
//! objects without an unwind table header.
//!
//! After a registration, libgcc searches these tables under its own locks, and allocates while holding them:
//! during a registration, or while an exception is thrown. A stack walk from inside that allocation would
//! deadlock, because its own thread holds the locks. So after the first registration no stack is walked any
//! more: allocations are counted in full, without a place.
//!
//! Constructors of ordinary objects register nothing, because these have an unwind table header; LLVM's
//! start-up files may. A program with its own unwinder registers its tables there, which does not affect
//! libgcc.

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::real::RealFunction;

static ANY: AtomicBool = AtomicBool::new(false);

/// A thread that holds libgcc's locks over a registered table sees true: the flag was set before the table
/// was added under these locks.
pub(crate) fn any_registered() -> bool {
    ANY.load(Ordering::Acquire)
}

/// The program will call the registering function directly, without passing through this library.
pub(crate) fn note_look_up(name: &CStr) {
    if name.to_bytes().starts_with(b"__register_frame") {
        ANY.store(true, Ordering::Release);
    }
}

/// Parameters: a table, space for libgcc's data about it, and two base addresses. Functions with fewer
/// parameters ignore the rest.
type RegisterFn = unsafe extern "C" fn(usize, usize, usize, usize);

macro_rules! registers {
    ($($symbol:ident, $real:ident, $name:literal;)*) => {
        $(
            static $real: RealFunction = RealFunction::new($name);

            /// # Safety
            /// The caller keeps libgcc's rules.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub(crate) unsafe extern "C" fn $symbol(table: usize, room: usize, text: usize, data: usize) {
                // Set the flag before the call, which allocates while it holds libgcc's locks.
                ANY.store(true, Ordering::Release);
                let real = $real.get();
                // Without the function, there is no unwinder that would search for the table.
                if !real.is_null() {
                    // SAFETY: `real` is a function of this name and signature; the arguments are valid.
                    unsafe { core::mem::transmute::<*mut core::ffi::c_void, RegisterFn>(real)(table, room, text, data) }
                }
            }
        )*

        pub(crate) fn prepare() {
            for real in [$(&$real),*] {
                real.get();
            }
        }
    };
}

registers! {
    __register_frame, FRAME, c"__register_frame";
    __register_frame_info, FRAME_INFO, c"__register_frame_info";
    __register_frame_info_bases, FRAME_INFO_BASES, c"__register_frame_info_bases";
    __register_frame_table, FRAME_TABLE, c"__register_frame_table";
    __register_frame_info_table, FRAME_INFO_TABLE, c"__register_frame_info_table";
    __register_frame_info_table_bases, FRAME_INFO_TABLE_BASES, c"__register_frame_info_table_bases";
}
