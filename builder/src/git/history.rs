//! Histories: ranges of commits, and build numbers.
//!
//! Upstream's build number is the count of a commit's ancestors, itself included (`git rev-list --count`). Upstream's
//! main line has no merges, so there it is also the place in the line; forks do merge, so everything is counted.

use std::collections::HashSet;

use git2::Oid;
use jiff::Timestamp;

use super::fault::Fault;
use super::repository::Repository;
use crate::error::Result;

/// Upstream abbreviates commits to nine digits.
const SHORT: usize = 9;

/// A commit of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevisionInfo {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// Its build tag (`b9976`); else `b<count>-<commit in nine digits>`; else, in a history that is cut off, the nine
    /// digits alone.
    pub label: String,
    /// Day of the commit, in UTC: `2026-08-22`.
    pub date: String,
    /// Upstream's build number, when it is known.
    pub build_number: Option<u32>,
    /// The first line of its message.
    pub subject: String,
}

/// Age of a commit relative to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelativeAge {
    /// It descends from the other.
    Descendant,
    /// It is the other, or an ancestor of it.
    Ancestor,
    /// Neither descends from the other, and it was made before the other.
    Earlier,
    /// Neither descends from the other, and it was made at the same time or later.
    Later,
}

/// One step back along first parents.
struct Step {
    id: Oid,
    seconds: i64,
    subject: String,
    /// All but the first.
    merged: Vec<Oid>,
}

impl Repository {
    /// The commits of `from..to` along first parents, oldest first. `from` itself is left out, as git does; `to` is
    /// always in it. Of more than that every `every`-th is taken, counted from the beginning. Both ends may be
    /// anything that [`Repository::resolve`] understands.
    ///
    /// # Errors
    ///
    /// An end is unknown, the range holds nothing, or the history is cut off before its beginning.
    pub fn range(&self, from: &str, to: &str, every: usize) -> Result<Vec<RevisionInfo>> {
        let fault = |why| Fault::Range {
            repository: self.shown().to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            why,
        };
        let (first, last) = (self.id(&self.resolve(from)?)?, self.id(&self.resolve(to)?)?);
        let line = self.first_parents(last)?;
        // From here on they are behind the beginning, and all that follow too: an ancestor's ancestors are ancestors.
        let here = line.iter().position(|step| step.id == first);
        let cut = here.unwrap_or_else(|| {
            let repo = self.lock();
            let behind = |step: &Step| repo.graph_descendant_of(first, step.id).unwrap_or(false);
            line.partition_point(|step| !behind(step))
        });
        if cut == 0 {
            return Err(fault("holds nothing: its end is not newer than its beginning").into());
        }
        if cut == line.len() && !self.is_complete() {
            return Err(fault("begins where the history that is here does not reach").into());
        }
        let all = self.infos(&line, cut)?;
        let (every, count) = (every.max(1), all.len());
        let wanted = |index: usize| (index + 1).is_multiple_of(every) || index + 1 == count;
        Ok(all
            .into_iter()
            .enumerate()
            .filter(|(index, _)| wanted(*index))
            .map(|(_, revision)| revision)
            .collect())
    }

    /// The commits from `from` to `to` along first parents, oldest first, both of them in it.
    ///
    /// # Errors
    ///
    /// An end is unknown, or `from` is not behind `to` on that line, as far as the history is here.
    pub fn line(&self, from: &str, to: &str) -> Result<Vec<RevisionInfo>> {
        let (first, last) = (self.id(&self.resolve(from)?)?, self.id(&self.resolve(to)?)?);
        let line = self.first_parents(last)?;
        let fault = |why| Fault::Range {
            repository: self.shown().to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
            why,
        };
        match line.iter().position(|step| step.id == first) {
            Some(0) => Err(fault("holds nothing: both ends are the same commit").into()),
            Some(at) => self.infos(&line, at + 1),
            None if self.is_complete() => {
                Err(fault("is no line: its beginning is not among the first parents of its end").into())
            }
            None => Err(fault("begins where the history that is here does not reach").into()),
        }
    }

