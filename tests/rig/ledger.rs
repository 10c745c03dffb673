//! Reads the ledger in which fake-llama records each execution of a request.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Trouble;

/// Line of the ledger.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    /// `begun`, `head` (the first byte of the answer is sent), `finished` or `cancelled`.
    pub event: String,
    /// Name of the request (`user` in its body, else `X-Request-Id`), or `-`.
    pub id: String,
    /// PID of the process that executed the request.
    pub pid: i32,
    /// Number of the request within that process, from 1.
    pub ordinal: u64,
    /// Hash of the body, on `begun` lines.
    #[serde(default)]
    pub sha256: String,
    /// Hash of the request's meaning (see [`crate::words`]), on `begun` lines.
    #[serde(default)]
    pub meaning: String,
    /// True if the client requested a stream, on `begun` lines.
    #[serde(default)]
    pub stream: bool,
    /// True if the head of a stream is sent before anything is computed, on `begun` lines.
    #[serde(default)]
    pub head_first: bool,
    /// Generated tokens, on the last lines.
    #[serde(default)]
    pub tokens: u64,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
}

/// End of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The process finished the request.
    Finished,
    /// The client left.
    Cancelled,
    /// The process still runs the request, or died.
    Open,
}

/// Ledger file.
#[derive(Debug, Clone)]
pub struct Ledger {
    path: PathBuf,
}

impl Ledger {
    /// Ledger at `path`, which need not exist yet.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Returns all complete lines. An incomplete line is skipped: its writer was killed, or is still writing.
    ///
    /// # Errors
    /// The file cannot be read, has a foreign line, or has a line appended to an incomplete one.
    pub fn lines(&self) -> Result<Vec<Line>, Trouble> {
        match std::fs::read(&self.path) {
            Ok(bytes) => parse(&String::from_utf8_lossy(&bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns a reader of new lines.
    pub fn tail(&self) -> Tail {
        Tail { path: self.path.clone(), read: 0 }
    }

    /// Returns the executions by the name of the request, in the order in which they began.
    ///
    /// # Errors
    /// The same as for [`Self::lines`].
    pub fn executions(&self) -> Result<BTreeMap<String, Vec<End>>, Trouble> {
        let mut ends = BTreeMap::new();
        let mut begun = Vec::new();
        for line in self.lines()? {
            let key = (line.pid, line.ordinal);
            match line.event.as_str() {
                "begun" => begun.push((key, line.id)),
                "head" => {}
                "finished" => drop(ends.insert(key, End::Finished)),
                _ => drop(ends.insert(key, End::Cancelled)),
            }
        }
        let mut all: BTreeMap<String, Vec<End>> = BTreeMap::new();
        for (key, id) in begun {
            all.entry(id).or_default().push(ends.get(&key).copied().unwrap_or(End::Open));
        }
        Ok(all)
    }

    /// Checks that each of `ids` was executed once and finished, and that nothing else was executed.
    ///
    /// # Errors
    /// A request was not executed as expected.
    pub fn each_finished_once<S: AsRef<str>>(&self, ids: impl IntoIterator<Item = S>) -> Result<(), Trouble> {
        let mut all = self.executions()?;
        let mut wrong = Vec::new();
        for id in ids {
            match all.remove(id.as_ref()).as_deref() {
                Some([End::Finished]) => {}
                other => wrong.push(format!("{}: {other:?}", id.as_ref())),
            }
        }
        wrong.extend(all.into_iter().map(|(id, ends)| format!("{id}: unexpected {ends:?}")));
        if wrong.is_empty() { Ok(()) } else { Err(Trouble::new(format!("ledger: {}", wrong.join("; ")))) }
    }

    /// Number of processes that executed a request.
    ///
    /// # Errors
    /// The same as for [`Self::lines`].
    pub fn generations(&self) -> Result<usize, Trouble> {
        let pids: std::collections::BTreeSet<i32> = self.lines()?.into_iter().map(|line| line.pid).collect();
        Ok(pids.len())
    }
}

/// Ledger file that is read while fake-llama writes it.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Bytes read so far.
    read: u64,
}

impl Tail {
    /// Returns the complete lines added since the last call.
    ///
    /// # Errors
    /// The same as for [`Ledger::lines`].
    pub fn fresh(&mut self) -> Result<Vec<Line>, Trouble> {
        let mut file = match std::fs::File::open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // Bytes after the last line break are incomplete.
        bytes.truncate(memchr::memrchr(b'\n', &bytes).map_or(0, |at| at + 1));
        self.read += bytes.len() as u64;
        parse(&String::from_utf8_lossy(&bytes))
    }
}

/// Beginning of every line. The PID comes first, so that an incomplete line can be told from dirt.
const BEGINNING: &str = "{\"pid\":";

fn parse(text: &str) -> Result<Vec<Line>, Trouble> {
    let mut lines: Vec<Line> = Vec::new();
    // Each incomplete line, and the number of complete lines before it.
    let mut torn: Vec<(&str, usize)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            Err(error) if error.is_eof() && (line.starts_with(BEGINNING) || BEGINNING.starts_with(line)) => {
                torn.push((line, lines.len()));
            }
            Err(error) => return Err(Trouble::new(format!("ledger line {line:?}: {error}"))),
        }
    }
    for (line, before) in torn {
        // The line ends within the PID.
        let number =
            line.strip_prefix(BEGINNING).and_then(|rest| rest.split_once(',')).map(|(number, _)| number);
        let Some(pid) = number.and_then(|number| number.parse::<i32>().ok()) else { continue };
        if lines[before..].iter().any(|later| later.pid == pid) {
            return Err(Trouble::new(format!("ledger line {line:?} is torn, and process {pid} wrote on")));
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGUN: &str = r#"{"pid":7,"event":"begun","id":"a","ordinal":1,"stream":true,"at_ms":1}"#;
    const FINISHED: &str = r#"{"pid":7,"event":"finished","id":"a","ordinal":1,"tokens":2,"at_ms":2}"#;
    const OTHER: &str = r#"{"pid":8,"event":"begun","id":"b","ordinal":1,"stream":true,"at_ms":3}"#;

    fn read(parts: &[&str]) -> Result<Vec<i32>, String> {
        let lines = parse(&parts.concat()).map_err(|trouble| trouble.to_string())?;
        Ok(lines.iter().map(|line| line.pid).collect())
    }

    #[test]
    fn a_line_torn_at_any_byte_by_the_end_of_its_process_says_nothing_and_the_next_one_is_read() {
        for cut in 0..FINISHED.len() {
            let parts = ["\n", BEGUN, "\n\n", &FINISHED[..cut], "\n", OTHER, "\n"];
            assert_eq!(read(&parts), Ok(vec![7, 8]), "{:?}", &FINISHED[..cut]);
            assert_eq!(read(&parts[..4]), Ok(vec![7]), "at the end of the file");
        }
    }

    #[test]
    fn a_torn_line_of_a_process_that_wrote_on_is_no_accident() {
        let told = read(&[BEGUN, "\n", &BEGUN[..30], "\n", FINISHED, "\n"]).unwrap_err();
        assert!(told.contains("torn, and process 7 wrote on"), "{told}");
    }

    #[test]
    fn dirt_is_no_torn_line() {
        for dirt in ["x", "{\"event\":\"begun\"", "{\"pid\":7}", "{\"pid\":7,\"event\":begun}"] {
            assert!(read(&[BEGUN, "\n", dirt, "\n"]).is_err(), "{dirt}");
        }
        // Two lines of which one was incomplete have become one, so the ledger is unreadable.
        assert!(read(&[&BEGUN[..40], FINISHED, "\n"]).is_err());
    }
}
