//! Judges patch sets at many commits of a repository.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use tokio_util::sync::CancellationToken;
use warden_patches::history::{HistoryRow, RowGrain, check_tree};
use warden_patches::prove::ProofRecords;
use warden_patches::{CachingJudge, PatchSet, SourceRevision};

use super::history::RevisionInfo;
use super::repository::GitRepository;
use crate::error::{BuilderError, Result};

/// Judges sets at many commits of a repository, on all cores. Returns the rows in the order of the
/// revisions. Calls `on_progress` with the number of judged revisions and the label of the last one.
///
/// # Errors
///
/// Fails if a commit cannot be read, or if `cancel` was set.
pub fn check_range(
    sets: &[&PatchSet],
    repository: &GitRepository,
    revisions: &[RevisionInfo],
    grain: RowGrain,
    on_progress: &(dyn Fn(usize, &str) + Sync),
    cancel: &CancellationToken,
) -> Result<Vec<HistoryRow>> {
    let judge = CachingJudge::default();
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || -> Result<Vec<(usize, Vec<HistoryRow>)>> {
        // Each thread opens its own handle: a repository serves one call at a time.
        let own = GitRepository::open_as(repository.path(), repository.shown().to_owned())?;
        let mut found = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(info) = revisions.get(index) else { return Ok(found) };
            if cancel.is_cancelled() {
                return Err(BuilderError::Cancelled);
            }
            let revision =
                SourceRevision { commit: Some(info.commit.clone()), build_number: info.build_number };
            let tree = Arc::clone(&own).tree(&info.commit)?.with_revision(revision);
            found.push((
                index,
                check_tree(sets, &tree, &info.label, grain, &judge, &ProofRecords::default())?,
            ));
            on_progress(done.fetch_add(1, Ordering::Relaxed) + 1, &info.label);
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from).min(revisions.len().max(1));
    #[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
    let parts = thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or(Err(BuilderError::Cancelled)))
            .collect::<Vec<_>>()
    });
    let mut all = Vec::with_capacity(revisions.len());
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().flat_map(|(_, rows)| rows).collect())
}
