//! Writes the llama.cpp of a commit into a folder: the files of a git checkout, without git's metadata,
//! submodules and models. Registers no worktree.
//!
//! # Missing objects
//!
//! A partial clone lacks large files until they are requested. A missing file fails the build only if the
//! build may need it: everything in `src/`, `ggml/`, `include/`, `common/`, `cmake/` and `vendor/`;
//! sources, headers and `.txt` in `tools/` and (in old trees) `examples/`; any `CMakeLists.txt` or
//! `.cmake`; files at the top. Other missing files (pages of the web interface, models, test data,
//! documentation) are skipped with a note.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;

use git2::{ErrorCode, ObjectType, Oid};
use tokio_util::sync::CancellationToken;

use super::commit_tree::{CommitTree, LINK_MODE};
use super::fault::GitError;
use crate::archive::stays_inside;
use crate::error::{BuilderError, Result, check_cancelled, io_error, list_names};
use crate::event::EventReporter;
use crate::source::{is_source, join_names};

const REQUIRED_FOLDERS: [&str; 6] = ["src/", "ggml/", "include/", "common/", "cmake/", "vendor/"];
/// Folders from which a build needs only files with the extensions in [`CODE_EXTENSIONS`].
const PARTIAL_FOLDERS: [&str; 2] = ["tools/", "examples/"];
const CODE_EXTENSIONS: [&str; 7] = ["c", "cc", "cpp", "h", "hpp", "txt", "in"];
/// Limits of a written tree, in bytes and files; the same as those of an archive.
const TREE_LIMITS: (u64, u64) = (2 << 30, 100_000);
const MAX_SHOWN_FILES: usize = 3;

impl CommitTree {
    /// Writes the tree into an empty folder. Blocks.
    pub(crate) fn write_to(
        &self,
        into: &Path,
        reporter: &EventReporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        let (root, name) = self.root_tree().ok_or_else(|| self.missing(self.root().unwrap_or_default()))?;
        let mut writing =
            TreeWriter { tree: self, top: name, into, cancel, bytes: 0, files: 0, skipped: Vec::new() };
        writing.write_folder(root, "")?;
        let skipped = writing.skipped;
        if !skipped.is_empty() {
            reporter.note(format!(
                "{} lacks {}: left out, as builds hardly ever need such files",
                self.repository().shown(),
                list_names(&skipped, MAX_SHOWN_FILES)
            ));
        }
        Ok(())
    }
}

struct TreeWriter<'a> {
    tree: &'a CommitTree,
    top: &'a str,
    into: &'a Path,
    cancel: &'a CancellationToken,
    bytes: u64,
    files: u64,
    skipped: Vec<String>,
}

impl TreeWriter<'_> {
    fn write_folder(&mut self, tree: Oid, name: &str) -> Result<()> {
        let path = self.into.join(name);
        fs::create_dir_all(&path).map_err(io_error("creating", path))?;
        let repository = self.tree.repository();
        let entries: Vec<_> = {
            let repo = repository.lock();
            let tree = repo.find_tree(tree).map_err(|error| self.missing_error(name, &error))?;
            tree.iter().map(|entry| entry.to_owned()).collect()
        };
        for entry in entries {
            check_cancelled(self.cancel)?;
            let raw = String::from_utf8_lossy(entry.name_bytes()).into_owned();
            let below = join_names(name, &raw);
            // git itself refuses such names, but a crafted tree object may contain them.
            if raw.is_empty() || raw == "." || raw == ".." || raw.contains(['/', '\\', '\0']) {
                return self.unsafe_error(&below, "has a name that leads elsewhere");
            }
            if !is_source(&below) || raw.eq_ignore_ascii_case(".git") {
                continue;
            }
            match entry.kind() {
                Some(ObjectType::Tree) => self.write_folder(entry.id(), &below)?,
                Some(ObjectType::Blob) => self.write_file(entry.id(), entry.filemode(), below)?,
                // Skip submodules: upstream removed its last one before the first commit that we support.
                _ => {}
            }
        }
        Ok(())
    }

    fn write_file(&mut self, id: Oid, mode: i32, name: String) -> Result<()> {
        let content = match self.tree.repository().blob(id, TREE_LIMITS.0 - self.bytes) {
            Ok(Some(content)) if self.files < TREE_LIMITS.1 => content,
            Ok(_) => {
                return self.unsafe_error(&name, "is beyond the size of any llama.cpp (2 GiB, 100000 files)");
            }
            Err(error) if error.code() == ErrorCode::NotFound && !is_needed(&name) => {
                self.skipped.push(name);
                return Ok(());
            }
            Err(error) => return Err(self.missing_error(&name, &error)),
        };
        self.files += 1;
        self.bytes += content.len() as u64;
        let path = self.into.join(&name);
        if mode == LINK_MODE {
            let target = String::from_utf8_lossy(&content);
            if !stays_inside(&name, &target) {
                return self.unsafe_error(&name, "is a link that leads out of the source");
            }
            return symlink(&*target, &path).map_err(io_error("writing", path));
        }
        let mode = if mode & 0o100 == 0 { 0o644 } else { 0o755 };
        // `create_new` follows no link: a crafted tree may contain a name twice, once as a link.
        let mut file = match OpenOptions::new().write(true).create_new(true).mode(mode).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return self.unsafe_error(&name, "is there twice");
            }
            Err(error) => return Err(io_error("writing", path)(error)),
        };
        file.write_all(&content).map_err(io_error("writing", path))
    }

    fn missing_error(&self, name: &str, error: &git2::Error) -> BuilderError {
        if error.code() == ErrorCode::NotFound {
            return self.tree.missing(&join_names(self.top, name)).into();
        }
        GitError::repository("reading a file of", self.tree.repository().shown(), error).into()
    }

    fn unsafe_error(&self, name: &str, why: &'static str) -> Result<()> {
        let commit = self.tree.commit().to_owned();
        Err(GitError::Unsafe { commit, entry: join_names(self.top, name), why }.into())
    }
}

/// Returns true if a build may need the file, by the rules of this module.
fn is_needed(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    let extension = Path::new(file).extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    !name.contains('/')
        || extension == "cmake"
        || file == "CMakeLists.txt"
        || REQUIRED_FOLDERS.iter().any(|folder| name.starts_with(folder))
        || (PARTIAL_FOLDERS.iter().any(|folder| name.starts_with(folder))
            && CODE_EXTENSIONS.contains(&extension))
}

#[cfg(test)]
mod tests {
    use super::is_needed;

    #[test]
    fn what_a_build_needs_is_told_from_the_rest() {
        for name in [
            "src/llama.cpp",
            "ggml/src/ggml-cuda/template-instances/x.cu",
            "tools/server/server.cpp",
            "examples/server/utils.hpp",
            "pocs/vdot/CMakeLists.txt",
            "CMakeLists.txt",
            "vendor/cpp-httplib/httplib.h",
        ] {
            assert!(is_needed(name), "{name}");
        }
        for name in [
            "tools/server/public/index.html.gz",
            "examples/server/webui/dist/index.html",
            "media/logo.png",
            "docs/build.md",
            "models/ggml-vocab.gguf.inp",
            "tests/data/x.json",
        ] {
            assert!(!is_needed(name), "{name}");
        }
    }
}
