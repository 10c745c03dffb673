//! `llama-warden patches …`: lists patch sets, judges whether they fit a source, and applies them.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | everything requested is verified, or is not needed there |
//! | 3 | a patch is refused, or unverified without permission |
//! | 2 | wrong use, or a broken patch set |
//! | 1 | anything else |

mod apply;
mod check;
mod prove;
mod show;

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use warden_builder::git::{GitLocation, GitRepository, RevisionInfo};
use warden_builder::{BuildSource, Builder, ComputeBackend};
use warden_config::machine::HostMachine;
use warden_config::source::layers::LoadedConfig;
use warden_patches::{PatchSeries, PatchSet, PatchStatus, SetCatalogue, SetFix, SetJudgement, SourceTree};
use warden_policies::defaults::Build;

use crate::cli::build::{CatalogueArgs, GitArgs};
use crate::exit::CommandError;

#[derive(Debug, Subcommand)]
pub(crate) enum PatchesCommand {
    /// Lists the patch sets and their fixes.
    List(show::PatchListArgs),
    /// Shows all that is known about a set or a fix.
    Show(show::PatchShowArgs),
    /// Judges sets in a source, or in every commit of a range.
    Check(check::PatchCheckArgs),
    /// Applies sets to a source folder, after checking every file.
    Apply(apply::PatchApplyArgs),
    /// Writes sets as ordinary patches for one revision, for git and patch; paths begin at llama.cpp's own
    /// folder.
    Export(apply::PatchExportArgs),
    /// Proves sets in a tree that nobody has reviewed, and records the proof next to the configuration.
    Prove(prove::ProveArgs),
}

pub(crate) fn run(command: PatchesCommand) -> Result<(), CommandError> {
    match command {
        PatchesCommand::List(args) => show::list(&args),
        PatchesCommand::Show(args) => show::show(&args),
        PatchesCommand::Check(args) => check::check(&args),
        PatchesCommand::Apply(args) => apply::apply(&args),
        PatchesCommand::Export(args) => apply::export(&args),
        PatchesCommand::Prove(args) => prove::run(&args),
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Uses only this set, by its id. May be repeated. Default: every set.
    #[arg(long, value_name = "ID")]
    patch_set: Vec<String>,
    /// Uses only sets for this backend, such as cuda.
    #[arg(long, value_name = "NAME", conflicts_with = "patch_set")]
    backend: Option<String>,
}

impl SetArgs {
    fn load(&self, loaded: &LoadedConfig, machine: &HostMachine) -> Result<Vec<PatchSet>, CommandError> {
        let catalogue = self.catalogue.load(loaded, machine)?;
        for id in &self.patch_set {
            catalogue.require(id)?;
        }
        if let Some(backend) = &self.backend {
            check_backend(backend, &catalogue)?;
        }
        let wanted = |set: &&PatchSet| match &self.backend {
            Some(backend) => set.is_for(backend),
            None => self.patch_set.is_empty() || self.patch_set.contains(&set.id),
        };
        Ok(catalogue.sets().iter().filter(wanted).cloned().collect())
    }
}

fn check_backend(backend: &str, catalogue: &SetCatalogue) -> Result<(), CommandError> {
    let mut known: Vec<&str> = ComputeBackend::ALL.into_iter().map(ComputeBackend::name).collect();
    known.extend(catalogue.sets().iter().flat_map(|set| &set.backends).map(String::as_str));
    if known.contains(&backend) {
        return Ok(());
    }
    known.sort_unstable();
    known.dedup();
    Err(CommandError::usage(
        format!("there is no backend `{backend}`"),
        format!("there are: {}", known.join(", ")),
    ))
}

fn check_admitted(series: &PatchSeries, allow_unverified: bool, what: &str) -> Result<(), CommandError> {
    let blocking: Vec<&SetJudgement> = series.blocking(allow_unverified).collect();
    if blocking.is_empty() {
        return Ok(());
    }
    let told = |judgement: &&SetJudgement| {
        let why = if judgement.status == PatchStatus::Refused { "is refused" } else { "is not verified" };
        let reasons = judgement.reasons.iter().map(|reason| format!("\n  {reason}"));
        format!(
            "the patch set `{}` {why} here, so nothing was {what}:{}",
            judgement.set,
            reasons.collect::<String>()
        )
    };
    let message = blocking.iter().map(told).collect::<Vec<_>>().join("\n");
    let others =
        "choose other sets with --patch-set ID, or bring one that knows this source with --patches DIR";
    let hint = if blocking.iter().all(|judgement| judgement.status == PatchStatus::Unverified) {
        format!(
            "show it to be good with `llama-warden patches prove`; or read what changed, then use \
             --allow-unverified; or {others}"
        )
    } else {
        others.to_owned()
    };
    Err(CommandError::Refused { message, hint })
}

/// Accepts `SET`, `FIX` or `SET/FIX`; also returns the fix if `patch` names one.
fn find_patch<'a>(
    sets: &'a [PatchSet],
    patch: &str,
) -> Result<(&'a PatchSet, Option<&'a SetFix>), CommandError> {
    let set_of = |id: &str| sets.iter().find(|set| set.id == id);
    let with_fix = |set: &'a PatchSet, fix: &str| Some((set, Some(set.fix(fix)?)));
    let found = match patch.split_once('/') {
        Some((set, fix)) => set_of(set).and_then(|set| with_fix(set, fix)),
        None => {
            set_of(patch).map(|set| (set, None)).or_else(|| sets.iter().find_map(|set| with_fix(set, patch)))
        }
    };
    found.ok_or_else(|| {
        let ids = |set: &'a PatchSet| {
            std::iter::once(set.id.as_str()).chain(set.fixes.iter().map(|fix| fix.id.as_str()))
        };
        let known: Vec<&str> = sets.iter().flat_map(ids).collect();
        CommandError::usage(
            format!("there is no patch set and no fix `{patch}`"),
            format!("there are: {}; sets of your own come with --patches DIR", known.join(", ")),
        )
    })
}

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
    range: Option<String>,
    /// Uses only every N-th commit of the range, and the last one.
    #[arg(
        long,
        value_name = "N",
        requires = "range",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    every: u32,
}

