//! Append-only files of lines, which several instances share.
//!
//! A kill or a full disk may leave half a line. It is kept, but gets a line end before the next line.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Append-only file of JSON lines. A full file is renamed to `NAME.1`, in place of an earlier one.
#[derive(Clone, Debug)]
pub struct LineFile {
    path: PathBuf,
    mode: u32,
    max_bytes: u64,
}

impl LineFile {
    /// A new file gets `mode`. `max_bytes`: size limit of the file, and of `NAME.1`.
    pub fn new(path: PathBuf, mode: u32, max_bytes: u64) -> Self {
        Self { path, mode, max_bytes }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line without its line end.
    ///
    /// # Errors
    ///
    /// The file cannot be opened or written, or it is full and another program's file has the name `NAME.1`.
    pub fn append(&self, line: &str) -> io::Result<()> {
        let size = fs::metadata(&self.path).map_or(0, |facts| facts.len());
        if size > 0 && size + line.len() as u64 >= self.max_bytes {
            self.rotate()?;
        }
        // Another instance may have renamed the file.
        let mut file = open_lines(&self.path, self.mode)?;
        // With one write, lines of two instances do not mix and readers see whole lines.
        file.write_all(format!("{line}\n").as_bytes())
    }

    /// Renames the full file to `NAME.1`, unless another program's file has that name.
    fn rotate(&self) -> io::Result<()> {
        let [before, now] = line_files(&self.path);
        if before.exists() && !begins_with_json(&before) {
            let why = format!("it is full, and {} is not llama-warden's", before.display());
            return Err(io::Error::other(why));
        }
        fs::rename(now, before)
    }
}

/// Paths of `NAME.1` and of the file.
pub fn line_files(path: &Path) -> [PathBuf; 2] {
    let mut before = OsString::from(path);
    before.push(".1");
    [before.into(), path.to_owned()]
}

/// Opens a file for appending whole lines. A new file gets `mode`.
///
/// # Errors
///
/// The file cannot be opened, or a line end cannot be added to a half line.
pub fn open_lines(path: &Path, mode: u32) -> io::Result<File> {
    let mut file = File::options().create(true).append(true).mode(mode).open(path)?;
    if ends_torn(path, &file)? {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// True if the last line lacks its line end. False for devices, pipes and unreadable files.
fn ends_torn(path: &Path, file: &File) -> io::Result<bool> {
    let facts = file.metadata()?;
    if !facts.is_file() || facts.len() == 0 {
        return Ok(false);
    }
    let mut last = *b"\n";
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut last, facts.len() - 1));
    Ok(read.is_ok() && last != *b"\n")
}

fn begins_with_json(path: &Path) -> bool {
    let mut line = String::new();
    let read = File::open(path).and_then(|file| BufReader::new(file).read_line(&mut line));
    read.is_ok() && serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&line).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_is_ended_once_and_nothing_else_is_changed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lines");
        for (before, after) in
            [(None, ""), (Some("a\n"), "a\n"), (Some("a\nha"), "a\nha\n"), (Some("\n"), "\n")]
        {
            if let Some(before) = before {
                fs::write(&path, before).unwrap();
            }
            for _ in 0..2 {
                open_lines(&path, 0o600).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), after);
            }
        }
        open_lines(Path::new("/dev/null"), 0o600).unwrap();
    }

    #[test]
    fn half_a_line_is_ended_before_the_next_one_whoever_left_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = LineFile::new(directory.path().join("lines"), 0o600, 1 << 20);
        file.append("one").unwrap();
        // As with a full disk: some bytes are written, and the rest fails.
        fs::write(file.path(), "one\ntw").unwrap();
        file.append("three").unwrap();
        file.append("four").unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "one\ntw\nthree\nfour\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error() {
        let file = LineFile::new("/dev/full".into(), 0o600, 1 << 20);
        assert_eq!(file.append("one").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn two_full_files_are_kept_and_files_of_others_are_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let file = LineFile::new(directory.path().join("lines"), 0o600, 60);
        let append = |id: u32| file.append(&format!("{{\"id\":{id},\"text\":\"{}\"}}", "x".repeat(10)));
        (10..17).for_each(|id| append(id).unwrap());
        let [before, now] = line_files(file.path());
        let ids = |path: &Path| {
            fs::read_to_string(path).unwrap().lines().map(|line| line[6..8].to_owned()).collect::<Vec<_>>()
        };
        assert_eq!((ids(&before), ids(&now)), (vec!["14".into(), "15".into()], vec!["16".to_owned()]));
        fs::write(&before, "my notes\n").unwrap();
        append(17).unwrap();
        let full = append(18).unwrap_err();
        assert!(full.to_string().contains("is not llama-warden's"), "{full}");
        assert_eq!(fs::read_to_string(&before).unwrap(), "my notes\n");
    }
}
