//! Reads the memory report of a patched llama-server: counters of its CUDA contexts in a small file that
//! the server keeps mapped.
//!
//! The server writes while we read, without locks. Plain reads of 16 KiB from the page cache take
//! microseconds. A mapping would need `unsafe`, and would kill us if the file were truncated.
//!
//! ```text
//!   file:    header (128 bytes) | 62 records (256 bytes each) | rest, unused
//!   record:  seq, state, device, context | 30 numbers of 64 bits
//! ```
//!
//! `seq` is odd while the server writes a record. A record counts if `seq` is even and two readings in a row
//! are equal. A missing or invalid file gives `None` and no error: an unpatched llama-server writes none.
//!
//! Numbers from the file are not trusted: sums saturate, and no number is used as an index.

mod counts;
mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use counts::{ContextCounts, ContextTotals};
use layout::{FILE_BYTES, RECORD_COUNT, ReportRecord};

/// Environment variable with the path to which a patched llama-server writes its report.
pub const REPORT_VARIABLE: &str = "LLAMA_WARDEN_REPORT";

/// Maximum number of readings. The server writes a thousand records a second, each within 1 µs.
const MAX_READINGS: usize = 6;

/// Maximum number of file names examined for further reports, because this happens every second.
const MAX_FOLDER_NAMES: usize = 4096;

/// A fix (a patch to llama.cpp) that is active in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActiveFix {
    /// Limits the number of CUDA graphs that exist.
    GraphCacheCap,
    /// Releases memory pools that exceed their budget.
    PoolPurge,
    /// Recreates cuBLAS handles periodically.
    CublasReset,
    /// Writes this report.
    MemoryReport,
    /// Destroys graphs that were unused for a while.
    IdleTrim,
}

/// All fixes, in the order of their bits in the header.
const FIXES: [ActiveFix; 5] = [
    ActiveFix::GraphCacheCap,
    ActiveFix::PoolPurge,
    ActiveFix::CublasReset,
    ActiveFix::MemoryReport,
    ActiveFix::IdleTrim,
];

/// Settings of the fixes; a value is 0 if its fix is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FixSettings {
    /// Maximum number of CUDA graphs of a context.
    pub graph_cap: u64,
    /// Milliseconds without use after which graphs are destroyed.
    pub idle_trim_ms: u64,
    /// Cached bytes of a context's pools above which they are released.
    pub pool_budget_bytes: u64,
    /// Number of graph computations after which cuBLAS handles are recreated.
    pub cublas_every: u64,
    /// Shortest time between two recreations of cuBLAS handles, in milliseconds.
    pub cublas_min_ms: u64,
}

/// A CUDA context (a `ggml_backend_cuda_context`), live or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextReport {
    /// Number of the context, in order of creation within the process.
    pub context: u32,
    /// Index of the context's device in ggml.
    pub device: i32,
    /// False if the context has been destroyed: then only its counters are meaningful.
    pub live: bool,
    /// Counts of the context.
    #[serde(flatten)]
    pub counts: ContextCounts,
    /// Time of the last write to the record, in milliseconds since 1970.
    pub updated_unix_ms: u64,
}

/// The complete report of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaReport {
    /// Pid of the writer in its own pid namespace; may differ from the pid in ours.
    pub pid: u32,
    /// Time at which the file was created, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Active fixes.
    pub active: BTreeSet<ActiveFix>,
    /// Settings of the fixes.
    pub settings: FixSettings,
    /// CUDA contexts, in the order of the file.
    pub contexts: Vec<ContextReport>,
}

impl CudaReport {
    /// Returns the sums over all contexts.
    pub fn totals(&self) -> ContextTotals {
        self.contexts.iter().fold(ContextTotals::default(), ContextTotals::with)
    }

    /// Returns the sums by device, in the order of the devices.
    pub fn by_device(&self) -> BTreeMap<i32, ContextTotals> {
        let mut devices: BTreeMap<i32, ContextTotals> = BTreeMap::new();
        for context in &self.contexts {
            let sum = devices.entry(context.device).or_default();
            *sum = sum.with(context);
        }
        devices
    }

    /// Merges two reports as if one process had written them.
    #[must_use]
    pub fn with(mut self, other: Self) -> Self {
        self.active.extend(other.active);
        self.contexts.extend(other.contexts);
        self
    }

    /// Returns whether the writer is the process `leader` or in its group, such as a llama-server started by
    /// a wrapper script. Needed only for a file that several processes may share.
    pub fn is_from(&self, leader: u32) -> bool {
        let group = |pid: u32| {
            let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
            u32::try_from(process.stat().ok()?.pgrp).ok()
        };
        self.pid == leader || group(self.pid) == Some(leader)
    }
}

/// Reads the report at `path`; `None` if there is none. May block for a read of 16 KiB.
pub fn read_report(path: &Path) -> Option<CudaReport> {
    read_settled(|| bytes_of(path))
}

/// Returns the files of processes that inherited the variable from the writer of `path`: the name of that
/// file followed by a pid. Their writers may have ended. Blocks for reading a folder.
pub fn sibling_reports(path: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Vec::new();
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let is_ours = |other: &str| {
        let number = other.strip_prefix(name).and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let names = entries.take(MAX_FOLDER_NAMES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut found: Vec<PathBuf> =
        names.filter(|other| is_ours(other)).map(|other| path.with_file_name(other)).collect();
    found.sort();
    found
}

/// Reads one byte more than a report has, so that a longer file is recognised as invalid.
fn bytes_of(path: &Path) -> Option<Vec<u8>> {
    // Reading a pipe would block.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::with_capacity(FILE_BYTES + 1);
    File::open(path).ok()?.take(FILE_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Reads the file until no record changes any more, or the limit is reached.
fn read_settled(mut reading: impl FnMut() -> Option<Vec<u8>>) -> Option<CudaReport> {
    let mut before = reading()?;
    layout::read_header(&before)?;
    let mut settled: [Option<ReportRecord>; RECORD_COUNT] = [None; RECORD_COUNT];
    for _ in 1..MAX_READINGS {
        let after = reading()?;
        layout::read_header(&after)?;
        // If another process has taken over the file, earlier readings belong to the previous writer.
        let same_writer = layout::header_bytes(&before) == layout::header_bytes(&after);
        let mut restless = !same_writer;
        for (index, known) in settled.iter_mut().enumerate() {
            if !same_writer {
                *known = None;
            } else if known.is_none() {
                *known = layout::record_at_rest(&before, &after, index);
                restless |= known.is_none();
            }
        }
        before = after;
        if !restless {
            break;
        }
    }
    let header = layout::read_header(&before)?;
    let contexts = settled.into_iter().flatten().filter_map(ReportRecord::context).collect();
    let active = FIXES.into_iter().enumerate().filter(|(bit, _)| header.active >> bit & 1 == 1);
    Some(CudaReport {
        pid: header.pid,
        started_unix_ms: header.started_unix_ms,
        active: active.map(|(_, fix)| fix).collect(),
        settings: header.settings,
        contexts,
    })
}

#[cfg(test)]
mod tests;
