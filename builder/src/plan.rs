//! The plan of a build, as a value that can be printed, stored and hashed. The hash is the build's id.
//!
//! A [`BuildRecipe`] has everything that shapes the binary and nothing else. Two builds with the same recipe
//! are the same build, independent of the source's location and of the program that ran the compilers.

mod extras;
mod options;
mod target;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use warden_patches::{PlannedSet, planned};

pub use extras::BuildExtras;
pub(crate) use extras::{DownloadLibrary, ExtraTools, SourceFeatures};
pub(crate) use options::{SHARED_GGML, WORKING_DIRECTORY_SEARCH, is_on, option_value};
pub use target::{ArchChoice, BackendChoice, ComputeBackend, CpuTarget};

use crate::error::{Result, io_error};
use crate::source::ExaminedSource;
use crate::store::BuildId;
use crate::toolchain::{BuildCompilers, ChosenBackend, GpuToolkit};

/// Incremented when an unchanged recipe would produce another binary.
const RECIPE_SCHEMA: u32 = 1;

/// Everything that shapes the binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRecipe {
    /// Version of this structure's meaning.
    pub schema: u32,
    /// Identity of the source, prefixed with the source's kind.
    pub source: String,
    /// llama.cpp's folder inside the source.
    pub root: String,
    /// The applied patch set as id and hash; `none` for unpatched upstream.
    pub patch_set: String,
    /// Compute backend.
    pub backend: ComputeBackend,
    /// CPUs that the binary runs on.
    pub arch: CpuTarget,
    /// cmake options in order; a later option overrides an earlier one.
    pub cmake: Vec<String>,
    /// Version line of the C compiler.
    pub c: String,
    /// Version line of the C++ compiler.
    pub cxx: String,
    /// Target triple of the compilers.
    pub target: String,
    /// Hash of the CPU's features for native builds, else empty.
    pub cpu: String,
    // Skip the fields below when empty: builds without them keep the ids from before these fields existed.
    /// Version of the GPU toolkit; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub toolkit: String,
    /// GPU architectures compiled ahead of time, in cmake's syntax; empty: upstream's list, or none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<String>,
    /// Versions of the tools and libraries for extras: npm for the web page, OpenSSL or libcurl for HTTPS.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extras: Vec<String>,
    /// Variables with default search paths of compilers and linkers, such as `CPATH`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub searched: BTreeMap<String, String>,
}

/// A recipe with details about its inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BuildPlan {
    /// Hash of the recipe.
    pub id: BuildId,
    /// Recipe of the build.
    pub recipe: BuildRecipe,
    /// Location and revision of the source.
    pub source: ExaminedSource,
    /// The compilers with their paths.
    pub compilers: BuildCompilers,
    /// The GPU toolkit with its path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub toolkit: Option<GpuToolkit>,
    /// Reason for the choice of this backend; empty if the user asked for it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// The judged patch sets, applied or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<PlannedSet>,
    /// Optional features (web page, HTTPS), described in words.
    #[serde(default)]
    pub extras: BuildExtras,
    /// Decision about the kernels for Intel's AMX; `None` if the build would not compile them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amx: Option<AmxKernels>,
    /// The user's own cmake options; empty in builds from before this field existed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// Decision about the kernels for Intel's AMX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmxKernels {
    /// The kernels are compiled.
    Compiled,
    /// The kernels are left out, with the reason.
    LeftOut(String),
}

pub(crate) struct PlanInputs {
    pub(crate) source: ExaminedSource,
    pub(crate) compilers: BuildCompilers,
    pub(crate) chosen: ChosenBackend,
    pub(crate) arch: CpuTarget,
    pub(crate) patches: Vec<PlannedSet>,
    pub(crate) searched: BTreeMap<String, String>,
    pub(crate) offers: SourceFeatures,
    pub(crate) tools: ExtraTools,
    pub(crate) amx: Option<AmxKernels>,
}

