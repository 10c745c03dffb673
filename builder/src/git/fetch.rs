//! Asks a server for commits, on a thread that nobody has to wait for.
//!
//! libgit2 looks up only now and then whether it should go on: while it connects, or waits for a server that fell
//! silent, it does not. Whoever waits here stops waiting at once, when cancelled or after [`SILENCE`]; the thread ends
//! by itself at its next step, and keeps the repository's lock until then. Nothing that it may still do harms: see
//! [`super::cache`].

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use git2::{AutotagOption, Direction, ErrorClass, ErrorCode, Oid, RemoteRedirect};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::Fault;
use super::cache::Place;
use super::fault::is_abbreviated;
use super::repository::no_such;
use crate::error::{Error, Result};
use crate::event::{Event, Reporter};
use crate::lock::Lock;

/// A server that says nothing for this long is taken for dead. Large repositories are counted for some seconds before
/// anything comes, with signs of life in between.
const SILENCE: Duration = Duration::from_secs(60);
/// Bytes of one commit that are taken from a server: thirty times what llama.cpp has. Whoever sends more sends no source.
const MOST_OF_COMMIT: usize = 1 << 30;
/// Bytes of a whole history: ten times llama.cpp's.
const MOST_OF_HISTORY: usize = 5 << 30;
/// Everything below `HEAD` and the branches and tags, as a clone has it.
const EVERYTHING: [&str; 2] = ["+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*"];
/// Where the commits that were asked for by name are kept: else a later clean-up would take them for garbage.
const KEPT: &str = "refs/llama-warden/";

/// What is wanted of a server.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) url: String,
    pub(super) place: Place,
    /// A tag, a branch, or a commit; `None`: what the server calls `HEAD`.
    pub(super) reference: Option<String>,
    pub(super) most: Most,
}

/// How much may be received, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Most {
    /// For one commit.
    pub(super) commit: usize,
    /// For a whole history.
    pub(super) history: usize,
}

impl Default for Most {
    fn default() -> Self {
        Self { commit: MOST_OF_COMMIT, history: MOST_OF_HISTORY }
    }
}

