//! Finds builds in the store, for models that name one by id or use the default.

use std::path::Path;

use warden_builder::{BuildStore, BuilderError};

use super::binary::{self, BinaryChoice, StoreBuild};
use crate::machine::HostMachine;
use crate::problem::ConfigProblems;
use crate::resolve::ResolvedConfig;

/// Finds and checks the binaries of all models, among them builds in the store.
///
/// # Errors
/// The errors of [`binary::fill_binaries`].
pub async fn fill_from_store(
    resolved: &mut ResolvedConfig,
    machine: &HostMachine,
) -> Result<(), ConfigProblems> {
    let data = resolved.dirs.data.clone();
    let other = resolved.other_store.clone();
    let look = |id: Option<&str>| match (find_build(&data, id)?, &other) {
        (None, Some(other)) if id.is_some() => find_build(other, id),
        (found, _) => Ok(found),
    };
    binary::fill_binaries(resolved, machine, &look).await
}

/// Finds a build by its id or a prefix of it, or the build in use. `Ok(None)` if there is none.
///
/// # Errors
/// The prefix matches several builds, or the build is damaged.
pub fn find_build(data_dir: &Path, id: Option<&str>) -> Result<Option<StoreBuild>, String> {
    let store = BuildStore::new(data_dir);
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
