//! Starts the tracer before `main`, if the environment names a folder to publish in.
//!
//! On any error nothing is counted: the program runs as without this library, and the reader finds no file.
//!
//! The folder should be on a temporary file system, and private to its owner. A copy-on-write file system may
//! lack space for an allocated page, and any process with write access may truncate the file: the next count
//! then raises SIGBUS.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::Ordering;

use crate::layout::{FILE_BYTES, HEADER_BYTES, MAGIC, VERSION, header};
use crate::map::real_mmap;
use crate::{live, state, sys};

/// Variable with the folder; each process writes `PID.trace` into it.
const FOLDER_VARIABLE: &CStr = c"LLAMA_WARDEN_TRACE";
/// Variable with the mean bytes between samples, 1 KiB to 16 MiB: beyond, the weight of a small block
/// overflows.
const INTERVAL_VARIABLE: &CStr = c"LLAMA_WARDEN_TRACE_INTERVAL";
/// Bytes; the docs of `diagnose --trace` state cost and precision.
const DEFAULT_INTERVAL: usize = 64 * 1024;
const MAX_PATH: usize = 4096;
const GATE_BYTES: usize = 4096;

/// The dynamic loader calls this constructor.
#[cfg_attr(not(test), used, unsafe(link_section = ".init_array"))]
static START: extern "C" fn() = start;

extern "C" fn start() {
    crate::real::find_dlsym();
    crate::heap::look_up_heap();
    crate::map::look_up_mappings();
    crate::registered::prepare();
    // SAFETY: the C library is initialised before any constructor, and the name is a C string. Only a thread
    // that changes the environment at this moment could interfere, as with any program that reads it at the
    // start.
    let folder = unsafe { sys::getenv(FOLDER_VARIABLE.as_ptr()) };
    if folder.is_null() || state::is_on() {
        return;
    }
    // SAFETY: a variable's value is a C string, valid unless a thread changes the environment: see above.
    let folder = unsafe { CStr::from_ptr(folder) };
    let _nothing = publish(folder.to_bytes());
}

fn publish(folder: &[u8]) -> Option<()> {
    // SAFETY: `getpid` takes no arguments and cannot fail.
    let pid = u32::try_from(unsafe { sys::getpid() }).ok()?;
    let mut path = [0_u8; MAX_PATH];
    write_path(&mut path, folder, pid)?;
    let flags = sys::O_RDWR | sys::O_CREAT | sys::O_EXCL | sys::O_CLOEXEC | sys::O_NOFOLLOW;
    // Remove the file that this process published before its exec. Never truncate it: a process with the same
    // PID in another namespace may have it mapped.
    // SAFETY: the path ends in a zero.
    unsafe { sys::unlink(path.as_ptr().cast::<c_char>()) };
    if !may_have_size(FILE_BYTES.max(live::PRIVATE_BYTES)) {
        return None;
    }
    // SAFETY: the path ends in a zero.
    let file = map_new_file(unsafe { sys::open(path.as_ptr().cast::<c_char>(), flags, 0o600) }, FILE_BYTES)?;
    // SAFETY: the name is a C string.
    let private = map_new_file(
        unsafe { sys::memfd_create(c"warden-tracer".as_ptr(), sys::MFD_CLOEXEC) },
        live::PRIVATE_BYTES,
    )?;
    let gate = map_gate()?;
    let mut interval = DEFAULT_INTERVAL;
    // SAFETY: as in `start`.
    let asked = unsafe { sys::getenv(INTERVAL_VARIABLE.as_ptr()) };
    if !asked.is_null() {
        // SAFETY: as in `start`.
        interval = parse_number(unsafe { CStr::from_ptr(asked) }.to_bytes())
            .unwrap_or(DEFAULT_INTERVAL)
            .clamp(1 << 10, 1 << 24);
    }
    // SAFETY: `getauxval` only returns a number that the kernel passed to this process.
    state::set_page(usize::try_from(unsafe { sys::getauxval(sys::AT_PAGESZ) }).unwrap_or(0));
    // The unwinder initializes itself at its first use; trigger that while no lock is held.
    let _first = crate::walk::StackWalk::current();
    // SAFETY: both files were just mapped with these sizes, shared and zero, and are never unmapped; a fork
    // wipes the gate.
    unsafe { state::start_counting(file, private, gate, interval) };
    write_header(pid, interval);
    Some(())
}

/// Returns false if SIGXFSZ would end the program at this file size.
fn may_have_size(bytes: usize) -> bool {
    let mut limit = sys::ResourceLimit { now: 0, most: 0 };
    // SAFETY: writes to `limit`.
    unsafe { sys::getrlimit(sys::RLIMIT_FSIZE, &raw mut limit) == 0 && limit.now >= bytes as u64 }
}

