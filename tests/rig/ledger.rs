//! Reading the execution ledger that fake-llama writes: who began what, and how often.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{Context as _, Trouble};

/// One line.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    /// `begun`, `head` (the first byte of the answer is out), `finished` or `cancelled`.
    pub event: String,
    /// The request's own name (`request_id` in its body, else `X-Request-Id`), or `-`.
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

    /// All lines; none when there is no file.
    ///
    /// # Errors
    /// The file cannot be read or a line is none of ours.
    pub fn lines(&self) -> Result<Vec<Line>, Trouble> {
        let text = match std::fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        text.lines().map(|line| serde_json::from_str(line).context(format!("ledger line {line:?}"))).collect()
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
