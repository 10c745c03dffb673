//! Ledger of replacements, reclaims, canaries and pins: one JSON line each in `ledger.jsonl` in the state
//! directory. Only lines about replacements have no `kind`.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use warden_policies::growth::{GrowthBlame, GrowthForecast, GrowthVerdict, IntervalEstimate};
use warden_policies::sample::{GpuIndex, HostMemory, MemoryKind, VramReading};
use warden_policies::warmth::WarmthReport;
use warden_policies::{GenerationId, ModelName, Reason, WorkDone, secrets};
use warden_sensors::report::ContextTotals;

use crate::state::line_file::{LineFile, open_lines};
use crate::state::{StateKind, StateWriter, is_tolerable};

/// Order of the steps that replace a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplacementMode {
    /// The old process drains and stops, then the new one starts.
    Sequential,
    /// The new process starts and takes the requests, then the old one drains and stops.
    Overlap,
}

impl ReplacementMode {
    /// Name in the ledger, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Overlap => "overlap",
        }
    }
}

/// Observations at the decision for the replacement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplacementEvidence {
    /// Host memory charged to the old generation, in bytes.
    pub host_bytes: Option<u64>,
    /// Exceeded budget, in bytes.
    pub budget_bytes: Option<u64>,
    /// Requests answered by the old generation.
    pub requests: u64,
    /// Total work done by the old generation.
    pub work: WorkDone,
    /// Seconds since the old generation became ready.
    pub age_s: f64,
    /// Reason for the replacement mode, for people.
    pub note: Option<String>,
    /// Totals of the old process's last GPU memory report, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<ContextTotals>,
    /// Kind of memory that caused the decision, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<MemoryKind>,
    /// Bytes of the memory named by `series` at the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series_bytes: Option<u64>,
    /// Growth verdict on the memory named by `series`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<GrowthVerdict>,
    /// Growth in bytes per request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slope: Option<IntervalEstimate>,
    /// Kind of work to which the growth is attributed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blame: Option<GrowthBlame>,
    /// Forecast of when the memory reaches its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<GrowthForecast>,
    /// Explanation of the decision in one sentence, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub words: Option<String>,
}

/// Free memory of a GPU before the old process was created and after it had ended, with the memory of our
/// other processes. The driver holds what is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuAfterExit {
    /// GPU.
    pub gpu: GpuIndex,
    /// Bytes before the process was created.
    pub free_before_spawn: u64,
    /// Bytes a moment after the process had ended.
    pub free_after_exit: u64,
}

/// A replacement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Entry number within one run of the supervisor, from 1.
    pub id: u64,
    /// Time of completion, RFC 3339.
    pub at: String,
    /// Model.
    pub model: ModelName,
    /// Number of the replica, from 0.
    pub replica: u32,
    /// Reason for the replacement.
    pub reason: Reason,
    /// Evidence for the decision.
    pub evidence: ReplacementEvidence,
    /// Replacement mode.
    pub mode: ReplacementMode,
    /// Old generation; `None` if no process ran.
    pub from: Option<GenerationId>,
    /// New generation; `None` if it never served.
    pub to: Option<GenerationId>,
    /// Requests that waited for the new generation while none took requests.
    pub carried_over: u64,
    /// Requests that ran when the old generation was closed, and ended before it was stopped.
    pub drained: u64,
    /// Requests that were aborted at the drain deadline.
    pub cut: u64,
    /// Milliseconds in which no generation took requests; 0 in a successful overlap.
    pub gap_ms: u64,
    /// Milliseconds from closing the old generation to the end of its last request.
    pub drain_ms: u64,
    /// Milliseconds from the stop signal to the end of the old process; `None` if no process ran.
    #[serde(default)]
    pub exit_ms: Option<u64>,
    /// Milliseconds of the gap that llama-warden itself caused: without the drain, the end of the old process
    /// and the start of the new one. `None` for an overlap.
    #[serde(default)]
    pub ours_ms: Option<u64>,
    /// Milliseconds from the creation of the new process to its first successful probe.
    pub start_ms: Option<u64>,
    /// Host memory of the old generation at its last sample.
    pub host_before: Option<HostMemory>,
    /// Host memory of the new generation when it became ready.
    pub host_after: Option<HostMemory>,
    /// VRAM of the old generation at its last sample, per GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_before: Vec<VramReading>,
    /// VRAM of the new generation when it became ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_after: Vec<VramReading>,
    /// Free GPU memory before and after the old process; empty if unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_after_exit: Vec<GpuAfterExit>,
    /// True if the new generation holds clearly less memory and is within the budget. `None` if unknown, or
    /// if memory was not the reason.
    pub helped: Option<bool>,
    /// Result of carrying conversations over, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<WarmthReport>,
    /// Reason of a failure; `None` on success.
    pub failed: Option<String>,
    /// True if another command ended the replacement, which is no error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given_up: bool,
    /// Operator who requested the replacement, if known: `page, 127.0.0.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl LedgerEntry {
    /// Creates an entry with default values.
    pub fn new(model: ModelName, replica: u32, reason: Reason, mode: ReplacementMode) -> Self {
        Self {
            id: 0,
            at: String::new(),
            model,
            replica,
            reason,
            evidence: ReplacementEvidence::default(),
            mode,
            from: None,
            to: None,
            carried_over: 0,
            drained: 0,
            cut: 0,
            gap_ms: 0,
            drain_ms: 0,
            exit_ms: None,
            ours_ms: None,
            start_ms: None,
            host_before: None,
            host_after: None,
            vram_before: Vec::new(),
            vram_after: Vec::new(),
            vram_after_exit: Vec::new(),
            helped: None,
            warm: None,
            failed: None,
            given_up: false,
            by: None,
        }
    }
}

