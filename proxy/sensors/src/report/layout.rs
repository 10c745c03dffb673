//! Layout of the report file, in this machine's byte order: the writer runs on this machine.

use super::counts::ContextCounts;
use super::{ContextReport, FixSettings};

pub(super) const FILE_BYTES: usize = 16_384;
pub(super) const RECORD_COUNT: usize = 62;

const HEADER_BYTES: usize = 128;
const RECORD_BYTES: usize = 256;
const MAGIC: [u8; 8] = *b"LWREPT1\0";
const VERSION: u32 = 1;

/// Index of the word in a record that has the time of the last write; it follows the counts.
const UPDATED_WORD: usize = 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct ReportHeader {
    pub(super) pid: u32,
    pub(super) started_unix_ms: u64,
    /// Bits that show which fixes are active.
    pub(super) active: u64,
    pub(super) settings: FixSettings,
}

struct WordReader<'a>(&'a [u8]);

impl WordReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (piece, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*piece)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// Reads the header of a whole file; `None` unless the file is a report in a known format.
pub(super) fn read_header(file: &[u8]) -> Option<ReportHeader> {
    if file.len() != FILE_BYTES {
        return None;
    }
    let mut pieces = WordReader(header_bytes(file)?);
    let known = pieces.take() == Some(MAGIC)
        && pieces.u32() == Some(VERSION)
        && pieces.u32() == u32::try_from(RECORD_BYTES).ok()
        && pieces.u32() == u32::try_from(RECORD_COUNT).ok();
    if !known {
        return None;
    }
    Some(ReportHeader {
        pid: pieces.u32()?,
        started_unix_ms: pieces.u64()?,
        active: pieces.u64()?,
        settings: FixSettings {
            graph_cap: pieces.u64()?,
            idle_trim_ms: pieces.u64()?,
            pool_budget_bytes: pieces.u64()?,
            cublas_every: pieces.u64()?,
            cublas_min_ms: pieces.u64()?,
        },
    })
}

pub(super) fn header_bytes(file: &[u8]) -> Option<&[u8]> {
    file.get(..HEADER_BYTES)
}

/// A record that the writer did not change between two readings.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReportRecord {
    state: u32,
    device: i32,
    context: u32,
    counts: ContextCounts,
    updated_unix_ms: u64,
}

impl ReportRecord {
    /// Returns the context that the record describes; `None` for a free record and for an unknown state.
    pub(super) fn context(self) -> Option<ContextReport> {
        let live = match self.state {
            1 => true,
            2 => false,
            _ => return None,
        };
        let Self { device, context, counts, updated_unix_ms, .. } = self;
        Some(ContextReport { context, device, live, counts, updated_unix_ms })
    }
}

/// Returns a record that is equal in two readings and was not being written; `None` otherwise.
pub(super) fn record_at_rest(before: &[u8], after: &[u8], index: usize) -> Option<ReportRecord> {
    let start = HEADER_BYTES + index * RECORD_BYTES;
    let bytes = after.get(start..start + RECORD_BYTES)?;
    if before.get(start..start + RECORD_BYTES)? != bytes {
        return None;
    }
    let mut pieces = WordReader(bytes);
    let seq = pieces.u32()?;
    if !seq.is_multiple_of(2) {
        return None;
    }
    let state = pieces.u32()?;
    let device = pieces.take().map(i32::from_ne_bytes)?;
    let context = pieces.u32()?;
    let words: Vec<u64> = std::iter::from_fn(|| pieces.u64()).collect();
    let updated_unix_ms = words.get(UPDATED_WORD).copied().unwrap_or(0);
    Some(ReportRecord { state, device, context, counts: ContextCounts::from_words(words), updated_unix_ms })
}
