//! Finds builds in the store, for models that name one by id or use the default.

use std::path::Path;

use warden_builder::{BuildStore, BuilderError};

use super::binary::{self, StoreBuild};
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
    let (data, other) = (resolved.dirs.data.clone(), resolved.other_store.clone());
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
    let found = match id {
        Some(prefix) => store.resolve(prefix).and_then(|id| store.show(&id)),
        None => match store.default_build() {
            Ok(Some(build)) => Ok(build),
            Ok(None) => return Ok(None),
            Err(error) => Err(error),
        },
    };
    let build = found.and_then(|provenance| {
        let facts = provenance.facts(&store.binary(&provenance.id)?);
        Ok(StoreBuild { facts, measured: provenance.verified.measured })
    });
    match build {
        Ok(build) => Ok(Some(build)),
        Err(BuilderError::NoSuchBuild { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
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
