//! Writes the memory report of a patched llama-server to the file in `LLAMA_WARDEN_REPORT`.
//!
//! There is one context on device 0. Each request captures a graph and enlarges the pools;
//! `LLAMA_WARDEN_GRAPH_CACHE_CAP` limits the graphs, as the fix does. The layout is implemented independently
//! of the reader's.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::script::ReportKind;
use crate::{clock, say};

const FILE_BYTES: usize = 16_384;
const HEADER_BYTES: usize = 128;
const RECORD_BYTES: usize = 256;

/// Reported bytes of a graph on host and device, and of a request in the pools.
const GRAPH_HOST_BYTES: u64 = 640 << 10;
const GRAPH_DEVICE_BYTES: u64 = 256 << 10;
const POOL_BYTES: u64 = 4 << 20;

/// Open file, and the number of writes.
#[derive(Debug, Default)]
pub(crate) struct Report(Mutex<Option<Open>>);

#[derive(Debug)]
struct Open {
    file: File,
    cap: Option<u64>,
    requests: u64,
    sequence: u32,
}

impl Report {
    /// Creates the file if the variable names one.
    pub(crate) fn open(&self, kind: ReportKind) {
        let path = std::env::var_os("LLAMA_WARDEN_REPORT").filter(|path| !path.is_empty());
        let Some(path) = path.filter(|_| kind != ReportKind::None) else { return };
        let cap = std::env::var("LLAMA_WARDEN_GRAPH_CACHE_CAP").ok().and_then(|text| text.parse().ok());
        let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path);
        let written = file.and_then(|file| {
            if kind == ReportKind::Corrupt {
                file.write_all_at(&[0x5A; FILE_BYTES], 0)?;
                return Ok(None);
            }
            let mut open = Open { file, cap, requests: 0, sequence: 0 };
            open.header()?;
            open.record()?;
            Ok(Some(open))
        });
        match written {
            Ok(open) => *self.0.lock().unwrap_or_else(PoisonError::into_inner) = open,
            Err(error) => say::err(&format!("fake-llama: report {}: {error}", Path::new(&path).display())),
        }
    }

    pub(crate) fn computed(&self) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = open.as_mut() else { return };
        open.requests += 1;
        if let Err(error) = open.record() {
            say::err(&format!("fake-llama: report: {error}"));
        }
    }
}

impl Open {
    fn header(&self) -> std::io::Result<()> {
        let mut bytes = b"LWREPT1\0".to_vec();
        for number in [1, 256, 62, std::process::id()] {
            bytes.extend(number.to_ne_bytes());
        }
        let active = 8 | u64::from(self.cap.is_some());
        for number in [clock::unix_ms(), active, self.cap.unwrap_or(0)] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.resize(FILE_BYTES, 0);
        self.file.write_all_at(&bytes, 0)
    }

    /// Writes the record like the real one: an odd number, the rest, an even number.
    fn record(&mut self) -> std::io::Result<()> {
        let at = HEADER_BYTES as u64;
        self.sequence += 1;
        self.file.write_all_at(&self.sequence.to_ne_bytes(), at)?;
        let mut bytes = Vec::with_capacity(RECORD_BYTES);
        for number in [1_u32, 0, 0] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.extend(self.numbers().into_iter().flat_map(u64::to_ne_bytes));
        self.file.write_all_at(&bytes, at + 4)?;
        self.sequence += 1;
        self.file.write_all_at(&self.sequence.to_ne_bytes(), at)
    }

    fn numbers(&self) -> [u64; 30] {
        let live = self.requests.min(self.cap.unwrap_or(u64::MAX));
        let pool = self.requests * POOL_BYTES;
        let mut numbers = [0; 30];
        for (index, number) in [
            (0, self.requests),
            (1, live),
            (2, live),
            (3, live * 100),
            (4, live * GRAPH_HOST_BYTES),
            (5, live * GRAPH_DEVICE_BYTES),
            (6, self.requests - live),
            (8, live.min(1)),
            (9, self.cap.unwrap_or(0)),
            (10, pool),
            (11, pool),
            (14, 1),
            (20, clock::unix_ms()),
        ] {
            numbers[index] = number;
        }
        numbers
    }
}
