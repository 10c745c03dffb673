//! Stores the results of a search in a file of the state folder. After Ctrl-C or a reboot, the same command
//! continues the search. A hash of everything that affects the results is the file's name.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};
use warden_diagnose::between::ProcessRecord;
use warden_experiment::Workload;

use super::CommitSearch;
use crate::exit::CommandError;

#[derive(Debug)]
pub(super) struct SearchFile {
    path: PathBuf,
    file: File,
    /// Each record with the offset at which its line ends.
    records: Vec<(ProcessRecord, u64)>,
}

impl SearchFile {
    /// Truncates the file at the first line that is incomplete or of another version.
    pub(super) fn open(state: &Path, name: &str) -> Result<Self, CommandError> {
        let folder = state.join("between");
        let path = folder.join(name);
        let failed =
            |error| CommandError::hinted(cannot_keep(&path, &error), "choose another `paths.state_dir`");
        DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).open(&path).map_err(failed)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(CommandError::hinted(
                format!("another llama-warden searches this already: it holds {}", path.display()),
                "wait for it, or end it",
            ));
        }
        let mut known = Vec::new();
        let mut end = 0;
        let mut line = Vec::new();
        let mut reader = BufReader::new(&file);
        while reader.read_until(b'\n', &mut line).map_err(failed)? > 0
            && line.ends_with(b"\n")
            && let Ok(record) = serde_json::from_slice(&line)
        {
            end += line.len() as u64;
            known.push((record, end));
            line.clear();
        }
        file.set_len(end).map_err(failed)?;
        Ok(Self { path, file, records: known })
    }

    pub(super) fn records(&self) -> Vec<ProcessRecord> {
        self.records.iter().map(|(record, _)| record.clone()).collect()
    }

    pub(super) fn truncate(&mut self, used: usize) -> Result<(), CommandError> {
        self.records.truncate(used);
        self.file
            .set_len(self.end_offset())
            .map_err(|error| CommandError::failed(cannot_keep(&self.path, &error)))
    }

    pub(super) fn add(&mut self, record: &ProcessRecord) -> Result<(), CommandError> {
        let written = serde_json::to_vec(record).map_err(std::io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line).and_then(|()| self.file.sync_data()).map(|()| line.len() as u64)
        });
        match written {
            Ok(length) => {
                self.records.push((record.clone(), self.end_offset() + length));
                Ok(())
            }
            Err(error) => {
                // A partial line would make all later lines unreadable.
                self.file.set_len(self.end_offset()).ok();
                Err(CommandError::failed(cannot_keep(&self.path, &error)))
            }
        }
    }

    fn end_offset(&self) -> u64 {
        self.records.last().map_or(0, |(_, end)| *end)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn cannot_keep(path: &Path, error: &std::io::Error) -> String {
    format!("results of the search cannot be kept in {}: {error}", path.display())
}

const LLAMA_VARIABLE_PREFIXES: [&str; 7] = ["LLAMA_", "GGML_", "CUDA_", "HIP_", "ROCR_", "OMP_", "MALLOC_"];

impl CommitSearch<'_> {
    /// The name contains only a hash of the command and its variables, which may include keys.
    pub(super) async fn file_name(
        &self,
        workloads: &[Workload],
        requests: u64,
    ) -> Result<String, CommandError> {
        let model = self.model();
        let command = &model.command;
        // Omit files named by variables, and the log: each server start writes to them, which would change
        // the name and so begin another search.
        let named = input_file_words(&command.args).map(PathBuf::from);
        let facts = |path: PathBuf| {
            let facts = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
            Some((path, facts.len(), facts.modified().ok()))
        };
        let files: Vec<_> = named.filter_map(facts).collect();
        let is_own = |name: &str| {
            LLAMA_VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                && !name.starts_with("LLAMA_WARDEN_")
        };
        let mut inherited: Vec<(String, String)> = self.machine.text_vars();
        inherited.retain(|(name, _)| is_own(name));
        // Include the build plan, which depends on the machine and its tools.
        let oldest = &self.line[0];
        let newest = &self.line[self.line.len() - 1];
        let plan = self.builder.plan(&self.request(newest)).await?;
        let aim = self.args.aim();
        // The `[proof]` settings do not affect a search for growth.
        let proof = (!aim.is_growth()).then_some(&self.configured.settings.proof);
        let all = [
            format!("{} {} {} {}", env!("CARGO_PKG_VERSION"), self.shown, oldest.commit, newest.commit),
            format!("{workloads:?} {requests} {aim:?} {proof:?}"),
            format!("{:?} {:?}", plan.recipe.backend, plan.recipe.cmake),
            format!("{:?} {:?} {:?}", command.args, command.env, command.env_remove),
            format!("{:?} {:?}", self.configured.models[self.index].mitigations, model.run.socket),
            format!("{files:?} {inherited:?}"),
            format!("{:?} {:?}", self.configured.settings.diagnose, self.configured.fleet.growth),
        ];
        let short = |commit: &str| commit.chars().take(9).collect::<String>();
        let hash = hex::encode(&Sha256::digest(all.join("\n"))[..8]);
        Ok(format!("{}-{}-{hash}.jsonl", short(&oldest.commit), short(&newest.commit)))
    }
}

