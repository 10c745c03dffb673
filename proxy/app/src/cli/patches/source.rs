//! The source of llama.cpp that a command reads: a folder, an archive, or commits of a repository.

use std::path::PathBuf;

use clap::Args;
use warden_builder::git::{GitLocation, GitRepository, RevisionInfo};
use warden_builder::{BuildSource, Builder};
use warden_patches::SourceTree;
use warden_policies::defaults::Build;

use crate::cli::build::GitArgs;
use crate::exit::CommandError;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SourceArgs {
    /// Folder or archive (.tar.gz, .tar.xz, .zip) that contains llama.cpp.
    #[arg(long, visible_alias = "tree", value_name = "PATH", conflicts_with_all = ["git", "reference", "offline"])]
    source: Option<PathBuf>,
    #[command(flatten)]
    git: GitArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct RangeArgs {
    /// Range of commits after A up to B, oldest first: tags, branches, commits, or builds such as b4881.
    #[arg(long, value_name = "A..B")]
    pub(super) range: Option<String>,
    /// Uses only every N-th commit of the range, and the last one.
    #[arg(long, value_name = "N", requires = "range", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) every: u32,
}

/// A source tree with its label.
pub(super) struct OpenedTree {
    pub(super) tree: Box<dyn SourceTree>,
    /// Label, such as `b8827`, `a0c91e8f9` or the name of a folder.
    pub(super) label: String,
    /// Source as the user gave it.
    pub(super) shown: String,
}

impl SourceArgs {
    /// Returns whether a folder or an archive is given.
    pub(super) fn is_path(&self) -> bool {
        self.source.is_some()
    }

    /// Returns whether `--ref` names a commit, which excludes a range.
    pub(super) fn names_commit(&self) -> bool {
        self.git.names_commit()
    }

    /// Opens the source, and fetches the commit if needed.
    pub(super) async fn open(&self, builder: &Builder, numbers: &Build) -> Result<OpenedTree, CommandError> {
        Ok(self.open_with(None, builder, numbers).await?.0)
    }

    /// Opens the source, or `other` in its place. Returns the tree, and the source for builds.
    pub(super) async fn open_with(
        &self,
        other: Option<BuildSource>,
        builder: &Builder,
        numbers: &Build,
    ) -> Result<(OpenedTree, BuildSource), CommandError> {
        let source = match (other, &self.source) {
            (Some(other), _) => other,
            (None, Some(path)) => BuildSource::at(path)?,
            (None, None) => builder.git(&self.git.repository_request(numbers, false)?).await?,
        };
        let whole = source.clone();
        let shown = match &source {
            BuildSource::Commit { shown, .. } => shown.clone(),
            BuildSource::Directory(path) | BuildSource::Archive(path) => path.display().to_string(),
        };
        let (cache, cancel) = (builder.dirs.cache.clone(), builder.cancel.clone());
        let opened = run_blocking(move || {
            let tree = source.tree(&cache, &cancel)?;
            Ok((tree, source))
        });
        let (tree, source) = opened.await?;
        let revision = tree.revision();
        let label = match (revision.build_number, revision.commit.is_some(), source) {
            (Some(number), ..) => format!("b{number}"),
            (None, true, _) => revision.short_commit().to_owned(),
            (None, false, source) => source
                .path()
                .file_name()
                .map_or_else(|| shown.clone(), |name| name.to_string_lossy().into_owned()),
        };
        Ok((OpenedTree { tree, label, shown }, whole))
    }

    /// Fetches the commits of a range with their repository, oldest first.
    pub(super) async fn fetch_range(
        &self,
        range: &str,
        every: u32,
        builder: &Builder,
        numbers: &Build,
    ) -> Result<(std::sync::Arc<GitRepository>, Vec<RevisionInfo>), CommandError> {
        let (from, to) = split_range(range)?;
        let mut request = self.git.repository_request(numbers, true)?;
        // A remote has no name for a build without a tag: fetch all commits, and find the build by its
        // number, which counts commits.
        let by_count = to.strip_prefix('b').is_some_and(|digits| digits.parse::<u32>().is_ok());
        let on_server = matches!(request.location, GitLocation::Url(_));
        request.reference = (!(on_server && by_count)).then(|| to.to_owned());
        let obtained = builder.repository(&request).await?;
        let (from, to, every) = (from.to_owned(), to.to_owned(), every as usize);
        run_blocking(move || {
            let repository = obtained.repository;
            let revisions = repository.range(&from, &to, every)?;
            Ok((repository, revisions))
        })
        .await
    }
}

/// Splits `A..B`.
fn split_range(range: &str) -> Result<(&str, &str), CommandError> {
    match range.split_once("..") {
        Some((from, to)) if !from.is_empty() && !to.is_empty() && !to.starts_with('.') => Ok((from, to)),
        _ => Err(CommandError::usage(
            format!("--range {range}: this is no A..B"),
            "write two tags, branches, commits or builds, such as --range b4881..b10587",
        )),
    }
}

/// Runs blocking work off the thread that shows progress and handles signals.
#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
pub(super) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> warden_builder::Result<T> + Send + 'static,
) -> Result<T, CommandError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|error| CommandError::failed(format!("internal error: {error}")))??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_two_ends() {
        assert_eq!(split_range("b1..b2").unwrap(), ("b1", "b2"));
        for wrong in ["b1", "b1..", "..b2", "b1...b2", ""] {
            assert_eq!(split_range(wrong).unwrap_err().code(), 2, "{wrong}");
        }
    }
}