    /// Age of a commit relative to another one, both given as 40 digits. `None` if the repository lacks one of them.
    pub fn age(&self, commit: &str, beside: &str) -> Option<RelativeAge> {
        let (one, other) = (self.id(commit).ok()?, self.id(beside).ok()?);
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

    /// What is told of the newest `count` commits of a line, the oldest of them first.
    fn infos(&self, line: &[Step], count: usize) -> Result<Vec<RevisionInfo>> {
        let tags = self.build_tags()?;
        let counts = if self.is_complete() { self.counts(line)? } else { vec![None; line.len()] };
        let infos = line[..count].iter().zip(&counts).map(|(step, count)| {
            let commit = step.id.to_string();
            let tag = tags.get(&step.id).copied();
            let label = match (tag, count) {
                (Some(tag), _) => format!("b{tag}"),
                (None, Some(count)) => format!("b{count}-{}", &commit[..SHORT]),
                (None, None) => commit[..SHORT].to_owned(),
            };
            let (date, subject) = (date(step.seconds), step.subject.clone());
            RevisionInfo { commit, label, date, build_number: tag.or(*count), subject }
        });
        Ok(infos.rev().collect())
    }

    /// The count of a commit's history; `None` where that is cut off.
    pub(super) fn count(&self, commit: Oid) -> Result<Option<u32>> {
        if !self.is_complete() {
            return Ok(None);
        }
        let repo = self.lock();
        let mut walk = repo.revwalk().map_err(self.failed("counting the history of"))?;
        walk.push(commit).map_err(self.failed("counting the history of"))?;
        // A parent that is missing, as in a damaged clone, leaves the number unknown.
        Ok(walk
            .collect::<std::result::Result<Vec<_>, _>>()
            .ok()
            .and_then(|all| u32::try_from(all.len()).ok()))
    }

    /// The commit on the first-parent line of `HEAD` whose history has so many commits.
    pub(super) fn commit_of_build(&self, number: u32) -> Result<Option<String>> {
        // A tag names it whatever its history is.
        if let Some((id, _)) = self.build_tags()?.iter().find(|(_, tag)| **tag == number) {
            return Ok(Some(id.to_string()));
        }
        let head = self.lock().head().and_then(|head| head.peel_to_commit()).map(|commit| commit.id());
        let Ok(head) = head else { return Ok(None) };
        if !self.is_complete() {
            return Ok(None);
        }
        let line = self.first_parents(head)?;
        let counts = self.counts(&line)?;
        Ok(line
            .iter()
            .zip(counts)
            .find(|(_, count)| *count == Some(number))
            .map(|(step, _)| step.id.to_string()))
    }

    /// A commit and everything behind it along first parents, newest first, as far as it is here.
    fn first_parents(&self, from: Oid) -> Result<Vec<Step>> {
        let repo = self.lock();
        let mut line = Vec::new();
        let mut next = Some(from);
        while let Some(id) = next {
            let commit = match repo.find_commit(id) {
                Ok(commit) => commit,
                // Beyond the edge of a shallow clone.
                Err(_) if !line.is_empty() && repo.is_shallow() => break,
                Err(error) => return Err(self.failed("reading the history of")(error)),
            };
            let mut parents = commit.parent_ids();
            next = parents.next();
            let subject = String::from_utf8_lossy(commit.summary_bytes().unwrap_or_default()).into_owned();
            line.push(Step { id, seconds: commit.time().seconds(), subject, merged: parents.collect() });
        }
        Ok(line)
    }

    /// The count of the history of each commit of a line. One pass: from the oldest on, each adds itself and what
    /// it merged that was not there before.
    fn counts(&self, line: &[Step]) -> Result<Vec<Option<u32>>> {
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
