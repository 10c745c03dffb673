//! Allocates as lines of its input say, in functions named after their action, so that results of the tracer
//! can be checked.
//!
//! ```text
//!   small COUNT BYTES     leaks blocks               large COUNT BYTES    the same, elsewhere
//!   zeroed COUNT BYTES    leaks zeroed blocks        aligned COUNT BYTES  leaks blocks at 4096 bytes
//!   churn COUNT BYTES     allocates and frees        grow BYTES           leaks one block that grew by doubling
//!   threads COUNT BYTES   small, in four threads     handed COUNT BYTES   allocates here, frees in another thread
//!   mapped BYTES          leaks a mapping            unmapped BYTES       maps and unmaps
//!   refused BYTES         leaks a mapping and a block, after all that would end them was refused
//!   parts BYTES           leaks half of a mapping, in two parts
//!   replaced BYTES        leaks a mapping that another took the place of
//!   moved BYTES           leaks a mapping that grew to twice as much
//!   families BYTES        leaks one block of each function that allocates
//!   ended COUNT BYTES     leaks blocks in threads that end, also while they end
//!   forked COUNT BYTES    leaks blocks in a child      spawned COUNT BYTES  the same in a new program
//!   signals COUNT BYTES   maps and unmaps, also in a signal handler meanwhile
//!   atexit BYTES          allocates when it ends
//! ```
//!
//! Answers each line with `done`. Needs only the C library, so that any compiler can build it for any
//! processor.

#![expect(unsafe_code, reason = "it calls the C library as C programs do")]

use std::alloc::Layout;
use std::ffi::{c_int, c_long, c_void};
use std::hint::black_box;
use std::io::{self, BufRead as _, Write as _};
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

// SAFETY: these are the C library's signatures.
unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        bytes: usize,
        access: c_int,
        flags: c_int,
        file: c_int,
        offset: c_long,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, bytes: usize) -> c_int;
    fn mremap(at: *mut c_void, bytes: usize, new_bytes: usize, flags: c_int, ...) -> *mut c_void;
    fn malloc(bytes: usize) -> *mut c_void;
    fn calloc(count: usize, bytes: usize) -> *mut c_void;
    fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void;
    fn reallocarray(block: *mut c_void, count: usize, bytes: usize) -> *mut c_void;
    fn posix_memalign(out: *mut *mut c_void, alignment: usize, bytes: usize) -> c_int;
    fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void;
    fn memalign(alignment: usize, bytes: usize) -> *mut c_void;
    fn valloc(bytes: usize) -> *mut c_void;
    fn pvalloc(bytes: usize) -> *mut c_void;
    fn fork() -> c_int;
    fn waitpid(child: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
    fn atexit(handler: extern "C" fn()) -> c_int;
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn setitimer(which: c_int, new: *const [c_long; 4], old: *mut [c_long; 4]) -> c_int;
}

const READ_WRITE: c_int = 3;
const PRIVATE: c_int = 2;
const FIXED: c_int = 0x10;
const ANONYMOUS: c_int = 0x20;
const MAY_MOVE: c_int = 1;
const FAILED: *mut c_void = -1_isize as *mut c_void;
const ALARM: c_int = 14;

#[inline(never)]
fn leak_small(count: usize, bytes: usize) {
    for _ in 0..count {
        std::mem::forget(black_box(Vec::<u8>::with_capacity(bytes)));
    }
}

#[inline(never)]
fn leak_large(count: usize, bytes: usize) {
    for _ in 0..count {
        std::mem::forget(black_box(Vec::<u8>::with_capacity(bytes)));
    }
}

#[inline(never)]
fn leak_zeroed(count: usize, bytes: usize) {
    for _ in 0..count {
        std::mem::forget(black_box(vec![0_u8; bytes]));
    }
}

/// Page, whose alignment is more than `malloc` promises.
#[derive(Clone)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "it is there to be large")] [u8; 4096]);

#[inline(never)]
fn leak_aligned(count: usize, bytes: usize) {
    for _ in 0..count {
        std::mem::forget(black_box(Vec::<Page>::with_capacity(bytes / size_of::<Page>())));
    }
}

#[inline(never)]
fn churn(count: usize, bytes: usize) {
    for _ in 0..count {
        drop(black_box(Vec::<u8>::with_capacity(bytes)));
    }
}

#[inline(never)]
fn grow(bytes: usize) {
    let mut block = Vec::<u8>::with_capacity(512);
    while block.capacity() < bytes {
        let wanted = block.capacity();
        block.resize(wanted, 1);
        block.reserve_exact(wanted);
    }
    std::mem::forget(black_box(block));
}

#[inline(never)]
fn leak_in_thread(count: usize, bytes: usize) {
    leak_small(count, bytes);
}

