//! The execution ledger: who began what, and how it ended. JSON Lines, appended with `O_APPEND` by any number of
//! processes, one write(2) per line.
//!
//! ```text
//! {"pid":41,"event":"begun","id":"r7","ordinal":3,"path":"/completion","sha256":"..","meaning":"..","stream":true,"at_ms":..}
//! {"pid":41,"event":"head","id":"r7","ordinal":3,"at_ms":..}                   the first byte of its answer is out
//! {"pid":41,"event":"finished","id":"r7","ordinal":3,"tokens":16,"at_ms":..}      or "cancelled"
//! ```
//!
//! A request that begins and has no second line was cut by the end of its process. The kernel may also cut a line: a process
//! that is killed in the middle of a write leaves off at the end of a page. So each write begins with a line break of its
//! own, for whoever was killed before; blank lines mean nothing. And the process comes first, so that a reader can tell
//! whose a torn line is.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};

use crate::{clock, say};

/// What a request is, as it came in.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) path: String,
    /// Of its body.
    pub(crate) sha256: String,
    /// Of what it asks for, without the manner in which it asks.
    pub(crate) meaning: String,
    pub(crate) stream: bool,
    /// The head of a stream is sent before anything is computed.
    pub(crate) head_first: bool,
}

/// An open ledger, or none.
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
        // Never `write_all`: its second write would begin behind somebody else's line.
        match file.write(line.as_bytes()) {
            Ok(written) if written == line.len() => {}
            Ok(written) => {
                say::err(&format!("fake-llama: ledger: {written} of {} bytes written", line.len()));
            }
            Err(error) => say::err(&format!("fake-llama: ledger: {error}")),
        }
    }

    /// A request has a slot and begins.
    pub(crate) fn begun(&self, id: &str, ordinal: u64, begun: &Begun) {
        let facts = json!({
            "id": id, "ordinal": ordinal, "path": begun.path, "sha256": begun.sha256, "meaning": begun.meaning,
            "stream": begun.stream, "head_first": begun.head_first,
        });
        self.write("begun", &facts);
    }

    /// The first byte of the answer has been handed to the system.
    pub(crate) fn head(&self, id: &str, ordinal: u64) {
        self.write("head", &json!({"id": id, "ordinal": ordinal}));
    }

    /// A request that had begun ends after `tokens` tokens, by itself (`finished`) or because its client left.
    pub(crate) fn ended(&self, id: &str, ordinal: u64, finished: bool, tokens: u64) {
        let event = if finished { "finished" } else { "cancelled" };
        self.write(event, &json!({"id": id, "ordinal": ordinal, "tokens": tokens}));
    }
}
