//! A program that allocates as it is told, a line at a time, at functions whose names say what they do. What the tracer says
//! of it can be compared with what is known.
//!
//! ```text
//!   small COUNT BYTES     leaks blocks               large COUNT BYTES    the same, elsewhere
//!   zeroed COUNT BYTES    leaks zeroed blocks        aligned COUNT BYTES  leaks blocks at 4096 bytes
//!   churn COUNT BYTES     allocates and frees        grow BYTES           leaks one block that grew by doubling
//!   threads COUNT BYTES   small, in four threads     handed COUNT BYTES   allocates here, frees in another thread
//!   mapped BYTES          leaks a mapping            unmapped BYTES       maps and unmaps
//! ```
//!
//! Answers each line with `done`.

use std::alloc::Layout;
use std::hint::black_box;
use std::io::{self, BufRead as _, Write as _};
use std::thread;

use memmap2::MmapMut;

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

/// A page: its alignment is more than what `malloc` promises.
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
fn hand_over(count: usize, bytes: usize) {
    let blocks: Vec<Vec<u8>> = (0..count).map(|_| black_box(Vec::with_capacity(bytes))).collect();
    let _ended = thread::spawn(move || drop(blocks)).join();
}

#[inline(never)]
fn leak_mapping(bytes: usize) -> io::Result<()> {
    std::mem::forget(MmapMut::map_anon(bytes)?);
    Ok(())
}

#[inline(never)]
fn map_and_unmap(bytes: usize) -> io::Result<()> {
    drop(black_box(MmapMut::map_anon(bytes)?));
    Ok(())
}

fn obey(line: &str) -> Result<(), Box<dyn std::error::Error>> {
    let mut words = line.split_whitespace();
    let what = words.next().unwrap_or_default();
    let numbers = words.map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let (first, second) = (numbers.first().copied().unwrap_or(0), numbers.get(1).copied().unwrap_or(0));
    // A size that no allocator takes is our own mistake, not something to abort on.
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
