//! The file `events.jsonl` of the state directory: events of this and former instances, as lines of JSON, for
//! `llama-warden history`. Replacements are recorded in the ledger, and therefore not in this file.
//!
//! The size is bounded: a full file becomes `events.jsonl.1` and replaces the previous one. Secrets are not
//! written. A failed write is logged once, and its events are missing; nothing else depends on the file.

use std::path::Path;
use std::sync::Arc;

use warden_policies::secrets;
use warden_supervisor::{EventKind, FleetEvent, LineFile, StateKind, StateWriter};

pub(crate) const FILE_NAME: &str = "events.jsonl";
/// In bytes: some 50,000 events, years of a healthy fleet, or days of one that crashes all the time.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// File mode: not world-readable, because the file has names of models and output of llama-server.
const FILE_MODE: u32 = 0o640;

#[derive(Debug)]
pub(crate) struct EventsFile {
    file: LineFile,
    pid: u32,
}

impl EventsFile {
    pub(crate) fn new(state: &Path, pid: u32) -> Self {
        Self { file: LineFile::new(state.join(FILE_NAME), FILE_MODE, MAX_FILE_BYTES), pid }
    }

    /// Queues an event for writing. The writer counts events that cannot be written.
    pub(crate) fn queue(self: &Arc<Self>, event: &FleetEvent, writer: &StateWriter) {
        if let Some(line) = self.line(event) {
            let own = Arc::clone(self);
            writer.write(StateKind::Events, line.len(), move || own.file.append(&line));
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
        Some(value.to_string())
    }
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
    fn events_are_written_with_the_instance() {
        let state = tempfile::tempdir().unwrap();
        let file = EventsFile::new(state.path(), 7);
        (0..4).for_each(|id| file.file.append(&file.line(&event(id)).unwrap()).unwrap());
        let all = std::fs::read_to_string(state.path().join(FILE_NAME)).unwrap();
        let ids: Vec<u64> =
            all.lines().map(|line| serde_json::from_str::<FleetEvent>(line).unwrap().id).collect();
        assert_eq!(ids, [0, 1, 2, 3]);
        assert!(all.lines().all(|line| line.contains("\"instance\":7")), "{all}");
    }
}
