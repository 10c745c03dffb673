//! A file of lines that is only appended to. A full disk, or a kill, leaves half a line: the next one ends it before
//! it begins, so that no line becomes a part of another.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

/// Such a file. It is opened when it is needed, and again where that failed.
#[derive(Debug)]
pub(crate) struct LineFile {
    path: PathBuf,
    /// Rights of a new one.
    mode: u32,
    file: Option<File>,
    /// The last line may have no end.
    torn: bool,
}

impl LineFile {
    /// The file of this name, which need not be there.
    pub(crate) fn new(path: PathBuf, mode: u32) -> Self {
        Self { path, mode, file: None, torn: true }
    }

    /// Makes it if need be.
    ///
    /// # Errors
    ///
    /// It can be neither made nor opened.
    pub(crate) fn open(&mut self) -> io::Result<&mut File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => File::options().read(true).create(true).append(true).mode(self.mode).open(&self.path)?,
        };
        Ok(self.file.insert(file))
    }

    /// Appends a line, whose end is not part of `line`, with one write: a reader never sees half a line of a process
    /// that lives.
    ///
    /// # Errors
    ///
    /// It cannot be opened, or not all of the line could be written.
    pub(crate) fn append(&mut self, line: &str) -> io::Result<()> {
        let was_torn = self.torn;
        let file = self.open()?;
        let begins = if was_torn && ends_torn(file)? { "\n" } else { "" };
        let done = file.write_all(format!("{begins}{line}\n").as_bytes());
        self.torn = done.is_err();
        done
    }
}

/// Whether the last line has no end.
fn ends_torn(file: &mut File) -> io::Result<bool> {
    if file.metadata()?.len() == 0 {
        return Ok(false);
    }
    let mut last = *b"\n";
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_is_ended_before_the_next_one_whoever_left_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lines");
        let mut file = LineFile::new(path.clone(), 0o600);
        file.append("one").unwrap();
        // As a full disk does: some bytes are written, and the rest is an error.
        std::fs::write(&path, "one\ntw").unwrap();
        file.torn = true;
        file.append("three").unwrap();
        file.append("four").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntw\nthree\nfour\n");
        std::fs::write(&path, "ha").unwrap();
        LineFile::new(path.clone(), 0o600).append("whole").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "ha\nwhole\n");
        // Whoever else writes there may have ended it.
        std::fs::write(&path, "whole\n").unwrap();
        LineFile::new(path.clone(), 0o600).append("whole").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "whole\nwhole\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_line_that_fails_is_remembered_as_torn() {
        let mut file = LineFile::new("/dev/full".into(), 0o600);
        assert_eq!(file.append("one").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(file.torn);
    }
}