impl BuildPlan {
    /// `user` has the user's options, as `NAME=VALUE` or `-DNAME=VALUE`; they override ours.
    pub(crate) fn new(from: PlanInputs, user: &[String]) -> Result<Self> {
        let PlanInputs { source, compilers, chosen, arch, patches, searched, offers, tools, amx } = from;
        let asked = user.to_vec();
        let user: Vec<&String> = user.iter().filter(|option| !options::wants_page(option)).collect();
        let decided = |name: &str| user.iter().any(|option| options::option_name(option) == name);
        let extras = extras::choose_extras(&offers, &tools, decided);
        let mut cmake = options::fixed_options(&source, arch, &extras);
        cmake.extend(options::backend_options(chosen.backend, &chosen.gpu));
        for option in user {
            cmake.push(options::normalize_option(option)?);
        }
        if matches!(amx, Some(AmxKernels::LeftOut(_))) {
            cmake.extend(options::without_amx(&asked));
        }
        let recipe = BuildRecipe {
            schema: RECIPE_SCHEMA,
            source: source.identity.clone(),
            root: source.root.clone(),
            patch_set: planned::recipe_name(&patches),
            backend: chosen.backend,
            arch,
            cmake,
            c: compilers.c.version.clone(),
            cxx: compilers.cxx.version.clone(),
            target: compilers.target.clone(),
            cpu: compilers.cpu.clone(),
            toolkit: chosen.toolkit.as_ref().map(|toolkit| toolkit.tool.version.clone()).unwrap_or_default(),
            gpu: chosen.gpu,
            extras: extras.versions,
            searched,
        };
        let (toolkit, why) = (chosen.toolkit, chosen.why);
        let (id, extras, options) = (recipe.id()?, extras.words, asked);
        Ok(Self { id, recipe, source, compilers, toolkit, why, patches, extras, amx, options })
    }

    pub(crate) fn makes_page(&self) -> bool {
        option_value(&self.recipe.cmake, "LLAMA_BUILD_UI") == Some("ON")
    }

    /// Ids of the fixes in the binary.
    pub fn fixes(&self) -> Vec<String> {
        self.patches.iter().flat_map(PlannedSet::applied_fixes).map(|fix| fix.fix.clone()).collect()
    }
}

impl BuildRecipe {
    /// The architectures in the syntax of `--arch`.
    pub fn arch(&self) -> String {
        ArchChoice { cpu: self.arch, gpu: self.gpu.clone() }.to_string()
    }

    /// The build id: the first 16 hexadecimal digits of the sha256 of the recipe's JSON.
    ///
    /// # Errors
    /// Never fails in practice: every recipe serializes to JSON.
    pub fn id(&self) -> Result<BuildId> {
        let json = serde_json::to_vec(self).map_err(|error| io_error("hashing", "the plan")(error.into()))?;
        Ok(BuildId::from_hash(&Sha256::digest(json).into()))
    }
}

impl fmt::Display for BuildPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipe = &self.recipe;
        writeln!(f, "build     {}", self.id)?;
        writeln!(f, "source    {}", self.source)?;
        writeln!(f, "identity  {}", recipe.source)?;
        writeln!(f, "patches   {}", recipe.patch_set)?;
        for set in &self.patches {
            writeln!(f, "{set}")?;
        }
        let why = if self.why.is_empty() { String::new() } else { format!(" ({})", self.why) };
        writeln!(f, "backend   {}{why}", recipe.backend)?;
        let cpu = if recipe.cpu.is_empty() { String::new() } else { format!(", cpu {}", recipe.cpu) };
        writeln!(f, "arch      {} ({}{cpu})", recipe.arch(), recipe.target)?;
        if let Some(toolkit) = &self.toolkit {
            writeln!(f, "toolkit   {} | {}", toolkit.tool.version, toolkit.tool.path.display())?;
        }
        writeln!(f, "compilers {} | {}", recipe.c, recipe.cxx)?;
        match &self.amx {
            None => {}
            Some(AmxKernels::Compiled) => writeln!(f, "AMX       compiled")?,
            Some(AmxKernels::LeftOut(why)) => writeln!(f, "AMX       left out: {why}")?,
        }
        writeln!(f, "web page  {}", self.extras.page)?;
        writeln!(f, "HTTPS     {}", self.extras.https)?;
        write!(f, "cmake     {}", recipe.cmake.join(" "))
    }
}

#[cfg(test)]
pub(crate) mod tests;
