//! The file through which processes of a generation are asked to give memory back.
//!
//! The supervisor creates the file next to the socket before the process starts, and removes it after the
//! end. Builds without the patches `reclaim-heap` and `reclaim-cuda` ignore the variable that names the file.
//! A build with them locks a block of the file; the locks show which parts of a process would answer.
//!
//! `LLAMA_WARDEN_RECLAIM` in the model's own environment names an operator's file, which is not used.
//!
//! The C header `patches/cuda-memory/llama-warden-reclaim.h` describes the same layout:
//!
//! ```text
//!     header | request | 16 answers of llama-server's heap | 16 answers of CUDA parts    (blocks of 64 bytes)
//! ```
//!
//! Requests and answers end with a checksum, so that incomplete or foreign blocks are skipped. The byte order
//! is that of the machine.

#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Flock, FlockOffsetType, FlockType, fcntl_getlk};
use tokio::time::Instant;
use warden_policies::reclaim::{ReclaimOutcome, ReclaimParts, ReclaimedBytes};

use crate::clock;
use crate::spec::ServerCommand;

const BLOCK_BYTES: usize = 64;
/// Limits the number of processes that share a file.
const BLOCKS_PER_PART: usize = 16;
const FILE_BYTES: usize = BLOCK_BYTES * (2 + 2 * BLOCKS_PER_PART);
const MAGIC: [u8; 8] = *b"LWRECL1\0";
const VERSION: u32 = 1;
const CHECKED_BYTES: usize = BLOCK_BYTES - 8;

pub(crate) const VARIABLE: &str = "LLAMA_WARDEN_RECLAIM";

/// The process checks for requests four times a second.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time for the process to notice the request and to report that its time is over.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReclaimResult {
    pub(crate) outcome: ReclaimOutcome,
    /// Outcome for the heap; `None` if it was not asked.
    pub(crate) heap: Option<ReclaimOutcome>,
    /// Outcome for CUDA graphs, memory pools and cuBLAS; `None` if they were not asked.
    pub(crate) cuda: Option<ReclaimOutcome>,
    pub(crate) given: ReclaimedBytes,
    /// Milliseconds that the reclaim took, as reported by the process.
    pub(crate) ms: u64,
}

impl ReclaimResult {
    pub(crate) const NONE_ASKED: Self = Self {
        outcome: ReclaimOutcome::Nobody,
        heap: None,
        cuda: None,
        given: ReclaimedBytes { graphs_host: 0, graphs_device: 0, pools: 0, cublas: 0, heap: 0 },
        ms: 0,
    };
}

/// Reclaim file of the generation with this socket. Its name is as unique as that of the socket.
pub(crate) fn reclaim_path(socket: &Path) -> PathBuf {
    socket.with_extension("reclaim")
}

/// Sets the variable to our file, or removes the variable if not `wanted`; a value in the model's
/// environment stays.
pub(crate) fn announce_reclaim(command: &mut ServerCommand, socket: &Path, wanted: bool) {
    command.announce_file(VARIABLE, wanted.then(|| reclaim_path(socket)));
}

fn announced_path(command: &ServerCommand, socket: &Path) -> Option<PathBuf> {
    let path = reclaim_path(socket);
    (Path::new(command.own_variable(VARIABLE)?) == path).then_some(path)
}

pub(crate) fn remove_reclaim_file(socket: &Path) {
    drop(std::fs::remove_file(reclaim_path(socket)));
}

#[derive(Debug)]
pub(crate) struct ReclaimChannel {
    file: File,
}

