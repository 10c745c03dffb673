//! Finds the requested commit: in the cache, on a server, or in a repository on disk.

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::cache;
use super::fault::GitError;
use super::fetch::{FetchLimits, FetchRequest, fetch};
use super::location::GitLocation;
use super::repository::GitRepository;
use crate::error::{BuilderError, Result};
use crate::event::{BuildEvent, BuildPhase, EventReporter};
use crate::lock::FileLock;
use crate::process::run_blocking;

const HEAD_REF: &str = "refs/llama-warden/head";

/// A request for a commit.
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// Location of the repository.
    pub location: GitLocation,
    /// A tag, a branch, or a commit; `None`: the repository's `HEAD`.
    pub reference: Option<String>,
    /// Forbids network access. A full commit id that is cached never needs the network.
    pub offline: bool,
    /// Requests all earlier commits, too, as for a range: ten times the bytes, once.
    pub history: bool,
}

/// The requested commit with its repository.
#[derive(Clone, Debug)]
pub struct ObtainedCommit {
    /// Repository with the commit.
    pub repository: Arc<GitRepository>,
    /// The commit's id, 40 hexadecimal digits.
    pub commit: String,
}

/// Finds the commit, and fetches it if necessary and allowed. Branches and tags are looked up on the server
/// each time. If the server cannot be reached, the last cached state is used, with a note.
pub(crate) async fn obtain(
    request: &CommitRequest,
    cache: &Path,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<ObtainedCommit> {
    let url = match &request.location {
        GitLocation::Path(path) => {
            let (path, reference) = (path.clone(), request.reference.clone());
            return run_blocking(move || {
                let repository = GitRepository::open(&path)?;
                let commit = repository.resolve(reference.as_deref().unwrap_or("HEAD"))?;
                Ok(ObtainedCommit { repository, commit })
            })
            .await;
        }
        GitLocation::Url(url) => url.clone(),
    };
    let place = cache::cache_slot(cache, &url, request.history);
    let (here, reference) = (place.clone(), request.reference.clone());
    let kept = run_blocking(move || find_cached(&here, reference.as_deref())).await?;
    let whole = request.reference.as_deref().is_some_and(is_full_id);
    let shown = request.reference.clone().unwrap_or_else(|| "the default branch".to_owned());
    match kept {
        Some(kept) if whole || request.offline => return Ok(kept),
        None if request.offline => {
            return Err(GitError::Offline { url: place.shown, reference: shown }.into());
        }
        _ => {}
    }
    let host = request.location.host().to_owned();
    let waiting = || {
        reporter.note(format!("another llama-warden fetches from {host}; waiting for it"));
    };
    let lock = FileLock::take(&place.lock_path(), cancel, waiting).await?;
    let what = format!("{shown} of {}", place.shown);
    reporter.report(BuildEvent::Obtaining { what, from: "its server", into: place.folder.clone() });
    reporter.report(BuildEvent::Phase(BuildPhase::Fetch));
    let (place_of, reference) = (place.clone(), request.reference.clone());
    let wanted = FetchRequest { url, place: place_of, reference, limits: FetchLimits::default() };
    match fetch(wanted, lock, reporter, cancel).await {
        Ok(commit) => {
            run_blocking(move || match place.open()? {
                Some(repository) => Ok(ObtainedCommit { repository, commit }),
                None => Err(GitError::Offline { url: place.shown, reference: commit }.into()),
            })
            .await
        }
        Err(BuilderError::Git(
            fault @ (GitError::Unreachable { .. } | GitError::Refused { .. } | GitError::Repository { .. }),
        )) if kept.is_some() => {
            let kept = kept.ok_or(BuilderError::Git(fault.clone()))?;
            reporter.note(format!(
                "{fault}; taking what the cache last saw as {shown}: commit {}, which may be out of date",
                kept.commit
            ));
            Ok(kept)
        }
        Err(error) => Err(error),
    }
}

fn find_cached(place: &cache::CacheSlot, reference: Option<&str>) -> Result<Option<ObtainedCommit>> {
    let repository = match place.open() {
        Ok(Some(repository)) => repository,
        Ok(None) => return Ok(None),
        // The next fetch recreates a damaged repository.
        Err(_) if place.is_damaged() => return Ok(None),
        Err(error) => return Err(error),
    };
    let commit = repository.resolve(reference.unwrap_or(HEAD_REF)).ok();
    Ok(commit.filter(|commit| repository.has(commit)).map(|commit| ObtainedCommit { repository, commit }))
}

fn is_full_id(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
