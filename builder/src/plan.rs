//! What will be built, as a value that can be printed, stored and hashed. The hash names the build.
//!
//! Everything in a [`Recipe`] shapes the binary; nothing else is in it. So two builds of one recipe are the same
//! build, wherever the source lay and whatever drove the compilers.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::source::Found;
use crate::store::BuildId;
use crate::toolchain::Compilers;

/// Raised when the same recipe would come to mean another binary.
const SCHEMA: u32 = 1;

/// What the binary computes on. GPU backends join here, each with its own cmake options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The CPU alone.
    #[default]
    Cpu,
}

/// Which CPUs the binary is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// This machine's, with everything it can do (`-march=native`). The default, as upstream's: most builds run
    /// where they are made, and on ARM the difference is a multiple. What the compiler knows of the CPU is part of
    /// the recipe, so a store that moves to another kind of machine is not hit there by mistake.
    #[default]
    Native,
    /// The common ones of today: x86-64 with AVX2, plain aarch64. For stores and compiler caches that several
    /// machines share.
    Portable,
}

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
}

/// A recipe with what is known about its ingredients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Hash of the recipe.
    pub id: BuildId,
    /// What will be built.
    pub recipe: Recipe,
    /// Where the source was found and what it believes it is.
    pub source: Found,
    /// The compilers with their paths.
    pub compilers: Compilers,
}

impl Plan {
    /// Puts a plan together. `options` are the user's own, as `NAME=VALUE` or `-DNAME=VALUE`; they win over ours.
    pub(crate) fn new(
        source: Found,
        compilers: Compilers,
        backend: Backend,
        arch: Arch,
        options: &[String],
    ) -> Result<Self> {
        let mut cmake = fixed_options(&source, arch);
        for option in options {
            cmake.push(checked(option)?);
        }
        let recipe = Recipe {
            schema: SCHEMA,
            source: source.identity.clone(),
            root: source.root.clone(),
            patch_set: "none".to_owned(),
            backend,
            arch,
            cmake,
            c: compilers.c.version.clone(),
            cxx: compilers.cxx.version.clone(),
            target: compilers.target.clone(),
            cpu: compilers.cpu.clone(),
        };
        Ok(Self { id: recipe.id()?, recipe, source, compilers })
    }
}

impl Recipe {
    /// The recipe's name: the first 16 hexadecimal digits of the sha256 of its JSON, whose fields have a fixed
    /// order.
    pub fn id(&self) -> Result<BuildId> {
        let json = serde_json::to_vec(self)
            .map_err(|error| crate::error::io_error("hashing", "the plan")(error.into()))?;
        Ok(BuildId::of_hash(&Sha256::digest(json).into()))
    }
}

/// A static Release server and nothing else; no network is used while building, and no TLS is needed behind a
/// proxy.
fn fixed_options(source: &Found, arch: Arch) -> Vec<String> {
    let native = match arch {
        Arch::Native => "ON",
        Arch::Portable => "OFF",
    };
    let revision = &source.revision;
    let mut options: Vec<String> = [
        ("CMAKE_BUILD_TYPE", "Release"),
        // One file is what a store can keep and a supervisor can start.
        ("BUILD_SHARED_LIBS", "OFF"),
        ("GGML_NATIVE", native),
        ("LLAMA_OPENSSL", "OFF"),
        // The name of the same switch in sources before OpenSSL replaced curl.
        ("LLAMA_CURL", "OFF"),
        ("LLAMA_BUILD_TESTS", "OFF"),
        ("LLAMA_BUILD_APP", "OFF"),
        ("LLAMA_BUILD_UI", "OFF"),
        // Else it is fetched from a bucket while building.
        ("LLAMA_USE_PREBUILT_UI", "OFF"),
        // In old sources the server is one of the examples.
        ("LLAMA_BUILD_EXAMPLES", if source.server.starts_with("examples") { "ON" } else { "OFF" }),
        ("LLAMA_BUILD_SERVER", "ON"),
    ]
    .map(|(name, value)| format!("-D{name}={value}"))
    .into();
    // Always given: without them cmake asks git, and finds the repository that happens to enclose the work folder.
    options.push(format!("-DLLAMA_BUILD_NUMBER={}", revision.build_number.unwrap_or(0)));
    options.push(format!("-DLLAMA_BUILD_COMMIT={}", revision.short_commit()));
    options
}

/// Brings a user's option into the form `-DNAME=VALUE`, or refuses it.
fn checked(option: &str) -> Result<String> {
    let refuse = |why| Err(Error::Option { option: option.to_owned(), why });
    let bare = option.strip_prefix("-D").unwrap_or(option);
    let Some((typed, value)) = bare.split_once('=') else { return refuse("it is not NAME=VALUE") };
    let name = typed.split(':').next().unwrap_or(typed);
    let plain =
        |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-' || letter == '.';
    if name.is_empty() || !name.chars().all(plain) || name.starts_with('-') {
        return refuse("it is not NAME=VALUE");
    }
    if value.contains(['\n', '\0']) {
        return refuse("its value has a line break");
    }
    let on = matches!(value.to_ascii_uppercase().as_str(), "ON" | "1" | "YES" | "TRUE" | "Y");
    match name {
        "BUILD_SHARED_LIBS" | "GGML_BACKEND_DL" | "GGML_CPU_ALL_VARIANTS" if on => {
            refuse("the store keeps one static binary")
        }
        "LLAMA_BUILD_SERVER" if !on => refuse("llama-server is what is built"),
        "GGML_NATIVE" => refuse("use --arch native or --arch portable, so that the build knows its CPU"),
        "CMAKE_C_COMPILER" | "CMAKE_CXX_COMPILER" => {
            refuse("set CC and CXX, so that the build knows its compiler")
        }
        _ => Ok(format!("-D{bare}")),
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recipe = &self.recipe;
        writeln!(f, "build     {}", self.id)?;
        writeln!(f, "source    {}", self.source)?;
        writeln!(f, "identity  {}", recipe.source)?;
        writeln!(f, "patches   {}", recipe.patch_set)?;
        writeln!(f, "backend   {}", recipe.backend)?;
        let cpu = if recipe.cpu.is_empty() { String::new() } else { format!(", cpu {}", recipe.cpu) };
        writeln!(f, "arch      {} ({}{cpu})", recipe.arch, recipe.target)?;
        writeln!(f, "compilers {} | {}", recipe.c, recipe.cxx)?;
        write!(f, "cmake     {}", recipe.cmake.join(" "))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
        })
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Portable => "portable",
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