impl ReclaimChannel {
    /// Creates the file before the process starts. `None` if the command does not name our file, or on an
    /// error. Blocks for a small write.
    pub(crate) fn make(command: &ServerCommand, socket: &Path) -> Option<Self> {
        let path = announced_path(command, socket)?;
        // Remove a file left by an earlier supervisor with the same PID.
        drop(std::fs::remove_file(&path));
        let made = || -> io::Result<Self> {
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all_at(&empty_file(), 0)?;
            Ok(Self { file })
        };
        match made() {
            Ok(desk) => Some(desk),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the process cannot be asked to give memory back");
                drop(std::fs::remove_file(path));
                None
            }
        }
    }

    pub(crate) fn reopen(command: &ServerCommand, socket: &Path) -> Option<Self> {
        let path = announced_path(command, socket)?;
        OpenOptions::new().read(true).write(true).open(path).ok().map(|file| Self { file })
    }

    /// Parts that can be asked now. Blocks for some small calls.
    pub(crate) fn parts(&self) -> ReclaimParts {
        ReclaimParts {
            heap: !self.present_answers(ReclaimPart::Heap).is_empty(),
            cuda: !self.present_answers(ReclaimPart::Cuda).is_empty(),
        }
    }

    /// Asks all parts and waits for their answers. CUDA comes first, because it frees host memory to the
    /// heap. `wait`: time limit for each part.
    pub(crate) async fn reclaim(&self, wait: Duration) -> ReclaimResult {
        let asked = self.parts();
        let cuda = if asked.cuda { Some(self.ask_part(ReclaimPart::Cuda, wait).await) } else { None };
        let heap = if asked.heap { Some(self.ask_part(ReclaimPart::Heap, wait).await) } else { None };
        let both = [cuda, heap].into_iter().flatten();
        let outcome = both.clone().map(|(outcome, ..)| outcome).reduce(ReclaimOutcome::combine);
        ReclaimResult {
            outcome: outcome.unwrap_or(ReclaimOutcome::Nobody),
            heap: heap.map(|(outcome, ..)| outcome),
            cuda: cuda.map(|(outcome, ..)| outcome),
            given: both.clone().fold(ReclaimedBytes::default(), |sum, (_, given, _)| sum.plus(given)),
            ms: both.map(|(.., ms)| ms).fold(0, u64::saturating_add),
        }
    }

    /// Sends a request to one part of each process that has the file open.
    async fn ask_part(&self, part: ReclaimPart, wait: Duration) -> (ReclaimOutcome, ReclaimedBytes, u64) {
        let nothing = (ReclaimOutcome::NoAnswer, ReclaimedBytes::default(), 0);
        let Some(seq) = self.write_request(part, wait) else { return nothing };
        let until = clock::after(Instant::now(), wait.saturating_add(ANSWER_GRACE));
        loop {
            tokio::time::sleep(ANSWER_POLL_INTERVAL).await;
            let there = self.present_answers(part);
            // Processes that started after the request do not answer.
            let mut open = there.iter().filter(|answer| answer.seq < seq);
            let last = Instant::now() >= until;
            if open.next().is_some() && !last {
                continue;
            }
            let given = there
                .iter()
                .filter(|answer| answer.seq == seq)
                .filter_map(|answer| Some((answer.outcome?, answer.given, u64::from(answer.ms))));
            let late = there.iter().any(|answer| answer.seq < seq).then_some(nothing);
            let sum = given
                .chain(late)
                .reduce(|one, other| (one.0.combine(other.0), one.1.plus(other.1), one.2.max(other.2)));
            return sum.unwrap_or(nothing);
        }
    }

    /// Writes the request in one call. Returns its number, or `None` on an error.
    fn write_request(&self, part: ReclaimPart, wait: Duration) -> Option<u64> {
        let mut block = [0; BLOCK_BYTES];
        self.file.read_exact_at(&mut block, BLOCK_BYTES as u64).ok()?;
        let seq = request_number(&block).unwrap_or(0) + 1;
        let deadline = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let written =
            self.file.write_all_at(&request_block(seq, part.request_bits(), deadline), BLOCK_BYTES as u64);
        written
            .inspect_err(|error| tracing::warn!(%error, "a process could not be asked to give memory back"))
            .ok()?;
        Some(seq)
    }

    /// Last answers of the running processes, which hold a lock on their block.
    fn present_answers(&self, part: ReclaimPart) -> Vec<ReclaimAnswer> {
        let mut blocks = vec![0; BLOCK_BYTES * BLOCKS_PER_PART];
        let start = part.block_offset();
        if self.file.read_exact_at(&mut blocks, start as u64).is_err() {
            return Vec::new();
        }
        let each = blocks.as_chunks::<BLOCK_BYTES>().0.iter().enumerate();
        let of = |(index, block): (usize, &[u8; BLOCK_BYTES])| {
            let answer = read_answer(block, part)?;
            self.is_held(start + index * BLOCK_BYTES).then_some(answer)
        };
        each.filter_map(of).collect()
    }

    fn is_held(&self, at: usize) -> bool {
        let lock = Flock {
            start: at as u64,
            length: BLOCK_BYTES as u64,
            pid: None,
            typ: FlockType::WriteLock,
            offset_type: FlockOffsetType::Set,
        };
        matches!(fcntl_getlk(&self.file, &lock), Ok(Some(_)))
    }
}

/// Part of a process, with its own blocks in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReclaimPart {
    Heap,
    Cuda,
}

impl ReclaimPart {
    const fn request_bits(self) -> u32 {
        match self {
            Self::Heap => 8,
            // Graphs, memory pools and cuBLAS.
            Self::Cuda => 1 | 2 | 4,
        }
    }

    const fn block_offset(self) -> usize {
        match self {
            Self::Heap => BLOCK_BYTES * 2,
            Self::Cuda => BLOCK_BYTES * (2 + BLOCKS_PER_PART),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReclaimAnswer {
    /// Number of the answered request, or of the request at the process's start.
    seq: u64,
    /// Outcome; `None` if the request was for another part.
    outcome: Option<ReclaimOutcome>,
    given: ReclaimedBytes,
    ms: u32,
}

fn empty_file() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_ne_bytes());
    bytes.extend(u32::try_from(BLOCKS_PER_PART).unwrap_or_default().to_ne_bytes());
    bytes.resize(FILE_BYTES, 0);
    bytes
}

fn request_block(seq: u64, what: u32, deadline_ms: u32) -> Vec<u8> {
    let mut block = seq.to_ne_bytes().to_vec();
    block.extend(what.to_ne_bytes());
    block.extend(deadline_ms.to_ne_bytes());
    block.resize(CHECKED_BYTES, 0);
    block.extend(block_checksum(&block).to_ne_bytes());
    block
}

/// Returns `None` if the block has no request.
fn request_number(block: &[u8]) -> Option<u64> {
    is_whole(block).then(|| u64_at(block, 0)).flatten()
}

/// Returns `None` if the block is empty or incomplete.
fn read_answer(block: &[u8], part: ReclaimPart) -> Option<ReclaimAnswer> {
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

/// FNV-1a hash.
fn block_checksum(bytes: &[u8]) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, fold)
}
