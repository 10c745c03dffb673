//! Fetches from a server: lists its references, resolves the requested one, and downloads its commit or the
//! whole history.

use std::collections::HashSet;

use git2::Oid;
use tokio_util::sync::CancellationToken;

use super::cache::CacheSlot;
use super::fault::{GitError, is_abbreviated};
use super::program::{GitServer, REMOTE_NAME, parse_progress};
use super::repository::no_such_reference;
use crate::error::{BuilderError, Result};
use crate::event::{BuildEvent, EventReporter};
use crate::lock::FileLock;

/// Maximum bytes fetched for one commit: thirty times llama.cpp's size. A larger commit is no llama.cpp.
const MAX_COMMIT_BYTES: usize = 1 << 30;
/// Maximum bytes fetched for a whole history: ten times llama.cpp's size.
const MAX_HISTORY_BYTES: usize = 5 << 30;
const ALL_REFSPECS: [&str; 2] = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"];
/// The `--depth` that means all of history, also for a shallow repository.
const FULL_DEPTH: u32 = 0x7fff_ffff;
/// Prefix of references to commits fetched by id; without one, git's garbage collection removes the commit.
const KEPT_REF_PREFIX: &str = "refs/llama-warden/";

#[derive(Clone, Debug)]
pub(super) struct FetchRequest {
    pub(super) url: String,
    pub(super) place: CacheSlot,
    pub(super) reference: Option<String>,
    pub(super) limits: FetchLimits,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FetchLimits {
    pub(super) commit: usize,
    pub(super) history: usize,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self { commit: MAX_COMMIT_BYTES, history: MAX_HISTORY_BYTES }
    }
}

/// Fetches the requested commit and returns its id. Holds the caller's lock until the last write is done.
pub(super) async fn fetch(
    wanted: FetchRequest,
    _lock: FileLock,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<String> {
    let described = match &wanted.reference {
        Some(name) => format!("`{name}`"),
        None => "its default branch".to_owned(),
    };
    RunningFetch { wanted: &wanted, described: &described, reporter, cancel }.run().await
}

struct RunningFetch<'a> {
    wanted: &'a FetchRequest,
    described: &'a str,
    reporter: &'a EventReporter,
    cancel: &'a CancellationToken,
}

struct RemoteHead {
    name: String,
    id: Oid,
}

