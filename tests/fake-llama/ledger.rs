//! Ledger of executions in JSON Lines, appended with `O_APPEND` by any number of processes, one write(2) per
//! line.
//!
//! ```text
//! {"pid":41,"event":"begun","id":"r7","ordinal":3,"path":"/completion","sha256":"..","meaning":"..","stream":true,"at_ms":..}
//! {"pid":41,"event":"head","id":"r7","ordinal":3,"at_ms":..}                   the first byte of its answer is out
//! {"pid":41,"event":"finished","id":"r7","ordinal":3,"tokens":16,"at_ms":..}      or "cancelled"
//! ```
//!
//! A request without an end line was cut by the end of its process. A kill may also cut a line at the end of
//! a page, so each write begins with a line break, and blank lines mean nothing. The PID comes first, so that
//! the owner of an incomplete line is known.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use crate::{clock, say};

/// Request at its beginning.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) path: String,
    /// Hash of the body.
    pub(crate) sha256: String,
    /// Hash of the request without fields that only affect the form of the answer.
    pub(crate) meaning: String,
    pub(crate) stream: bool,
    /// True if the head of a stream is sent before anything is computed.
    pub(crate) head_first: bool,
}

/// Open ledger, or none.
#[derive(Debug, Default)]
pub(crate) struct Ledger(Option<File>);

impl Ledger {
    /// Opens the file named by `FAKE_LLAMA_LEDGER`, if any.
    ///
    /// # Errors
    /// The file cannot be opened for appending.
    pub(crate) fn from_env() -> Result<Self, String> {
        let Some(path) = std::env::var_os("FAKE_LLAMA_LEDGER") else { return Ok(Self(None)) };
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.map(|file| Self(Some(file)))
            .map_err(|error| format!("ledger {}: {error}", Path::new(&path).display()))
    }

    fn write(&self, event: &str, facts: &Value) {
        let Some(mut file) = self.0.as_ref() else { return };
        let mut line = json!({ "pid": std::process::id(), "event": event });
        if let (Some(line), Some(facts)) = (line.as_object_mut(), facts.as_object()) {
            line.extend(facts.clone());
        }
        line["at_ms"] = json!(clock::unix_ms());
        let line = format!("\n{line}\n");
        // `write_all` might append the rest of this line to another process's line.
        match file.write(line.as_bytes()) {
            Ok(written) if written == line.len() => {}
            Ok(written) => {
                say::err(&format!("fake-llama: ledger: {written} of {} bytes written", line.len()));
            }
            Err(error) => say::err(&format!("fake-llama: ledger: {error}")),
        }
    }

    /// Records that a request has a slot and begins.
    pub(crate) fn begun(&self, id: &str, ordinal: u64, begun: &Begun) {
        let facts = json!({
            "id": id, "ordinal": ordinal, "path": begun.path, "sha256": begun.sha256, "meaning": begun.meaning,
            "stream": begun.stream, "head_first": begun.head_first,
        });
        self.write("begun", &facts);
    }

    /// Records that the first byte of the answer was handed to the kernel.
    pub(crate) fn head(&self, id: &str, ordinal: u64) {
        self.write("head", &json!({"id": id, "ordinal": ordinal}));
    }

    /// Records the end of a request: `finished`, or `cancelled` because its client left.
    pub(crate) fn ended(&self, id: &str, ordinal: u64, finished: bool, tokens: u64) {
        let event = if finished { "finished" } else { "cancelled" };
        self.write(event, &json!({"id": id, "ordinal": ordinal, "tokens": tokens}));
    }
}
