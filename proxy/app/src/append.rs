//! Opens line-based files to which several instances append, one after the other.
//!
//! A process that is killed in the middle of a write leaves half a line, which is kept, because it may be
//! useful. The next program that opens the file adds a line end, so that its own first line stays separate.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Opens a file for appending whole lines. A new file gets `mode`.
///
/// # Errors
/// The file cannot be opened, or a line end cannot be added to a half line.
pub(crate) fn open_lines(path: &Path, mode: u32) -> io::Result<File> {
    let mut file = OpenOptions::new().create(true).append(true).mode(mode).open(path)?;
    if ends_torn(path, &file)? {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// Returns whether the last line has no line end. A device or a pipe has no last line, and an unreadable
/// file is not changed.
fn ends_torn(path: &Path, file: &File) -> io::Result<bool> {
    let facts = file.metadata()?;
    if !facts.is_file() || facts.len() == 0 {
        return Ok(false);
    }
    let mut last = *b"\n";
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut last, facts.len() - 1));
    Ok(read.is_ok() && last != *b"\n")
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
                std::fs::write(&path, before).unwrap();
            }
            for _ in 0..2 {
                open_lines(&path, 0o600).unwrap();
                assert_eq!(std::fs::read_to_string(&path).unwrap(), after);
            }
        }
        open_lines(Path::new("/dev/null"), 0o600).unwrap();
    }
}
