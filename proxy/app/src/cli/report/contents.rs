//! Contents of a report: names, texts, and notes about missing parts. Values only.

use warden_policies::ByteSize;

use super::clean::ReportCleaner;
use crate::out;

/// Maximum bytes of all contents: below the limit of a bug tracker after packing, with reserve.
const MAX_CONTENT_BYTES: usize = 64 << 20;

/// Maximum number of entries with the same name.
const MAX_EQUAL_NAMES: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReportEntry {
    /// Plain letters, with slashes for folders.
    pub(super) name: String,
    /// Description for the operator who decides whether to send the report.
    pub(super) what: String,
    pub(super) text: String,
}

/// All contents.
#[derive(Debug)]
pub(super) struct ReportContents {
    cleaner: ReportCleaner,
    entries: Vec<ReportEntry>,
    notes: Vec<String>,
    size: usize,
}

/// Name of the list of contents in the archive.
const CONTENTS_FILE: &str = "contents.txt";

impl ReportContents {
    pub(super) const fn new(cleaner: ReportCleaner) -> Self {
        Self { cleaner, entries: Vec::new(), notes: Vec::new(), size: 0 }
    }

    /// Adds a text.
    pub(super) fn add_text(&mut self, name: &str, what: &str, text: &str) {
        let text = self.cleaner.clean_text(text);
        self.add(name, what, text);
    }

    /// Adds a value for programs.
    pub(super) fn add_json(&mut self, name: &str, what: &str, value: serde_json::Value) {
        let text = self.cleaner.clean_json(value);
        self.add(name, what, text);
    }

    /// Adds lines, each of which may be JSON.
    pub(super) fn add_lines<'a>(&mut self, name: &str, what: &str, lines: impl Iterator<Item = &'a str>) {
        let text: String = lines.map(|line| self.cleaner.clean_line(line) + "\n").collect();
        self.add(name, what, text);
    }

    fn add(&mut self, name: &str, what: &str, text: String) {
        if text.trim().is_empty() {
            return;
        }
        let tamed = safe_name(name);
        // Distinct names may have become equal by the substitution of characters.
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

    /// Notes a missing part and the reason.
    pub(super) fn add_note(&mut self, text: &str) {
        // The note is shown on a terminal: keep it on one line, without control characters.
        let text = self.cleaner.clean_text(text).replace(char::is_control, " ");
        self.notes.push(text.trim().to_owned());
    }

    /// Completes the contents with the notes and the list of entries.
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

    /// Entries ordered by name, after the list.
    pub(super) fn entries(&self) -> &[ReportEntry] {
        &self.entries
    }

    /// Formats the table for the operator: a line per file, and the missing parts.
    pub(super) fn table(&self) -> String {
        let notes = self.notes.iter().map(|note| format!("  {note}\n"));
        let notes: String = if self.notes.is_empty() {
            String::new()
        } else {
            "not in it:\n".to_owned() + &notes.collect::<String>()
        };
        format!("{}{notes}", rows(&self.entries))
    }
}

fn rows(entries: &[ReportEntry]) -> String {
    let head = ["FILE", "SIZE", "WHAT"].map(str::to_owned).to_vec();
    let row = |entry: &ReportEntry| {
        vec![entry.name.clone(), ByteSize(entry.text.len() as u64).to_string(), entry.what.clone()]
    };
    out::format_table(&std::iter::once(head).chain(entries.iter().map(row)).collect::<Vec<_>>())
}

/// Makes a name valid on every machine. The result cannot lead out of the folder in which the archive is
/// unpacked.
pub(super) fn safe_name(name: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() || "._-/".contains(c) { c } else { '-' };
    let parts = name.split('/').map(|part| part.trim_start_matches('.')).filter(|part| !part.is_empty());
    let name = parts.collect::<Vec<_>>().join("/");
    name.chars().map(letter).take(100).collect()
}
