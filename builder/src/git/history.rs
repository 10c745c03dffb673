//! Determines ranges of commits and build numbers, and judges patch sets at many commits.
//!
//! Upstream's build number is the number of a commit's ancestors, including itself (`git rev-list --count`).
//! All ancestors are counted, not only first parents: forks have merges.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use git2::Oid;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use warden_patches::history::{HistoryRow, RowGrain, check_tree};
use warden_patches::prove::ProofRecords;
use warden_patches::{CachingJudge, PatchSet, SourceRevision};

use super::fault::GitError;
use super::repository::GitRepository;
use crate::error::{BuilderError, Result, check_cancelled};
use crate::machine::run_on_all_cores;

const SHORT_COMMIT_DIGITS: usize = 9;

const UNREACHED: &str = "begins where the history that is here does not reach";

/// A commit of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionInfo {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// Build tag of the commit (`b9976`); without a tag `b<count>-<nine digits>`; in a shallow history only
    /// the nine digits.
    pub label: String,
    /// Date of the commit in UTC, such as `2026-08-22`.
    pub date: String,
    /// Upstream's build number, if known.
    pub build_number: Option<u32>,
    /// First line of the commit message.
    pub subject: String,
}

/// Age of a commit relative to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelativeAge {
    /// The commit descends from the other.
    Descendant,
    /// The commit equals the other, or is an ancestor of it.
    Ancestor,
    /// Neither descends from the other; the commit is older.
    Earlier,
    /// Neither descends from the other; the commit has the same date or a later one.
    Later,
}

struct LineCommit {
    id: Oid,
    seconds: i64,
    subject: String,
    /// All parents except the first.
    merged: Vec<Oid>,
}

impl GitRepository {
    /// Returns the commits of `from..to` along first parents, oldest first. As in git, `from` itself is
    /// excluded. With `every` above 1, only every `every`-th commit is returned, and always `to`. Both ends
    /// may be anything that [`GitRepository::resolve`] accepts.
    ///
    /// # Errors
    /// Fails if an end is unknown, the range is empty, or a shallow history ends before its beginning.
    pub fn range(&self, from: &str, to: &str, every: usize) -> Result<Vec<RevisionInfo>> {
        let (first, last) = (self.id(&self.resolve(from)?)?, self.id(&self.resolve(to)?)?);
        let line = self.first_parents(last)?;
        // If `from` is not on the first-parent line, end the range before the first commit that is an
        // ancestor of `from`.
        let here = line.iter().position(|step| step.id == first);
        let cut = here.unwrap_or_else(|| {
            let repo = self.lock();
            let behind = |step: &LineCommit| repo.graph_descendant_of(first, step.id).unwrap_or(false);
            line.partition_point(|step| !behind(step))
        });
        if cut == 0 {
            return Err(self.range_error(from, to, "holds nothing: its end is not newer than its beginning"));
        }
        if cut == line.len() && !self.is_complete() {
            return Err(self.range_error(from, to, UNREACHED));
        }
        let mut all = self.describe_line(&line, cut)?;
        let count = all.len();
        let mut numbers = 1..;
        all.retain(|_| numbers.next().is_some_and(|n: usize| n.is_multiple_of(every.max(1)) || n == count));
        Ok(all)
    }

    /// Returns the commits from `from` to `to` along first parents, oldest first, including both.
    ///
    /// # Errors
    /// Fails if an end is unknown, or if `from` is not on the available first-parent line of `to`.
    pub fn line(&self, from: &str, to: &str) -> Result<Vec<RevisionInfo>> {
        let (first, last) = (self.id(&self.resolve(from)?)?, self.id(&self.resolve(to)?)?);
        let line = self.first_parents(last)?;
        match line.iter().position(|step| step.id == first) {
            Some(0) => Err(self.range_error(from, to, "holds nothing: both ends are the same commit")),
            Some(at) => self.describe_line(&line, at + 1),
            None if self.is_complete() => {
                let why = "is no line: its beginning is not among the first parents of its end";
                Err(self.range_error(from, to, why))
            }
            None => Err(self.range_error(from, to, UNREACHED)),
        }
    }

    fn range_error(&self, from: &str, to: &str, why: &'static str) -> BuilderError {
        let (from, to) = (from.to_owned(), to.to_owned());
        GitError::Range { repository: self.shown().to_owned(), from, to, why }.into()
    }

    /// Age of `commit` relative to `reference`, both 40 digits; `None` if the repository lacks one of them.
    pub fn age(&self, commit: &str, reference: &str) -> Option<RelativeAge> {
        let (one, other) = (self.id(commit).ok()?, self.id(reference).ok()?);
        let repo = self.lock();
        let seconds = |id| repo.find_commit(id).map(|commit| commit.time().seconds()).ok();
        let (its, others) = (seconds(one)?, seconds(other)?);
        let descends = |one, from| repo.graph_descendant_of(one, from).unwrap_or(false);
        Some(if descends(one, other) {
            RelativeAge::Descendant
        } else if one == other || descends(other, one) {
            RelativeAge::Ancestor
        } else if its < others {
            RelativeAge::Earlier
        } else {
            RelativeAge::Later
        })
    }

