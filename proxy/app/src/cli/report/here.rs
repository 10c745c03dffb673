//! Facts about this machine (versions, effective configuration, memory, GPUs, builds) and its state directory
//! (ledger, events, learnt values, recordings). Reads only the ends of regular files.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use warden_admin::status::AdminStatus;
use warden_builder::{BuildId, BuildStore};
use warden_config::machine::HostMachine;
use warden_config::show::print_config;
use warden_config::source::layers::LoadedConfig;
use warden_policies::ByteSize;
use warden_sensors::gpu::GpuSensors;
use warden_supervisor::{line_files, regular_file};

use super::contents::ReportContents;
use crate::cli::diagnose::machine_facts;
use crate::exit::CommandError;

pub(super) fn gather_machine(
    contents: &mut ReportContents,
    loaded: Result<&LoadedConfig, &CommandError>,
    machine: &HostMachine,
) {
    contents.add_text(
        "machine.txt",
        "version, kernel, processor, memory, driver, GPUs",
        &machine_text(machine),
    );
    match loaded {
        Ok(loaded) => {
            let text = print_config(loaded, machine, false);
            contents.add_text(
                "config.toml",
                "the configuration in force, with the place of each value, without secrets",
                &text,
            );
            if loaded.file.is_none() {
                contents.add_note("config.toml: no file is named; give --config as `serve` gets it");
            }
        }
        Err(error) => {
            contents.add_note(&format!("config.toml: it cannot be read: {}", error.lines().join(" ")));
        }
    }
}

fn machine_text(machine: &HostMachine) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &dyn std::fmt::Display| {
        // A write to a String cannot fail.
        let _ = writeln!(text, "{name}: {value}");
    };
    row("llama-warden", &env!("CARGO_PKG_VERSION"));
    row("made for", &format_args!("{} {}", std::env::consts::OS, std::env::consts::ARCH));
    for (name, value) in machine_facts() {
        row(&name, &value);
    }
    row("processors for us", &std::thread::available_parallelism().map_or(0, std::num::NonZero::get));
    row("memory for us", &machine.memory);
    if let Ok(totals) = warden_sensors::host_totals() {
        row("memory available", &ByteSize(totals.available));
    }
    if let Ok(group) = warden_sensors::cgroup_memory(machine.pid) {
        row("control group", &json_line(&group));
    }
    let gpus = GpuSensors::open();
    for device in gpus.devices() {
        row("GPU", &json_line(device));
    }
    for note in gpus.notes() {
        row("GPUs", note);
    }
    text
}

fn json_line(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Adds the provenance of the builds in use and of the default build; without an instance, also of the newest
/// build.
pub(super) fn add_builds(contents: &mut ReportContents, data: &Path, status: Option<&AdminStatus>) {
    let store = BuildStore::with_bundled(data);
    let used = status.and_then(|status| status.binaries.as_ref());
    let mut ids: Vec<BuildId> = used
        .into_iter()
        .flat_map(|all| all.values().flatten())
        .filter_map(|file| store.find_by_file(file))
        .collect();
    ids.extend(store.default_build().ok().flatten().map(|build| build.id));
    if status.is_none() {
        ids.extend(store.newest().ok().flatten().map(|build| build.id));
    }
    ids.sort();
    ids.dedup();
    for id in ids {
        match store.show(&id).map(serde_json::to_value) {
            Ok(Ok(papers)) => {
                contents.add_json(
                    &format!("builds/{id}.json"),
                    "what a build was made of, and what it was tried with",
                    papers,
                );
            }
            Ok(Err(error)) => contents.add_note(&format!("builds/{id}.json: {error}")),
            Err(error) => contents.add_note(&format!("builds/{id}.json: {error}")),
        }
    }
}

/// Enough for some thousand replacements or events.
const TAIL_BYTES: u64 = 2 << 20;
const MAX_RECORDINGS: usize = 4;

pub(super) fn gather_files(contents: &mut ReportContents, state: &Path) {
    let replacements = "replacements of processes, with their reasons: the latest ones";
    add_line_files(contents, state, "ledger.jsonl", replacements);
    add_history(contents, state);
    add_line_files(contents, state, "events.jsonl", "what happened to models: the latest events");
    add_recordings(contents, &state.join("traces"));
}

/// Adds the ends of a JSON-lines file and of its rotated predecessor.
fn add_line_files(contents: &mut ReportContents, state: &Path, name: &str, what: &str) {
    let tails = line_files(&state.join(name)).map(|path| tail_or_note(contents, &path).unwrap_or_default());
    contents.add_lines(name, what, last_bytes(&tails.concat(), TAIL_BYTES).lines());
}

/// Adds what llama-warden learned from earlier processes: a JSON value, or the end of an invalid file.
fn add_history(contents: &mut ReportContents, state: &Path) {
    let (name, what) = ("growth.json", "what is remembered of earlier processes: what leaked, what was held");
    let Some(text) = tail_or_note(contents, &state.join(name)) else { return };
    match serde_json::from_str(&text) {
        Ok(value) => contents.add_json(name, what, value),
        Err(_) => contents.add_lines(name, what, text.lines()),
    }
}

/// Returns the end of a file, if it exists. Adds a note if the file cannot be read.
fn tail_or_note(contents: &mut ReportContents, path: &Path) -> Option<String> {
    read_tail(path, TAIL_BYTES).unwrap_or_else(|error| {
        contents.add_note(&format!("{}: {error}", path.display()));
        None
    })
}

fn add_recordings(contents: &mut ReportContents, folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".jsonl"))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    for (_, path) in found.iter().take(MAX_RECORDINGS) {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(text) = tail_or_note(contents, path) {
            let what = "readings of a process's memory, without anything of its requests";
            contents.add_lines(&format!("recordings/{file}"), what, text.lines());
        }
    }
    if found.len() > MAX_RECORDINGS {
        contents.add_note(&format!(
            "recordings: {} older ones in {}",
            found.len() - MAX_RECORDINGS,
            folder.display()
        ));
    }
}

/// Returns whole lines; `None` if the file does not exist.
fn read_tail(path: &Path, most: u64) -> io::Result<Option<String>> {
    // Root reports on services of other users, who may replace the file by a link or a pipe at any time.
    let mut file = match regular_file::open_unlinked(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(Some(if length > most { drop_partial_line(&text).to_owned() } else { text }))
}

/// Returns at most the last `most` bytes, from the beginning of a line.
fn last_bytes(text: &str, most: u64) -> &str {
    let from = text.len().saturating_sub(usize::try_from(most).unwrap_or(usize::MAX));
    if from == 0 {
        return text;
    }
    let from = (from..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    drop_partial_line(&text[from..])
}

fn drop_partial_line(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_file_has_whole_lines_and_nothing_else_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "one\ntwo\nthree\n").unwrap();
        assert_eq!(read_tail(&path, 100).unwrap().unwrap(), "one\ntwo\nthree\n");
        assert_eq!(read_tail(&path, 8).unwrap().unwrap(), "three\n");
        assert_eq!(read_tail(&path, 3).unwrap().unwrap(), "");
        assert_eq!(read_tail(&dir.path().join("none"), 3).unwrap(), None);
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        assert!(read_tail(&dir.path().join("link"), 9).is_err());
        assert!(read_tail(dir.path(), 9).is_err());
        assert_eq!(last_bytes("é\nb\n", 3), "b\n");
    }
}
