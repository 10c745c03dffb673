//! Parses a published file. The file is untrusted: values out of range are dropped.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use procfs::process::{MMapPath, Process};

use crate::layout::{
    AllocationKind, BUSY_HASH, COUNT_UNIT, FILE_BYTES, HEADER_BYTES, MAGIC, MAX_FRAMES, MAX_SITES,
    RECORD_BYTES, VERSION, function_by_number, header, record,
};

/// Errors of reading a snapshot.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read the trace {}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file is no trace, or has another version.
    #[error("{} is no trace of this version", path.display())]
    Foreign { path: PathBuf },
}

/// Events that the counts miss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceLosses {
    /// Counted allocations whose free will not be seen.
    pub unfollowed: u64,
    /// Samples dropped because no record was free for their call site.
    pub siteless: u64,
    /// Stack walks that were truncated, or skipped because the program registers unwind tables at run time.
    pub short_walks: u64,
    /// Number of stack walks.
    pub walks: u64,
}

/// Allocating function with the return addresses of its callers.
#[derive(Clone, Debug, PartialEq)]
pub struct CallSite {
    /// Number in the file, the same in all snapshots of a process.
    pub number: u32,
    /// Allocating function, such as `malloc`.
    pub function: &'static str,
    /// Kind of allocation.
    pub kind: AllocationKind,
    /// Number of the site of the enclosing CUDA call, if any.
    pub within: Option<u32>,
    /// Return addresses, innermost first, beginning with addresses in the tracer.
    pub addresses: Vec<u64>,
    /// Estimated live bytes.
    pub live_bytes: i64,
    /// Estimated live allocations.
    pub live_count: f64,
    /// Estimated bytes ever allocated.
    pub total_bytes: u64,
    /// Estimated number of allocations ever made.
    pub total_count: f64,
    /// Most live bytes at any time.
    pub peak_bytes: u64,
}

/// All call sites of a process at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSnapshot {
    /// PID in the process's own namespace.
    pub pid: u32,
    /// Start of the process, in milliseconds since the Unix epoch.
    pub started_unix_ms: u64,
    /// Mean bytes between heap samples.
    pub interval: u64,
    /// Path of the program.
    pub exe: PathBuf,
    /// True if the program replaces the C library's allocator, so heap blocks are not counted.
    pub own_heap: bool,
    /// Events that the counts miss.
    pub losses: TraceLosses,
    /// Call sites.
    pub sites: Vec<CallSite>,
}

impl TraceSnapshot {
    /// Reads a trace.
    ///
    /// # Errors
    /// The file cannot be read, or is no trace.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let unreadable = |source| TraceError::Unreadable { path: path.to_owned(), source };
        // Opening a pipe would block.
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(TraceError::Foreign { path: path.to_owned() });
        }
        let bytes = fs::read(path).map_err(unreadable)?;
        Self::parse(&bytes).ok_or_else(|| TraceError::Foreign { path: path.to_owned() })
    }

    /// Reads the traces of all running processes in a folder, the one with most allocations first: a wrapper
    /// and its shell publish, too.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn all_in(folder: &Path) -> Result<Vec<Self>, TraceError> {
        let unreadable = |source| TraceError::Unreadable { path: folder.to_owned(), source };
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|end| end == "trace")
                && let Ok(snapshot) = Self::read(&path)
                && has_mapped(snapshot.pid, &path)
            {
                found.push(snapshot);
            }
        }
        found.sort_by_key(|snapshot| std::cmp::Reverse((snapshot.total_bytes(), snapshot.pid)));
        Ok(found)
    }

    fn total_bytes(&self) -> u64 {
        self.sites.iter().fold(0, |sum, site| sum.saturating_add(site.total_bytes))
    }

    /// Returns the live bytes of these kinds.
    pub fn live_bytes(&self, kinds: &[AllocationKind]) -> i64 {
        self.of_kinds(kinds).fold(0, |sum, site| sum.saturating_add(site.live_bytes))
    }

    /// Returns the number of live allocations of these kinds.
    pub fn live_count(&self, kinds: &[AllocationKind]) -> f64 {
        self.of_kinds(kinds).map(|site| site.live_count).sum()
    }

    fn of_kinds(&self, kinds: &[AllocationKind]) -> impl Iterator<Item = &CallSite> {
        self.sites.iter().filter(|site| kinds.contains(&site.kind))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |offset: usize| Some(u64::from_ne_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?));
        let half = |offset: usize| Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?));
        if bytes.len() != FILE_BYTES || word(header::MAGIC)? != MAGIC || half(header::VERSION)? != VERSION {
            return None;
        }
        let exe_bytes = (half(header::EXE_BYTES)? as usize).min(HEADER_BYTES - header::EXE);
        let exe = bytes.get(header::EXE..header::EXE + exe_bytes)?;
        let exe = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(exe);
        let sites = (0..MAX_SITES).filter_map(|number| {
            let at = HEADER_BYTES + number * RECORD_BYTES;
            if word(at + record::HASH)? <= BUSY_HASH {
                return None;
            }
            let (function, kind) = function_by_number(half(at + record::FUNCTION)?)?;
            let frames = (half(at + record::FRAME_COUNT)? as usize).min(MAX_FRAMES);
            let signed = |offset: usize| Some(word(at + offset)?.cast_signed());
            #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
            let count = |count: i64| count as f64 / COUNT_UNIT as f64;
            Some(CallSite {
                number: u32::try_from(number).ok()?,
                function,
                kind,
                within: half(at + record::PARENT)?.checked_sub(1),
                addresses: (0..frames).filter_map(|frame| word(at + record::FRAME + 8 * frame)).collect(),
                live_bytes: signed(record::LIVE_BYTES)?,
                live_count: count(signed(record::LIVE_COUNT)?),
                total_bytes: word(at + record::TOTAL_BYTES)?,
                total_count: count(signed(record::TOTAL_COUNT)?),
                peak_bytes: word(at + record::PEAK_BYTES)?,
            })
        });
        Some(Self {
            pid: half(header::PID)?,
            started_unix_ms: word(header::STARTED)?,
            interval: word(header::INTERVAL)?,
            exe: exe.into(),
            own_heap: word(header::OWN_HEAP)? != 0,
            losses: TraceLosses {
                unfollowed: word(header::UNFOLLOWED)?,
                siteless: word(header::SITELESS)?,
                short_walks: word(header::SHORT_WALKS)?,
                walks: word(header::WALKS)?,
            },
            sites: sites.collect(),
        })
    }
}

