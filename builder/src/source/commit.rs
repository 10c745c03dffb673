//! Examines a commit as a source: finds llama.cpp in it, and its revision.

use std::path::Path;

use super::ExaminedSource;
use crate::error::{BuilderError, Result};
use crate::git::GitRepository;

pub(super) fn examine_commit(repository: &Path, shown: &str, commit: &str) -> Result<ExaminedSource> {
    let repository = GitRepository::open_as(repository, shown.to_owned())?;
    let tree = repository.tree(commit)?;
    let Some(located) = tree.located() else {
        return Err(BuilderError::NoLlamaCpp {
            path: format!("{shown} at {commit}").into(),
            top: tree.top_names(),
        });
    };
    Ok(ExaminedSource {
        given: shown.into(),
        kind: "git".into(),
        identity: format!("git-{commit}"),
        root: located.root.clone(),
        server: located.server.into(),
        revision: repository.revision(commit)?,
    })
}
