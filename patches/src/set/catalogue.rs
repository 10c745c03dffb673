//! The available patch sets (embedded in the program, or the user's), and the selection for a build.

use std::path::Path;
use std::{fs, io};

use super::fix::SetFix;
use super::{PatchSet, SetOrigin, load};
use crate::embedded;
use crate::error::{PatchError, Result, io_error};
use crate::mitigation::MitigationCatalogue;
use crate::prove::ProofRecords;

/// The available sets. Set ids are unique in the catalogue, and so are fix ids.
#[derive(Clone, Debug, Default)]
pub struct SetCatalogue {
    sets: Vec<PatchSet>,
}

impl SetCatalogue {
    /// The curated sets, sorted by id.
    ///
    /// # Errors
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
    /// Fails if a set is invalid, if the folder has no set, or if an id exists already.
    pub fn with_folder(mut self, folder: &Path) -> Result<Self> {
        // Resolve the path, so that `.` and the like have a folder name.
        let folder = fs::canonicalize(folder).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                PatchError::set(folder.display().to_string(), "", "there is no such folder")
            }
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
            let why = format!("there is no {} in it, nor in a folder in it", load::SET_FILE);
            return Err(PatchError::set(folder.display().to_string(), "", why));
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
            let file = match &set.origin {
                SetOrigin::Embedded => format!("patches/{}/{}", set.id, load::SET_FILE),
                SetOrigin::Folder(path) => path.join(load::SET_FILE).display().to_string(),
            };
            let (set, origin) = (&other.id, &other.origin);
            let why = format!("the {what} `{id}` is taken by the set `{set}` ({origin}): rename it");
            Err(PatchError::set(file, "", why))
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
            check_own_names(self, &set, path)?;
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
    /// Fails if there is none.
    pub fn require(&self, id: &str) -> Result<&PatchSet> {
        self.set(id).ok_or_else(|| PatchError::NoSuchSet {
            id: id.to_owned(),
            known: self.sets.iter().map(|set| set.id.clone()).collect(),
        })
    }
}

/// Selected sets for a build, and the strictness of their application.
#[derive(Clone, Debug, Default)]
pub struct SetSelection {
    /// Available sets.
    pub catalogue: SetCatalogue,
    /// Selected sets.
    pub sets: SelectedSets,
    /// True if sets with an unknown seam are applied, too.
    pub allow_unverified: bool,
    /// Records of this machine.
    pub proofs: ProofRecords,
}

/// Selected sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SelectedSets {
    /// All sets for the backend.
    #[default]
    Default,
    /// No set: unpatched upstream.
    None,
    /// Only the sets with these ids, for any backend.
    Only(Vec<String>),
}

impl SetSelection {
    /// The sets for a build with this backend, such as `cuda`, in the catalogue's order.
    pub(crate) fn sets_for(&self, backend: &str) -> Result<Vec<&PatchSet>> {
        match &self.sets {
            SelectedSets::Default => {
                Ok(self.catalogue.sets().iter().filter(|set| set.is_for(backend)).collect())
            }
            SelectedSets::None => Ok(Vec::new()),
            SelectedSets::Only(ids) => {
                for id in ids {
                    self.catalogue.require(id)?;
                }
                Ok(self.catalogue.sets().iter().filter(|set| ids.contains(&set.id)).collect())
            }
        }
    }
}

/// Prefixes of variables with a meaning for llama-server, ggml, the dynamic loader or us.
const FOREIGN_PREFIXES: [&str; 8] =
    ["LLAMA_ARG_", "GGML_", "CUDA_", "HIP_", "ROCR_", "LD_", "MALLOC_", "LLAMA_WARDEN_PATHS"];

