//! `llama-warden history`: shows past events of the models, in this and earlier instances. Reads files of the
//! state directory; no instance needs to run.

use std::collections::BTreeSet;
use std::path::Path;

use clap::Args;
use jiff::{SpanRelativeTo, Timestamp};
use serde::Deserialize;
use serde_json::Value;
use warden_admin::clock;
use warden_policies::secrets;
use warden_supervisor::{
    CanaryEntry, EventKind, FleetEvent, LedgerEntry, PinEntry, ReclaimEntry, line_files, regular_file,
};

use super::control::event_line;
use super::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::{events_file, out};

#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// Shows only this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Shows only this reason of a replacement (`host_soft`, `wedged`, `operator`, ...), kind of failure
    /// (`out_of_memory`, `bad_model`, ...), or kind of event (`crashed`, `ready`, ...). May be repeated.
    #[arg(long, value_name = "NAME")]
    reason: Vec<String>,
    /// Shows only entries since a time like `2026-01-31T08:00:00Z`, or an age like `90m`, `12h` or `7d`.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<Timestamp>,
    /// Shows only entries until this time.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<Timestamp>,
    /// Prints JSON lines, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    let ago = text.parse::<jiff::Span>().ok().and_then(|span| {
        let length = span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()?;
        clock::now().checked_sub(length).ok()
    });
    ago.ok_or_else(|| {
        "write a time like `2026-01-31T08:00:00Z`, or how long ago, like `90m`, `12h`, `7d`".to_owned()
    })
}

pub(crate) fn run(args: &HistoryArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let state = loaded.dirs(&machine)?.state;
    let mut all = HistoryLog::read(&state)?;
    if all.unread > 0 {
        out::error_line(&format!("warning: {} lines cannot be read and are left out", all.unread));
    }
    all.entries.retain(|entry| entry.is_wanted(args));
    if all.entries.is_empty() && !args.json {
        return out::print_line(&format!("nothing of that kind is recorded in {}", state.display()));
    }
    all.entries.iter().try_for_each(|entry| {
        out::print_line(&if args.json {
            secrets::redact_json(entry.json.clone()).to_string()
        } else {
            event_line(&entry.event)
        })
    })
}

#[derive(Default)]
struct HistoryLog {
    entries: Vec<HistoryEntry>,
    /// Number of unreadable lines: cut off by a kill, or of a later version.
    unread: usize,
}

struct HistoryEntry {
    at: Option<Timestamp>,
    event: FleetEvent,
    json: Value,
}

impl HistoryLog {
    fn read(state: &Path) -> Result<Self, CommandError> {
        let mut all = Self::default();
        let mut lines = Vec::new();
        for path in line_files(&state.join("ledger.jsonl")) {
            lines.append(&mut read_lines(&path)?);
        }
        for line in lines {
            all.add(&line, |json| {
                let (kind, event) = ledger_event(json)?;
                json.as_object_mut()?.insert("kind".to_owned(), kind.into());
                Some(event)
            });
        }
        for path in line_files(&state.join(events_file::FILE_NAME)) {
            for line in read_lines(&path)? {
                all.add(&line, |json| Deserialize::deserialize(&*json).ok());
            }
        }
        // A stable sort keeps the order of entries with equal times.
        all.entries.sort_by_key(|entry| entry.at);
        Ok(all)
    }

    fn add(&mut self, line: &str, event: impl FnOnce(&mut Value) -> Option<FleetEvent>) {
        let read = serde_json::from_str::<Value>(line).ok().and_then(|mut json| {
            let event = event(&mut json)?;
            Some(HistoryEntry { at: event.at.parse().ok(), event, json })
        });
        match read {
            Some(entry) => self.entries.push(entry),
            None => self.unread += 1,
        }
    }
}

/// Converts a ledger line, which does not name its kind.
fn ledger_event(json: &Value) -> Option<(&'static str, FleetEvent)> {
    if let Ok(entry) = ReclaimEntry::deserialize(json) {
        let id = entry.id;
        let at = entry.at.clone();
        let model = Some(entry.model.clone());
        let generation = Some(entry.generation);
        let kind = EventKind::Reclaimed { entry: Box::new(entry) };
        return Some(("reclaimed", FleetEvent { id, at, model, generation, kind }));
    }
    if let Ok(entry) = PinEntry::deserialize(json) {
        let id = entry.id;
        let at = entry.at.clone();
        let model = Some(entry.model.clone());
        let kind = EventKind::Pinned { entry: Box::new(entry) };
        return Some(("pinned", FleetEvent { id, at, model, generation: None, kind }));
    }
    if let Ok(entry) = CanaryEntry::deserialize(json) {
        let id = entry.id;
        let at = entry.at.clone();
        let model = Some(entry.canary.model.clone());
        let kind = EventKind::CanaryEnded { entry: Box::new(entry) };
        return Some(("canary_ended", FleetEvent { id, at, model, generation: None, kind }));
    }
    let entry = LedgerEntry::deserialize(json).ok()?;
    let id = entry.id;
    let at = entry.at.clone();
    let model = Some(entry.model.clone());
    let generation = entry.to.or(entry.from);
    let kind = EventKind::RecycleDone { entry: Box::new(entry) };
    Some(("recycle_done", FleetEvent { id, at, model, generation, kind }))
}

