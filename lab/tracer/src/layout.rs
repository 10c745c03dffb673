//! The file that a traced process publishes its counts in. Shared by the tracer, which writes it, and its reader.
//!
//! ```text
//!   header (4096 bytes) | SITES records of 256 bytes
//!   header:  magic, version, sizes, pid, … | losses | path of the program
//!   record:  hash, function, frames, parent | live, total and peak | return addresses
//! ```
//!
//! All numbers are in the machine's own byte order: writer and reader are on one machine. A record is valid once its
//! `hash` is larger than [`BUSY`]; then only its counters change, each by itself, so a reader may see a count that is newer
//! than its neighbour, and never a torn one.

/// First eight bytes of the file, "WDNTRACE"; written last.
pub const MAGIC: u64 = u64::from_le_bytes(*b"WDNTRACE");
/// Version of this layout.
pub const VERSION: u32 = 2;
/// Bytes of the header.
pub const HEADER: usize = 4096;
/// Bytes of a record.
pub const RECORD: usize = 256;
/// Records in the file; a process has some hundreds of call sites that allocate while it serves.
pub const SITES: usize = 16_384;
/// Bytes of the file.
pub const FILE: usize = HEADER + SITES * RECORD;
/// Return addresses in a record.
pub const FRAMES: usize = 24;
/// Counts of allocations are in 256ths, because a sampled allocation stands for a number that is not whole.
pub const COUNT_UNIT: u64 = 256;

/// Where things are in the header.
pub mod header {
    /// [`super::MAGIC`], u64.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`], u32.
    pub const VERSION: usize = 8;
    /// The process by its own count, u32.
    pub const PID: usize = 12;
    /// When it was made, milliseconds since the Unix epoch, u64.
    pub const STARTED: usize = 16;
    /// Bytes between samples on average, u64.
    pub const INTERVAL: usize = 24;
    /// Allocations that were counted and whose end will not be noticed, because a table was full: u64.
    pub const UNFOLLOWED: usize = 32;
    /// Call sites that found no record, u64; what they allocated is in no count.
    pub const SITELESS: usize = 40;
    /// Walks that were cut short because there were too many in a second, or not begun (`registered.rs`), u64.
    pub const SHORT_WALKS: usize = 48;
    /// Walks, u64.
    pub const WALKS: usize = 56;
    /// 1 if the program has an allocator of its own in place of the C library's, so that the heap is not seen: u64.
    pub const OWN_HEAP: usize = 64;
    /// Bytes of the path that follows, u32, and the path.
    pub const EXE_BYTES: usize = 2044;
    /// The path of the program.
    pub const EXE: usize = 2048;
}

/// Where things are in a record.
pub mod record {
    /// 0: free; [`super::BUSY`]: being filled in; else valid. u64.
    pub const HASH: usize = 0;
    /// Index in [`super::FUNCTIONS`], u32.
    pub const FUNCTION: usize = 8;
    /// How many return addresses there are, u32.
    pub const FRAME_COUNT: usize = 12;
    /// For an allocation within a call into CUDA that is itself counted: the number of that call's record and 1; else 0. u32.
    pub const PARENT: usize = 16;
    /// Estimated bytes that are allocated now, i64.
    pub const LIVE_BYTES: usize = 24;
    /// Estimated allocations that live, in 256ths, i64.
    pub const LIVE_COUNT: usize = 32;
    /// Estimated bytes ever, u64.
    pub const TOTAL_BYTES: usize = 40;
    /// Estimated allocations ever, in 256ths, u64.
    pub const TOTAL_COUNT: usize = 48;
    /// The most that `LIVE_BYTES` has been, i64.
    pub const PEAK_BYTES: usize = 56;
    /// Return addresses, the innermost first, u64 each.
    pub const FRAME: usize = 64;
}

/// A record that is being filled in.
pub const BUSY: u64 = 1;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// The C library's heap.
    Heap = 1,
    /// Anonymous memory that was mapped with the right to write.
    Mapped = 2,
    /// Host memory that CUDA has pinned.
    Pinned = 3,
    /// Device memory.
    Device = 4,
    /// Device memory out of CUDA's own pools.
    Pool = 5,
    /// Physical device memory that has a handle. It lives on without one while it is mapped, so this is no measure of memory.
    Handle = 6,
    /// Device memory mapped into a range of addresses.
    DeviceMapped = 7,
    /// Executable CUDA graphs: a number, no bytes.
    GraphExec = 8,
    /// cuBLAS handles: a number, no bytes.
    Cublas = 9,
}

/// Every function that may allocate, by the number in a record, and what it allocates.
pub const FUNCTIONS: [(&str, Kind); 29] = [
    ("malloc", Kind::Heap),
    ("calloc", Kind::Heap),
    ("realloc", Kind::Heap),
    ("memalign", Kind::Heap),
    ("aligned_alloc", Kind::Heap),
    ("posix_memalign", Kind::Heap),
    ("mmap", Kind::Mapped),
    ("mremap", Kind::Mapped),
    ("cudaHostAlloc", Kind::Pinned),
    ("cudaMallocHost", Kind::Pinned),
    ("cuMemHostAlloc", Kind::Pinned),
    ("cuMemAllocHost", Kind::Pinned),
    ("cudaMalloc", Kind::Device),
    ("cudaMallocManaged", Kind::Device),
    ("cuMemAlloc", Kind::Device),
    ("cuMemAllocManaged", Kind::Device),
    ("cudaMallocAsync", Kind::Pool),
    ("cudaMallocFromPoolAsync", Kind::Pool),
    ("cuMemAllocAsync", Kind::Pool),
    ("cuMemAllocFromPoolAsync", Kind::Pool),
    ("cuMemCreate", Kind::Handle),
    ("cuMemMap", Kind::DeviceMapped),
    ("cudaGraphInstantiate", Kind::GraphExec),
    ("cudaGraphInstantiateWithFlags", Kind::GraphExec),
    ("cudaGraphInstantiateWithParams", Kind::GraphExec),
    ("cuGraphInstantiate", Kind::GraphExec),
    ("cuGraphInstantiateWithFlags", Kind::GraphExec),
    ("cuGraphInstantiateWithParams", Kind::GraphExec),
    ("cublasCreate", Kind::Cublas),
];

/// The name and kind of a function's number.
pub const fn function(number: u32) -> Option<(&'static str, Kind)> {
    if (number as usize) < FUNCTIONS.len() { Some(FUNCTIONS[number as usize]) } else { None }
}

/// The number of a function's name.
pub const fn number_of(name: &str) -> u32 {
    let mut number = 0;
    while number < FUNCTIONS.len() {
        if same(FUNCTIONS[number].0.as_bytes(), name.as_bytes()) {
            #[expect(clippy::cast_possible_truncation, reason = "there are 29")]
            return number as u32;
        }
        number += 1;
    }
    u32::MAX
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut place = 0;
    while place < one.len() {
        if one[place] != other[place] {
            return false;
        }
        place += 1;
    }
    true
}
