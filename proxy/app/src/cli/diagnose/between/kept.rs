//! What a search was told so far, in a file of the state folder: the same command goes on from there, after Ctrl-C or a new start of the
//! machine. One line says what is searched, each further one what came of one process.

use std::fs::{self, File, OpenOptions};
use std::hash::Hasher;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use warden_diagnose::between::Told;

use crate::exit::Failure;

/// What is searched: everything that changes what comes of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct What {
    /// The repository, without a password.
    pub(super) repository: String,
    /// The commits at both ends.
    pub(super) older: String,
    pub(super) newer: String,
    /// What it is built for.
    pub(super) backend: String,
    pub(super) workloads: Vec<String>,
    pub(super) requests: u64,
    /// The command of the server behind its program, and its variables.
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    /// The files that it names, and the recording: path, bytes, seconds of their last change.
    pub(super) files: Vec<(String, u64, u64)>,
}

/// The file, held by us alone.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    file: File,
    /// What it had when it was opened.
    pub(super) known: Vec<Told>,
}

impl What {
    /// A name that another search does not have.
    fn name(&self) -> String {
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        hash.write(serde_json::to_string(self).unwrap_or_default().as_bytes());
        let short = |commit: &str| commit.chars().take(9).collect::<String>();
        format!("{}-{}-{:016x}.jsonl", short(&self.older), short(&self.newer), hash.finish())
    }
}

impl Kept {
    /// Opens the file of a search, and reads it. A last line that was not written to its end is cut off.
    pub(super) fn open(state: &Path, what: &What) -> Result<Self, Failure> {
        let folder = state.join("between");
        let path = folder.join(what.name());
        let failed = |error: std::io::Error| {
            Failure::hinted(
                format!("what the search is told cannot be kept in {}: {error}", path.display()),
                "choose another `paths.state_dir`",
            )
        };
        fs::create_dir_all(&folder).map_err(failed)?;
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(failed)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Failure::hinted(
                format!("another llama-warden searches this already: it holds {}", path.display()),
                "wait for it, or end it",
            ));
        }
        let mut kept = Self { path: path.clone(), file, known: Vec::new() };
        kept.read(what).map_err(failed)?;
        Ok(kept)
    }

    fn read(&mut self, what: &What) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        let mut reader = BufReader::new(&self.file);
        let (mut line, mut whole) = (Vec::new(), 0_u64);
        let mut known = Vec::new();
        let mut is_ours = false;
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)?;
            if length == 0 || line.last() != Some(&b'\n') {
                break;
            }
            if is_ours {
                let Ok(told) = serde_json::from_slice::<Told>(&line) else { break };
                known.push(told);
            } else if serde_json::from_slice::<What>(&line).is_ok_and(|known| known == *what) {
                is_ours = true;
            } else {
                break;
            }
            whole += length as u64;
        }
        // What is behind it is torn, or was written by another version.
        self.file.set_len(whole)?;
        self.known = known;
        if !is_ours {
            self.write(what)?;
        }
        Ok(())
    }

    /// One more.
    pub(super) fn add(&mut self, told: &Told) -> Result<(), Failure> {
        self.write(told).map_err(|error| {
            Failure::failed(format!(
                "what the search was told cannot be kept in {}: {error}",
                self.path.display()
            ))
        })
    }

    fn write(&mut self, value: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.file.sync_data()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// The same on every machine and in every version, and for names alone.
struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::experiment::between::{Ask, Seen};

    fn what(requests: u64) -> What {
        What {
            repository: "/r".to_owned(),
            older: "a".repeat(40),
            newer: "b".repeat(40),
            backend: "cpu".to_owned(),
            workloads: vec!["short-text".to_owned()],
            requests,
            args: Vec::new(),
            env: Vec::new(),
            files: Vec::new(),
        }
    }

    fn told(revision: usize) -> Told {
        let ask = Ask { revision, is_end: false, whole: false, control: false, workload: None };
        Told { ask, seen: Seen::Cannot("why\nnot".to_owned()) }
    }

    #[test]
    fn what_was_told_is_there_again_and_a_torn_line_is_cut_off() {
        let state = tempfile::tempdir().unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        assert!(kept.known.is_empty());
        kept.add(&told(1)).unwrap();
        kept.add(&told(2)).unwrap();
        let path = kept.path().to_owned();
        let second = Kept::open(state.path(), &what(1)).unwrap_err().to_string();
        assert!(second.contains("another llama-warden"), "{second}");
        drop(kept);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"ask\":{\"rev").unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        assert_eq!(kept.known, [told(1), told(2)]);
        kept.add(&told(3)).unwrap();
        drop(kept);
        assert_eq!(Kept::open(state.path(), &what(1)).unwrap().known.len(), 3);
        assert!(Kept::open(state.path(), &what(2)).unwrap().known.is_empty(), "another search");
    }

    #[test]
    fn a_file_of_another_version_is_begun_anew() {
        let state = tempfile::tempdir().unwrap();
        let path = Kept::open(state.path(), &what(1)).unwrap().path().to_owned();
        fs::write(&path, "{\"format\":7}\n{}\n").unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        kept.add(&told(1)).unwrap();
        drop(kept);
        assert_eq!(Kept::open(state.path(), &what(1)).unwrap().known, [told(1)]);
    }
}
