//! Plans a build: examines the source, judges its patch sets, and checks the tools of this machine.

use warden_patches::PlannedSet;

use super::{BuildRequest, Builder, amx, patching};
use crate::error::Result;
use crate::event::BuildEvent;
use crate::plan::{
    AmxKernels, BuildPlan, ComputeBackend, DownloadLibrary, ExtraTools, PlanInputs, SourceFeatures,
};
use crate::source::{BuildSource, ExaminedSource};
use crate::toolchain;

/// The reason for no page on machines without npm.
const NO_NPM: &str = "there is no npm here (apt install npm, or put the page of a release into tools/ui/dist of the source), \
                      then build again";

/// Parts of the source that a plan leaves out, each with its reason.
#[derive(Clone, Debug, Default)]
pub(super) struct OmittedParts {
    /// The web page.
    pub(super) page: Option<String>,
    /// The kernels for AMX.
    pub(super) amx: Option<String>,
}

impl Builder {
    /// Plans a build of this request. Writes nothing but facts about a source archive into the cache.
    ///
    /// # Errors
    ///
    /// Fails if the source has no llama.cpp, a tool is missing or too old, a patch set is refused, or the
    /// request contradicts itself.
    pub async fn plan(&self, request: &BuildRequest) -> Result<BuildPlan> {
        self.plan_without(request, OmittedParts::default()).await
    }

    /// Like [`Self::plan`], without the parts that failed or could not be made.
    pub(super) async fn plan_without(
        &self,
        request: &BuildRequest,
        without: OmittedParts,
    ) -> Result<BuildPlan> {
        let OmittedParts { page, amx } = without;
        let compilers = toolchain::find_compilers(&self.env, request.arch.cpu, &self.cancel);
        let chosen = toolchain::choose_backend(&self.env, request.backend, &request.arch, &self.cancel);
        let (chosen, compilers, found) = tokio::try_join!(chosen, compilers, self.examine(&request.source))?;
        if !chosen.why.is_empty() {
            self.reporter.report(BuildEvent::Note(format!("backend {}: {}", chosen.backend, chosen.why)));
        }
        let amx = match amx {
            Some(why) => Some(AmxKernels::LeftOut(why)),
            None => amx::decide_amx_kernels(self, request, &compilers, &found.identity).await?,
        };
        let (patches, offers) = self.judge(request, chosen.backend, &found).await?;
        let npm = async {
            if let Some(why) = page {
                return Ok(Err(why));
            }
            let npm =
                if offers.needs_npm() { toolchain::find_npm(&self.env, &self.cancel).await? } else { None };
            Ok(npm.ok_or_else(|| NO_NPM.to_owned()))
        };
        let openssl = async {
            if offers.fetches == DownloadLibrary::OpenSsl {
                toolchain::find_openssl(&self.env, &compilers, &self.cancel).await
            } else {
                Ok(None)
            }
        };
        let curl = async {
            if offers.fetches == DownloadLibrary::Curl {
                toolchain::find_curl(&self.env, &compilers, &self.cancel).await
            } else {
                Ok(None)
            }
        };
        let (npm, openssl, curl) = tokio::try_join!(npm, openssl, curl)?;
        let tools = ExtraTools { npm, openssl, curl };
        let searched = self.env.searched.iter();
        let searched =
            searched.map(|(name, value)| (name.clone(), value.to_string_lossy().into_owned())).collect();
        let arch = request.arch.cpu;
        let ingredients =
            PlanInputs { source: found, compilers, chosen, arch, patches, searched, offers, tools, amx };
        BuildPlan::new(ingredients, &request.options)
    }

    async fn examine(&self, source: &BuildSource) -> Result<ExaminedSource> {
        let (source, cache) = (source.clone(), self.dirs.cache.clone());
        self.run_blocking(move |cancel| source.examine(&cache, &cancel)).await
    }

    /// Determines from the source's files which sets fit and what the source offers.
    async fn judge(
        &self,
        request: &BuildRequest,
        backend: ComputeBackend,
        found: &ExaminedSource,
    ) -> Result<(Vec<PlannedSet>, SourceFeatures)> {
        let (selection, source) = (request.patches.clone(), request.source.clone());
        let (found, cache) = (found.clone(), self.dirs.cache.clone());
        self.run_blocking(move |cancel| {
            patching::judge_sets(&selection, backend, &source, &found, &cache, &cancel)
        })
        .await
    }
}