impl RunningFetch<'_> {
    async fn run(&self) -> Result<String> {
        let place = &self.wanted.place;
        let was_there = place.folder.exists();
        if was_there && place.is_damaged() {
            self.discard_damaged()?;
        }
        match self.fetch_once().await {
            // The server responded, but the cached repository is damaged.
            Err(BuilderError::Git(GitError::Repository { .. })) if was_there && place.is_damaged() => {
                self.discard_damaged()?;
                self.fetch_once().await
            }
            other => other,
        }
    }

    fn discard_damaged(&self) -> Result<()> {
        let place = &self.wanted.place;
        let note = format!("what the cache has of {} is damaged: fetching it again", place.shown);
        self.reporter.note(note);
        place.discard()
    }

    async fn fetch_once(&self) -> Result<String> {
        let place = &self.wanted.place;
        place.create()?;
        place.remove_leftovers();
        let heads = self.list_heads().await?;
        let target = self.resolve_target(&heads)?;
        remove_deleted_references(&self.open()?, &heads);
        if place.history {
            self.download(&ALL_REFSPECS, None).await?;
        } else if !self.has(target.id)? {
            let kept = format!("+{}:{KEPT_REF_PREFIX}{}", target.refspec, target.id);
            match self.download(&[&kept], Some(1)).await {
                // The server may not allow fetching by id: everything is fetched below.
                Err(BuilderError::Git(GitError::Repository { .. })) if target.by_id => {}
                other => other?,
            }
            if !self.has(target.id)? && target.by_id {
                // Old servers, and servers configured so, give out commits by name only.
                let note = format!("{} does not hand out single commits: fetching all of them", place.shown);
                self.reporter.note(note);
                self.download(&ALL_REFSPECS, Some(FULL_DEPTH)).await?;
            }
        }
        if !self.has(target.id)? {
            return Err(no_such_reference(&place.shown, &target.refspec, std::iter::empty()).into());
        }
        self.set_references(&self.open()?, &heads, &target).map_err(|error| self.failed(&error))?;
        Ok(target.id.to_string())
    }

    fn open(&self) -> Result<git2::Repository> {
        git2::Repository::open_bare(&self.wanted.place.folder).map_err(|error| self.failed(&error))
    }

    fn has(&self, id: Oid) -> Result<bool> {
        Ok(self.open()?.find_commit(id).and_then(|commit| commit.tree()).is_ok())
    }

    fn server(&self) -> GitServer<'_> {
        GitServer { url: &self.wanted.url, folder: &self.wanted.place.folder, wanted: self.described }
    }

    /// Lists the server's references; each line of git's output has 40 digits and a name.
    async fn list_heads(&self) -> Result<Vec<RemoteHead>> {
        let mut heads = Vec::new();
        let line = |line: &str| {
            if let Some((id, name)) = line.split_once('\t')
                && id.len() == 40
                && let Ok(id) = Oid::from_str(id)
            {
                heads.push(RemoteHead { name: name.to_owned(), id });
            }
        };
        self.server().run(&["ls-remote", REMOTE_NAME], self.wanted.limits.commit, self.cancel, line).await?;
        Ok(heads)
    }

    async fn download(&self, what: &[&str], depth: Option<u32>) -> Result<()> {
        let most = if depth == Some(1) { self.wanted.limits.commit } else { self.wanted.limits.history };
        let depth = depth.map(|depth| format!("--depth={depth}"));
        let mut arguments =
            vec!["fetch", "--progress", "--no-tags", "--no-auto-gc", "--no-recurse-submodules"];
        arguments.extend(depth.as_deref());
        arguments.push(REMOTE_NAME);
        arguments.extend(what);
        let mut told = None;
        let line = |line: &str| {
            let Some((done, total, size)) = parse_progress(line) else { return };
            // A hundred progress lines suffice.
            let part = u64::from(done) * 100 / u64::from(total.max(1));
            if told.replace(part) != Some(part) {
                self.reporter.report(BuildEvent::Progress { done, total, item: format!("objects, {size}") });
            }
        };
        let outcome = self.server().run(&arguments, most, self.cancel, line).await;
        if let Err(BuilderError::Git(GitError::TooLarge { .. })) = &outcome {
            remove_dangling_references(&self.open()?);
        }
        outcome
    }

    /// Sets the references that later calls resolve offline, and that determine a commit's build number.
    fn set_references(
        &self,
        repo: &git2::Repository,
        heads: &[RemoteHead],
        target: &FetchTarget,
    ) -> std::result::Result<(), git2::Error> {
        let why = "fetched";
        repo.reference(&format!("{KEPT_REF_PREFIX}{}", target.id), target.id, true, why)?;
        if let Some(name) = &target.name {
            repo.reference(name, target.id, true, why)?;
        }
        if self.wanted.reference.is_none() {
            repo.reference(&format!("{KEPT_REF_PREFIX}head"), target.id, true, why)?;
        }
        for head in heads.iter().filter(|head| head.id == target.id) {
            let name = head.name.trim_end_matches("^{}");
            if name.starts_with("refs/tags/") {
                repo.reference(name, target.id, true, why)?;
            }
        }
        // Build numbers are counted from HEAD, so the repository needs the server's HEAD.
        if let Some(head) = heads.iter().find(|head| head.name == "HEAD")
            && self.wanted.place.history
            && let Some(branch) =
                heads.iter().find(|other| other.id == head.id && other.name.starts_with("refs/heads/"))
        {
            repo.set_head(&branch.name)?;
        }
        Ok(())
    }

    fn resolve_target(&self, heads: &[RemoteHead]) -> Result<FetchTarget> {
        let shown = &self.wanted.place.shown;
        let Some(wanted) = &self.wanted.reference else {
            return match heads.iter().find(|head| head.name == "HEAD") {
                Some(head) => Ok(FetchTarget { refspec: "HEAD".into(), ..FetchTarget::new(head.id) }),
                None => Err(no_such_reference(shown, "HEAD", std::iter::empty()).into()),
            };
        };
        for folder in ["refs/tags/", "refs/heads/", ""] {
            let name = format!("{folder}{wanted}");
            // An annotated tag is listed twice, the second time (`^{}`) with its commit.
            let peeled = heads.iter().find(|head| head.name.strip_suffix("^{}") == Some(&name));
            if let Some(head) = peeled.or_else(|| heads.iter().find(|head| head.name == name)) {
                let target = FetchTarget::new(head.id);
                return Ok(FetchTarget { refspec: name.clone(), name: Some(name), ..target });
            }
        }
        if wanted.len() == 40
            && let Ok(id) = Oid::from_str(wanted)
        {
            return Ok(match heads.iter().find(|head| head.id == id && !head.name.ends_with("^{}")) {
                Some(head) => FetchTarget { refspec: head.name.clone(), ..FetchTarget::new(id) },
                None => FetchTarget { refspec: wanted.clone(), by_id: true, ..FetchTarget::new(id) },
            });
        }
        if is_abbreviated(wanted) {
            let wanted = wanted.to_ascii_lowercase();
            let mut ids: Vec<Oid> =
                heads.iter().map(|head| head.id).filter(|id| id.to_string().starts_with(&wanted)).collect();
            ids.sort();
            ids.dedup();
            match ids[..] {
                [id] => return Ok(FetchTarget { by_id: true, ..FetchTarget::new(id) }),
                [] => {}
                _ => {
                    return Err(GitError::Ambiguous { repository: shown.clone(), reference: wanted }.into());
                }
            }
        }
        let names = heads.iter().filter(|head| !head.name.ends_with("^{}"));
        let names = names.filter_map(|head| super::repository::short_name(&head.name));
        Err(no_such_reference(shown, wanted, names).into())
    }

    fn failed(&self, error: &git2::Error) -> BuilderError {
        GitError::repository("fetching from", &self.wanted.place.shown, error).into()
    }
}

