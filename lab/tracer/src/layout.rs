//! Layout of the file in which a traced process publishes its counts, shared by the tracer and its reader.
//!
//! ```text
//!   header (4096 bytes) | MAX_SITES records of 256 bytes
//!   header:  magic, version, sizes, pid, … | losses | path of the program
//!   record:  hash, function, frames, parent | live, total and peak | return addresses
//! ```
//!
//! Numbers have native byte order, because writer and reader run on the same machine. A record is valid once
//! its `hash` is larger than [`BUSY_HASH`]; from then on only its counters change. Each counter is updated
//! atomically, but separately: a reader may see counters of different ages, never a torn one.

/// First eight bytes of the file; written last.
pub const MAGIC: u64 = u64::from_le_bytes(*b"WDNTRACE");
/// Version of this layout.
pub const VERSION: u32 = 2;
/// Size of the header in bytes.
pub const HEADER_BYTES: usize = 4096;
/// Size of a record in bytes.
pub const RECORD_BYTES: usize = 256;
/// Records in the file; a serving process has some hundreds of allocating call sites.
pub const MAX_SITES: usize = 16_384;
/// Size of the file in bytes.
pub const FILE_BYTES: usize = HEADER_BYTES + MAX_SITES * RECORD_BYTES;
/// Most return addresses in a record.
pub const MAX_FRAMES: usize = 24;
/// Units per allocation in a counter, because the weight of a sampled allocation is no integer.
pub const COUNT_UNIT: u64 = 256;

/// Offsets in the header.
pub mod header {
    /// [`super::MAGIC`], u64.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`], u32.
    pub const VERSION: usize = 8;
    /// PID in the process's own namespace, u32.
    pub const PID: usize = 12;
    /// Start of the process, in milliseconds since the Unix epoch, u64.
    pub const STARTED: usize = 16;
    /// Mean bytes between samples, u64.
    pub const INTERVAL: usize = 24;
    /// Counted allocations whose free the tracer will miss because a table was full, u64.
    pub const UNFOLLOWED: usize = 32;
    /// Samples without a free record for their call site, u64; no counter includes them.
    pub const SITELESS: usize = 40;
    /// Stack walks truncated because of too many per second, or skipped (`registered.rs`), u64.
    pub const SHORT_WALKS: usize = 48;
    /// Stack walks, u64.
    pub const WALKS: usize = 56;
    /// 1 if the program replaces the C library's allocator, so heap blocks are not counted, u64.
    pub const OWN_HEAP: usize = 64;
    /// Length in bytes of the path that follows, u32.
    pub const EXE_BYTES: usize = 2044;
    /// Path of the program.
    pub const EXE: usize = 2048;
}

/// Offsets in a record.
pub mod record {
    /// 0: free; [`super::BUSY_HASH`]: being written; other values: valid. u64.
    pub const HASH: usize = 0;
    /// Index in [`super::FUNCTIONS`], u32.
    pub const FUNCTION: usize = 8;
    /// Number of return addresses, u32.
    pub const FRAME_COUNT: usize = 12;
    /// 1 + the record number of the enclosing counted CUDA call, or 0, u32.
    pub const PARENT: usize = 16;
    /// Estimated live bytes, i64.
    pub const LIVE_BYTES: usize = 24;
    /// Estimated live allocations, in 256ths, i64.
    pub const LIVE_COUNT: usize = 32;
    /// Estimated bytes ever allocated, u64.
    pub const TOTAL_BYTES: usize = 40;
    /// Estimated number of allocations ever made, in 256ths, u64.
    pub const TOTAL_COUNT: usize = 48;
    /// Most `LIVE_BYTES` at any time, i64.
    pub const PEAK_BYTES: usize = 56;
    /// Return addresses, innermost first, u64 each.
    pub const FRAME: usize = 64;
}

/// Hash of a record that is being written.
pub const BUSY_HASH: u64 = 1;

/// Kinds of counted allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum AllocationKind {
    /// The C library's heap.
    Heap = 1,
    /// Writable anonymous mappings.
    Mapped = 2,
    /// Host memory pinned by CUDA.
    Pinned = 3,
    /// Device memory.
    Device = 4,
    /// Device memory from CUDA's own pools.
    Pool = 5,
    /// Handles of physical device memory. Mapped memory outlives its handle, so this kind does not measure
    /// memory.
    Handle = 6,
    /// Device memory mapped into an address range.
    DeviceMapped = 7,
    /// Executable CUDA graphs, counted without bytes.
    GraphExec = 8,
    /// cuBLAS handles, counted without bytes.
    Cublas = 9,
}

/// All counted functions; a record stores the index.
pub const FUNCTIONS: [(&str, AllocationKind); 29] = [
    ("malloc", AllocationKind::Heap),
    ("calloc", AllocationKind::Heap),
    ("realloc", AllocationKind::Heap),
    ("memalign", AllocationKind::Heap),
    ("aligned_alloc", AllocationKind::Heap),
    ("posix_memalign", AllocationKind::Heap),
    ("mmap", AllocationKind::Mapped),
    ("mremap", AllocationKind::Mapped),
    ("cudaHostAlloc", AllocationKind::Pinned),
    ("cudaMallocHost", AllocationKind::Pinned),
    ("cuMemHostAlloc", AllocationKind::Pinned),
    ("cuMemAllocHost", AllocationKind::Pinned),
    ("cudaMalloc", AllocationKind::Device),
    ("cudaMallocManaged", AllocationKind::Device),
    ("cuMemAlloc", AllocationKind::Device),
    ("cuMemAllocManaged", AllocationKind::Device),
    ("cudaMallocAsync", AllocationKind::Pool),
    ("cudaMallocFromPoolAsync", AllocationKind::Pool),
    ("cuMemAllocAsync", AllocationKind::Pool),
    ("cuMemAllocFromPoolAsync", AllocationKind::Pool),
    ("cuMemCreate", AllocationKind::Handle),
    ("cuMemMap", AllocationKind::DeviceMapped),
    ("cudaGraphInstantiate", AllocationKind::GraphExec),
    ("cudaGraphInstantiateWithFlags", AllocationKind::GraphExec),
    ("cudaGraphInstantiateWithParams", AllocationKind::GraphExec),
    ("cuGraphInstantiate", AllocationKind::GraphExec),
    ("cuGraphInstantiateWithFlags", AllocationKind::GraphExec),
    ("cuGraphInstantiateWithParams", AllocationKind::GraphExec),
    ("cublasCreate", AllocationKind::Cublas),
];

/// Returns the name and kind of a function by its index.
pub const fn function_by_number(number: u32) -> Option<(&'static str, AllocationKind)> {
    if (number as usize) < FUNCTIONS.len() { Some(FUNCTIONS[number as usize]) } else { None }
}

/// Returns the index of a function by its name.
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
