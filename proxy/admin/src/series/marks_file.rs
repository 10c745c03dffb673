//! The file of marks: appended JSON lines. When the file has twice as many lines as there are marks, it is
//! rewritten.
//!
//! Skips a line that is incomplete because a process was killed. A file without any mark is foreign and stays
//! unchanged.

use std::fs;
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use warden_supervisor::open_lines;

use super::marks::SeriesMark;

/// The file has names of models and output of llama-server, so other users must not read it.
const FILE_MODE: u32 = 0o640;
/// Shorter files are not rewritten.
const MIN_REWRITE_LINES: usize = 1000;
/// In bytes. A larger file cannot be a file of marks, and is not read.
const MAX_FILE_BYTES: u64 = 256 << 20;

#[derive(Debug)]
pub(super) struct MarksFile {
    path: PathBuf,
    lines: usize,
    ours: bool,
}

impl MarksFile {
    pub(super) fn open(folder: &Path) -> (Self, Vec<SeriesMark>) {
        let path = folder.join("marks.jsonl");
        let facts = fs::symlink_metadata(&path);
        let Ok(facts) = facts else { return (Self { path, lines: 0, ours: true }, Vec::new()) };
        let text = if facts.is_file() && facts.len() < MAX_FILE_BYTES { fs::read(&path).ok() } else { None };
        let Some(text) = text else { return (Self { path, lines: 0, ours: false }, Vec::new()) };
        let text = String::from_utf8_lossy(&text);
        let read: Vec<SeriesMark> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        // Any line may be incomplete, even the first.
        let ours = text.is_empty() || !read.is_empty();
        let lines = text.lines().count();
        (Self { path, lines, ours }, if ours { read } else { Vec::new() })
    }

    /// Returns the reason why the file is not used.
    pub(super) fn refusal(&self) -> Option<String> {
        (!self.ours).then(|| {
            format!(
                "actions on models are recorded in this process only, because {} is no file of \
                     llama-warden's",
                self.path.display()
            )
        })
    }

    /// `all` returns the `kept` marks in memory, including `new`.
    pub(super) fn write(
        &mut self,
        new: &[SeriesMark],
        kept: usize,
        all: impl FnOnce() -> Vec<SeriesMark>,
    ) -> io::Result<()> {
        if !self.ours || new.is_empty() {
            return Ok(());
        }
        if self.lines + new.len() > MIN_REWRITE_LINES + 2 * kept {
            return self.rewrite(&all());
        }
        let mut text = Vec::new();
        for mark in new {
            serde_json::to_writer(&mut text, mark)?;
            text.push(b'\n');
        }
        // A full disk may have left part of a line, which `open_lines` ends.
        open_lines(&self.path, FILE_MODE)?.write_all(&text)?;
        self.lines += new.len();
        Ok(())
    }

    fn rewrite(&mut self, all: &[SeriesMark]) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let new = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
        let mut writer = BufWriter::new(new.as_file());
        for mark in all {
            serde_json::to_writer(&mut writer, mark)?;
            writer.write_all(b"\n")?;
        }
        writer.flush()?;
        drop(writer);
        new.as_file().set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
        new.as_file().sync_all()?;
        new.persist(&self.path).map_err(|failed| failed.error)?;
        self.lines = all.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;

    use super::super::marks::SeriesMarkKind;
    use super::*;

    fn mark(at: u64) -> SeriesMark {
        let (replica, memory, generation) = (None, None, None);
        SeriesMark {
            at,
            model: ModelName::new("m"),
            replica,
            memory,
            generation,
            kind: SeriesMarkKind::Replaced,
            words: "why".into(),
        }
    }

    #[test]
    fn marks_come_back_and_a_torn_line_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, read) = MarksFile::open(dir.path());
        assert_eq!(read, []);
        let all = [mark(1), mark(2)];
        file.write(&all, 2, || all.to_vec()).unwrap();
        let path = dir.path().join("marks.jsonl");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[..text.len() - 9]).unwrap();
        let (mut file, read) = MarksFile::open(dir.path());
        assert_eq!(read, [mark(1)]);
        file.write(&[mark(3)], 2, Vec::new).unwrap();
        assert_eq!(MarksFile::open(dir.path()).1, [mark(1), mark(3)]);
        // The first line may be the torn one.
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, &text[9..]).unwrap();
        let (file, read) = MarksFile::open(dir.path());
        assert_eq!((file.refusal(), read), (None, vec![mark(3)]));
    }

    proptest::proptest! {
        /// Whatever a file contains, its marks are read and writing continues, or the file stays unchanged.
        #[test]
        fn any_bytes_are_read_or_left_alone(bytes in crate::mutated::mutated(&[
            "{\"at\":1,\"model\":\"m\",\"kind\":\"replaced\",\"words\":\"why\"}\n{\"at\":2,\"model\":\"a/b\",\"kind\":\"replaced\",\"words\":\"\"}\n",
        ])) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("marks.jsonl");
            fs::write(&path, &bytes).unwrap();
            let (mut file, read) = MarksFile::open(dir.path());
            file.write(&[mark(3)], read.len() + 1, Vec::new).unwrap();
            if file.refusal().is_some() {
                proptest::prop_assert_eq!(fs::read(&path).unwrap(), bytes);
            } else {
                let again = MarksFile::open(dir.path()).1;
                proptest::prop_assert_eq!(again.last(), Some(&mark(3)));
                proptest::prop_assert_eq!(again.len(), read.len() + 1);
            }
        }
    }

    #[test]
    fn the_file_is_bounded_and_somebody_elses_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (mut file, _) = MarksFile::open(dir.path());
        let kept: Vec<SeriesMark> = (0..10).map(mark).collect();
        let mut longest = 0;
        for n in 0..3000 {
            file.write(&[mark(n)], kept.len(), || kept.clone()).unwrap();
            longest = longest.max(file.lines);
        }
        assert!(longest <= 1020, "{longest}");
        fs::write(dir.path().join("marks.jsonl"), "my notes\n").unwrap();
        let (mut file, read) = MarksFile::open(dir.path());
        assert!(read.is_empty() && file.refusal().is_some_and(|why| why.contains("marks.jsonl")));
        file.write(&kept, 10, || kept.clone()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("marks.jsonl")).unwrap(), "my notes\n");
    }
}
