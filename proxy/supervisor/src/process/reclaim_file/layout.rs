//! Layout of the file named by `LLAMA_WARDEN_RECLAIM`. The C header
//! `patches/cuda-memory/llama-warden-reclaim.h` describes the same layout.
//!
//! ```text
//!     header | request | 16 answers of llama-server's heap | 16 answers of CUDA parts    (blocks of 64 bytes)
//! ```
//!
//! Requests and answers end with a checksum of the bytes before it, so that incomplete or foreign blocks
//! are detected and skipped. The byte order is that of the machine.

use warden_policies::reclaim::{ReclaimOutcome, ReclaimedBytes};

pub(super) const BLOCK_BYTES: usize = 64;
/// Number of blocks per part, which limits the number of processes that share a file.
pub(super) const BLOCKS_PER_PART: usize = 16;
pub(super) const FILE_BYTES: usize = BLOCK_BYTES * (2 + 2 * BLOCKS_PER_PART);
const MAGIC: [u8; 8] = *b"LWRECL1\0";
const VERSION: u32 = 1;
/// Number of bytes of a block that its checksum covers.
const CHECKED_BYTES: usize = BLOCK_BYTES - 8;

pub(super) const GRAPHS: u32 = 1;
pub(super) const POOLS: u32 = 2;
pub(super) const CUBLAS: u32 = 4;
pub(super) const HEAP: u32 = 8;

/// Part of a process that answers in its own blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimPart {
    Heap,
    Cuda,
}

impl ReclaimPart {
    pub(super) const fn request_bits(self) -> u32 {
        match self {
            Self::Heap => HEAP,
            Self::Cuda => GRAPHS | POOLS | CUBLAS,
        }
    }

    /// Offset of the part's blocks in the file.
    pub(super) const fn block_offset(self) -> usize {
        match self {
            Self::Heap => BLOCK_BYTES * 2,
            Self::Cuda => BLOCK_BYTES * (2 + BLOCKS_PER_PART),
        }
    }
}

/// Last answer by one part of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReclaimAnswer {
    /// Number of the answered request, or of the request in the file when the process started.
    pub(super) seq: u64,
    /// Outcome; `None` if the request was for another part.
    pub(super) outcome: Option<ReclaimOutcome>,
    pub(super) given: ReclaimedBytes,
    pub(super) ms: u32,
}

/// Contents of a file without a request.
pub(super) fn empty_file() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_ne_bytes());
    bytes.extend(u32::try_from(BLOCKS_PER_PART).unwrap_or_default().to_ne_bytes());
    bytes.resize(FILE_BYTES, 0);
    bytes
}

pub(super) fn request_block(seq: u64, what: u32, deadline_ms: u32) -> Vec<u8> {
    let mut block = seq.to_ne_bytes().to_vec();
    block.extend(what.to_ne_bytes());
    block.extend(deadline_ms.to_ne_bytes());
    block.resize(CHECKED_BYTES, 0);
    block.extend(block_checksum(&block).to_ne_bytes());
    block
}

/// Number of the request in a block; `None` if the block has no request.
pub(super) fn request_number(block: &[u8]) -> Option<u64> {
    is_whole(block).then(|| u64_at(block, 0)).flatten()
}

/// Answer in a block; `None` if the block is empty or incomplete.
pub(super) fn read_answer(block: &[u8], part: ReclaimPart) -> Option<ReclaimAnswer> {
    if !is_whole(block) {
        return None;
    }
    let [one, two, three, four] =
        [u64_at(block, 8)?, u64_at(block, 16)?, u64_at(block, 24)?, u64_at(block, 32)?];
    let given = match part {
        ReclaimPart::Heap => ReclaimedBytes { heap: one, ..ReclaimedBytes::default() },
        ReclaimPart::Cuda => {
            ReclaimedBytes { graphs_host: one, graphs_device: two, pools: three, cublas: four, heap: 0 }
        }
    };
    let result = u16::from_ne_bytes(block.get(44..46)?.try_into().ok()?);
    let outcome = match result {
        1 => Some(ReclaimOutcome::Done),
        2 => Some(ReclaimOutcome::Partly),
        3 => Some(ReclaimOutcome::Refused),
        5 => Some(ReclaimOutcome::TooSoon),
        6 => Some(ReclaimOutcome::OtherAllocator),
        0 => None,
        // An unknown result of a later version must not count as a success.
        _ => Some(ReclaimOutcome::Failed),
    };
    let ms = u32::from_ne_bytes(block.get(40..44)?.try_into().ok()?);
    Some(ReclaimAnswer { seq: u64_at(block, 0)?, outcome, given, ms })
}

fn u64_at(block: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(block.get(at..at + 8)?.try_into().ok()?))
}

fn is_whole(block: &[u8]) -> bool {
    let told = u64_at(block, CHECKED_BYTES);
    block.get(..CHECKED_BYTES).is_some_and(|bytes| told == Some(block_checksum(bytes)))
}

/// FNV-1a hash of the bytes.
fn block_checksum(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}
