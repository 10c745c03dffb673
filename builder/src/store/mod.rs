//! The store: one folder per build, named by its recipe's hash. A build is in it completely or not at all.
//!
//! ```text
//!  builds/0123456789abcdef/llama-server        the binary
//!                          lib*.so             its libraries, if it was built with some (`--arch any`)
//!                          provenance.json     its provenance
//!  builds/.incoming-0123456789abcdef/          being written or removed; renamed to the above when complete
//!  builds/.lock                                held by a process that writes or removes
//!  builds/.chosen.json                         the default build, and the rollback target
//! ```
//!
//! Entries that do not look like a build are reported and never touched. A build is removed file by file,
//! and only if its folder has no other files. A running process keeps its deleted binary, but could not be
//! restarted, so callers must not remove builds in use.
//!
//! A package may install builds next to this program, as `bin/llama-warden` and `lib/llama-warden/builds`. A
//! store made by [`BuildStore::with_bundled`] reads these builds after its own, and never changes them.

mod bundled;
mod chosen;
mod gc;
pub(crate) mod id;
mod lineage;
mod provenance;

use std::collections::BTreeSet;
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

/// A folder of builds. Cheap to create: only methods access the disk. Methods block briefly.
#[derive(Clone, Debug)]
pub struct BuildStore {
    root: PathBuf,
    /// Folder of the builds that a package installed next to this program.
    bundled: Option<PathBuf>,
}

/// Content of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreListing {
    /// Usable builds, newest first; the bundled ones last.
    pub builds: Vec<Provenance>,
    /// Ids of the bundled builds among them.
    pub bundled: Vec<BuildId>,
    /// Unusable folders named like a build, with the reason.
    pub damaged: Vec<(PathBuf, String)>,
    /// Entries that are no builds.
    pub foreign: Vec<PathBuf>,
}

impl BuildStore {
    /// The store under a data folder.
    pub fn new(data: &Path) -> Self {
        Self { root: data.join("builds"), bundled: None }
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
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(io_error("reading", &self.root)(error)),
        };
        for entry in entries.into_iter().flatten() {
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
        self.append_bundled(&mut listing);
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
        // A build may be in the store and bundled.
        let mut ids: BTreeSet<BuildId> = ids_in(&self.root).into_iter().collect();
        ids.extend(self.bundled.iter().flat_map(|folder| ids_in(folder)));
        ids.retain(|id| !wanted.is_empty() && id.as_str().starts_with(&wanted));
        let mut ids: Vec<BuildId> = ids.into_iter().collect();
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
        let folder = self.readable_folder(id);
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
        for (name, facts) in provenance.files() {
            match fs::metadata(folder.join(name)) {
                Ok(metadata) if metadata.is_file() && metadata.len() == facts.size => {}
                Ok(_) => return damaged(format!("{name} has not the size that it was built with")),
                Err(error) => return damaged(format!("{name} cannot be read ({error})")),
            }
        }
        Ok(provenance)
    }

    /// Path of a build's llama-server, after a check that it exists.
    ///
    /// # Errors
    /// Fails if the build does not exist or is damaged.
    pub fn binary(&self, id: &BuildId) -> Result<PathBuf> {
        self.show(id).map(|_| self.readable_folder(id).join(BINARY_FILE))
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
    /// Fails if the build does not exist or is bundled, or if its folder has other files; then nothing was
    /// removed.
    pub fn remove(&self, id: &BuildId) -> Result<()> {
        let folder = self.folder(id);
        if fs::symlink_metadata(&folder).is_err() {
            if let Some(bundled) = self.bundled_folder(id) {
                return Err(BuilderError::BundledBuild { id: id.to_string(), folder: bundled });
            }
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
        let folder = real(file.parent()?);
        let parent = folder.parent()?;
        let is_in_store = std::iter::once(&self.root).chain(&self.bundled).any(|root| real(root) == parent);
        is_in_store.then(|| file_name(&folder).parse().ok())?
    }

    fn lock(&self) -> Result<FileLock> {
        FileLock::wait(&self.root.join(LOCK_FILE))
    }

    /// Copies a binary, and the libraries next to it that `provenance` names, into the store. The caller
    /// holds the build's lock. Replaces a damaged build with the same id. The new build becomes the default
    /// only if it is a suitable successor of the previous default.
    pub(crate) fn install(&self, binary: &Path, provenance: &Provenance) -> Result<PathBuf> {
        let (incoming, folder) = (self.incoming(&provenance.id), self.folder(&provenance.id));
        let _lock = self.lock()?;
        // The user's first own build replaces a bundled one, also with an older or another llama.cpp.
        let before = self.default_build()?.filter(|before| !self.is_bundled(&before.id));
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
    for (name, _) in provenance.files() {
        let from = if name == BINARY_FILE { binary.to_owned() } else { binary.with_file_name(name) };
        fs::copy(&from, folder.join(name)).map_err(io_error("copying", from))?;
    }
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
        let is_ours = [BINARY_FILE, PROVENANCE_FILE].contains(&name.as_str()) || is_library(&name);
        if !file || !is_ours {
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
    for entry in fs::read_dir(folder).map_err(io_error("reading", folder))? {
        let path = entry.map_err(io_error("reading", folder))?.path();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("removing", path)(error));
            }
            _ => {}
        }
    }
    fs::remove_dir(folder).map_err(io_error("removing", folder))
}

/// Returns true for the file name of a library that a build may have next to its binary.
pub(crate) fn is_library(name: &str) -> bool {
    name.starts_with("lib") && Path::new(name).extension().is_some_and(|extension| extension == "so")
}

fn ids_in(folder: &Path) -> Vec<BuildId> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| file_name(&entry.path()).parse().ok()).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests;