    /// Describes the newest `count` commits of a line, oldest first.
    fn describe_line(&self, line: &[LineCommit], count: usize) -> Result<Vec<RevisionInfo>> {
        let tags = self.build_tags()?;
        let counts = if self.is_complete() { self.count_line(line)? } else { vec![None; line.len()] };
        let infos = line[..count].iter().zip(&counts).map(|(step, count)| {
            let commit = step.id.to_string();
            let tag = tags.get(&step.id).copied();
            let label = match (tag, count) {
                (Some(tag), _) => format!("b{tag}"),
                (None, Some(count)) => format!("b{count}-{}", &commit[..SHORT_COMMIT_DIGITS]),
                (None, None) => commit[..SHORT_COMMIT_DIGITS].to_owned(),
            };
            let (date, subject) = (date(step.seconds), step.subject.clone());
            RevisionInfo { commit, label, date, build_number: tag.or(*count), subject }
        });
        Ok(infos.rev().collect())
    }

    /// Number of commits in the history of a commit; `None` if the history is shallow.
    pub(super) fn count(&self, commit: Oid) -> Result<Option<u32>> {
        if !self.is_complete() {
            return Ok(None);
        }
        let repo = self.lock();
        let mut walk = repo.revwalk().map_err(self.failed("counting the history of"))?;
        walk.push(commit).map_err(self.failed("counting the history of"))?;
        // A missing parent, as in a damaged clone, leaves the number unknown.
        Ok(walk
            .collect::<std::result::Result<Vec<_>, _>>()
            .ok()
            .and_then(|all| u32::try_from(all.len()).ok()))
    }

    /// Finds the commit with this build number on the first-parent line of `HEAD`.
    pub(super) fn commit_of_build(&self, number: u32) -> Result<Option<String>> {
        // Tags also work in a shallow history.
        if let Some((id, _)) = self.build_tags()?.iter().find(|(_, tag)| **tag == number) {
            return Ok(Some(id.to_string()));
        }
        let head = self.lock().head().and_then(|head| head.peel_to_commit()).map(|commit| commit.id());
        let Ok(head) = head else { return Ok(None) };
        if !self.is_complete() {
            return Ok(None);
        }
        let line = self.first_parents(head)?;
        let counts = self.count_line(&line)?;
        let found = line.iter().zip(counts).find(|(_, count)| *count == Some(number));
        Ok(found.map(|(step, _)| step.id.to_string()))
    }

    /// Returns a commit and its first-parent ancestors, newest first, as far as the repository has them.
    fn first_parents(&self, from: Oid) -> Result<Vec<LineCommit>> {
        let repo = self.lock();
        let mut line = Vec::new();
        let mut next = Some(from);
        while let Some(id) = next {
            let commit = match repo.find_commit(id) {
                Ok(commit) => commit,
                // A shallow clone ends here.
                Err(_) if !line.is_empty() && repo.is_shallow() => break,
                Err(error) => return Err(self.failed("reading the history of")(error)),
            };
            let mut parents = commit.parent_ids();
            next = parents.next();
            let subject = String::from_utf8_lossy(commit.summary_bytes().unwrap_or_default()).into_owned();
            line.push(LineCommit {
                id,
                seconds: commit.time().seconds(),
                subject,
                merged: parents.collect(),
            });
        }
        Ok(line)
    }

    /// Counts the history of each commit of a line in one pass. From the oldest on, each commit adds itself
    /// and those merged commits that were not counted before.
    fn count_line(&self, line: &[LineCommit]) -> Result<Vec<Option<u32>>> {
        let repo = self.lock();
        let mut seen: HashSet<Oid> = HashSet::with_capacity(line.len());
        let mut counts = vec![None; line.len()];
        for (step, count) in line.iter().zip(&mut counts).rev() {
            seen.insert(step.id);
            let mut open = step.merged.clone();
            while let Some(id) = open.pop() {
                if seen.insert(id) {
                    let commit = repo.find_commit(id).map_err(self.failed("counting the history of"))?;
                    open.extend(commit.parent_ids());
                }
            }
            *count = u32::try_from(seen.len()).ok();
        }
        Ok(counts)
    }
}

fn date(seconds: i64) -> String {
    Timestamp::from_second(seconds).map_or_else(
        |_| "unknown".to_owned(),
        |time| time.to_string().chars().take_while(|letter| *letter != 'T').collect(),
    )
}

/// Judges sets at many commits of a repository, on all cores. Returns the rows in the order of the
/// revisions. Calls `on_progress` with the number of judged revisions and the label of the last one.
///
/// # Errors
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
    let done = AtomicUsize::new(0);
    let rows = run_on_all_cores(revisions.len(), |indices| {
        // Each thread opens its own handle: a repository serves one call at a time.
        let own = GitRepository::open_as(repository.path(), repository.shown().to_owned())?;
        let mut found = Vec::new();
        for index in indices {
            check_cancelled(cancel)?;
            let info = &revisions[index];
            let revision =
                SourceRevision { commit: Some(info.commit.clone()), build_number: info.build_number };
            let tree = Arc::clone(&own).tree(&info.commit)?.with_revision(revision);
            let rows = check_tree(sets, &tree, &info.label, grain, &judge, &ProofRecords::default())?;
            found.push((index, rows));
            on_progress(done.fetch_add(1, Ordering::Relaxed) + 1, &info.label);
        }
        Ok(found)
    })?;
    Ok(rows.into_iter().flatten().collect())
}