/// Fetches it and says which commit it is. Holds the place's lock, which the caller took.
pub(super) async fn fetch(
    wanted: Wanted,
    lock: Lock,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<String> {
    let (alive, mut signs) = watch::channel(());
    let (done, mut result) = oneshot::channel();
    let token = cancel.child_token();
    // Whoever drops this future ends the thread too.
    let _guard = token.clone().drop_guard();
    let (host, reference) = (host_of(&wanted.url), wanted.describe());
    let work = Work { wanted, reporter: reporter.clone(), cancel: token, alive, passed: AtomicUsize::new(0) };
    let thread = thread::Builder::new().name("git-fetch".into()).spawn(move || {
        let outcome = work.run();
        drop(lock);
        // Nobody may be waiting any more.
        done.send(outcome).ok();
    });
    thread.map_err(crate::error::io_error("starting a thread for", host.clone()))?;
    loop {
        tokio::select! {
            outcome = &mut result => {
                let broken = || Fault::Unreachable { host, reference, why: "the fetch broke off".into() };
                return outcome.unwrap_or_else(|_| Err(broken().into()));
            }
            () = cancel.cancelled() => return Err(Error::Cancelled),
            // The sender goes with the thread, whose result is then there.
            Ok(()) = signs.changed() => {}
            () = tokio::time::sleep(SILENCE) => {
                let why = format!("it said nothing for {} s", SILENCE.as_secs());
                return Err(Fault::Unreachable { host, reference, why }.into());
            }
        }
    }
}

struct Work {
    wanted: Wanted,
    reporter: Reporter,
    cancel: CancellationToken,
    alive: watch::Sender<()>,
    /// The bound of [`Most`] that was passed; 0 if none was.
    passed: AtomicUsize,
}

/// A branch or tag of the server.
struct Head {
    name: String,
    id: Oid,
}

impl Wanted {
    fn describe(&self) -> String {
        self.reference.as_ref().map_or_else(|| "its default branch".to_owned(), |name| format!("`{name}`"))
    }
}

impl Work {
    fn run(&self) -> Result<String> {
        let place = &self.wanted.place;
        let was_there = place.folder.exists();
        match self.once() {
            // The server was asked and it is our own copy that fails.
            Err(Error::Git(Fault::Repository { .. })) if was_there && place.is_damaged() => {
                self.stop_if_cancelled()?;
                let note = format!("what the cache has of {} is damaged: fetching it anew", place.shown);
                self.reporter.tell(Event::Note(note));
                place.discard()?;
                self.once()
            }
            other => other,
        }
    }

    fn once(&self) -> Result<String> {
        let place = &self.wanted.place;
        place.create()?;
        place.sweep();
        let repo = git2::Repository::open_bare(&place.folder).map_err(|error| self.failed(&error))?;
        // Without a name nothing of the URL, which may hold a password, is written down.
        let mut remote = repo.remote_anonymous(&self.wanted.url).map_err(|error| self.failed(&error))?;
        let heads: Vec<Head> = {
            let connection = remote
                .connect_auth(Direction::Fetch, Some(self.callbacks(self.wanted.most.commit)), Some(proxy()))
                .map_err(|error| self.failed(&error))?;
            let list = connection.list().map_err(|error| self.failed(&error))?;
            list.iter().map(|head| Head { name: head.name().to_owned(), id: head.oid() }).collect()
        };
        self.stop_if_cancelled()?;
        let target = self.target(&heads)?;
        let is_here = |id: Oid| repo.find_commit(id).and_then(|commit| commit.tree()).is_ok();
        forget(&repo, &heads);
        if place.history {
            self.download(&mut remote, &EVERYTHING, 0)?;
        } else if !is_here(target.id) {
            let kept = format!("{KEPT}{}", target.id);
            match self.download(&mut remote, &[&format!("+{}:{kept}", target.asked)], 1) {
                // It does not allow that: see below.
                Err(Error::Git(Fault::Repository { .. })) if target.by_id => {}
                other => other?,
            }
            if !is_here(target.id) && target.by_id {
                // An old server, or one that was told so: it gives commits by name only.
                let note = format!("{} does not hand out single commits: fetching all of them", place.shown);
                self.reporter.tell(Event::Note(note));
                self.download(&mut remote, &EVERYTHING, 0)?;
            }
        }
        if !is_here(target.id) {
            return Err(no_such(&place.shown, &target.asked, std::iter::empty()).into());
        }
        self.remember(&repo, &heads, &target).map_err(|error| self.failed(&error))?;
        Ok(target.id.to_string())
    }

    /// Sets the references that later calls resolve without a network, and that tell a commit's build number.
    fn remember(
        &self,
        repo: &git2::Repository,
        heads: &[Head],
        target: &Target,
    ) -> std::result::Result<(), git2::Error> {
        let why = "fetched";
        repo.reference(&format!("{KEPT}{}", target.id), target.id, true, why)?;
        if let Some(name) = &target.name {
            repo.reference(name, target.id, true, why)?;
        }
        if self.wanted.reference.is_none() {
            repo.reference(&format!("{KEPT}head"), target.id, true, why)?;
        }
        for head in heads.iter().filter(|head| head.id == target.id) {
            let name = head.name.trim_end_matches("^{}");
            if name.starts_with("refs/tags/") {
                repo.reference(name, target.id, true, why)?;
            }
        }
        // Counting commits begins at HEAD: it is to be the server's.
        if let Some(head) = heads.iter().find(|head| head.name == "HEAD")
            && self.wanted.place.history
            && let Some(branch) =
                heads.iter().find(|other| other.id == head.id && other.name.starts_with("refs/heads/"))
        {
            repo.set_head(&branch.name)?;
        }
        Ok(())
    }

    /// Which commit is meant, and how to ask for it.
    fn target(&self, heads: &[Head]) -> Result<Target> {
        let Some(wanted) = &self.wanted.reference else {
            return heads
                .iter()
                .find(|head| head.name == "HEAD")
                .map(|head| Target { id: head.id, asked: "HEAD".into(), name: None, by_id: false })
                .ok_or_else(|| no_such(&self.wanted.place.shown, "HEAD", std::iter::empty()).into());
        };
        for folder in ["refs/tags/", "refs/heads/", ""] {
            let name = format!("{folder}{wanted}");
            // An annotated tag is listed twice, the second time as the commit that it is on.
            let peeled = heads.iter().find(|head| head.name.strip_suffix("^{}") == Some(&name));
            if let Some(head) = peeled.or_else(|| heads.iter().find(|head| head.name == name)) {
                return Ok(Target { id: head.id, asked: name.clone(), name: Some(name), by_id: false });
            }
        }
        if wanted.len() == 40
            && let Ok(id) = Oid::from_str(wanted)
        {
            return Ok(match heads.iter().find(|head| head.id == id && !head.name.ends_with("^{}")) {
                Some(head) => Target { id, asked: head.name.clone(), name: None, by_id: false },
                None => Target { id, asked: wanted.clone(), name: None, by_id: true },
            });
        }
        if is_abbreviated(wanted) {
            let wanted = wanted.to_ascii_lowercase();
            let mut ids: Vec<Oid> =
                heads.iter().map(|head| head.id).filter(|id| id.to_string().starts_with(&wanted)).collect();
            ids.sort();
            ids.dedup();
            match ids[..] {
                [id] => return Ok(Target { id, asked: id.to_string(), name: None, by_id: true }),
                [] => {}
                _ => {
                    let (repository, reference) = (self.wanted.place.shown.clone(), wanted);
                    return Err(Fault::Ambiguous { repository, reference }.into());
                }
            }
        }
        let names = heads.iter().filter(|head| !head.name.ends_with("^{}"));
        let names = names.filter_map(|head| super::repository::short_name(&head.name));
        Err(no_such(&self.wanted.place.shown, wanted, names).into())
    }

    fn download(&self, remote: &mut git2::Remote<'_>, what: &[&str], depth: i32) -> Result<()> {
        let most = if depth == 0 { self.wanted.most.history } else { self.wanted.most.commit };
        let mut options = git2::FetchOptions::new();
        options
            .remote_callbacks(self.callbacks(most))
            .proxy_options(proxy())
            .download_tags(AutotagOption::None)
            .follow_redirects(RemoteRedirect::Initial)
            .update_fetchhead(false)
            .depth(depth);
        remote.fetch(what, Some(&mut options), Some("fetched")).map_err(|error| self.failed(&error))?;
        self.stop_if_cancelled()
    }

    /// `most`: bytes that may be received.
    fn callbacks(&self, most: usize) -> git2::RemoteCallbacks<'_> {
        let mut callbacks = git2::RemoteCallbacks::new();
        let mut told = 0;
        callbacks.transfer_progress(move |progress| {
            self.alive.send(()).ok();
            if progress.received_bytes() > most {
                self.passed.store(most, Ordering::Relaxed);
                return false;
            }
            let (done, total) = (progress.received_objects(), progress.total_objects());
            // A hundred lines are enough for anybody.
            let part = done * 100 / total.max(1);
            if part != told {
                told = part;
                let (done, total) = (clamp(done), clamp(total));
                let item = format!("objects, {} MiB", progress.received_bytes() >> 20);
                self.reporter.tell(Event::Progress { done, total, item });
            }
            !self.cancel.is_cancelled()
        });
        callbacks.sideband_progress(|_| {
            self.alive.send(()).ok();
            !self.cancel.is_cancelled()
        });
        callbacks.credentials(|_, _, _| {
            // User and password of the URL were tried before this is called. Nobody is asked for more.
            Err(git2::Error::new(ErrorCode::Auth, ErrorClass::Http, "it wants a user and a password"))
        });
        callbacks
    }

    fn stop_if_cancelled(&self) -> Result<()> {
        if self.cancel.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// What libgit2 says, told apart by whose turn it is.
    fn failed(&self, error: &git2::Error) -> Error {
        let passed = self.passed.load(Ordering::Relaxed);
        if passed > 0 && !self.cancel.is_cancelled() {
            return Fault::TooLarge { url: self.wanted.place.shown.clone(), most: passed as u64 >> 20 }
                .into();
        }
        if error.code() == ErrorCode::User || self.cancel.is_cancelled() {
            return Error::Cancelled;
        }
        let why = error.message().to_owned();
        let url = self.wanted.place.shown.clone();
        match (error.code(), error.class()) {
            (ErrorCode::Auth, _) => Fault::Refused { url, why }.into(),
            // A certificate is checked before anything is asked: it is the way there that is wrong.
            (ErrorCode::Certificate, _) | (_, ErrorClass::Net | ErrorClass::Ssl | ErrorClass::Os) => {
                Fault::Unreachable { host: host_of(&url), reference: self.wanted.describe(), why }.into()
            }
            // 404 and its like.
            (_, ErrorClass::Http) => Fault::Refused { url, why }.into(),
            _ => Fault::Repository { doing: "fetching from", repository: url, why }.into(),
        }
    }
}

/// Removes the branches and tags that the server has no more: one may stand in the way of a new one (`a` and `a/b`).
fn forget(repo: &git2::Repository, heads: &[Head]) {
    let known: HashSet<&str> = heads.iter().map(|head| head.name.as_str()).collect();
    for folder in ["refs/heads/*", "refs/tags/*"] {
        let Ok(references) = repo.references_glob(folder) else { continue };
        for mut reference in references.flatten() {
            if !reference.name().is_ok_and(|name| known.contains(name)) {
                // One that stays is told about when it is in the way.
                reference.delete().ok();
            }
        }
    }
}

struct Target {
    id: Oid,
    /// What the server is asked for: a name, or 40 digits.
    asked: String,
    /// The reference that is set here.
    name: Option<String>,
    /// Whether it is asked for by its digits, which not every server allows.
    by_id: bool,
}

fn proxy<'a>() -> git2::ProxyOptions<'a> {
    let mut options = git2::ProxyOptions::new();
    options.auto();
    options
}

fn host_of(url: &str) -> String {
    super::Location::Url(url.to_owned()).host().to_owned()
}

fn clamp(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