/// Removes references to missing commits, which would make the next fetch find the repository damaged.
fn remove_dangling_references(repo: &git2::Repository) {
    let Ok(references) = repo.references() else { return };
    for mut reference in references.flatten() {
        if reference.target().is_some_and(|id| repo.find_object(id, None).is_err()) {
            // If this fails, the next fetch finds the damage.
            reference.delete().ok();
        }
    }
}

/// Removes branches and tags that the server has deleted: a deleted name may conflict with a new one (`a`
/// with `a/b`).
fn remove_deleted_references(repo: &git2::Repository, heads: &[RemoteHead]) {
    let known: HashSet<&str> = heads.iter().map(|head| head.name.as_str()).collect();
    for folder in ["refs/heads/*", "refs/tags/*"] {
        let Ok(references) = repo.references_glob(folder) else { continue };
        for mut reference in references.flatten() {
            if !reference.name().is_ok_and(|name| known.contains(name)) {
                // If the deletion fails, a conflict with this reference is reported later.
                reference.delete().ok();
            }
        }
    }
}

struct FetchTarget {
    id: Oid,
    refspec: String,
    name: Option<String>,
    /// The commit is fetched by id, which not every server allows.
    by_id: bool,
}

impl FetchTarget {
    fn new(id: Oid) -> Self {
        Self { id, refspec: id.to_string(), name: None, by_id: false }
    }
}
