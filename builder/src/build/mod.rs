//! Executes a plan: from a source to a verified llama-server in the store.
//!
//! A build's log stays in the cache folder as `logs/<BuildId>.log`, also after success.
//!
//! If the web page cannot be made, the build restarts with a plan without a page, because a build's id must
//! match the content of the binary. The next build tries to make the page again.

mod amx;
pub(crate) mod failure;
mod log;
mod making;
mod page;
mod planning;
mod trial;
mod work;

use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_patches::SetSelection;

use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::event::{BuildEvent, EventReporter};
use crate::lock::FileLock;
use crate::machine::{self, MachineNeeds};
use crate::plan::{AmxKernels, ArchChoice, BackendChoice, BuildPlan};
use crate::process::{RunPriority, run_blocking};
use crate::source::BuildSource;
use crate::store::{BuildId, BuildStore, Provenance};
use crate::{git, toolchain};
use log::BuildLog;
use making::{BuildOutcome, RunningBuild};
use planning::OmittedParts;
use work::WorkFolder;

/// Folders of the builder. No other program uses them; they are created when needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuilderDirs {
    /// Replaceable files: sources, tools, work folders, logs.
    pub cache: PathBuf,
    /// Persistent files: the store.
    pub data: PathBuf,
}

/// A request for a build.
#[derive(Clone, Debug)]
pub struct BuildRequest {
    /// Location of the source.
    pub source: BuildSource,
    /// Compute backend of the binary.
    pub backend: BackendChoice,
    /// CPU and GPU architectures that the binary must run on.
    pub arch: ArchChoice,
    /// Patch sets to apply.
    pub patches: SetSelection,
    /// Additional cmake options, as `NAME=VALUE` or `-DNAME=VALUE`.
    pub options: Vec<String>,
    /// Parallel compilers; `None`: as many as cores and memory allow.
    pub jobs: Option<usize>,
    /// Requirements on the machine.
    pub needs: MachineNeeds,
    /// Time limit for npm to make the web page; after that, the build continues without a page.
    pub page_timeout: Duration,
    /// Time limit for each start and each answer of the new server.
    pub verify_timeout: Duration,
    /// Priority of the compilers.
    pub priority: RunPriority,
}

/// A build that is in the store.
#[derive(Clone, Debug)]
pub struct StoredBuild {
    /// The build's id.
    pub id: BuildId,
    /// Path of the llama-server.
    pub binary: PathBuf,
    /// The store had the build already.
    pub hit: bool,
    /// The build's provenance.
    pub provenance: Provenance,
}

/// Builds llama-server. Cheap to create; holds no resources between calls.
#[derive(Clone, Debug)]
pub struct Builder {
    /// Folders for cache and store.
    pub dirs: BuilderDirs,
    /// Search path for programs, and environment variables.
    pub env: BuildEnvironment,
    /// Bytes of memory available without swapping; `None` if unknown: memory then limits nothing.
    pub memory: fn() -> Option<u64>,
    /// Receiver of progress events.
    pub reporter: EventReporter,
    /// Cancels the running work: before the call returns, all children have ended and all work folders are
    /// removed.
    pub cancel: CancellationToken,
}

impl Builder {
    /// The store that receives the builds.
    pub fn store(&self) -> BuildStore {
        BuildStore::new(&self.dirs.data)
    }

    /// Returns a commit as a source, fetched if necessary.
    ///
    /// # Errors
    /// Fails if the commit does not exist, or is not on this machine and cannot be fetched.
    pub async fn git(&self, request: &git::CommitRequest) -> Result<BuildSource> {
        let git::ObtainedCommit { repository, commit } = self.repository(request).await?;
        let (shown, repository) = (repository.shown().to_owned(), repository.path().to_owned());
        Ok(BuildSource::Commit { repository, shown, commit })
    }

