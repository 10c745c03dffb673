//! Tables of frames that a program registers at run time: with `__register_frame` and its like, as compilers at run time do
//! for their code, and objects that have no header for their tables.
//!
//! From then on libgcc looks through them under locks of its own, and allocates there: while it registers one, or while an
//! exception is thrown. A walk from within that allocation would wait for those locks, which its own thread has, without end.
//! So once anything was registered no stack is walked any more: what is allocated is counted in full, at no place.
//!
//! The constructors of ordinary objects register nothing, because they have a header for their tables. Those of a start-up
//! file of LLVM's own may, and whoever has an unwinder of his own linked in registers with that, which is not in our way.

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::real::Real;

static ANY: AtomicBool = AtomicBool::new(false);

/// Whether anything was, or is just being. A thread that has libgcc's locks with a table behind them has seen it, because the
/// table came after it and by way of those locks.
pub(crate) fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// Notes that something will be, if a function of this name is one that does so: whoever looks it up will call it, past us.
pub(crate) fn looked_up(name: &CStr) {
    if name.to_bytes().starts_with(b"__register_frame") {
        ANY.store(true, Ordering::Release);
    }
}

/// A table, the room for what libgcc keeps about it, and two bases of addresses, as far as the function has them: what it does
/// not have it does not read.
type Register = unsafe extern "C" fn(usize, usize, usize, usize);

macro_rules! registers {
    ($($symbol:ident, $real:ident, $name:literal;)*) => {
        $(
            static $real: Real = Real::new($name);

            /// As in libgcc.
            ///
            /// # Safety
            /// As in libgcc.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub(crate) unsafe extern "C" fn $symbol(table: usize, room: usize, text: usize, data: usize) {
                // Before: it allocates while it has its locks.
                ANY.store(true, Ordering::Release);
                let real = $real.get();
                // Where there is none there is no unwinder either that would look for the table.
                if !real.is_null() {
                    // SAFETY: the next function of this name behind ours; the arguments are the caller's.
                    unsafe { core::mem::transmute::<*mut core::ffi::c_void, Register>(real)(table, room, text, data) }
                }
            }
        )*

        /// Looks up what is behind ours, while nobody waits for it.
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