impl HistoryEntry {
    fn is_wanted(&self, args: &HistoryArgs) -> bool {
        let model = self.event.model.as_ref().map(warden_policies::ModelName::as_str);
        let known = self.filter_names();
        args.model.as_deref().is_none_or(|wanted| model == Some(wanted))
            && (args.reason.is_empty() || args.reason.iter().any(|wanted| known.contains(wanted.as_str())))
            && args.since.is_none_or(|since| self.at.is_some_and(|at| at >= since))
            && args.until.is_none_or(|until| self.at.is_some_and(|at| at <= until))
    }

    fn filter_names(&self) -> BTreeSet<&str> {
        let of = |path: &str| self.json.pointer(path).and_then(Value::as_str);
        let all = ["/kind", "/reason", "/decision/reason", "/failure/kind"];
        all.into_iter().filter_map(of).collect()
    }
}

/// In bytes. A replacement takes some hundred bytes, so replacements of many years fit.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Returns no lines if the file does not exist.
fn read_lines(path: &Path) -> Result<Vec<String>, CommandError> {
    match regular_file::read(path, MAX_FILE_BYTES) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(CommandError::cannot("read", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct HistoryTestCli {
        #[command(flatten)]
        args: HistoryArgs,
    }

    fn args(words: &[&str]) -> HistoryArgs {
        HistoryTestCli::parse_from(std::iter::once(&"history").chain(words)).args
    }

    const LEDGER: &str = r#"{"id":1,"at":"2026-01-02T03:00:00Z","model":"a","replica":0,"reason":"operator","evidence":{"host_bytes":7,"budget_bytes":null,"requests":2,"work":{"requests":2,"prompt_tokens":1,"output_tokens":1,"images":0},"age_s":1.5,"note":null},"mode":"sequential","from":1,"to":2,"carried_over":0,"drained":0,"cut":0,"gap_ms":40,"drain_ms":5,"start_ms":30,"host_before":null,"host_after":null,"helped":null,"failed":null}"#;
    const EVENTS: &str = r#"{"id":1,"at":"2026-01-02T02:00:00Z","model":"a","generation":1,"kind":"suspect","instance":5}
{"id":2,"at":"2026-01-02T04:00:00Z","model":"b","kind":"crashed","failure":{"kind":"out_of_memory","message":"memory ran out","lines":[],"failures":1},"instance":5}
{"id":3,"at":"2026-01-02T05:0"#;

    #[test]
    fn ledger_and_events_are_one_history_that_can_be_asked_by_model_reason_and_time() {
        let state = tempfile::tempdir().unwrap();
        fs::write(state.path().join("ledger.jsonl"), LEDGER).unwrap();
        fs::write(state.path().join("events.jsonl"), EVENTS).unwrap();
        let all = HistoryLog::read(state.path()).unwrap();
        assert_eq!(all.unread, 1, "the torn line");
        let shown = |words: &[&str]| -> Vec<String> {
            let args = args(words);
            let wanted = all.entries.iter().filter(|entry| entry.is_wanted(&args));
            wanted.map(|entry| entry.event.at[11..13].to_owned()).collect()
        };
        assert_eq!(shown(&[]), ["02", "03", "04"]);
        assert_eq!(shown(&["--model", "a"]), ["02", "03"]);
        assert_eq!(shown(&["--reason", "operator"]), ["03"]);
        assert_eq!(shown(&["--reason", "out_of_memory"]), ["04"]);
        assert_eq!(shown(&["--reason", "suspect", "--reason", "crashed"]), ["02", "04"]);
        assert_eq!(shown(&["--since", "2026-01-02T03:00:00Z"]), ["03", "04"]);
        assert_eq!(shown(&["--until", "2026-01-02T03:00:00Z"]), ["02", "03"]);
        assert_eq!(shown(&["--since", "1h"]), [""; 0]);
        insta::assert_snapshot!(
            all.entries.iter().map(|entry| event_line(&entry.event) + "\n").collect::<String>()
        );
        assert!(HistoryLog::read(&state.path().join("none")).unwrap().entries.is_empty());
    }

    #[test]
    fn times_are_absolute_or_ago() {
        assert!(parse_time("7d").unwrap() < parse_time("12h").unwrap());
        assert!(parse_time("2026-01-31T08:00:00Z").is_ok());
        assert!(parse_time("yesterday-ish").unwrap_err().contains("12h"));
    }
}
