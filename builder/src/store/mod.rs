//! The store: one folder per build, named by its recipe's hash. A build is in it completely or not at all.
//!
//! ```text
//!  builds/0123456789abcdef/llama-server        the binary
//!                          provenance.json     its provenance
//!  builds/.incoming-0123456789abcdef/          being written or removed; renamed to the above when complete
//!  builds/.lock                                held by a process that writes or removes
//!  builds/.chosen.json                         the default build, and the rollback target
//! ```
//!
//! Entries that do not look like a build are reported and never touched. A build is removed file by file,
//! and only if its folder has no other files. A running process keeps its deleted binary, but could not be
//! restarted, so callers must not remove builds in use.

mod chosen;
mod gc;
pub(crate) mod id;
mod lineage;
mod provenance;

use std::path::{Path, PathBuf};
use std::{fs, io};

pub use chosen::{BuildChoices, BuildDecision, BuildMove};
pub use gc::{GcKeep, GcPlan};
pub use id::{BuildId, BuildIdError};
pub use lineage::{SuccessorObstacle, check_successor};
pub use provenance::{BinaryFacts, BuildHost, BuildTimings, PROVENANCE_SCHEMA, Provenance};

use crate::error::{BuilderError, Result, io_error};
use crate::lock::FileLock;

const BINARY_FILE: &str = "llama-server";
const PROVENANCE_FILE: &str = "provenance.json";
/// Name prefix of folders that are being written or removed.
const INCOMING_PREFIX: &str = ".incoming-";
const LOCK_FILE: &str = ".lock";
const CHOICES_FILE: &str = ".chosen.json";
/// File of an unfinished rollout; with the prefix [`CHOICES_FILE`], the file is not listed as foreign.
const MOVE_FILE: &str = ".chosen.json.move";
/// All files of a build's folder; no others are removed with it.
const BUILD_FILES: [&str; 2] = [BINARY_FILE, PROVENANCE_FILE];

/// A folder of builds. Cheap to create: only methods access the disk. Methods block briefly.
#[derive(Clone, Debug)]
pub struct BuildStore {
    root: PathBuf,
}

/// Content of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreListing {
    /// Usable builds, newest first.
    pub builds: Vec<Provenance>,
    /// Unusable folders named like a build, with the reason.
    pub damaged: Vec<(PathBuf, String)>,
    /// Entries that are no builds.
    pub foreign: Vec<PathBuf>,
}

impl BuildStore {
    /// The store under a data folder.
    pub fn new(data: &Path) -> Self {
        Self { root: data.join("builds") }
    }

