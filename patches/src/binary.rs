//! Searches a binary for the marker text of each fix. Without this check, a fix would count as applied even
//! if the build excludes the patched file, or if the linker drops the code.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memchr::memmem::Finder;

use crate::error::{Result, io_error};

/// Bytes per read: a GPU binary has hundreds of MiB, and need not be in memory.
const CHUNK_BYTES: usize = 1 << 20;

/// Returns the ids of the fixes whose markers are missing. An empty marker never counts as missing. Blocks.
/// If `cancelled` stops the search, all markers not found so far count as missing.
///
/// # Errors
/// Fails if the binary cannot be read.
pub fn missing_markers<'a>(
    binary: &Path,
    fixes: impl Iterator<Item = (&'a str, &'a str)>,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<String>> {
    let mut wanted: Vec<(&str, Finder<'_>)> = fixes
        .filter(|(_, marker)| !marker.is_empty())
        .map(|(fix, marker)| (fix, Finder::new(marker.as_bytes())))
        .collect();
    let overlap = wanted.iter().map(|(_, finder)| finder.needle().len()).max().unwrap_or(1) - 1;
    let mut file = File::open(binary).map_err(io_error("opening", binary))?;
    let mut window: Vec<u8> = Vec::with_capacity(CHUNK_BYTES + overlap);
    while !wanted.is_empty() && !cancelled() {
        // A marker may cross the boundary of two chunks.
        let kept = window.len().min(overlap);
        window.drain(..window.len() - kept);
        if append(&mut file, &mut window).map_err(io_error("reading", binary))? == 0 {
            break;
        }
        wanted.retain(|(_, finder)| finder.find(&window).is_none());
    }
    Ok(wanted.into_iter().map(|(fix, _)| fix.to_owned()).collect())
}

fn append(file: &mut File, window: &mut Vec<u8>) -> io::Result<usize> {
    file.take(CHUNK_BYTES as u64).read_to_end(window)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TextPresence {
    Yes,
    No,
    Script,
}

/// Searches a binary for a text, then the libraries of llama.cpp in its folder and in `../lib`, where a build
/// with shared libraries has its backends. Skips unreadable libraries.
pub(crate) fn find_text(binary: &Path, text: &str) -> Result<TextPresence> {
    if contains(binary, text)? {
        return Ok(TextPresence::Yes);
    }
    let mut start = [0; 2];
    let mut file = File::open(binary).map_err(io_error("opening", binary))?;
    if file.read_exact(&mut start).is_ok() && start == *b"#!" {
        return Ok(TextPresence::Script);
    }
    // Resolve links: the libraries are next to the real binary.
    let binary = binary.canonicalize().map_err(io_error("finding", binary))?;
    let found = libraries(&binary).iter().any(|library| contains(library, text).unwrap_or(false));
    Ok(if found { TextPresence::Yes } else { TextPresence::No })
}

fn contains(file: &Path, text: &str) -> Result<bool> {
    let missing = missing_markers(file, std::iter::once((text, text)), &|| false)?;
    Ok(missing.is_empty())
}

fn libraries(binary: &Path) -> Vec<PathBuf> {
    let Some(folder) = binary.parent() else { return Vec::new() };
    let folders = [folder.to_owned(), folder.join("../lib"), folder.join("../lib64")];
    let names = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        ["libggml", "libllama", "libmtmd"].iter().any(|start| name.starts_with(start)) && name.contains(".so")
    };
    let entries = folders.iter().filter_map(|folder| folder.read_dir().ok()).flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(names).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found_anywhere_also_across_the_border_of_two_chunks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        let fixes = [("begin", "AAA-first"), ("border", "BBB-border"), ("end", "CCC-last"), ("none", "")];
        for shift in 0..12 {
            let mut bytes = b"AAA-first".to_vec();
            bytes.resize(CHUNK_BYTES - shift, 0);
            bytes.extend_from_slice(b"BBB-border");
            bytes.resize(2 * CHUNK_BYTES + 7, 0);
            bytes.extend_from_slice(b"CCC-last");
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(
                missing_markers(&path, fixes.into_iter(), &|| false).unwrap(),
                Vec::<String>::new(),
                "{shift}"
            );
        }
    }

    #[test]
    fn a_marker_that_is_not_there_names_its_fix() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        std::fs::write(&path, "AAA-firs AAA-second").unwrap();
        let fixes = [("one", "AAA-first"), ("two", "AAA-second")];
        assert_eq!(missing_markers(&path, fixes.into_iter(), &|| false).unwrap(), ["one"]);
    }

    #[test]
    fn an_empty_file_has_no_marker() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("binary");
        std::fs::write(&path, "").unwrap();
        assert_eq!(missing_markers(&path, [("one", "x")].into_iter(), &|| false).unwrap(), ["one"]);
    }

    #[test]
    fn a_text_is_found_in_the_binary_and_in_a_library_beside_it_and_in_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(dir.path().join("lib")).unwrap();
        let binary = bin.join("llama-server");
        let seen = |text: &str| find_text(&binary, text).unwrap();
        std::fs::write(&binary, "..fix one active..").unwrap();
        assert_eq!(seen("fix one active"), TextPresence::Yes);
        assert_eq!(seen("fix two active"), TextPresence::No);
        std::fs::write(bin.join("notes.txt"), "fix two active").unwrap();
        assert_eq!(seen("fix two active"), TextPresence::No, "only libraries count");
        std::fs::write(dir.path().join("lib/libggml-cuda.so.0"), "..fix two active..").unwrap();
        assert_eq!(seen("fix two active"), TextPresence::Yes);
        std::fs::write(&binary, "#!/bin/sh\nexec other \"$@\"\n").unwrap();
        assert_eq!(seen("fix one active"), TextPresence::Script);
        assert!(find_text(&dir.path().join("missing"), "x").is_err());
    }
}