/// A shell that execs an untraceable server leaves a file that the process no longer maps.
fn has_mapped(pid: u32, file: &Path) -> bool {
    let maps = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.maps().ok());
    let path = fs::canonicalize(file).ok();
    let inode = fs::metadata(file).map(|facts| facts.ino()).ok();
    maps.into_iter().flatten().any(|map| match map.pathname {
        // On some file systems, the mapping shows another path or inode than the file.
        MMapPath::Path(mapped) => path.as_ref() == Some(&mapped) || Some(map.inode) == inode,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let mut bytes = vec![0; FILE_BYTES];
        let mut put = |offset: usize, data: &[u8]| bytes[offset..offset + data.len()].copy_from_slice(data);
        put(header::MAGIC, &MAGIC.to_ne_bytes());
        put(header::VERSION, &VERSION.to_ne_bytes());
        put(header::PID, &7_u32.to_ne_bytes());
        put(header::OWN_HEAP, &1_u64.to_ne_bytes());
        put(header::EXE_BYTES, &4_u32.to_ne_bytes());
        put(header::EXE, b"/a/b");
        let at = HEADER_BYTES + 5 * RECORD_BYTES;
        put(at + record::HASH, &99_u64.to_ne_bytes());
        put(at + record::FUNCTION, &crate::layout::number_of("cudaMalloc").to_ne_bytes());
        put(at + record::FRAME_COUNT, &2_u32.to_ne_bytes());
        put(at + record::FRAME, &[1_u64.to_ne_bytes(), 2_u64.to_ne_bytes()].concat());
        put(at + record::LIVE_BYTES, &(-5_i64).to_ne_bytes());
        put(at + record::LIVE_COUNT, &384_i64.to_ne_bytes());
        // A record that is being written, and one with an unknown function.
        put(HEADER_BYTES + RECORD_BYTES, &BUSY_HASH.to_ne_bytes());
        put(HEADER_BYTES + 2 * RECORD_BYTES, &77_u64.to_ne_bytes());
        put(HEADER_BYTES + 2 * RECORD_BYTES + record::FUNCTION, &1000_u32.to_ne_bytes());
        bytes
    }

    #[test]
    fn what_was_written_is_read() {
        let read = TraceSnapshot::parse(&file()).unwrap();
        assert_eq!((read.pid, read.exe.as_path(), read.sites.len()), (7, Path::new("/a/b"), 1));
        assert!(read.own_heap);
        let site = &read.sites[0];
        assert_eq!(
            (site.function, site.kind, site.addresses.as_slice()),
            ("cudaMalloc", AllocationKind::Device, [1, 2].as_slice())
        );
        assert_eq!((site.number, site.within, site.live_bytes), (5, None, -5));
        assert!((site.live_count - 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_file_that_nobody_has_mapped_is_of_a_process_that_is_gone_or_became_another() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = file();
        bytes[header::PID..header::PID + 4].copy_from_slice(&std::process::id().to_ne_bytes());
        fs::write(folder.path().join("1.trace"), bytes).unwrap();
        assert_eq!(TraceSnapshot::all_in(folder.path()).unwrap(), []);
        assert!(has_mapped(std::process::id(), &std::env::current_exe().unwrap()));
    }

    #[test]
    fn what_is_no_trace_is_none_and_nothing_in_it_leads_out_of_it() {
        assert_eq!(TraceSnapshot::parse(b""), None);
        assert_eq!(TraceSnapshot::parse(&vec![0; FILE_BYTES]), None);
        assert_eq!(TraceSnapshot::parse(&file()[..FILE_BYTES - 1]), None);
        let mut bytes = file();
        bytes[header::EXE_BYTES..header::EXE_BYTES + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
        let at = HEADER_BYTES + 5 * RECORD_BYTES + record::FRAME_COUNT;
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
        let read = TraceSnapshot::parse(&bytes).unwrap();
        assert_eq!(read.sites[0].addresses.len(), MAX_FRAMES);
    }
}
