//! The record of replacements, of what processes gave back instead, of canaries and of pins by hand: one JSON line each, appended to `ledger.jsonl` in
//! the state directory. Lines of the other kinds have a `kind`, and none of the fields that the others begin with.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use warden_policies::growth::{Blame, Forecast, Interval, Verdict};
use warden_policies::sample::{GpuIndex, HostMemory, MemoryKind, Vram};
use warden_policies::warmth::Warmth;
use warden_policies::{GenerationId, ModelName, Reason, Work, secrets};
use warden_sensors::report::Totals;

use crate::state::line_file::LineFile;
use crate::state::{StateKind, StateWriter, may_pass};
use crate::sync::lock;
use crate::view::canary::CanaryEntry;
use crate::view::pin_entry::PinEntry;
use crate::view::reclaim_entry::ReclaimEntry;

/// The way a generation was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Drain, stop, start.
    Sequential,
    /// Start, switch, drain, stop.
    Overlap,
}

impl Mode {
    /// The name in the ledger, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Overlap => "overlap",
        }
    }
}

/// What was known when the replacement was decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// Host memory charged to the old generation, in bytes.
    pub host_bytes: Option<u64>,
    /// The budget that was passed, in bytes.
    pub budget_bytes: Option<u64>,
    /// Requests that it had answered.
    pub requests: u64,
    /// All work that it had done.
    pub work: Work,
    /// Seconds since it became ready.
    pub age_s: f64,
    /// Why the replacement took its way, for people.
    pub note: Option<String>,
    /// Sums of what it had last reported about its GPU memory; absent if it reported nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<Totals>,
    /// Which memory the decision was about; absent if it was about none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series: Option<MemoryKind>,
    /// Bytes of that series at the decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub series_bytes: Option<u64>,
    /// What the series said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Its growth in bytes per request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slope: Option<Interval>,
    /// Which unit of work paid for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blame: Option<Blame>,
    /// What was left until the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// The grounds in one sentence, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub words: Option<String>,
}

/// Free memory of a GPU before the old process was made and after it had ended, each with what our other processes held.
/// What is missing after the end is not the process's to give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AfterExit {
    /// Which GPU.
    pub gpu: GpuIndex,
    /// Bytes before the process was made.
    pub free_before_spawn: u64,
    /// Bytes a moment after it had ended.
    pub free_after_exit: u64,
}