#[inline(never)]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn hand_over(count: usize, bytes: usize) {
    let blocks: Vec<Vec<u8>> = (0..count).map(|_| black_box(Vec::with_capacity(bytes))).collect();
    let _ended = thread::spawn(move || drop(blocks)).join();
}

/// Maps private, readable and writable memory; at `place` unless it is null.
///
/// # Safety
/// `place` is null, or a mapping from `map` of so many bytes that is not used.
#[expect(clippy::inline_always, reason = "the function that is named is the one around it")]
#[inline(always)]
unsafe fn map(place: *mut c_void, bytes: usize) -> io::Result<*mut c_void> {
    let fixed = if place.is_null() { 0 } else { FIXED };
    // SAFETY: replaces only the mapping that the caller names.
    let at = unsafe { mmap(place, bytes, READ_WRITE, PRIVATE | ANONYMOUS | fixed, -1, 0) };
    if at == FAILED { Err(io::Error::last_os_error()) } else { Ok(at) }
}

/// Unmaps a mapping or a part of it.
///
/// # Safety
/// The memory comes from `map` and is not used any more.
#[expect(clippy::inline_always, reason = "the function that is named is the one around it")]
#[inline(always)]
unsafe fn unmap(at: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    if unsafe { munmap(at, bytes) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[inline(never)]
fn leak_mapping(bytes: usize) -> io::Result<()> {
    // SAFETY: a mapping at a new place.
    black_box(unsafe { map(null_mut(), bytes)? });
    Ok(())
}

#[inline(never)]
fn map_and_unmap(bytes: usize) -> io::Result<()> {
    // SAFETY: mapped just now at a new place, and not used.
    unsafe { unmap(black_box(map(null_mut(), bytes)?), bytes) }
}

/// Every call after the first two fails: an address between two pages, a mapping that cannot grow into its
/// own other half, an invalid file, and a block as large as the address space.
#[inline(never)]
fn leak_refused(bytes: usize) -> io::Result<()> {
    // SAFETY: a new mapping and a block, which are leaked, and refused calls, which change nothing.
    let refused = unsafe {
        let at = black_box(map(null_mut(), bytes)?);
        let block = black_box(malloc(bytes));
        [
            munmap(at.wrapping_byte_add(1), bytes) != 0,
            mremap(at, bytes / 2, bytes, 0) == FAILED,
            mmap(at, bytes, READ_WRITE, PRIVATE | FIXED, -1, 0) == FAILED,
            black_box(realloc(block, usize::MAX / 2 - 4096)).is_null(),
            black_box(reallocarray(block, usize::MAX / 2, 3)).is_null(),
            black_box(calloc(usize::MAX / 2, 3)).is_null(),
        ]
    };
    if refused == [true; 6] { Ok(()) } else { Err(io::Error::other(format!("not refused: {refused:?}"))) }
}

/// Unmaps the second of four parts first, then the first.
#[inline(never)]
fn leak_parts(bytes: usize) -> io::Result<()> {
    let part = bytes / 4;
    // SAFETY: mapped just now at a new place; neither it nor its parts are used.
    unsafe {
        let at = black_box(map(null_mut(), bytes)?);
        unmap(at.wrapping_byte_add(part), part)?;
        unmap(at, part)
    }
}

#[inline(never)]
fn leak_replaced(bytes: usize) -> io::Result<()> {
    // SAFETY: first at a new place, then at that place, which is not used.
    unsafe {
        let at = black_box(map(null_mut(), bytes)?);
        black_box(map(at, bytes)?);
    }
    Ok(())
}

#[inline(never)]
fn leak_moved(bytes: usize) -> io::Result<()> {
    // SAFETY: mapped just now at a new place, and not used.
    let at = unsafe { black_box(mremap(black_box(map(null_mut(), bytes)?), bytes, 2 * bytes, MAY_MOVE)) };
    if at == FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[inline(never)]
fn leak_families(bytes: usize) -> io::Result<()> {
    let mut block = null_mut();
    // SAFETY: blocks that are leaked and not used.
    let blocks = unsafe {
        if posix_memalign(&raw mut block, 64, bytes) != 0 {
            return Err(io::Error::last_os_error());
        }
        [
            block,
            aligned_alloc(128, bytes),
            memalign(8192, bytes),
            valloc(bytes),
            pvalloc(bytes),
            reallocarray(malloc(bytes / 4), 2, bytes / 2),
            calloc(2, bytes / 2),
        ]
    };
    let aligned = [64, 128, 8192, 4096, 4096, 16, 16];
    let right = |(block, alignment): (&*mut c_void, usize)| !block.is_null() && block.addr() % alignment == 0;
    let good = black_box(&blocks).iter().zip(aligned).all(right);
    if good { Ok(()) } else { Err(io::Error::other(format!("{blocks:?}"))) }
}

/// Leaks when its thread ends.
struct AtEnd(usize);

impl Drop for AtEnd {
    fn drop(&mut self) {
        leak_while_ending(self.0);
    }
}

#[inline(never)]
fn leak_while_ending(bytes: usize) {
    std::mem::forget(black_box(Vec::<u8>::with_capacity(bytes)));
}

#[inline(never)]
fn leak_before_ending(bytes: usize) {
    std::mem::forget(black_box(Vec::<u8>::with_capacity(bytes)));
}

thread_local!(static AT_END: std::cell::RefCell<Option<AtEnd>> = const { std::cell::RefCell::new(None) });

#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn leak_in_threads_that_end(count: usize, bytes: usize) {
    for _ in 0..count {
        let ended = thread::spawn(move || {
            AT_END.with_borrow_mut(|end| *end = Some(AtEnd(bytes)));
            leak_before_ending(bytes);
        });
        let _ended = ended.join();
    }
}

/// The child has only this thread, so it may allocate if no other thread held a lock during the fork.
fn fork_and_leak(count: usize, bytes: usize) -> io::Result<()> {
    // SAFETY: the test waits for `done`, by which all started threads have been joined, so this is the only
    // thread apart from one that may just be ending. The C library handles its own locks. The child leaves by
    // `_exit`.
    let status = unsafe {
        match fork() {
            0 => {
                leak_large(count, bytes);
                let mapped = leak_mapping(bytes).and_then(|()| map_and_unmap(bytes));
                _exit(i32::from(mapped.is_err()));
            }
            child => {
                let mut status = -1;
                waitpid(child, &raw mut status, 0);
                status
            }
        }
    };
    if status == 0 { Ok(()) } else { Err(io::Error::other(format!("the child ended with {status}"))) }
}

fn spawn_and_leak(count: usize, bytes: usize) -> io::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    if let Some(mut to) = child.stdin.take() {
        writeln!(to, "large {count} {bytes}")?;
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(status.to_string())) }
}

