//! What a search was told so far, in a file of the state folder: the same command goes on from there, after Ctrl-C or a new start of the
//! machine. One line says what is searched, each further one what came of one process.

use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::Hasher;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use warden_diagnose::between::Told;
use warden_policies::experiment::between::Aim;

use crate::exit::Failure;

/// What is searched: everything that changes what comes of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct What {
    /// The version of this program.
    pub(super) warden: String,
    /// The repository, without a password.
    pub(super) repository: String,
    /// The commits at both ends.
    pub(super) older: String,
    pub(super) newer: String,
    pub(super) workloads: Vec<String>,
    pub(super) requests: u64,
    /// What is looked for.
    #[serde(default, skip_serializing_if = "Aim::is_growth")]
    pub(super) aim: Aim,
    /// A hash of all else: what it is built for, the command and its variables, which may have keys in them, the files that it names, numbers.
    pub(super) rest: String,
}

/// A line behind the first one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Entry {
    /// What came of a process.
    Told(Told),
    /// A build was made.
    Built(String),
}

/// The file, held by us alone.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    file: File,
    /// What it had when it was opened, each with the bytes up to its end.
    known: Vec<(Told, u64)>,
    built: Vec<String>,
    /// Where its first line ends.
    head: u64,
    /// Where its last whole line ends.
    whole: u64,
    /// It cannot be written any more.
    broken: bool,
}

