//! Contents of a report: names, texts, and notes about missing parts; and the archive of them. Equal contents
//! give equal bytes. Never overwrites an existing file.
//!
//! The cleaner hides all known secrets of the configuration and environment. The common redactor finds other
//! secrets by name, position and form. Names of API keys, which are often people's names, become numbers.

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use warden_config::machine::HostMachine;
use warden_config::source::layers::LoadedConfig;
use warden_policies::ByteSize;
use warden_policies::secrets::{self, KnownSecrets};

use crate::exit::CommandError;
use crate::out;

/// Stays below the attachment limit of a bug tracker after packing.
const MAX_CONTENT_BYTES: usize = 64 << 20;

const MAX_EQUAL_NAMES: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportEntry {
    /// ASCII letters, digits, `.`, `_` and `-`, with slashes for folders.
    pub(super) name: String,
    pub(super) what: String,
    pub(super) text: String,
}

#[derive(Debug)]
pub(super) struct ReportContents {
    cleaner: ReportCleaner,
    entries: Vec<ReportEntry>,
    notes: Vec<String>,
    size: usize,
}

const CONTENTS_FILE: &str = "contents.txt";

impl ReportContents {
    pub(super) const fn new(cleaner: ReportCleaner) -> Self {
        Self { cleaner, entries: Vec::new(), notes: Vec::new(), size: 0 }
    }

    pub(super) fn add_text(&mut self, name: &str, what: &str, text: &str) {
        let text = self.cleaner.clean_text(text);
        self.add(name, what, text);
    }

    pub(super) fn add_json(&mut self, name: &str, what: &str, value: Value) {
        let text = self.cleaner.clean_json(value);
        self.add(name, what, text);
    }

    pub(super) fn add_lines<'a>(&mut self, name: &str, what: &str, lines: impl Iterator<Item = &'a str>) {
        let text: String = lines.map(|line| self.cleaner.clean_line(line) + "\n").collect();
        self.add(name, what, text);
    }

    fn add(&mut self, name: &str, what: &str, text: String) {
        if text.trim().is_empty() {
            return;
        }
        let tamed = safe_name(name);
        // The replacement of characters may have made distinct names equal.
        let is_free = |name: &String| !self.entries.iter().any(|entry| entry.name == *name);
        let names = std::iter::once(tamed.clone()).chain((2..).map(|number| format!("{tamed}-{number}")));
        let Some(name) = names.take(MAX_EQUAL_NAMES).find(is_free) else { return };
        if self.size + text.len() > MAX_CONTENT_BYTES {
            self.add_note(&format!(
                "{name}: left out, because {} would be too much",
                ByteSize(text.len() as u64)
            ));
            return;
        }
        self.size += text.len();
        self.entries.push(ReportEntry { name, what: what.to_owned(), text });
    }

    pub(super) fn add_note(&mut self, text: &str) {
        // A terminal shows the note, so keep it on one line, without control characters.
        let text = self.cleaner.clean_text(text).replace(char::is_control, " ");
        self.notes.push(text.trim().to_owned());
    }

    pub(super) fn finish(&mut self) {
        if !self.notes.is_empty() {
            let text = self.notes.join("\n") + "\n";
            self.entries.push(ReportEntry {
                name: "notes.txt".to_owned(),
                what: "what could not be collected, and why".to_owned(),
                text,
            });
        }
        self.entries.sort_by(|a, b| a.name.cmp(&b.name));
        let text = rows(&self.entries);
        self.entries
            .insert(0, ReportEntry { name: CONTENTS_FILE.to_owned(), what: "this list".to_owned(), text });
    }

    /// Returns the list of contents first, then the other entries ordered by name.
    pub(super) fn entries(&self) -> &[ReportEntry] {
        &self.entries
    }

    pub(super) fn table(&self) -> String {
        let mut text = rows(&self.entries);
        if !self.notes.is_empty() {
            text.push_str("not in it:\n");
            text.extend(self.notes.iter().map(|note| format!("  {note}\n")));
        }
        text
    }
}

fn rows(entries: &[ReportEntry]) -> String {
    let row = |entry: &ReportEntry| {
        vec![entry.name.clone(), ByteSize(entry.text.len() as u64).to_string(), entry.what.clone()]
    };
    out::table(["FILE", "SIZE", "WHAT"], entries.iter().map(row))
}

/// Makes a name valid on every machine. The name cannot lead out of the folder in which the archive is
/// unpacked.
pub(super) fn safe_name(name: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() || "._-/".contains(c) { c } else { '-' };
    let parts = name.split('/').map(|part| part.trim_start_matches('.')).filter(|part| !part.is_empty());
    let name = parts.collect::<Vec<_>>().join("/");
    name.chars().map(letter).take(100).collect()
}

