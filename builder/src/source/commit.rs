//! Examines a commit as a source: finds llama.cpp in it, and its revision.

use std::path::Path;

use super::Found;
use crate::error::{Error, Result};
use crate::git::Repository;

pub(super) fn examine(repository: &Path, shown: &str, commit: &str) -> Result<Found> {
    let repository = Repository::open_as(repository, shown.to_owned())?;
    let tree = repository.tree(commit)?;
    let Some(located) = tree.located() else {
        return Err(Error::NoLlamaCpp { path: format!("{shown} at {commit}").into(), top: tree.top_names() });
    };
    Ok(Found {
        given: shown.into(),
        kind: "git".into(),
        identity: format!("git-{commit}"),
        root: located.root.clone(),
        server: located.server.into(),
        revision: repository.revision(commit)?,
    })
}