struct OpenedTree {
    tree: Box<dyn SourceTree>,
    /// Short name, such as `b8827`, `a0c91e8f9` or the name of a folder.
    label: String,
    /// Source as the user gave it.
    shown: String,
}

impl SourceArgs {
    async fn open(&self, builder: &Builder, numbers: &Build) -> Result<OpenedTree, CommandError> {
        Ok(self.open_with(None, builder, numbers).await?.0)
    }

    /// Opens `other`, else the source of the arguments. Returns the tree, and the source for builds.
    async fn open_with(
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
        let shown = match &source {
            BuildSource::Commit { shown, .. } => shown.clone(),
            BuildSource::Directory(path) | BuildSource::Archive(path) => path.display().to_string(),
        };
        let whole = source.clone();
        let cache = builder.dirs.cache.clone();
        let cancel = builder.cancel.clone();
        let tree = run_blocking(move || source.tree(&cache, &cancel)).await?;
        let revision = tree.revision();
        let label = match (revision.build_number, whole.path().file_name()) {
            (Some(number), _) => format!("b{number}"),
            (None, _) if revision.commit.is_some() => revision.short_commit().to_owned(),
            (None, Some(name)) => name.to_string_lossy().into_owned(),
            (None, None) => shown.clone(),
        };
        Ok((OpenedTree { tree, label, shown }, whole))
    }

    /// Returns the repository with the commits of the range, oldest first.
    async fn fetch_range(
        &self,
        range: &str,
        every: u32,
        builder: &Builder,
        numbers: &Build,
    ) -> Result<(Arc<GitRepository>, Vec<RevisionInfo>), CommandError> {
        let (from, to) = split_range(range)?;
        let mut request = self.git.repository_request(numbers, true)?;
        // A remote knows no name for a build without a tag. So fetch all commits: the build number is a count
        // of commits.
        let by_count = to.strip_prefix('b').is_some_and(|digits| digits.parse::<u32>().is_ok());
        let on_server = matches!(request.location, GitLocation::Url(_));
        request.reference = (!(on_server && by_count)).then(|| to.to_owned());
        let obtained = builder.repository(&request).await?;
        let from = from.to_owned();
        let to = to.to_owned();
        let every = every as usize;
        run_blocking(move || {
            let repository = obtained.repository;
            let revisions = repository.range(&from, &to, every)?;
            Ok((repository, revisions))
        })
        .await
    }
}

fn split_range(range: &str) -> Result<(&str, &str), CommandError> {
    match range.split_once("..") {
        Some((from, to)) if !from.is_empty() && !to.is_empty() && !to.starts_with('.') => Ok((from, to)),
        _ => Err(CommandError::usage(
            format!("--range {range}: this is no A..B"),
            "write two tags, branches, commits or builds, such as --range b4881..b10587",
        )),
    }
}

/// Keeps blocking work off the thread that shows progress and handles signals.
#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
async fn run_blocking<T: Send + 'static>(
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
