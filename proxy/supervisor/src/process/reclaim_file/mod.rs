//! The file through which processes of a generation are asked to give memory back: creation, requests,
//! answers and removal.
//!
//! The file is next to the socket in the private directory. The supervisor creates it before the process
//! starts, removes it after the process has ended, and never truncates or replaces it in between. No
//! process maps it. Builds without the patches `reclaim-heap` and `reclaim-cuda` ignore the variable that
//! names the file. A build with them locks a block of the file, so the locks show which parts of a process
//! would answer.
//!
//! If the model's own environment sets `LLAMA_WARDEN_RECLAIM`, that file belongs to an operator and is not
//! used.
//!
//! | file | job |
//! |---|---|
//! | `layout` | bytes of requests and answers |

mod layout;
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

use layout::{BLOCK_BYTES, BLOCKS_PER_PART, ReclaimAnswer, ReclaimPart};

use crate::clock;
use crate::spec::ServerCommand;

/// Variable with the path of the file.
pub(crate) const VARIABLE: &str = "LLAMA_WARDEN_RECLAIM";

/// Interval for checking for answers. The process checks for requests four times a second.
const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Extra time for the process to notice the request, and to report that its time is over.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// Result of asking a process to give memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReclaimResult {
    pub(crate) outcome: ReclaimOutcome,
    /// Outcome for the heap; `None` if it was not asked.
    pub(crate) heap: Option<ReclaimOutcome>,
    /// Outcome for CUDA graphs, memory pools and cuBLAS; `None` if they were not asked.
    pub(crate) cuda: Option<ReclaimOutcome>,
    pub(crate) given: ReclaimedBytes,
    /// Milliseconds that giving memory back took, as reported by the process.
    pub(crate) ms: u64,
}

impl ReclaimResult {
    /// Result if no part of the process could be asked.
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
    if command.env.iter().any(|(name, _)| name == VARIABLE) {
        return;
    }
    if wanted {
        command.env.push((VARIABLE.to_owned(), reclaim_path(socket).to_string_lossy().into_owned()));
    } else {
        // Remove an inherited value, which would name the file of another program.
        command.env_remove.push(VARIABLE.to_owned());
    }
}

pub(crate) fn remove_reclaim_file(socket: &Path) {
    drop(std::fs::remove_file(reclaim_path(socket)));
}

/// Open reclaim file of a process.
#[derive(Debug)]
pub(crate) struct ReclaimChannel {
    file: File,
}

impl ReclaimChannel {
    /// Creates the file that the command names, before the process starts. `None` if the command does not
    /// name our file, or it cannot be created. Blocks for a small write.
    pub(crate) fn make(command: &ServerCommand, socket: &Path) -> Option<Self> {
        let path = reclaim_path(socket);
        let told = command.env.iter().rfind(|(name, _)| name == VARIABLE);
        if told.is_none_or(|(_, told)| Path::new(told) != path) {
            return None;
        }
        // Remove a file left by an earlier supervisor with the same PID.
        drop(std::fs::remove_file(&path));
        let made = || -> io::Result<Self> {
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all_at(&layout::empty_file(), 0)?;
            Ok(Self { file })
        };
        match made() {
            Ok(desk) => Some(desk),
            Err(error) => {
                // The process is started without this file.
                let path = path.display();
                tracing::warn!(%path, %error, "the process cannot be asked to give memory back");
                drop(std::fs::remove_file(reclaim_path(socket)));
                None
            }
        }
    }

    /// Opens the file of a running process. Blocks for a small call.
    pub(crate) fn reopen(command: &ServerCommand, socket: &Path) -> Option<Self> {
        let path = reclaim_path(socket);
        let told = command.env.iter().rfind(|(name, _)| name == VARIABLE);
        let told = told.is_some_and(|(_, told)| Path::new(told) == path);
        let file = told.then(|| OpenOptions::new().read(true).write(true).open(&path).ok())?;
        file.map(|file| Self { file })
    }

    /// Parts of the process that can be asked now. Blocks for some small calls.
    pub(crate) fn parts(&self) -> ReclaimParts {
        ReclaimParts {
            heap: !self.present_answers(ReclaimPart::Heap).is_empty(),
            cuda: !self.present_answers(ReclaimPart::Cuda).is_empty(),
        }
    }

    /// Asks all parts and waits for their answers. The CUDA part is asked first, because host memory that
    /// it frees goes to the heap. `wait`: time for which the process may look for a good moment, for each
    /// part.
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

    /// Sends one request to one part of each process that has the file open.
    async fn ask_part(&self, part: ReclaimPart, wait: Duration) -> (ReclaimOutcome, ReclaimedBytes, u64) {
        let nothing = (ReclaimOutcome::NoAnswer, ReclaimedBytes::default(), 0);
        let Some(seq) = self.write_request(part, wait) else { return nothing };
        let until = clock::after(Instant::now(), wait.saturating_add(ANSWER_GRACE));
        loop {
            tokio::time::sleep(ANSWER_POLL_INTERVAL).await;
            let there = self.present_answers(part);
            // Ignore processes that started after the request, which do not answer, and processes that have
            // ended.
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

    /// Writes the request in one call and returns its number. `None` if the write fails.
    fn write_request(&self, part: ReclaimPart, wait: Duration) -> Option<u64> {
        let mut block = [0; BLOCK_BYTES];
        self.file.read_exact_at(&mut block, BLOCK_BYTES as u64).ok()?;
        let seq = layout::request_number(&block).unwrap_or(0) + 1;
        let deadline = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let written = self
            .file
            .write_all_at(&layout::request_block(seq, part.request_bits(), deadline), BLOCK_BYTES as u64);
        written
            .inspect_err(|error| tracing::warn!(%error, "a process could not be asked to give memory back"))
            .ok()?;
        Some(seq)
    }

    /// Last answers of the processes that hold a lock on their block, and so still run.
    fn present_answers(&self, part: ReclaimPart) -> Vec<ReclaimAnswer> {
        let mut blocks = vec![0; BLOCK_BYTES * BLOCKS_PER_PART];
        let start = part.block_offset();
        if self.file.read_exact_at(&mut blocks, start as u64).is_err() {
            return Vec::new();
        }
        let each = blocks.as_chunks::<BLOCK_BYTES>().0.iter().enumerate();
        let of = |(index, block): (usize, &[u8; BLOCK_BYTES])| {
            let answer = layout::read_answer(block, part)?;
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