fn input_file_words(args: &[String]) -> impl Iterator<Item = &String> {
    let before = std::iter::once(None).chain(args.iter().map(Some));
    let read =
        args.iter().zip(before).filter(|(_, before)| before.is_none_or(|before| before != "--log-file"));
    read.map(|(word, _)| word)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use std::os::unix::fs::PermissionsExt as _;
    use warden_experiment::between::{ProcessOrder, ProcessResult, RevisionAim};

    fn record(revision: usize) -> ProcessRecord {
        let aim = RevisionAim::Growth;
        let ask = ProcessOrder { revision, is_end: false, whole: false, control: false, workload: None, aim };
        ProcessRecord { ask, seen: ProcessResult::Cannot("why\nnot".to_owned()), lengths: None }
    }

    #[test]
    fn records_are_there_again_and_a_torn_line_is_cut_off() {
        let state = tempfile::tempdir().unwrap();
        let open = || SearchFile::open(state.path(), "one").unwrap();
        let mut kept = open();
        assert!(kept.records().is_empty());
        kept.add(&record(1)).unwrap();
        kept.add(&record(2)).unwrap();
        let path = kept.path().to_owned();
        let second = SearchFile::open(state.path(), "one").unwrap_err().to_string();
        assert!(second.contains("another llama-warden"), "{second}");
        drop(kept);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"ask\":{\"rev").unwrap();
        let mut kept = open();
        assert_eq!(kept.records(), [record(1), record(2)]);
        kept.add(&record(3)).unwrap();
        drop(kept);
        let mut kept = open();
        assert_eq!(kept.records().len(), 3);
        assert!(SearchFile::open(state.path(), "other").unwrap().records().is_empty(), "another search");
        kept.truncate(1).unwrap();
        kept.add(&record(7)).unwrap();
        drop(kept);
        assert_eq!(open().records(), [record(1), record(7)]);
        // Even if no record is kept, a new record is read again.
        let mut kept = open();
        kept.truncate(0).unwrap();
        kept.add(&record(8)).unwrap();
        drop(kept);
        assert_eq!(open().records(), [record(8)]);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "commands have keys in them");
    }

    #[test]
    fn a_file_of_another_version_is_begun_anew() {
        let state = tempfile::tempdir().unwrap();
        let open = || SearchFile::open(state.path(), "one").unwrap();
        let path = open().path().to_owned();
        fs::write(&path, "{\"format\":7}\n{}\n").unwrap();
        let mut kept = open();
        kept.add(&record(1)).unwrap();
        drop(kept);
        assert_eq!(open().records(), [record(1)]);
    }

    #[test]
    fn what_a_server_writes_makes_no_other_search() {
        let args = ["-m", "model.gguf", "--log-file", "out.log", "-ngl", "9"].map(str::to_owned);
        assert_eq!(
            input_file_words(&args).collect::<Vec<_>>(),
            ["-m", "model.gguf", "--log-file", "-ngl", "9"]
        );
    }
}
