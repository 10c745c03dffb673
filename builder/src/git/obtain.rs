//! Finds the requested commit: in the cache, on a server, or in a repository on disk.

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::cache;
use super::fault::Fault;
use super::fetch::{Most, Wanted, fetch};
use super::location::Location;
use super::repository::Repository;
use crate::error::{Error, Result};
use crate::event::{Event, Phase, Reporter};
use crate::lock::Lock;

/// Reference to the server's `HEAD` in a cached repository.
const HEAD: &str = "refs/llama-warden/head";

/// A request for a commit.
#[derive(Clone, Debug)]
pub struct Request {
    /// Location of the repository.
    pub location: Location,
    /// A tag, a branch, or a commit; `None`: the repository's `HEAD`.
    pub reference: Option<String>,
    /// Forbids network access. A full commit id that is cached needs none in any case.
    pub offline: bool,
    /// Requests all earlier commits, too, as for a range: ten times the bytes, once.
    pub history: bool,
}

/// The requested commit with its repository.
#[derive(Clone, Debug)]
pub struct Obtained {
    /// Repository with the commit.
    pub repository: Arc<Repository>,
    /// The commit's id, 40 hexadecimal digits.
    pub commit: String,
}

/// Finds the commit, and fetches it if necessary and allowed. A branch or tag is looked up on its server
/// each time, because it may have moved; if the server cannot be reached, the last cached state is used,
/// with a note.
///
/// # Errors
///
/// Fails if the commit does not exist, or is not here and cannot be fetched. The cache is never damaged.
pub(crate) async fn obtain(
    request: &Request,
    cache: &Path,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Obtained> {
    let url = match &request.location {
        Location::Path(path) => {
            let (path, reference) = (path.clone(), request.reference.clone());
            return blocking(move || {
                let repository = Repository::open(&path)?;
                let commit = repository.resolve(reference.as_deref().unwrap_or("HEAD"))?;
                Ok(Obtained { repository, commit })
            })
            .await;
        }
        Location::Url(url) => url.clone(),
    };
    let place = cache::place(cache, &url, request.history);
    let (here, reference) = (place.clone(), request.reference.clone());
    let kept = blocking(move || kept(&here, reference.as_deref())).await?;
    let whole = request.reference.as_deref().is_some_and(is_whole);
    let shown = request.reference.clone().unwrap_or_else(|| "the default branch".to_owned());
    match kept {
        Some(kept) if whole || request.offline => return Ok(kept),
        None if request.offline => return Err(Fault::Offline { url: place.shown, reference: shown }.into()),
        _ => {}
    }
    let host = request.location.host().to_owned();
    let waiting =
        || reporter.tell(Event::Note(format!("another llama-warden fetches from {host}; waiting for it")));
    let lock = Lock::take(&place.lock_path(), cancel, waiting).await?;
    let what = format!("{shown} of {}", place.shown);
    reporter.tell(Event::Obtaining { what, from: "its server", into: place.folder.clone() });
    reporter.tell(Event::Phase(Phase::Fetch));
    let (place_of, reference) = (place.clone(), request.reference.clone());
    let wanted = Wanted { url, place: place_of, reference, most: Most::default() };
    match fetch(wanted, lock, reporter, cancel).await {
        Ok(commit) => {
            blocking(move || match place.open()? {
                Some(repository) => Ok(Obtained { repository, commit }),
                None => Err(Fault::Offline { url: place.shown, reference: commit }.into()),
            })
            .await
        }
        Err(Error::Git(
            fault @ (Fault::Unreachable { .. } | Fault::Refused { .. } | Fault::Repository { .. }),
        )) if kept.is_some() => {
            let kept = kept.ok_or(Error::Git(fault.clone()))?;
            reporter.tell(Event::Note(format!(
                "{fault}; taking what the cache last saw as {shown}: commit {}, which may be out of date",
                kept.commit
            )));
            Ok(kept)
        }
        Err(error) => Err(error),
    }
}

/// Looks up a reference in the cached repository.
fn kept(place: &cache::Place, reference: Option<&str>) -> Result<Option<Obtained>> {
    let repository = match place.open() {
        Ok(Some(repository)) => repository,
        Ok(None) => return Ok(None),
        // The next fetch recreates a damaged repository.
        Err(_) if place.is_damaged() => return Ok(None),
        Err(error) => return Err(error),
    };
    let commit = repository.resolve(reference.unwrap_or(HEAD)).ok();
    Ok(commit.filter(|commit| repository.has(commit)).map(|commit| Obtained { repository, commit }))
}

/// Returns true for a full commit id, which never changes its meaning.
fn is_whole(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    // Joining fails only when the runtime shuts down.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(Error::Cancelled))
}