    /// Returns the repository with a commit, for ranges and single files; fetched if necessary.
    ///
    /// # Errors
    /// Fails if the commit does not exist, or is not on this machine and cannot be fetched.
    pub async fn repository(&self, request: &git::CommitRequest) -> Result<git::ObtainedCommit> {
        git::obtain(request, &self.dirs.cache, &self.reporter, &self.cancel).await
    }

    /// Builds llama-server, or returns the build from the store (within a second) if it is there already.
    ///
    /// # Errors
    /// Fails if the plan cannot be made (see [`Self::plan`]), a program of the build fails, the result does
    /// not pass its checks, the disk is full, or the caller cancelled. The store stays unchanged then.
    pub async fn build(&self, request: &BuildRequest) -> Result<StoredBuild> {
        let mut without = OmittedParts::default();
        loop {
            let plan = self.plan_without(request, without.clone()).await?;
            let (compilers, source) = (plan.compilers.clone(), plan.source.identity.clone());
            let has_amx = plan.amx == Some(AmxKernels::Compiled);
            match self.execute_plan(request, plan).await? {
                BuildOutcome::RepackFails(error) if has_amx => {
                    let text = error.to_string();
                    let first = text.lines().next().unwrap_or_default();
                    let why = format!("a build with them failed: {first}");
                    self.reporter.note(format!("{why}; the build is made again without AMX"));
                    amx::remember_crash(&self.dirs.cache, &compilers, &source, &why)?;
                    without.amx = Some(why);
                }
                BuildOutcome::RepackFails(error) => return Err(*error),
                BuildOutcome::Built(built) => return Ok(*built),
                BuildOutcome::NoPage(why) => {
                    self.reporter.note(format!(
                        "the web page cannot be made, and the build continues without it: {why}; the next \
                         build tries again"
                    ));
                    without.page = Some(why);
                }
            }
        }
    }

    async fn execute_plan(&self, request: &BuildRequest, plan: BuildPlan) -> Result<BuildOutcome> {
        self.reporter.report(BuildEvent::Planned(Box::new(plan.clone())));
        if let Some(hit) = self.find_stored(&plan.id) {
            return Ok(BuildOutcome::Built(Box::new(hit)));
        }
        let folders = [self.dirs.cache.as_path(), &self.dirs.data];
        machine::check_resources(request.needs, plan.recipe.backend, (self.memory)(), &folders)?;
        let drivers = toolchain::find_drivers(self, plan.recipe.backend).await?;
        let lock = work::lock_path(&self.dirs.cache, plan.id.as_str());
        let waiting = || self.reporter.report(BuildEvent::Waiting(plan.id.clone()));
        let _lock = FileLock::take(&lock, &self.cancel, waiting).await?;
        // The previous holder of the lock may have made the same build.
        if let Some(hit) = self.find_stored(&plan.id) {
            return Ok(BuildOutcome::Built(Box::new(hit)));
        }
        work::remove_abandoned(&self.dirs.cache);
        let work = WorkFolder::create(&self.dirs.cache, &plan.id)?;
        let log = BuildLog::create(self.dirs.cache.join("logs").join(format!("{}.log", plan.id)))?;
        self.reporter.report(BuildEvent::Log(log.path().to_owned()));
        RunningBuild { builder: self, request, plan, drivers, work, log }.make().await
    }

    fn find_stored(&self, id: &BuildId) -> Option<StoredBuild> {
        let store = self.store();
        // A damaged build is no hit: the new build replaces it.
        let provenance = store.show(id).ok()?;
        let binary = store.binary(id).ok()?;
        self.reporter.report(BuildEvent::Hit(id.clone()));
        Some(StoredBuild { id: id.clone(), binary, hit: true, provenance })
    }

    /// Runs blocking work on another thread. The token given to `work` is cancelled when the builder is
    /// cancelled, or when the caller drops the future.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(CancellationToken) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let token = self.cancel.child_token();
        let _guard = token.clone().drop_guard();
        run_blocking(move || work(token)).await
    }
}

#[cfg(test)]
pub(crate) mod tests;