fn map_new_file(file: c_int, bytes: usize) -> Option<*mut c_void> {
    if file < 0 {
        return None;
    }
    let mmap = real_mmap()?;
    let length = core::ffi::c_long::try_from(bytes).ok()?;
    let access = sys::PROT_READ | sys::PROT_WRITE;
    // SAFETY: the file is new and ours, the limit allows its size, and the kernel chooses the address.
    let at = unsafe {
        // Allocate the space now: on a full disk, the first access to a page would raise SIGBUS inside
        // `malloc`.
        let at = if sys::ftruncate(file, length) == 0 && sys::posix_fallocate(file, 0, length) == 0 {
            mmap(core::ptr::null_mut(), bytes, access, sys::MAP_SHARED, file, 0)
        } else {
            sys::MAP_FAILED
        };
        sys::close(file);
        at
    };
    (at != sys::MAP_FAILED).then_some(at)
}

/// Maps a page that the kernel zeroes in a forked child.
fn map_gate() -> Option<*mut c_void> {
    let mmap = real_mmap()?;
    let access = sys::PROT_READ | sys::PROT_WRITE;
    // SAFETY: the page is new and ours, and the kernel chooses the address.
    unsafe {
        let at =
            mmap(core::ptr::null_mut(), GATE_BYTES, access, sys::MAP_PRIVATE | sys::MAP_ANONYMOUS, -1, 0);
        (at != sys::MAP_FAILED && sys::madvise(at, GATE_BYTES, sys::MADV_WIPEONFORK) == 0).then_some(at)
    }
}

/// The magic number is written last.
fn write_header(pid: u32, interval: usize) {
    let mut now = sys::CTimespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: writes to `now`.
    unsafe { sys::clock_gettime(sys::CLOCK_REALTIME, &raw mut now) };
    let started = now.seconds.cast_unsigned() * 1000 + now.nanoseconds.cast_unsigned() / 1_000_000;
    let put = |offset: usize, number: u64| {
        if let Some(word) = state::public_u64(offset) {
            word.store(number, Ordering::Relaxed);
        }
    };
    let put_half = |offset: usize, number: u32| {
        if let Some(half) = state::public_u32(offset) {
            half.store(number, Ordering::Relaxed);
        }
    };
    put_half(header::VERSION, VERSION);
    put_half(header::PID, pid);
    put(header::STARTED, started);
    put(header::INTERVAL, interval as u64);
    // An allocator linked into the program takes precedence over this library's, which is then never called.
    // SAFETY: `RTLD_DEFAULT` is always valid.
    let malloc = unsafe { crate::real::dlsym(sys::RTLD_DEFAULT, c"malloc") };
    put(header::OWN_HEAP, u64::from(!crate::loaded::is_ours(malloc)));
    let mut exe = [0_u8; HEADER_BYTES - header::EXE];
    // SAFETY: `readlink` writes at most `exe.len()` bytes.
    let length = unsafe { sys::readlink(c"/proc/self/exe".as_ptr(), exe.as_mut_ptr().cast(), exe.len()) };
    if let Ok(length) = u32::try_from(length) {
        put_half(header::EXE_BYTES, length);
        for (index, bytes) in exe.as_chunks::<8>().0.iter().enumerate() {
            let word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            put(header::EXE + 8 * index, word.to_le());
        }
    }
    if let Some(magic) = state::public_u64(header::MAGIC) {
        magic.store(MAGIC, Ordering::Release);
    }
}

/// Writes `FOLDER/PID.trace` with a terminating zero.
fn write_path(path: &mut [u8; MAX_PATH], folder: &[u8], pid: u32) -> Option<()> {
    let mut digits = [0_u8; 10];
    let mut rest = pid;
    let mut first = digits.len();
    loop {
        first -= 1;
        *digits.get_mut(first)? = b'0' + u8::try_from(rest % 10).ok()?;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let mut length = 0;
    for part in [folder, b"/", digits.get(first..)?, b".trace\0"] {
        path.get_mut(length..length + part.len())?.copy_from_slice(part);
        length += part.len();
    }
    Some(())
}

fn parse_number(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0_usize, |number, digit| {
        number
            .checked_mul(10)?
            .checked_add(Some(usize::from(digit.wrapping_sub(b'0'))).filter(|digit| *digit < 10)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_named_after_the_process() {
        let mut path = [0; MAX_PATH];
        write_path(&mut path, b"/run/x", 4_000_000_001).unwrap();
        assert_eq!(CStr::from_bytes_until_nul(&path).unwrap(), c"/run/x/4000000001.trace");
        write_path(&mut path, b"/", 7).unwrap();
        assert_eq!(CStr::from_bytes_until_nul(&path).unwrap(), c"//7.trace");
        assert_eq!(write_path(&mut path, &[b'a'; MAX_PATH], 7), None);
    }

    #[test]
    fn only_digits_are_a_number() {
        assert_eq!(
            [parse_number(b"65536"), parse_number(b""), parse_number(b"6x"), parse_number(b"-1")],
            [Some(65_536), Some(0), None, None]
        );
    }
}
