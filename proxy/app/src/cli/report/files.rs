//! Reads the state directory: ledger, events, learnt values, recordings. Reads only the ends of regular
//! files, so that neither large files nor pipes and links in their place do harm.

use std::fs;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use warden_supervisor::{line_files, regular_file};

use super::contents::ReportContents;

/// Bytes read from the end of a file: some thousand replacements or events.
const TAIL_BYTES: u64 = 2 << 20;
/// Maximum number of recordings, the latest ones.
const MAX_RECORDINGS: usize = 4;

pub(super) fn gather_files(contents: &mut ReportContents, state: &Path) {
    let replacements = "replacements of processes, with their reasons: the latest ones";
    add_line_files(contents, state, "ledger.jsonl", replacements);
    add_history(contents, state);
    add_line_files(contents, state, "events.jsonl", "what happened to models: the latest events");
    add_recordings(contents, &state.join("traces"));
}

/// Adds the ends of a line file and of the full file before it.
fn add_line_files(contents: &mut ReportContents, state: &Path, name: &str, what: &str) {
    let tails = line_files(&state.join(name)).map(|path| tail_or_note(contents, &path).unwrap_or_default());
    contents.add_lines(name, what, last_bytes(&tails.concat(), TAIL_BYTES).lines());
}

/// Adds the memory of earlier processes: one JSON value, or the end of its text if it is none.
fn add_history(contents: &mut ReportContents, state: &Path) {
    let (name, what) = ("growth.json", "what is remembered of earlier processes: what leaked, what was held");
    let Some(text) = tail_or_note(contents, &state.join(name)) else { return };
    match serde_json::from_str(&text) {
        Ok(value) => contents.add_json(name, what, value),
        Err(_) => contents.add_lines(name, what, text.lines()),
    }
}

/// End of a file, if it exists. An unreadable file becomes a note.
fn tail_or_note(contents: &mut ReportContents, path: &Path) -> Option<String> {
    read_tail(path, TAIL_BYTES).unwrap_or_else(|error| {
        contents.add_note(&format!("{}: {error}", path.display()));
        None
    })
}

/// Adds the latest recordings of memory.
fn add_recordings(contents: &mut ReportContents, folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_name().to_string_lossy().ends_with(".jsonl"))
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    for (_, path) in found.iter().take(MAX_RECORDINGS) {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(text) = tail_or_note(contents, path) {
            let what = "readings of a process's memory, without anything of its requests";
            contents.add_lines(&format!("recordings/{file}"), what, text.lines());
        }
    }
    if found.len() > MAX_RECORDINGS {
        contents.add_note(&format!(
            "recordings: {} older ones in {}",
            found.len() - MAX_RECORDINGS,
            folder.display()
        ));
    }
}

/// The whole lines at the end of a regular file; `None` if it does not exist.
fn read_tail(path: &Path, most: u64) -> io::Result<Option<String>> {
    // Root reports on services of other users, who may replace the file by a link or a pipe at any time.
    let mut file = match regular_file::open_unlinked(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(Some(if length > most { drop_partial_line(&text).to_owned() } else { text }))
}

/// The last `most` bytes of a text, from the beginning of a line.
fn last_bytes(text: &str, most: u64) -> &str {
    let from = text.len().saturating_sub(usize::try_from(most).unwrap_or(usize::MAX));
    if from == 0 {
        return text;
    }
    let from = (from..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    drop_partial_line(&text[from..])
}

/// Drops the incomplete first line.
fn drop_partial_line(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_file_has_whole_lines_and_nothing_else_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        fs::write(&path, "one\ntwo\nthree\n").unwrap();
        assert_eq!(read_tail(&path, 100).unwrap().unwrap(), "one\ntwo\nthree\n");
        assert_eq!(read_tail(&path, 8).unwrap().unwrap(), "three\n");
        assert_eq!(read_tail(&path, 3).unwrap().unwrap(), "");
        assert_eq!(read_tail(&dir.path().join("none"), 3).unwrap(), None);
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        assert!(read_tail(&dir.path().join("link"), 9).is_err());
        assert!(read_tail(dir.path(), 9).is_err());
        assert_eq!(last_bytes("é\nb\n", 3), "b\n");
    }
}
