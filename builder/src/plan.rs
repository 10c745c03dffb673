//! What will be built, as a value that can be printed, stored and hashed. The hash names the build.
//!
//! Everything in a [`Recipe`] shapes the binary; nothing else is in it. So two builds of one recipe are the same
//! build, wherever the source lay and whatever drove the compilers.

pub(crate) mod backend;
mod extras;
mod options;
pub(crate) mod target;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use warden_patches::{PlannedSet, planned};

pub use backend::Backend;
pub use extras::Extras;
pub(crate) use extras::{Fetches, Offers, Tools};
pub(crate) use options::{is_on, of_user, value as option_value};
pub use target::{Arch, ArchWish, BackendWish};

use crate::error::{Result, io_error};
use crate::source::found::Found;
use crate::store::id::BuildId;
use crate::toolchain::found::{Chosen, Compilers, Toolkit};

/// Raised when the same recipe would come to mean another binary.
const SCHEMA: u32 = 1;

/// Everything that shapes the binary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// Version of this structure's meaning.
    pub schema: u32,
    /// The source's identity, its kind in front.
    pub source: String,
    /// llama.cpp's folder inside of the source.
    pub root: String,
    /// The patch set that is applied, as id and hash; `none` for plain upstream.
    pub patch_set: String,
    /// What it computes on.
    pub backend: Backend,
    /// Which CPUs it is for.
    pub arch: Arch,
    /// Options for cmake in their order, later ones winning.
    pub cmake: Vec<String>,
    /// The C compiler's version line.
    pub c: String,
    /// The C++ compiler's version line.
    pub cxx: String,
    /// What the compilers make code for.
    pub target: String,
    /// A hash of the CPU's abilities for native builds, else empty.
    pub cpu: String,
    // What follows is left out where it is empty, so that builds for CPUs keep the names that they always had.
    /// The version of what makes code for the GPU; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub toolkit: String,
    /// The GPUs that code is made for beforehand, as cmake is told; empty where there are none to choose, or where
    /// upstream chooses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu: Vec<String>,
    /// Versions of what makes or is linked for more than the bare server: npm for its web page, OpenSSL or libcurl for HTTPS.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extras: Vec<String>,
    /// Variables by which compilers and linkers find headers and libraries without being told, such as `CPATH`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub searched: BTreeMap<String, String>,
}

/// A recipe with what is known about its ingredients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Hash of the recipe.
    pub id: BuildId,
    /// What will be built.
    pub recipe: Recipe,
    /// Where the source was found and what it believes it is.
    pub source: Found,
    /// The compilers with their paths.
    pub compilers: Compilers,
    /// What makes code for the GPU, with its path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub toolkit: Option<Toolkit>,
    /// Why this backend was chosen; empty when it was asked for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// The patch sets that were judged, applied or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<PlannedSet>,
    /// What it has beside serving, in words.
    #[serde(default)]
    pub extras: Extras,
    /// What becomes of the kernels for Intel's AMX; `None` where none would be compiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amx: Option<AmxKernels>,
    /// The user's own options for cmake; builds from before this was kept have none here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// What becomes of the kernels for Intel's AMX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmxKernels {
    /// They are compiled.
    Compiled,
    /// They are left out, and why.
    LeftOut(String),
}

/// What a plan is made of, found by those who know where to look.
pub(crate) struct Ingredients {
    pub(crate) source: Found,
    pub(crate) compilers: Compilers,
    /// The backend with its toolkit.
    pub(crate) chosen: Chosen,
    /// The CPU part.
    pub(crate) arch: Arch,
    /// The patch sets, as judged.
    pub(crate) patches: Vec<PlannedSet>,
    /// Where compilers search without being told.
    pub(crate) searched: BTreeMap<String, String>,
    /// What the source offers beside the server.
    pub(crate) offers: Offers,
    /// What makes its web page and gives it HTTPS.
    pub(crate) tools: Tools,
    /// What becomes of the kernels for AMX.
    pub(crate) amx: Option<AmxKernels>,
}

impl Plan {
    /// Puts a plan together. `user` are the user's own options, as `NAME=VALUE` or `-DNAME=VALUE`; they win over ours.
    pub(crate) fn new(from: Ingredients, user: &[String]) -> Result<Self> {
        let Ingredients { source, compilers, chosen, arch, patches, searched, offers, tools, amx } = from;
        let asked = user.to_vec();
        let user: Vec<&String> = user.iter().filter(|option| !options::wants_page(option)).collect();
        let decided = |name: &str| user.iter().any(|option| options::name(option) == name);
        let extras = extras::choose(&offers, &tools, decided);
        let mut cmake = options::fixed(&source, arch, &extras);
        cmake.extend(options::of_backend(chosen.backend, &chosen.gpu, &compilers.target));
        for option in user {
            cmake.push(options::checked(option)?);
        }
        if matches!(amx, Some(AmxKernels::LeftOut(_))) {
            cmake.extend(options::without_amx(&asked));
        }
        let recipe = Recipe {
            schema: SCHEMA,
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

    /// Whether npm is to make the web page.
    pub(crate) fn makes_page(&self) -> bool {
        option_value(&self.recipe.cmake, "LLAMA_BUILD_UI") == Some("ON")
    }

    /// The fixes that its binary will have, by id.
    pub fn fixes(&self) -> Vec<String> {
        self.patches.iter().flat_map(PlannedSet::applied_fixes).map(|fix| fix.fix.clone()).collect()
    }
}

impl Recipe {
    /// The architectures in one word, as `--arch` takes them.
    pub fn arch(&self) -> String {
        ArchWish { cpu: self.arch, gpu: self.gpu.clone() }.to_string()
    }

    /// The recipe's name: the first 16 hexadecimal digits of the sha256 of its JSON, whose fields have a fixed
    /// order.
    ///
    /// # Errors
    ///
    /// Never in practice: a recipe can always be written as JSON.
    pub fn id(&self) -> Result<BuildId> {
        let json = serde_json::to_vec(self).map_err(|error| io_error("hashing", "the plan")(error.into()))?;
        Ok(BuildId::of_hash(&Sha256::digest(json).into()))
    }
}

impl fmt::Display for Plan {
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