    /// The store's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Lists the content. A store that does not exist yet is empty.
    ///
    /// # Errors
    /// Fails if the folder exists and cannot be read.
    pub fn list(&self) -> Result<StoreListing> {
        let mut listing = StoreListing::default();
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(listing),
            Err(error) => return Err(io_error("reading", &self.root)(error)),
        };
        for entry in entries {
            let path = entry.map_err(io_error("reading", &self.root))?.path();
            match file_name(&path).parse::<BuildId>() {
                Ok(id) => match self.show(&id) {
                    Ok(build) => listing.builds.push(build),
                    Err(error) => listing.damaged.push((path, error.to_string())),
                },
                Err(_) if file_name(&path).starts_with(INCOMING_PREFIX) || file_name(&path) == LOCK_FILE => {}
                Err(_) if file_name(&path).starts_with(CHOICES_FILE) => {}
                Err(_) => listing.foreign.push(path),
            }
        }
        listing.builds.sort_by(|one, other| (&other.built_at, &other.id).cmp(&(&one.built_at, &one.id)));
        listing.damaged.sort();
        listing.foreign.sort();
        Ok(listing)
    }

    /// Resolves a prefix to an id. Damaged builds count, so that they can be removed.
    ///
    /// # Errors
    /// Fails if no build has this prefix, or if several builds have it.
    pub fn resolve(&self, prefix: &str) -> Result<BuildId> {
        let wanted = prefix.to_ascii_lowercase();
        let mut ids: Vec<BuildId> = match fs::read_dir(&self.root) {
            Ok(entries) => {
                entries.flatten().filter_map(|entry| file_name(&entry.path()).parse().ok()).collect()
            }
            Err(_) => Vec::new(),
        };
        ids.retain(|id| !wanted.is_empty() && id.as_str().starts_with(&wanted));
        ids.sort();
        match ids.len() {
            0 => Err(BuilderError::NoSuchBuild { id: prefix.to_owned(), store: self.root.clone() }),
            1 => Ok(ids.remove(0)),
            _ => Err(BuilderError::AmbiguousBuild { prefix: prefix.to_owned(), ids }),
        }
    }

    /// Reads a build's provenance and checks its folder.
    ///
    /// # Errors
    /// Fails if the build does not exist or is damaged.
    pub fn show(&self, id: &BuildId) -> Result<Provenance> {
        let folder = self.folder(id);
        let damaged = |why: String| Err(BuilderError::DamagedBuild { path: folder.clone(), why });
        if !folder.exists() {
            return Err(BuilderError::NoSuchBuild { id: id.to_string(), store: self.root.clone() });
        }
        let text = match fs::read(folder.join(PROVENANCE_FILE)) {
            Ok(text) => text,
            Err(error) => return damaged(format!("{PROVENANCE_FILE} cannot be read ({error})")),
        };
        let provenance: Provenance = match serde_json::from_slice(&text) {
            Ok(provenance) => provenance,
            Err(error) => return damaged(format!("{PROVENANCE_FILE} cannot be understood ({error})")),
        };
        if provenance.schema != PROVENANCE_SCHEMA || provenance.id != *id {
            return damaged(format!(
                "{PROVENANCE_FILE} is that of {} in version {}",
                provenance.id, provenance.schema
            ));
        }
        match fs::metadata(folder.join(BINARY_FILE)) {
            Ok(metadata) if metadata.is_file() && metadata.len() == provenance.binary.size => Ok(provenance),
            Ok(_) => damaged(format!("{BINARY_FILE} has not the size that it was built with")),
            Err(error) => damaged(format!("{BINARY_FILE} cannot be read ({error})")),
        }
    }

    /// Path of a build's llama-server, after a check that it exists.
    ///
    /// # Errors
    /// Fails if the build does not exist or is damaged.
    pub fn binary(&self, id: &BuildId) -> Result<PathBuf> {
        self.show(id).map(|_| self.folder(id).join(BINARY_FILE))
    }

    /// The newest usable build, if there is one.
    ///
    /// # Errors
    /// Fails if the store cannot be read.
    pub fn newest(&self) -> Result<Option<Provenance>> {
        Ok(self.list()?.builds.into_iter().next())
    }

    /// Removes a build, damaged or not. Waits for other processes that write or remove.
    ///
    /// # Errors
    /// Fails if the build does not exist, or if its folder has other files; then nothing was removed.
    pub fn remove(&self, id: &BuildId) -> Result<()> {
        let folder = self.folder(id);
        if fs::symlink_metadata(&folder).is_err() {
            return Err(BuilderError::NoSuchBuild { id: id.to_string(), store: self.root.clone() });
        }
        let _lock = self.lock()?;
        check_only_ours(&folder)?;
        // Rename the folder first, so that no process finds a partial build while its files are removed.
        let going = self.incoming(id);
        remove_files(&going)?;
        fs::rename(&folder, &going).map_err(io_error("removing", folder))?;
        remove_files(&going)
    }

    /// Returns the build whose folder in this store contains a file.
    pub fn find_by_file(&self, file: &Path) -> Option<BuildId> {
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        // A removed file has no canonical path, but its folder may have one.
        let (folder, root) = (real(file.parent()?), real(&self.root));
        (folder.parent()? == root).then(|| file_name(&folder).parse().ok())?
    }

    fn lock(&self) -> Result<FileLock> {
        FileLock::wait(&self.root.join(LOCK_FILE))
    }

    /// Moves a binary into the store. The caller holds the build's lock. Replaces a damaged build with the
    /// same id. The new build becomes the default only if it is a suitable successor of the previous default.
    pub(crate) fn install(&self, binary: &Path, provenance: &Provenance) -> Result<PathBuf> {
        let (incoming, folder) = (self.incoming(&provenance.id), self.folder(&provenance.id));
        let _lock = self.lock()?;
        let before = self.default_build()?;
        remove_files(&incoming)?;
        fs::create_dir(&incoming).map_err(io_error("creating", &incoming))?;
        let done = write_files(&incoming, binary, provenance).and_then(|()| {
            remove_files(&folder)?;
            fs::rename(&incoming, &folder).map_err(io_error("moving", &incoming))
        });
        if done.is_err() {
            // Ignore a second error: the caller gets the first one.
            remove_files(&incoming).ok();
        }
        done?;
        self.hold_previous(before, provenance)?;
        Ok(folder.join(BINARY_FILE))
    }

    fn folder(&self, id: &BuildId) -> PathBuf {
        self.root.join(id.as_str())
    }

    fn incoming(&self, id: &BuildId) -> PathBuf {
        self.root.join(format!("{INCOMING_PREFIX}{id}"))
    }
}

fn write_files(folder: &Path, binary: &Path, provenance: &Provenance) -> Result<()> {
    let to = folder.join(BINARY_FILE);
    fs::copy(binary, &to).map_err(io_error("copying", binary))?;
    let file = folder.join(PROVENANCE_FILE);
    let mut text =
        serde_json::to_vec_pretty(provenance).map_err(|error| io_error("writing", &file)(error.into()))?;
    text.push(b'\n');
    // No fsync, which takes ten seconds on a machine that just compiled. A file truncated by a power
    // failure has a wrong size, and then the build is repeated.
    fs::write(&file, text).map_err(io_error("writing", &file))
}

fn check_only_ours(folder: &Path) -> Result<()> {
    let foreign = |why: String| Err(BuilderError::ForeignInBuild { path: folder.to_owned(), why });
    let facts = fs::symlink_metadata(folder).map_err(io_error("reading", folder))?;
    if !facts.is_dir() {
        return foreign("it is no folder".to_owned());
    }
    for entry in fs::read_dir(folder).map_err(io_error("reading", folder))? {
        let entry = entry.map_err(io_error("reading", folder))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let file = entry.file_type().is_ok_and(|kind| kind.is_file() || kind.is_symlink());
        if !file || !BUILD_FILES.contains(&name.as_str()) {
            return foreign(format!("`{name}` is in it"));
        }
    }
    Ok(())
}

/// Removes a folder of a complete or partial build, if it exists. The caller holds the lock.
fn remove_files(folder: &Path) -> Result<()> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(());
    }
    check_only_ours(folder)?;
    for name in BUILD_FILES {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("removing", folder)(error));
            }
            _ => {}
        }
    }
    fs::remove_dir(folder).map_err(io_error("removing", folder))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;