impl What {
    /// A name that another search does not have.
    fn name(&self) -> String {
        let short = |commit: &str| commit.chars().take(9).collect::<String>();
        let hash = hash(&serde_json::to_string(self).unwrap_or_default());
        format!("{}-{}-{hash}.jsonl", short(&self.older), short(&self.newer))
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
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).open(&path).map_err(failed)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Failure::hinted(
                format!("another llama-warden searches this already: it holds {}", path.display()),
                "wait for it, or end it",
            ));
        }
        let (known, built) = (Vec::new(), Vec::new());
        let mut kept = Self { path: path.clone(), file, known, built, head: 0, whole: 0, broken: false };
        kept.read(what).map_err(failed)?;
        Ok(kept)
    }

    fn read(&mut self, what: &What) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        let mut reader = BufReader::new(&self.file);
        let mut line = Vec::new();
        let mut is_ours = false;
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)?;
            if length == 0 || line.last() != Some(&b'\n') {
                break;
            }
            let end = self.whole + length as u64;
            if is_ours {
                match serde_json::from_slice::<Entry>(&line) {
                    Ok(Entry::Told(told)) => self.known.push((told, end)),
                    Ok(Entry::Built(id)) if self.built.contains(&id) => {}
                    Ok(Entry::Built(id)) => self.built.push(id),
                    Err(_) => break,
                }
            } else if serde_json::from_slice::<What>(&line).is_ok_and(|known| known == *what) {
                (is_ours, self.head) = (true, end);
            } else {
                break;
            }
            self.whole = end;
        }
        // What is behind it is torn, or was written by another version.
        self.file.set_len(self.whole)?;
        if !is_ours {
            self.write(what)?;
            self.head = self.whole;
        }
        Ok(())
    }

    /// What it has.
    pub(super) fn known(&self) -> Vec<Told> {
        self.known.iter().map(|(told, _)| told.clone()).collect()
    }

    /// Cuts off what is behind so many processes, but for the builds.
    pub(super) fn keep(&mut self, used: usize) -> Result<(), Failure> {
        if used >= self.known.len() {
            return Ok(());
        }
        let end = used.checked_sub(1).map_or(self.head, |last| self.known[last].1);
        self.file.set_len(end).map_err(|error| self.failed(&error))?;
        self.whole = end;
        self.known.truncate(used);
        for id in self.built.clone() {
            self.write(&Entry::Built(id)).map_err(|error| self.failed(&error))?;
        }
        Ok(())
    }

    /// One more.
    pub(super) fn add(&mut self, told: &Told) -> Result<(), Failure> {
        self.write(&Entry::Told(told.clone())).map_err(|error| self.failed(&error))
    }

    /// A build was made for it.
    pub(super) fn add_build(&mut self, id: &str) -> Result<(), Failure> {
        self.built.push(id.to_owned());
        self.write(&Entry::Built(id.to_owned())).map_err(|error| self.failed(&error))
    }

    /// Builds that were made for it.
    pub(super) fn built(&self) -> &[String] {
        &self.built
    }

    fn failed(&self, error: &std::io::Error) -> Failure {
        Failure::failed(format!(
            "what the search was told cannot be kept in {}: {error}",
            self.path.display()
        ))
    }

    fn write(&mut self, value: &impl Serialize) -> std::io::Result<()> {
        if self.broken {
            return Ok(());
        }
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let written = self.file.write_all(&line).and_then(|()| self.file.sync_data());
        if written.is_ok() {
            self.whole += line.len() as u64;
        } else {
            // Nothing may come behind a part of a line.
            self.broken = true;
            drop(self.file.set_len(self.whole));
        }
        written
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// For names, and to see a change: the same on every machine and in every version.
pub(super) fn hash(text: &str) -> String {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    hash.write(text.as_bytes());
    format!("{:016x}", hash.finish())
}

/// FNV-1a.
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
    use std::fs;

    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use warden_policies::experiment::between::{Ask, Seen};

    fn what(requests: u64) -> What {
        What {
            warden: "1".to_owned(),
            repository: "/r".to_owned(),
            older: "a".repeat(40),
            newer: "b".repeat(40),
            workloads: vec!["short-text".to_owned()],
            requests,
            aim: Aim::Growth,
            rest: hash("rest"),
        }
    }

    fn told(revision: usize) -> Told {
        let aim = Aim::Growth;
        let ask = Ask { revision, is_end: false, whole: false, control: false, workload: None, aim };
        Told { ask, seen: Seen::Cannot("why\nnot".to_owned()), lengths: None }
    }

    #[test]
    fn what_was_told_is_there_again_and_a_torn_line_is_cut_off() {
        let state = tempfile::tempdir().unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        assert!(kept.known().is_empty());
        kept.add(&told(1)).unwrap();
        kept.add_build("abc").unwrap();
        kept.add(&told(2)).unwrap();
        let path = kept.path().to_owned();
        let second = Kept::open(state.path(), &what(1)).unwrap_err().to_string();
        assert!(second.contains("another llama-warden"), "{second}");
        drop(kept);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"ask\":{\"rev").unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        assert_eq!(kept.known(), [told(1), told(2)]);
        assert_eq!(kept.built(), ["abc"]);
        kept.add(&told(3)).unwrap();
        drop(kept);
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        assert_eq!(kept.known().len(), 3);
        assert!(Kept::open(state.path(), &what(2)).unwrap().known().is_empty(), "another search");
        kept.keep(1).unwrap();
        kept.add(&told(7)).unwrap();
        drop(kept);
        assert_eq!(Kept::open(state.path(), &what(1)).unwrap().known(), [told(1), told(7)]);
        // If not even the first one fits, what comes now is read again all the same, and the builds are known still.
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        kept.keep(0).unwrap();
        kept.add(&told(8)).unwrap();
        drop(kept);
        let kept = Kept::open(state.path(), &what(1)).unwrap();
        assert_eq!((kept.known(), kept.built()), (vec![told(8)], &["abc".to_owned()][..]));
        drop(kept);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "commands have keys in them");
    }

    #[test]
    fn a_file_of_another_version_is_begun_anew() {
        let state = tempfile::tempdir().unwrap();
        let path = Kept::open(state.path(), &what(1)).unwrap().path().to_owned();
        fs::write(&path, "{\"format\":7}\n{}\n").unwrap();
        let mut kept = Kept::open(state.path(), &what(1)).unwrap();
        kept.add(&told(1)).unwrap();
        drop(kept);
        assert_eq!(Kept::open(state.path(), &what(1)).unwrap().known(), [told(1)]);
    }
}
