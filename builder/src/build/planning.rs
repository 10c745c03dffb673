//! Plans a build: examines the source, judges its patch sets, and checks the tools of this machine.

use warden_patches::PlannedSet;

use super::{Builder, Request, amx, patching};
use crate::error::Result;
use crate::event::Event;
use crate::plan::{AmxKernels, Backend, Fetches, Ingredients, Offers, Plan, Tools};
use crate::source::{Found, Source};
use crate::toolchain;

/// The reason for no page on machines without npm.
const NO_NPM: &str = "there is no npm here (apt install npm, or put the page of a release into tools/ui/dist of the source), \
                      then build again";

/// Parts of the source that a plan leaves out, each with its reason.
#[derive(Clone, Debug, Default)]
pub(super) struct LeftOut {
    /// The web page.
    pub(super) page: Option<String>,
    /// The kernels for AMX.
    pub(super) amx: Option<String>,
}

impl Builder {
    /// Plans a build of this request. Writes only facts about an archive into the cache.
    ///
    /// # Errors
    ///
    /// Fails if the source has no llama.cpp, a tool is missing or too old, a patch set is refused, or the
    /// request contradicts itself.
    pub async fn plan(&self, request: &Request) -> Result<Plan> {
        self.plan_without(request, LeftOut::default()).await
    }

    /// Like [`Self::plan`], without the parts that failed or could not be made.
    pub(super) async fn plan_without(&self, request: &Request, without: LeftOut) -> Result<Plan> {
        let LeftOut { page, amx } = without;
        let compilers = toolchain::compilers(&self.env, request.arch.cpu, &self.cancel);
        let chosen = toolchain::choose(&self.env, request.backend, &request.arch, &self.cancel);
        let (chosen, compilers, found) = tokio::try_join!(chosen, compilers, self.examine(&request.source))?;
        if !chosen.why.is_empty() {
            self.reporter.tell(Event::Note(format!("backend {}: {}", chosen.backend, chosen.why)));
        }
        let amx = match amx {
            Some(why) => Some(AmxKernels::LeftOut(why)),
            None => amx::kernels(self, request, &compilers, &found.identity).await?,
        };
        let (patches, offers) = self.judge(request, chosen.backend, &found).await?;
        let npm = async {
            if let Some(why) = page {
                return Ok(Err(why));
            }
            let npm = if offers.needs_npm() { toolchain::npm(&self.env, &self.cancel).await? } else { None };
            Ok(npm.ok_or_else(|| NO_NPM.to_owned()))
        };
        let openssl = async {
            if offers.fetches == Fetches::OpenSsl {
                toolchain::openssl(&self.env, &compilers, &self.cancel).await
            } else {
                Ok(None)
            }
        };
        let curl = async {
            if offers.fetches == Fetches::Curl {
                toolchain::curl(&self.env, &compilers, &self.cancel).await
            } else {
                Ok(None)
            }
        };
        let (npm, openssl, curl) = tokio::try_join!(npm, openssl, curl)?;
        let tools = Tools { npm, openssl, curl };
        let searched = self.env.searched.iter();
        let searched =
            searched.map(|(name, value)| (name.clone(), value.to_string_lossy().into_owned())).collect();
        let arch = request.arch.cpu;
        let ingredients =
            Ingredients { source: found, compilers, chosen, arch, patches, searched, offers, tools, amx };
        Plan::new(ingredients, &request.options)
    }

    async fn examine(&self, source: &Source) -> Result<Found> {
        let (source, cache) = (source.clone(), self.dirs.cache.clone());
        self.blocking(move |cancel| source.examine(&cache, &cancel)).await
    }

    /// Determines from the source's files which sets fit and what the source offers.
    async fn judge(
        &self,
        request: &Request,
        backend: Backend,
        found: &Found,
    ) -> Result<(Vec<PlannedSet>, Offers)> {
        let (selection, source) = (request.patches.clone(), request.source.clone());
        let (found, cache) = (found.clone(), self.dirs.cache.clone());
        self.blocking(move |cancel| patching::judge(&selection, backend, &source, &found, &cache, &cancel))
            .await
    }
}