/// Mode of the ledger file: model names and reasons are not for all users of the machine.
const LEDGER_FILE_MODE: u32 = 0o640;
/// Size limit of the file, and of the one before it: some 20,000 replacements each.
const MAX_LEDGER_BYTES: u64 = 16 << 20;

#[derive(Debug)]
pub(crate) struct LedgerWriter {
    file: LineFile,
    state: StateWriter,
    last: AtomicU64,
}

impl LedgerWriter {
    /// Opens or creates `ledger.jsonl` in `directory`. A full disk is no error: it may have room again by the
    /// first entry.
    pub(crate) fn open(directory: &Path, state: StateWriter) -> Result<Self, (PathBuf, io::Error)> {
        let path = directory.join("ledger.jsonl");
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        let made = made.map_err(|error| (directory.to_owned(), error));
        let opened = made.and_then(|()| {
            open_lines(&path, LEDGER_FILE_MODE).map(drop).map_err(|error| (path.clone(), error))
        });
        match opened {
            Err((path, error)) if is_tolerable(&error) => {
                tracing::warn!(path = %path.display(), %error, "cannot write to the ledger now; serving without");
            }
            opened => opened?,
        }
        let file = LineFile::new(path, LEDGER_FILE_MODE, MAX_LEDGER_BYTES);
        Ok(Self { file, state, last: AtomicU64::new(0) })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn append(&self, entry: &impl Serialize) {
        match serde_json::to_value(entry) {
            Ok(entry) => {
                let line = secrets::redact_json(entry).to_string();
                let file = self.file.clone();
                self.state.write(StateKind::Ledger, line.len(), move || file.append(&line));
            }
            Err(error) => tracing::error!(%error, "an entry of the ledger cannot be written as JSON"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::sample::VramSource;

    use super::*;

    #[test]
    fn entries_are_appended_line_by_line_and_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let entry = |id| LedgerEntry {
            id,
            at: "2026-01-02T03:04:05.678Z".to_owned(),
            evidence: ReplacementEvidence { host_bytes: Some(7), ..ReplacementEvidence::default() },
            from: Some(GenerationId(1)),
            to: Some(GenerationId(2)),
            carried_over: 3,
            drained: 1,
            gap_ms: 40,
            drain_ms: 5,
            exit_ms: Some(3),
            start_ms: Some(30),
            vram_before: vec![VramReading { gpu: GpuIndex(0), bytes: 9, source: VramSource::Process }],
            helped: Some(true),
            ..LedgerEntry::new(ModelName::new("m"), 0, Reason::HostSoft, ReplacementMode::Sequential)
        };
        let append = |id| {
            // Opened again, as in the next run of the supervisor.
            let state = StateWriter::start().unwrap();
            LedgerWriter::open(directory.path(), state.clone()).unwrap().append(&entry(id));
            assert!(state.flush(Duration::from_secs(20)));
        };
        (1..=2).for_each(append);
        let text = std::fs::read_to_string(directory.path().join("ledger.jsonl")).unwrap();
        let read: Vec<LedgerEntry> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, [entry(1), entry(2)]);
        // A kill during a write leaves half a line; the entry of the next run is whole.
        std::fs::write(directory.path().join("ledger.jsonl"), &text[..text.len() - 9]).unwrap();
        append(3);
        let text = std::fs::read_to_string(directory.path().join("ledger.jsonl")).unwrap();
        let read: Vec<_> = text.lines().map(|line| serde_json::from_str(line).ok()).collect();
        assert_eq!(read, [Some(entry(1)), None, Some(entry(3))]);
    }

    #[test]
    fn an_entry_from_before_there_were_reports_can_still_be_read() {
        let line = r#"{"id":1,"at":"2026-01-02T03:04:05.678Z","model":"m","replica":0,"reason":"operator",
            "evidence":{"host_bytes":7,"budget_bytes":null,"requests":2,
                "work":{"requests":2,"prompt_tokens":1,"output_tokens":1,"images":0},"age_s":1.5,"note":null},
            "mode":"sequential","from":1,"to":2,"carried_over":0,"drained":0,"cut":0,"gap_ms":40,"drain_ms":5,
            "start_ms":30,"host_before":null,"host_after":null,"helped":null,"failed":null}"#;
        let entry: LedgerEntry = serde_json::from_str(line).unwrap();
        assert_eq!((entry.evidence.host_bytes, entry.evidence.report), (Some(7), None));
        let written = serde_json::to_string(&entry).unwrap();
        for absent in ["report", "vram", "series", "verdict", "slope", "warm"] {
            assert!(!written.contains(absent), "nothing known, nothing written: {written}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (path, _) = LedgerWriter::open(&file.join("state"), StateWriter::start().unwrap()).unwrap_err();
        assert_eq!(path, file.join("state"));
    }
}
