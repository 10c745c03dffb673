//! From what was asked for to a commit that is here: from the cache, from a server, or from a repository on disk.

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

/// Where the cache keeps what a server calls `HEAD`.
const HEAD: &str = "refs/llama-warden/head";

/// A commit that is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// The repository.
    pub location: Location,
    /// A tag, a branch, or a commit; `None`: what the repository shows first (its `HEAD`).
    pub reference: Option<String>,
    /// Whether the network must not be used. It is not used either for a whole commit that is here.
    pub offline: bool,
    /// Whether all commits before it are needed too, as for a range. Ten times the bytes, once.
    pub history: bool,
}

/// A repository with the commit that was asked for.
#[derive(Clone, Debug)]
pub struct Obtained {
    /// Where it is.
    pub repository: Arc<Repository>,
    /// 40 hexadecimal digits.
    pub commit: String,
}

/// Finds the commit, fetching it where that is needed and allowed. A branch or a tag is looked up on its server each
/// time, because it may have moved; when the server cannot be asked, what the cache last saw is taken, with a note.
///
/// # Errors
///
/// There is no such commit, or it is not here and cannot be fetched. What the cache holds is never harmed.
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

/// What the cache has under a name.
fn kept(place: &cache::Place, reference: Option<&str>) -> Result<Option<Obtained>> {
    let repository = match place.open() {
        Ok(Some(repository)) => repository,
        Ok(None) => return Ok(None),
        // A fetch makes it anew.
        Err(_) if place.is_damaged() => return Ok(None),
        Err(error) => return Err(error),
    };
    let commit = repository.resolve(reference.unwrap_or(HEAD)).ok();
    Ok(commit.filter(|commit| repository.has(commit)).map(|commit| Obtained { repository, commit }))
}

/// All 40 digits of a commit: it cannot mean another one tomorrow.
fn is_whole(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    // It can only fail to join when the runtime shuts down.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(Error::Cancelled))
}
