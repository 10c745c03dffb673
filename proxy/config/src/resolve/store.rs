//! The binary that a model's configuration asks for, and builds of the store.

use std::path::{Path, PathBuf};

use warden_builder::{BuildStore, BuilderError, ServerBehaviour};
use warden_patches::mitigation::BuildFacts;

/// Binary that a model's configuration asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BinaryChoice {
    /// A file.
    Path(PathBuf),
    /// A program name to be found in PATH.
    InPath(PathBuf),
    /// A build in the store, by its id or a prefix of it.
    Build(String),
    /// The newest build in the store; without builds there, the one that was installed with llama-warden, else
    /// the `llama-server` in PATH.
    Newest,
}

/// Finds a build by its id or a prefix of it; with `None`, finds the newest build.
pub type FindBuild<'a> = &'a (dyn Fn(Option<&str>) -> Result<Option<StoreBuild>, String> + Sync);

/// A build of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreBuild {
    /// Facts that decide which mitigations apply.
    pub facts: BuildFacts,
    /// Measured behaviour.
    pub measured: ServerBehaviour,
}

/// Finds a build by its id or a prefix of it, or the build in use. `Ok(None)` if there is none.
///
/// # Errors
/// The prefix matches several builds, or the build is damaged.
pub fn find_build(data_dir: &Path, id: Option<&str>) -> Result<Option<StoreBuild>, String> {
    let store = BuildStore::with_bundled(data_dir);
    let find = || -> Result<Option<StoreBuild>, BuilderError> {
        let found = match id {
            Some(prefix) => store.resolve(prefix).and_then(|id| store.show(&id)).map(Some)?,
            None => store.default_build()?,
        };
        let Some(provenance) = found else { return Ok(None) };
        let facts = provenance.facts(&store.binary(&provenance.id)?);
        Ok(Some(StoreBuild { facts, measured: provenance.verified.measured }))
    };
    match find() {
        Err(BuilderError::NoSuchBuild { .. }) => Ok(None),
        found => found.map_err(|error| error.to_string()),
    }
}

/// Returns a chosen build of the store. Ignores a damaged store, because a start reports it.
pub(super) fn chosen_build(data_dir: &Path, choice: &BinaryChoice) -> Option<StoreBuild> {
    let id = match choice {
        BinaryChoice::Build(id) => Some(id.as_str()),
        BinaryChoice::Newest => None,
        BinaryChoice::Path(_) | BinaryChoice::InPath(_) => return None,
    };
    find_build(data_dir, id).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_store_has_no_build_by_any_name() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(find_build(dir.path(), None), Ok(None));
        assert_eq!(find_build(dir.path(), Some("abc")), Ok(None));
    }
}
