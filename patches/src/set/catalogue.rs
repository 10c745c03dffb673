//! The available patch sets: those embedded in the program, and the user's own.

use std::path::Path;
use std::{fs, io};

use super::fix::SetFix;
use super::{PatchSet, SetOrigin, load, names};
use crate::embedded;
use crate::error::{PatchError, Result, io_error};

/// The available sets. Set ids are unique in the catalogue, and so are fix ids.
#[derive(Clone, Debug, Default)]
pub struct SetCatalogue {
    sets: Vec<PatchSet>,
}

impl SetCatalogue {
    /// The curated sets, sorted by id.
    ///
    /// # Errors
    ///
    /// Fails if an embedded set is invalid, which this crate's tests exclude.
    pub fn embedded() -> Result<Self> {
        let mut catalogue = Self::default();
        for (path, _) in embedded::embedded_files() {
            let Some(id) = path.strip_suffix("/set.toml").filter(|id| !id.contains('/')) else { continue };
            let read = |file: &str| Ok(embedded::embedded_file(&format!("{id}/{file}")).map(<[u8]>::to_vec));
            catalogue.add(load::load_set(id, &format!("patches/{id}"), SetOrigin::Embedded, &read)?)?;
        }
        Ok(catalogue)
    }

    /// Adds the user's own sets: `folder` is a set or a folder of sets.
    ///
    /// # Errors
    ///
    /// Fails if a set is invalid, if the folder has no set, or if an id exists already.
    pub fn with_folder(mut self, folder: &Path) -> Result<Self> {
        // Canonical, so that `.` and the like have a name.
        let folder = fs::canonicalize(folder).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => PatchError::Set {
                file: folder.display().to_string(),
                line: None,
                key: String::new(),
                why: "there is no such folder".to_owned(),
            },
            _ => io_error("reading", folder)(error),
        })?;
        let mut sets = Vec::new();
        if folder.join(load::SET_FILE).is_file() {
            sets.push(folder.clone());
        } else {
            for entry in fs::read_dir(&folder).map_err(io_error("reading", &folder))? {
                let path = entry.map_err(io_error("reading", &folder))?.path();
                if path.join(load::SET_FILE).is_file() {
                    sets.push(path);
                }
            }
            sets.sort();
        }
        if sets.is_empty() {
            return Err(PatchError::Set {
                file: folder.display().to_string(),
                line: None,
                key: String::new(),
                why: format!("there is no {} in it, nor in a folder in it", load::SET_FILE),
            });
        }
        for path in sets {
            let id = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            let read = |file: &str| {
                let file = path.join(file);
                match fs::read(&file) {
                    Ok(content) => Ok(Some(content)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(io_error("reading", file)(error)),
                }
            };
            // The configuration and a flag may name the same folder.
            if self.sets.iter().any(|set| set.origin == SetOrigin::Folder(path.clone())) {
                continue;
            }
            let set =
                load::load_set(&id, &path.display().to_string(), SetOrigin::Folder(path.clone()), &read)?;
            self.add(set)?;
        }
        Ok(self)
    }

    fn add(&mut self, set: PatchSet) -> Result<()> {
        let taken = |what: &str, id: &str, other: &PatchSet| {
            Err(PatchError::Set {
                file: match &set.origin {
                    SetOrigin::Embedded => format!("patches/{}/{}", set.id, load::SET_FILE),
                    SetOrigin::Folder(path) => path.join(load::SET_FILE).display().to_string(),
                },
                line: None,
                key: String::new(),
                why: format!(
                    "the {what} `{id}` is taken by the set `{}` ({}): rename it",
                    other.id, other.origin
                ),
            })
        };
        if let Some(other) = self.set(&set.id) {
            return taken("id", &set.id, other);
        }
        for fix in &set.fixes {
            if let Some((other, _)) = self.fix(&fix.id) {
                return taken("fix", &fix.id, other);
            }
        }
        if let SetOrigin::Folder(path) = &set.origin {
            names::check_own_names(self, &set, path)?;
        }
        self.sets.push(set);
        Ok(())
    }

    /// All sets, curated ones first.
    pub fn sets(&self) -> &[PatchSet] {
        &self.sets
    }

    /// The set with this id.
    pub fn set(&self, id: &str) -> Option<&PatchSet> {
        self.sets.iter().find(|set| set.id == id)
    }

    /// The fix with this id, and its set.
    pub fn fix(&self, id: &str) -> Option<(&PatchSet, &SetFix)> {
        self.sets.iter().find_map(|set| set.fix(id).map(|fix| (set, fix)))
    }

    /// The set with this id, or an error.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub fn require(&self, id: &str) -> Result<&PatchSet> {
        self.set(id).ok_or_else(|| PatchError::NoSuchSet {
            id: id.to_owned(),
            known: self.sets.iter().map(|set| set.id.clone()).collect(),
        })
    }
}
