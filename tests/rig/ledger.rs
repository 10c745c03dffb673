//! Reading the execution ledger that fake-llama writes: who began what, and how often.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::Trouble;

/// One line.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    /// `begun`, `head` (the first byte of the answer is out), `finished` or `cancelled`.
    pub event: String,
    /// The request's own name (`user` in its body, else `X-Request-Id`), or `-`.
    pub id: String,
    /// The generation that executed it.
    pub pid: i32,
    /// Its number within that process, from 1.
    pub ordinal: u64,
    /// Of the body, on `begun` lines.
    #[serde(default)]
    pub sha256: String,
    /// Of what it asks for (see [`crate::words`]), on `begun` lines.
    #[serde(default)]
    pub meaning: String,
    /// Whether a stream was asked for, on `begun` lines.
    #[serde(default)]
    pub stream: bool,
    /// Whether a stream's head is sent before anything is computed, on `begun` lines.
    #[serde(default)]
    pub head_first: bool,
    /// Tokens generated, on the last lines.
    #[serde(default)]
    pub tokens: u64,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
}

/// How one execution ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Finished,
    /// Its client left.
    Cancelled,
    /// Not at all: it runs, or its process died.
    Open,
}

/// A ledger file.
#[derive(Debug, Clone)]
pub struct Ledger {
    path: PathBuf,
}

impl Ledger {
    /// The ledger at `path`, which need not exist yet.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// All whole lines; none when there is no file. A line that its writer could not end, because it was killed in the
    /// middle of it, says nothing; neither does one that is being written.
    ///
    /// # Errors
    /// The file cannot be read or a line is none of ours; a process wrote on behind a torn line.
    pub fn lines(&self) -> Result<Vec<Line>, Trouble> {
        match std::fs::read(&self.path) {
            Ok(bytes) => parse(&String::from_utf8_lossy(&bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    /// Its lines from now on, as they come.
    pub fn tail(&self) -> Tail {
        Tail { path: self.path.clone(), read: 0 }
    }

    /// Every execution by the request's name, in order of beginning.
    ///
    /// # Errors
    /// As [`Self::lines`].
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

    /// Checks that each of `ids` was executed once and finished, and nothing else was executed at all.
    ///
    /// # Errors
    /// A sentence that names what was not.
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

    /// How many different processes executed something.
    ///
    /// # Errors
    /// As [`Self::lines`].
    pub fn generations(&self) -> Result<usize, Trouble> {
        let pids: std::collections::BTreeSet<i32> = self.lines()?.into_iter().map(|line| line.pid).collect();
        Ok(pids.len())
    }
}

/// A ledger file that is read while it is written.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Bytes that were read.
    read: u64,
}

impl Tail {
    /// The whole lines that have come since the last time.
    ///
    /// # Errors
    /// As [`Ledger::lines`].
    pub fn fresh(&mut self) -> Result<Vec<Line>, Trouble> {
        let mut file = match std::fs::File::open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file?,
        };
        file.seek(SeekFrom::Start(self.read))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // What follows the last line break is being written, or torn: then a line break follows it.
        bytes.truncate(memchr::memrchr(b'\n', &bytes).map_or(0, |at| at + 1));
        self.read += bytes.len() as u64;
        parse(&String::from_utf8_lossy(&bytes))
    }
}

/// How every line begins. Whose it is comes first, so that a torn one can be told from dirt.
const BEGINNING: &str = "{\"pid\":";

fn parse(text: &str) -> Result<Vec<Line>, Trouble> {
    let mut lines: Vec<Line> = Vec::new();
    // What was torn, and how many whole lines stood before it.
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
        // Torn within the number: nobody's.
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
        // Two lines of which one was torn have become one: whoever writes like that cannot be read.
        assert!(read(&[&BEGUN[..40], FINISHED, "\n"]).is_err());
    }
}
