//! Finds the commit or archive for a new build, and the commits since the build in use.

use warden_builder::git::{CommitRequest, RelativeAge, RevisionInfo};
use warden_builder::{BuildPlan, BuildSource, Builder, Provenance, SuccessorObstacle, check_successor};
use warden_policies::defaults::Build;

use super::UpdateArgs;
use crate::cli::build::{self, GitArgs};
use crate::exit::CommandError;

pub(super) struct NewSource {
    pub(super) source: BuildSource,
    pub(super) follows: String,
    /// Commits since the build in use, oldest first; `None` if unknown.
    pub(super) commits: Option<Vec<RevisionInfo>>,
    /// Age relative to the commit of the build in use, if one repository has both.
    age: Option<RelativeAge>,
    /// The user named the revision, so it may be older.
    is_requested: bool,
}

impl NewSource {
    /// Returns the reason why this plan gives no newer build than the one in use. `None` if it is newer, of
    /// unknown age, or named by the user.
    pub(super) fn not_newer_reason(&self, old: &Provenance, plan: &BuildPlan) -> Option<String> {
        if self.is_requested {
            return None;
        }
        let why = match self.age {
            Some(RelativeAge::Descendant) => return None,
            Some(RelativeAge::Ancestor) => "it is an ancestor of the revision in use".to_owned(),
            Some(RelativeAge::Earlier) => "it was made before the revision in use".to_owned(),
            Some(RelativeAge::Later) | None => match check_successor(&old.plan, plan) {
                Err(older @ SuccessorObstacle::Older { .. }) => older.to_string(),
                _ => return None,
            },
        };
        Some(why)
    }
}

pub(super) async fn find_newest(
    args: &UpdateArgs,
    builder: &Builder,
    numbers: &Build,
    track: &str,
    old: &Provenance,
) -> Result<NewSource, CommandError> {
    if let Some(path) = &args.source {
        let source = BuildSource::at(path)?;
        let follows = path.display().to_string();
        return Ok(NewSource { source, follows, commits: None, age: None, is_requested: true });
    }
    if args.sdist {
        let pin = build::sdist_pin(numbers);
        let (version, archive) = if args.offline {
            (pin.version.clone(), builder.sdist(&pin).await?)
        } else {
            builder.newest_sdist(&pin).await?
        };
        let source = BuildSource::at(&archive)?;
        let follows = format!("llama-cpp-python {version}");
        return Ok(NewSource { source, follows, commits: None, age: None, is_requested: false });
    }
    let git = GitArgs { git: args.git.clone(), reference: None, offline: args.offline };
    let request = git.repository_request(numbers, true)?;
    let wanted = args.to.as_deref().unwrap_or(track);
    let is_pattern = wanted.contains(['*', '?']);
    let reference = (!is_pattern).then(|| wanted.to_owned());
    let obtained = builder.repository(&CommitRequest { reference, ..request }).await?;
    let repository = obtained.repository;
    let (name, commit) = if is_pattern {
        repository.newest_tag(wanted)?.ok_or_else(|| {
            CommandError::hinted(
                format!("{} has no tag that fits `{wanted}`", repository.shown()),
                "name a branch in `update.track`, or a tag, branch or commit with --to",
            )
        })?
    } else {
        (wanted.to_owned(), obtained.commit)
    };
    let before = old.plan.source.revision.commit.as_deref();
    // A build of another repository or of an archive is not in this history.
    let between = before.and_then(|before| repository.line(before, &commit).ok());
    let commits = match between {
        Some(mut line) => {
            line.remove(0);
            Some(line)
        }
        None if before == Some(commit.as_str()) => Some(Vec::new()),
        None => None,
    };
    let age = before.and_then(|before| repository.age(&commit, before));
    let follows = format!("{name} of {}", repository.shown());
    let source = BuildSource::Commit {
        repository: repository.path().to_owned(),
        shown: repository.shown().to_owned(),
        commit,
    };
    Ok(NewSource { source, follows, commits, age, is_requested: args.to.is_some() })
}