const ARCHIVE_FOLDER: &str = "llama-warden-report";
/// A report is private until its author sends it.
const FILE_MODE: u32 = 0o600;

/// Leaves out times and owners, so that equal contents give equal bytes.
pub(super) fn pack_archive(contents: &ReportContents) -> Result<Vec<u8>, CommandError> {
    let packed = || -> io::Result<Vec<u8>> {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for entry in contents.entries() {
            let mut header = tar::Header::new_gnu();
            header.set_size(entry.text.len() as u64);
            header.set_mode(0o644);
            archive.append_data(
                &mut header,
                format!("{ARCHIVE_FOLDER}/{}", entry.name),
                entry.text.as_bytes(),
            )?;
        }
        archive.into_inner()?.finish()
    };
    packed().map_err(|error| CommandError::failed(format!("cannot pack the report: {error}")))
}

pub(super) fn check_free(path: &Path) -> Result<(), CommandError> {
    if path.symlink_metadata().is_ok() {
        return Err(exists_failure(path));
    }
    Ok(())
}

fn exists_failure(path: &Path) -> CommandError {
    CommandError::hinted(
        format!("{} is there already, and is left as it is", path.display()),
        "name another file with --out, or remove it",
    )
}

/// Removes the file again if a write fails.
pub(super) fn write_archive(path: &Path, archive: &[u8]) -> Result<(), CommandError> {
    let cannot = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => exists_failure(path),
        _ => CommandError::hinted(
            format!("cannot write {}: {error}", path.display()),
            "choose another place with --out",
        ),
    };
    let mut file: File =
        OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path).map_err(cannot)?;
    let written = file.write_all(archive).and_then(|()| file.sync_all());
    written.map_err(|error| {
        // Safe, because this call created the file.
        drop(std::fs::remove_file(path));
        cannot(error)
    })
}

/// Texts before the name of an API key, each with the character after the name.
const KEY_NAMES: [(&str, char); 2] = [("key=\"", '"'), ("page, key ", ',')];

#[derive(Debug, Default)]
pub(super) struct ReportCleaner {
    known: KnownSecrets,
    /// Names of API keys; each key's index determines its number.
    keys: RefCell<Vec<String>>,
}

impl ReportCleaner {
    pub(super) fn for_machine(loaded: Option<&LoadedConfig>, machine: &HostMachine) -> Self {
        let models = loaded.into_iter().flat_map(|loaded| {
            std::iter::once(&loaded.defaults).chain(loaded.models.iter().map(|(_, model)| model))
        });
        let mut args = Vec::new();
        let mut variables = machine.text_vars();
        for model in models {
            args.extend(model.args.iter().cloned());
            variables.extend(model.env.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Self { known: KnownSecrets::from_command(&args, variables), keys: RefCell::default() }
    }

    /// Hides known secrets first: the redactor might cut a known secret, and then not recognise the rest.
    pub(super) fn clean_text(&self, text: &str) -> String {
        secrets::redact_text(&self.known.redact(self.number_keys(text)))
    }

    /// Replaces each name of an API key by the same `key-N` throughout the report.
    fn number_keys(&self, text: &str) -> String {
        let mut keys = self.keys.borrow_mut();
        KEY_NAMES.iter().fold(text.to_owned(), |text, (before, end)| {
            let mut parts = text.split(before);
            let mut shown = parts.next().unwrap_or_default().to_owned();
            for part in parts {
                let (name, rest) = part.split_at(part.find(*end).unwrap_or(part.len()));
                let known = keys.iter().position(|known| known == name);
                let number = known.unwrap_or_else(|| {
                    keys.push(name.to_owned());
                    keys.len() - 1
                });
                shown.extend([before, &*format!("key-{}", number + 1), rest]);
            }
            shown
        })
    }

    pub(super) fn clean_json(&self, value: Value) -> String {
        serde_json::to_string_pretty(&self.clean_value(value)).unwrap_or_default() + "\n"
    }

    fn clean_value(&self, value: Value) -> Value {
        secrets::redact_json(self.hide_known(value))
    }

    /// Hides known secrets before the value becomes JSON text, which would escape quotation marks in them.
    fn hide_known(&self, value: Value) -> Value {
        match value {
            Value::String(text) => self.known.redact(self.number_keys(&text)).into(),
            Value::Array(items) => items.into_iter().map(|item| self.hide_known(item)).collect(),
            Value::Object(fields) => {
                let field = |(name, value)| (self.known.redact(name), self.hide_known(value));
                fields.into_iter().map(field).collect()
            }
            other => other,
        }
    }

    pub(super) fn clean_line(&self, line: &str) -> String {
        match serde_json::from_str::<Value>(line) {
            Ok(value @ (Value::Object(_) | Value::Array(_))) => self.clean_value(value).to_string(),
            _ => self.clean_text(line),
        }
    }
}
