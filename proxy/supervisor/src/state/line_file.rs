//! Append-only file of lines. If a full disk or a kill has left half a line, the next line is written after
//! an additional line end, so that the two do not mix.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

/// Append-only file of lines. The file is opened at the first use, and again after a failure.
#[derive(Debug)]
pub(crate) struct AppendFile {
    path: PathBuf,
    /// File mode that a new file gets.
    mode: u32,
    file: Option<File>,
    /// True if the last line of the file may lack its line end.
    torn: bool,
}

impl AppendFile {
    /// Prepares a file with this path, which need not exist yet.
    pub(crate) fn new(path: PathBuf, mode: u32) -> Self {
        Self { path, mode, file: None, torn: true }
    }

    /// Opens the file, and creates it if missing.
    ///
    /// # Errors
    ///
    /// The file can be neither created nor opened.
    pub(crate) fn open(&mut self) -> io::Result<&mut File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => File::options().read(true).create(true).append(true).mode(self.mode).open(&self.path)?,
        };
        Ok(self.file.insert(file))
    }

    /// Appends a line, which is given without its line end, in one write call. So while the writer lives,
    /// readers never see half a line.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, or not all of the line could be written.
    pub(crate) fn append_line(&mut self, line: &str) -> io::Result<()> {
        let was_torn = self.torn;
        let file = self.open()?;
        let begins = if was_torn && lacks_line_end(file)? { "\n" } else { "" };
        let done = file.write_all(format!("{begins}{line}\n").as_bytes());
        self.torn = done.is_err();
        done
    }
}

/// True if the last line lacks its end.
fn lacks_line_end(file: &mut File) -> io::Result<bool> {
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
        let mut file = AppendFile::new(path.clone(), 0o600);
        file.append_line("one").unwrap();
        // As with a full disk: some bytes are written, and the rest fails.
        std::fs::write(&path, "one\ntw").unwrap();
        file.torn = true;
        file.append_line("three").unwrap();
        file.append_line("four").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntw\nthree\nfour\n");
        std::fs::write(&path, "ha").unwrap();
        AppendFile::new(path.clone(), 0o600).append_line("whole").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "ha\nwhole\n");
        // Another writer may have ended the line.
        std::fs::write(&path, "whole\n").unwrap();
        AppendFile::new(path.clone(), 0o600).append_line("whole").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "whole\nwhole\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_line_that_fails_is_remembered_as_torn() {
        let mut file = AppendFile::new("/dev/full".into(), 0o600);
        assert_eq!(file.append_line("one").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(file.torn);
    }
}