/// One replacement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// Grows with every entry of one run of the supervisor, from 1.
    pub id: u64,
    /// When it was complete, RFC 3339.
    pub at: String,
    /// The model.
    pub model: ModelName,
    /// Which of its replicas.
    pub replica: u32,
    /// Why.
    pub reason: Reason,
    /// On what grounds.
    pub evidence: Evidence,
    /// In which way.
    pub mode: Mode,
    /// The old generation; `None` if none ran.
    pub from: Option<GenerationId>,
    /// The new generation; `None` if it did not come to serve.
    pub to: Option<GenerationId>,
    /// Requests that waited in the queue while no generation took leases, and went to the new one.
    pub carried_over: u64,
    /// Requests that were running when the old generation was closed, and ended by themselves before it was stopped.
    pub drained: u64,
    /// Requests that were still running at the drain deadline and were cut.
    pub cut: u64,
    /// Milliseconds in which no generation of the model took leases, those included in which the old one was there and did not
    /// answer. 0 in a successful overlap.
    pub gap_ms: u64,
    /// Milliseconds from closing the old generation to its last request's end.
    pub drain_ms: u64,
    /// Milliseconds from telling the old process to end until it was gone; `None` if none ran.
    #[serde(default)]
    pub exit_ms: Option<u64>,
    /// Milliseconds since the decision that were neither drain nor the old one's end nor the new one's start: what llama-warden
    /// itself took. `None` for an overlap.
    #[serde(default)]
    pub ours_ms: Option<u64>,
    /// Milliseconds from the new process's creation to its first good probe.
    pub start_ms: Option<u64>,
    /// Host memory of the old generation at its last sample.
    pub host_before: Option<HostMemory>,
    /// Host memory of the new generation when it had become ready.
    pub host_after: Option<HostMemory>,
    /// VRAM of the old generation at its last sample, GPU by GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_before: Vec<Vram>,
    /// VRAM of the new generation when it had become ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_after: Vec<Vram>,
    /// The GPUs after the end of the old process; empty where that could not be told.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram_after_exit: Vec<AfterExit>,
    /// For replacements because of memory: whether the new generation holds clearly less and is under the budget.
    pub helped: Option<bool>,
    /// What became of the conversations of the old generation; absent if it had none that matter, or nothing is taken along.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<Warmth>,
    /// Why it did not succeed; `None` if it did.
    pub failed: Option<String>,
    /// It did not take place because something else was asked for in between, as `failed` says. Nothing is wrong.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given_up: bool,
    /// Who asked for it, if an operator did and that is known: `page, 127.0.0.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl LedgerEntry {
    /// One of which nothing more is known yet.
    pub fn of(model: ModelName, replica: u32, reason: Reason, mode: Mode) -> Self {
        Self {
            id: 0,
            at: String::new(),
            model,
            replica,
            reason,
            evidence: Evidence::default(),
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

/// Entries have names of models and why they were replaced: not for everybody.
const MODE: u32 = 0o640;

/// Where entries go. Those of earlier runs stay; the file only grows, by a few hundred bytes a replacement.
#[derive(Debug)]
pub(crate) struct Ledger {
    path: PathBuf,
    /// Locked by the thread that writes, and by no other.
    file: Arc<Mutex<LineFile>>,
    state: StateWriter,
    last: AtomicU64,
}

impl Ledger {
    /// `ledger.jsonl` in a directory that it makes if need be. A disk that is full is no error: it may have room when
    /// there is something to write.
    pub(crate) fn open(directory: &Path, state: StateWriter) -> Result<Self, (PathBuf, io::Error)> {
        let path = directory.join("ledger.jsonl");
        let mut file = LineFile::new(path.clone(), MODE);
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        let made = made.map_err(|error| (directory.to_owned(), error));
        let opened = made.and_then(|()| file.open().map(drop).map_err(|error| (path.clone(), error)));
        match opened {
            Err((path, error)) if may_pass(&error) => {
                tracing::warn!(path = %path.display(), %error, "cannot write to the ledger now; serving without");
            }
            opened => opened?,
        }
        Ok(Self { path, file: Arc::new(Mutex::new(file)), state, last: AtomicU64::new(0) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the next entry.
    pub(crate) fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Has an entry appended.
    pub(crate) fn append(&self, entry: &LedgerEntry) {
        self.write(entry);
    }

    /// The same for a reclaim.
    pub(crate) fn append_reclaim(&self, entry: &ReclaimEntry) {
        self.write(entry);
    }

    /// The same for a model that was pinned or let loose by hand.
    pub(crate) fn append_pin(&self, entry: &PinEntry) {
        self.write(entry);
    }

    /// The same for a canary that has ended.
    pub(crate) fn append_canary(&self, entry: &CanaryEntry) {
        self.write(entry);
    }

    fn write(&self, entry: &impl Serialize) {
        match serde_json::to_value(entry) {
            Ok(entry) => {
                let (line, file) = (secrets::json(entry).to_string(), Arc::clone(&self.file));
                self.state.write(StateKind::Ledger, line.len(), move || lock(&file).append(&line));
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
            evidence: Evidence { host_bytes: Some(7), ..Evidence::default() },
            from: Some(GenerationId(1)),
            to: Some(GenerationId(2)),
            carried_over: 3,
            drained: 1,
            gap_ms: 40,
            drain_ms: 5,
            exit_ms: Some(3),
            start_ms: Some(30),
            vram_before: vec![Vram { gpu: GpuIndex(0), bytes: 9, source: VramSource::Process }],
            helped: Some(true),
            ..LedgerEntry::of(ModelName::new("m"), 0, Reason::HostSoft, Mode::Sequential)
        };
        let append = |id| {
            // Opened anew, as the next run of the supervisor does.
            let state = StateWriter::start().unwrap();
            Ledger::open(directory.path(), state.clone()).unwrap().append(&entry(id));
            assert!(state.flush(Duration::from_secs(20)));
        };
        (1..=2).for_each(append);
        let text = std::fs::read_to_string(directory.path().join("ledger.jsonl")).unwrap();
        let read: Vec<LedgerEntry> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, [entry(1), entry(2)]);
        // A run that is killed while it writes leaves half a line; the entry of the next run is whole.
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
        let (path, _) = Ledger::open(&file.join("state"), StateWriter::start().unwrap()).unwrap_err();
        assert_eq!(path, file.join("state"));
    }
}
