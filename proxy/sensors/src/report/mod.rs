//! The memory report of a patched llama-server: counters of its CUDA contexts in a small file that it keeps mapped.
//!
//! The process writes, we read; nothing locks. The file is read whole, as a plain file, some times in a row: 16 KiB out
//! of the page cache cost microseconds, and a mapping would need `unsafe` and could end us if the file were cut short.
//!
//! ```text
//!   file:    header (128 bytes) | 62 records (256 bytes each) | rest, unused
//!   record:  seq, state, device, context | 30 numbers of 64 bits
//! ```
//!
//! `seq` is odd while a record is written. A record counts when two readings in a row agree on every byte of it and `seq`
//! is even; one that never comes to rest is left out. Whatever is no report (no file, a short one, other magic, another
//! version) is `None` and never an error: a plain build of llama-server writes none.
//!
//! No number is believed: sums stop at the end of their type, and nothing is indexed by what the file says.
//!
//! | file | job |
//! |---|---|
//! | `layout` | bytes to header and records |
//! | `counts` | the numbers, and their sums |

mod counts;
mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use counts::{Counts, Totals};
use layout::{FILE_BYTES, RECORDS, Record};

/// The variable that tells a patched llama-server where to publish its report.
pub const VARIABLE: &str = "LLAMA_WARDEN_REPORT";

/// Readings at most, of which two in a row have to agree. A record is being written for less than a microsecond, about a
/// thousand times a second.
const READINGS: usize = 6;

/// Names in a folder that are looked at for files beside a report: in a crowded one not all, as this is done every second.
const NAMES: usize = 4096;

/// A fix that is active in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fix {
    /// Live graphs are limited.
    GraphCacheCap,
    /// Pools above their budget are given back.
    PoolPurge,
    /// cuBLAS handles are made anew now and then.
    CublasReset,
    /// This report is written.
    MemoryReport,
    /// Graphs that were not used for a while are destroyed.
    IdleTrim,
}

/// In the order of the bits.
const FIXES: [Fix; 5] =
    [Fix::GraphCacheCap, Fix::PoolPurge, Fix::CublasReset, Fix::MemoryReport, Fix::IdleTrim];

/// What the fixes are set to; 0 where one is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Live graphs that a context may have.
    pub graph_cap: u64,
    /// Graphs unused for this many milliseconds are destroyed.
    pub idle_trim_ms: u64,
    /// Cached bytes of a context's pools above which they are given back.
    pub pool_budget_bytes: u64,
    /// cuBLAS handles are made anew after this many graph computes.
    pub cublas_every: u64,
    /// And not more often than once in this many milliseconds.
    pub cublas_min_ms: u64,
}

/// One CUDA context (a `ggml_backend_cuda_context`), living or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextReport {
    /// Number in order of creation within the process.
    pub context: u32,
    /// Number of its device, as ggml counts.
    pub device: i32,
    /// False once it has been destroyed: then only its counters mean something.
    pub live: bool,
    /// Its numbers.
    #[serde(flatten)]
    pub counts: Counts,
    /// When it last wrote, milliseconds since the Unix epoch.
    pub updated_unix_ms: u64,
}

/// Everything that a process published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The process that wrote it, by its own count: in a pid namespace of its own it is another number than ours.
    pub pid: u32,
    /// When that process made the file, milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
    /// The fixes that are active.
    pub active: BTreeSet<Fix>,
    /// What they are set to.
    pub settings: Settings,
    /// Its contexts, in the order of the file.
    pub contexts: Vec<ContextReport>,
}

impl Report {
    /// The sum over all contexts.
    pub fn totals(&self) -> Totals {
        self.contexts.iter().fold(Totals::default(), Totals::with)
    }

    /// The sums by device, in the order of the devices.
    pub fn by_device(&self) -> BTreeMap<i32, Totals> {
        let mut devices: BTreeMap<i32, Totals> = BTreeMap::new();
        for context in &self.contexts {
            let sum = devices.entry(context.device).or_default();
            *sum = sum.with(context);
        }
        devices
    }

    /// Both together, as one process would have told them: the contexts of both, and the fixes of either.
    #[must_use]
    pub fn with(mut self, other: Self) -> Self {
        self.active.extend(other.active);
        self.contexts.extend(other.contexts);
        self
    }

    /// Whether the writer is the process `leader` or a member of the group that it leads, such as a llama-server behind a
    /// wrapper script. Needed only for a file that several processes may share.
    pub fn is_from(&self, leader: u32) -> bool {
        let group = |pid: u32| {
            let process = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?;
            u32::try_from(process.stat().ok()?.pgrp).ok()
        };
        self.pid == leader || group(self.pid) == Some(leader)
    }
}

/// Reads the report at `path`; `None` if there is none. May block for as long as a read of 16 KiB.
pub fn read(path: &Path) -> Option<Report> {
    settle(|| bytes_of(path))
}

/// The files of processes that inherited the variable of the one that writes `path`: its name with a process id behind it. A
/// file says nothing of whether its writer lives. Blocks for the reading of a folder.
pub fn beside(path: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Vec::new();
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let is_ours = |other: &str| {
        let number = other.strip_prefix(name).and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let names = entries.take(NAMES).filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut found: Vec<PathBuf> =
        names.filter(|other| is_ours(other)).map(|other| path.with_file_name(other)).collect();
    found.sort();
    found
}

/// The whole file, and one byte more, so that a longer one is recognised as something else.
fn bytes_of(path: &Path) -> Option<Vec<u8>> {
    // A pipe would keep us waiting.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::with_capacity(FILE_BYTES + 1);
    File::open(path).ok()?.take(FILE_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Takes readings until all records have come to rest, or there were enough.
fn settle(mut reading: impl FnMut() -> Option<Vec<u8>>) -> Option<Report> {
    let mut before = reading()?;
    layout::header(&before)?;
    let mut settled: [Option<Record>; RECORDS] = [None; RECORDS];
    for _ in 1..READINGS {
        let after = reading()?;
        layout::header(&after)?;
        // Another process has taken over the file: what was known is about the one before.
        let same_writer = layout::header_bytes(&before) == layout::header_bytes(&after);
        let mut restless = !same_writer;
        for (index, known) in settled.iter_mut().enumerate() {
            if !same_writer {
                *known = None;
            } else if known.is_none() {
                *known = layout::at_rest(&before, &after, index);
                restless |= known.is_none();
            }
        }
        before = after;
        if !restless {
            break;
        }
    }
    let header = layout::header(&before)?;
    let contexts = settled.into_iter().flatten().filter_map(Record::context).collect();
    let active = FIXES.into_iter().enumerate().filter(|(bit, _)| header.active >> bit & 1 == 1);
    Some(Report {
        pid: header.pid,
        started_unix_ms: header.started_unix_ms,
        active: active.map(|(_, fix)| fix).collect(),
        settings: header.settings,
        contexts,
    })
}

#[cfg(test)]
mod tests;
