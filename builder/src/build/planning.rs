//! Plans a build: examines the source, judges its patch sets, and checks the tools of this machine.

use std::path::Path;

use warden_patches::apply::apply;
use warden_patches::{FolderTree, PlannedSeries, PlannedSet, SetSelection};

use super::amx;
use crate::builder::{BuildRequest, Builder};
use crate::error::{BuilderError, Result};
use crate::plan::{
    AmxKernels, BuildPlan, ComputeBackend, DownloadLibrary, ExtraTools, PlanInputs, SourceFeatures,
};
use crate::source::{BuildSource, CachedTree, ExaminedSource};
use crate::toolchain::{self, BuildCompilers};

const NO_NPM: &str = "there is no npm here (apt install npm, or put the page of a release into tools/ui/dist of \
                      the source), then build again";

#[derive(Clone, Debug, Default)]
pub(super) struct OmittedParts {
    pub(super) page: Option<String>,
    pub(super) amx: Option<String>,
}

impl Builder {
    /// Plans a build of this request. Writes nothing but facts about a source archive into the cache.
    ///
    /// # Errors
    /// Fails if the source has no llama.cpp, a tool is missing or too old, a patch set is refused, or the
    /// request contradicts itself.
    pub async fn plan(&self, request: &BuildRequest) -> Result<BuildPlan> {
        self.plan_without(request, OmittedParts::default()).await
    }

    /// Like [`Self::plan`], without the parts in `without`, which failed in an earlier attempt.
    pub(super) async fn plan_without(
        &self,
        request: &BuildRequest,
        without: OmittedParts,
    ) -> Result<BuildPlan> {
        let compilers = toolchain::find_compilers(self, request.arch.cpu);
        let chosen = toolchain::choose_backend(self, request.backend, &request.arch);
        let (chosen, compilers, found) = tokio::try_join!(chosen, compilers, self.examine(&request.source))?;
        if !chosen.why.is_empty() {
            self.reporter.note(format!("backend {}: {}", chosen.backend, chosen.why));
        }
        let amx = match without.amx {
            Some(why) => Some(AmxKernels::LeftOut(why)),
            None => amx::decide_amx_kernels(self, request, &compilers, &found.identity).await?,
        };
        let (patches, offers) = self.judge(request, chosen.backend, &found).await?;
        let tools = self.find_extra_tools(&offers, without.page, &compilers).await?;
        let searched = self.env.searched.iter();
        let searched =
            searched.map(|(name, value)| (name.clone(), value.to_string_lossy().into_owned())).collect();
        let arch = request.arch.cpu;
        let ingredients =
            PlanInputs { source: found, compilers, chosen, arch, patches, searched, offers, tools, amx };
        BuildPlan::new(ingredients, &request.options)
    }

    /// Finds the tools and libraries for what the source offers. `no_page`: why the page is left out.
    async fn find_extra_tools(
        &self,
        offers: &SourceFeatures,
        no_page: Option<String>,
        compilers: &BuildCompilers,
    ) -> Result<ExtraTools> {
        let npm = async {
            match no_page {
                Some(why) => Ok(Err(why)),
                None if !offers.needs_npm() => Ok(Err(NO_NPM.to_owned())),
                None => Ok(toolchain::find_npm(self).await?.ok_or_else(|| NO_NPM.to_owned())),
            }
        };
        let library = async {
            match offers.fetches {
                DownloadLibrary::None => Ok(None),
                DownloadLibrary::OpenSsl => toolchain::find_openssl(self, compilers).await,
                DownloadLibrary::Curl => toolchain::find_curl(self, compilers).await,
            }
        };
        let (npm, library) = tokio::try_join!(npm, library)?;
        Ok(ExtraTools { npm, library })
    }

    async fn examine(&self, source: &BuildSource) -> Result<ExaminedSource> {
        let (source, cache) = (source.clone(), self.dirs.cache.clone());
        self.run_blocking(move |cancel| source.examine(&cache, &cancel)).await
    }

    async fn judge(
        &self,
        request: &BuildRequest,
        backend: ComputeBackend,
        found: &ExaminedSource,
    ) -> Result<(Vec<PlannedSet>, SourceFeatures)> {
        let (selection, source) = (request.patches.clone(), request.source.clone());
        let (found, cache) = (found.clone(), self.dirs.cache.clone());
        self.run_blocking(move |cancel| {
            let tree = CachedTree::new(&source, &found, &cache, &cancel);
            let planned = PlannedSeries::judge(&selection, backend.name(), &tree)?.sets;
            Ok((planned, SourceFeatures::inspect(&tree, &found.server)?))
        })
        .await
    }
}

/// Applies the plan's sets to the tree at `root`. Blocks. The sets are judged again; a result that differs from
/// the plan is an error before the first write, because the source has changed.
pub(super) fn apply_sets(selection: &SetSelection, plan: &BuildPlan, root: &Path) -> Result<usize> {
    let tree = FolderTree::new(root, plan.source.revision.clone());
    let planned = PlannedSeries::judge(selection, plan.recipe.backend.name(), &tree)?;
    if planned.sets != plan.patches {
        return Err(BuilderError::SourceChanged { path: plan.source.given.clone() });
    }
    apply(root, &planned.series)?;
    Ok(planned.series.edits.0.len())
}