/// Fails if a name in the user's own set, in the folder `path`, exists already: the configuration refers to
/// fixes, other mitigations and leaks by name alone, and a process has a single environment.
fn check_own_names(all: &SetCatalogue, set: &PatchSet, path: &Path) -> Result<()> {
    let wrong = |key: &str, why: &str| {
        Err(PatchError::set(path.join(load::SET_FILE).display().to_string(), key, why))
    };
    let list = MitigationCatalogue::embedded()?;
    for fix in &set.fixes {
        let key = format!("fix[{}]", fix.id);
        if list.leak(&fix.id).is_some() {
            return wrong(&key, "the name is that of a leak in the list of mitigations: rename the fix");
        }
        if list.mitigation(&fix.id).is_some() {
            let why = "the name is that of a mitigation that needs no patch (`llama-warden mitigations list`): \
                       rename the fix";
            return wrong(&key, why);
        }
        if fix.id.contains("--") || fix.id.starts_with('-') || fix.id.ends_with('-') {
            return wrong(&key, "begin and end it with a letter or a digit, with single dashes between");
        }
        for variable in &fix.variables {
            let key = format!("fix[{}].variable[{}]", fix.id, variable.name);
            if let Some(prefix) = FOREIGN_PREFIXES.iter().find(|prefix| variable.name.starts_with(*prefix)) {
                let why = format!(
                    "variables that begin with {prefix} mean something else to the process: rename it"
                );
                return wrong(&key, &why);
            }
            let users = all.sets.iter().flat_map(|other| other.fixes.iter().map(move |fix| (other, fix)));
            let taken = users.into_iter().find(|(_, other)| other.variable(&variable.name).is_some());
            if let Some((other, theirs)) = taken {
                let whose = if other.origin == SetOrigin::Embedded { "the curated set" } else { "the set" };
                let why = format!(
                    "{whose} `{}` reads it for its fix {}: one of the two would be switched on by the other; rename it",
                    other.id, theirs.id
                );
                return wrong(&key, &why);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn told(fix: &str, variable: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let set = folder.path().join("mine");
        fs::create_dir(&set).unwrap();
        let text = format!(
            "schema = 1\nid = \"mine\"\ntitle = \"t\"\n\n[[diff]]\nfile = \"a.patch\"\nfirst = \"b1\"\n\n\
             [[fix]]\nid = \"{fix}\"\ntitle = \"t\"\nsymptom = \"s\"\n\n\
             [[fix.variable]]\nname = \"{variable}\"\ntype = \"flag\"\n"
        );
        fs::write(set.join("set.toml"), text).unwrap();
        fs::write(set.join("a.patch"), "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n a\n+b\n").unwrap();
        match SetCatalogue::embedded().unwrap().with_folder(folder.path()) {
            Ok(_) => "fine".to_owned(),
            Err(error) => error.to_string().split_once("set.toml").unwrap().1.to_owned(),
        }
    }

    #[test]
    fn a_set_of_ones_own_takes_no_name_that_means_something_else() {
        assert_eq!(told("mine-fix", "MINE"), "fine");
        let all = [
            told("graph-cache-cap", "MINE"),
            told("no-cuda-graphs", "MINE"),
            told("cuda-graph-window", "MINE"),
            told("-mine", "MINE"),
            told("mine-fix", "LLAMA_WARDEN_RECLAIM"),
            told("mine-fix", "LLAMA_ARG_CTX_SIZE"),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }

    #[test]
    fn a_folder_that_is_named_twice_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let set = folder.path().join("mine");
        fs::create_dir(&set).unwrap();
        fs::write(
            set.join("set.toml"),
            "schema = 1\nid = \"mine\"\ntitle = \"t\"\n[[diff]]\nfile = \"a.patch\"\nfirst = \"b1\"\n",
        )
        .unwrap();
        fs::write(set.join("a.patch"), "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n a\n+b\n").unwrap();
        let all =
            SetCatalogue::embedded().unwrap().with_folder(folder.path()).unwrap().with_folder(&set).unwrap();
        assert_eq!(all.sets().iter().filter(|set| set.id == "mine").count(), 1);
    }
}
