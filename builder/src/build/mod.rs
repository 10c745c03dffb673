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

use crate::builder::{BuildRequest, Builder, StoredBuild};
use crate::error::Result;
use crate::event::BuildEvent;
use crate::lock::FileLock;
use crate::plan::{AmxKernels, BuildPlan};
use crate::store::BuildId;
use crate::{machine, toolchain};
use log::BuildLog;
use making::{BuildOutcome, RunningBuild};
use planning::OmittedParts;
use work::WorkFolder;

impl Builder {
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
}

#[cfg(test)]
pub(crate) mod tests;
