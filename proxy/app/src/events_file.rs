//! The file `events.jsonl` of the state directory: events of this and former instances, as lines of JSON, for
//! `llama-warden history`. Replacements are recorded in the ledger, and therefore not in this file.
//!
//! The size is bounded: a full file becomes `events.jsonl.1` and replaces the previous one. Secrets are not
//! written. A failed write is logged once, and its events are missing; nothing else depends on the file.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use warden_policies::secrets;
use warden_supervisor::{EventKind, FleetEvent, StateKind, StateWriter};

use crate::append;

/// Name of the file in the state directory.
const FILE_NAME: &str = "events.jsonl";
/// Name that a full file gets.
const PREVIOUS_NAME: &str = "events.jsonl.1";
/// Size limit of each file in bytes: some 50,000 events, which are years of a healthy fleet, or days of a
/// fleet that crashes all the time.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// Mode of the file, which has names of models and output of llama-server, and is not readable by everybody.
const FILE_MODE: u32 = 0o640;

/// Returns the paths of the files in a state directory, oldest first.
pub(crate) fn event_files(state: &Path) -> [PathBuf; 2] {
    [state.join(PREVIOUS_NAME), state.join(FILE_NAME)]
}

/// Appends the events of this instance.
#[derive(Debug)]
pub(crate) struct EventsFile {
    state: PathBuf,
    pid: u32,
    max_bytes: u64,
}

impl EventsFile {
    /// Creates the writer of the file in a state directory, for the process `pid`.
    pub(crate) fn new(state: &Path, pid: u32) -> Self {
        Self { state: state.to_owned(), pid, max_bytes: MAX_FILE_BYTES }
    }

    /// Queues an event for writing. The writer counts events that cannot be written.
    pub(crate) fn queue(self: &Arc<Self>, event: &FleetEvent, writer: &StateWriter) {
        if let Some(line) = self.line(event) {
            let own = Arc::clone(self);
            writer.write(StateKind::Events, line.len(), move || own.append(&line));
        }
    }

    /// Returns the line of an event; `None` for events that the ledger has.
    fn line(&self, event: &FleetEvent) -> Option<String> {
        let is_there = matches!(
            event.kind,
            EventKind::RecycleDone { .. } | EventKind::Reclaimed { .. } | EventKind::Pinned { .. }
        );
        if is_there {
            return None;
        }
        let mut value = secrets::redact_json(serde_json::to_value(event).ok()?);
        if let Some(fields) = value.as_object_mut() {
            fields.insert("instance".to_owned(), self.pid.into());
        }
        Some(format!("{value}\n"))
    }

    fn append(&self, line: &str) -> io::Result<()> {
        let path = self.state.join(FILE_NAME);
        let full = fs::metadata(&path).is_ok_and(|facts| facts.len() + line.len() as u64 > self.max_bytes);
        if full {
            self.rotate(&path)?;
        }
        // Open the file each time, because another instance with this directory may have renamed it.
        let mut file = append::open_lines(&path, FILE_MODE)?;
        // Write once, so that lines of two instances do not mix.
        file.write_all(line.as_bytes())
    }

    /// Renames the full file, replacing the previous full file, if that is a file of events.
    fn rotate(&self, path: &Path) -> io::Result<()> {
        let before = self.state.join(PREVIOUS_NAME);
        if before.exists() && !begins_with_an_event(&before) {
            let why = format!("it is full, and {} is not llama-warden's", before.display());
            return Err(io::Error::other(why));
        }
        fs::rename(path, before)
    }
}

fn begins_with_an_event(path: &Path) -> bool {
    let mut line = String::new();
    let read = fs::File::open(path).and_then(|file| BufReader::new(file).read_line(&mut line));
    read.is_ok() && serde_json::from_str::<FleetEvent>(&line).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::ModelName;

    fn event(id: u64) -> FleetEvent {
        let model = Some(ModelName::new("m"));
        FleetEvent {
            id,
            at: "2026-01-02T03:04:05.678Z".into(),
            model,
            generation: None,
            kind: EventKind::Suspect { refused: false, crash: None },
        }
    }

    #[test]
    fn events_are_kept_bounded_and_files_of_others_are_not_replaced() {
        let state = tempfile::tempdir().unwrap();
        let file = EventsFile { max_bytes: 300, ..EventsFile::new(state.path(), 7) };
        let write = |id| file.append(&file.line(&event(id)).unwrap());
        (0..4).for_each(|id| write(id).unwrap());
        let [before, now] = event_files(state.path()).map(|path| fs::read_to_string(path).unwrap());
        let all = format!("{before}{now}");
        let ids: Vec<u64> =
            all.lines().map(|line| serde_json::from_str::<FleetEvent>(line).unwrap().id).collect();
        assert_eq!(ids, [0, 1, 2, 3]);
        assert!(all.lines().all(|line| line.contains("\"instance\":7")), "{all}");
        fs::write(state.path().join(PREVIOUS_NAME), "my notes\n").unwrap();
        let full = (4..9).map(write).find_map(Result::err).unwrap();
        assert!(full.to_string().contains("is not llama-warden's"), "{full}");
        assert_eq!(fs::read_to_string(state.path().join(PREVIOUS_NAME)).unwrap(), "my notes\n");
    }
}