/// Bytes that the handler maps and unmaps.
static IN_HANDLER: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_alarm(_: c_int) {
    let _done = map_and_unmap(IN_HANDLER.load(Ordering::Relaxed));
}

fn map_under_signals(count: usize, bytes: usize) -> io::Result<()> {
    IN_HANDLER.store(bytes, Ordering::Relaxed);
    let (often, never) = ([0, 100, 0, 100], [0; 4]);
    // SAFETY: the handler calls only async-signal-safe functions.
    unsafe {
        signal(ALARM, on_alarm);
        setitimer(0, &raw const often, null_mut());
    }
    let done = (0..count).try_for_each(|_| map_and_unmap(bytes));
    // SAFETY: as above.
    unsafe { setitimer(0, &raw const never, null_mut()) };
    done
}

static AT_EXIT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn at_exit() {
    leak_large(10, AT_EXIT.load(Ordering::Relaxed));
    churn(10, AT_EXIT.load(Ordering::Relaxed));
}

#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn obey(line: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut words = line.split_whitespace();
    let what = words.next().unwrap_or_default();
    let numbers = words.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let (first, second) = (numbers.first().copied().unwrap_or(0), numbers.get(1).copied().unwrap_or(0));
    // An invalid size is the test's mistake, and must not abort.
    Layout::from_size_align(first.max(second), 4096)?;
    match what {
        "small" => leak_small(first, second),
        "large" => leak_large(first, second),
        "zeroed" => leak_zeroed(first, second),
        "aligned" => leak_aligned(first, second),
        "churn" => churn(first, second),
        "grow" => grow(first),
        "handed" => hand_over(first, second),
        "mapped" => leak_mapping(first)?,
        "unmapped" => map_and_unmap(first)?,
        "refused" => leak_refused(first)?,
        "parts" => leak_parts(first)?,
        "replaced" => leak_replaced(first)?,
        "moved" => leak_moved(first)?,
        "families" => leak_families(first)?,
        "ended" => leak_in_threads_that_end(first, second),
        "forked" => fork_and_leak(first, second)?,
        "spawned" => spawn_and_leak(first, second)?,
        "signals" => map_under_signals(first, second)?,
        "atexit" => {
            AT_EXIT.store(first, Ordering::Relaxed);
            // SAFETY: the function stays loaded.
            unsafe { atexit(at_exit) };
        }
        "threads" => thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| leak_in_thread(first, second));
            }
        }),
        _ => return Err(format!("what is {what:?}?").into()),
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        obey(&line?)?;
        writeln!(out, "done")?;
        out.flush()?;
    }
    Ok(())
}
