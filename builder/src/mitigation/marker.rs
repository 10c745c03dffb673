//! Searches a binary, and the libraries beside it, for a text.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;

use crate::build::markers;
use crate::error::{Result, io_error};

/// Whether a text is in a binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// In it, or in a library beside it.
    Yes,
    /// In neither.
    No,
    /// It is a script, which runs something else.
    Script,
}

/// Searches a binary for a text; then the libraries of llama.cpp in its folder and in `../lib`, because a build with
/// shared libraries has its backends there.
///
/// # Errors
/// The binary cannot be read. A library that cannot be read is passed over.
pub fn find_text(binary: &Path, text: &str) -> Result<Presence> {
    if contains(binary, text)? {
        return Ok(Presence::Yes);
    }
    let mut start = [0; 2];
    let mut file = File::open(binary).map_err(io_error("opening", binary))?;
    if file.read_exact(&mut start).is_ok() && start == *b"#!" {
        return Ok(Presence::Script);
    }
    // A link may lead to where the libraries are.
    let binary = binary.canonicalize().map_err(io_error("finding", binary))?;
    let found = libraries(&binary).iter().any(|library| contains(library, text).unwrap_or(false));
    Ok(if found { Presence::Yes } else { Presence::No })
}

fn contains(file: &Path, text: &str) -> Result<bool> {
    let missing = markers::missing(file, std::iter::once((text, text)), &CancellationToken::new())?;
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
    fn a_text_is_found_in_the_binary_and_in_a_library_beside_it_and_in_no_other_file() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(dir.path().join("lib")).unwrap();
        let binary = bin.join("llama-server");
        let seen = |text: &str| find_text(&binary, text).unwrap();
        std::fs::write(&binary, "..fix one active..").unwrap();
        assert_eq!(seen("fix one active"), Presence::Yes);
        assert_eq!(seen("fix two active"), Presence::No);
        std::fs::write(bin.join("notes.txt"), "fix two active").unwrap();
        assert_eq!(seen("fix two active"), Presence::No, "only libraries count");
        std::fs::write(dir.path().join("lib/libggml-cuda.so.0"), "..fix two active..").unwrap();
        assert_eq!(seen("fix two active"), Presence::Yes);
        std::fs::write(&binary, "#!/bin/sh\nexec other \"$@\"\n").unwrap();
        assert_eq!(seen("fix one active"), Presence::Script);
        assert!(find_text(&dir.path().join("missing"), "x").is_err());
    }
}
