//! Finds the programs of a build: compilers and GPU toolkits, which must be installed, and cmake and ninja,
//! which can be downloaded.
//!
//! Compilers shape the binary, so their versions are part of a plan's hash. cmake and ninja are recorded
//! with the build but not hashed, so a plan can be made before they are installed.

pub(crate) mod amx;
mod asking;
mod choice;
pub(crate) mod extras;
pub(crate) mod found;
mod toolkit;
pub(crate) mod venv;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::environment::BuildEnvironment;
use crate::error::{BuilderError, Result};
use crate::event::{BuildEvent, EventReporter};
use crate::plan::backend::ComputeBackend;
use crate::plan::target::CpuTarget;
pub(crate) use asking::finish_program;
use asking::{program_output, tool_with_version};
pub(crate) use choice::choose_backend;
pub(crate) use extras::{find_curl, find_npm, find_openssl};
pub use found::{BuildCompilers, BuildDrivers, BuildTool, GpuToolkit};
pub(crate) use toolkit::cuda::{architectures as cuda_architectures, driver_stub};
pub(crate) use toolkit::hip::architectures as hip_architectures;
use venv::PythonVenv;

/// Oldest supported cmake. llama.cpp demands 3.14; our usage (`-S`, `-B`, no presets) was tested from 3.18
/// on.
const MIN_CMAKE: (u32, u32) = (3, 18);
/// Oldest cmake for GPU builds: it knows HIP as a language (3.21) and `all-major` for CUDA (3.23).
const MIN_GPU_CMAKE: (u32, u32) = (3, 23);

/// Finds the compilers; the error names the package of a missing one.
pub(crate) async fn find_compilers(
    env: &BuildEnvironment,
    arch: CpuTarget,
    cancel: &CancellationToken,
) -> Result<BuildCompilers> {
    let c = find_compiler(env, env.cc.as_deref(), &["cc", "gcc", "clang"], "a C compiler")?;
    let cxx = find_compiler(env, env.cxx.as_deref(), &["c++", "g++", "clang++"], "a C++ compiler")?;
    let (c, cxx_tool, target, cpu) = tokio::try_join!(
        tool_with_version(env, c, cancel),
        tool_with_version(env, cxx.clone(), cancel),
        program_output(env, &cxx, &["-dumpmachine"], "asking for the target", cancel),
        async {
            match arch {
                CpuTarget::Portable => Ok(String::new()),
                CpuTarget::Native => hash_cpu_features(env, &cxx, cancel).await,
            }
        }
    )?;
    Ok(BuildCompilers { c, cxx: cxx_tool, target: target.trim().to_owned(), cpu })
}

fn find_compiler(
    env: &BuildEnvironment,
    wish: Option<&std::ffi::OsStr>,
    usual: &[&str],
    what: &str,
) -> Result<PathBuf> {
    let missing = |program: String| BuilderError::MissingProgram { program, package: "g++" };
    if let Some(wish) = wish {
        // `CXX="ccache g++"` is common. Drop the compiler cache, which is searched separately. Any other
        // word would be a flag outside the plan.
        let text = wish.to_string_lossy();
        let mut words = text.split_whitespace().filter(|word| !matches!(*word, "ccache" | "sccache"));
        return match (words.next(), words.next()) {
            (Some(program), None) => {
                env.find(program).ok_or_else(|| missing(format!("{what} (`{program}`, named by CC or CXX)")))
            }
            _ => Err(BuilderError::Option {
                option: text.into_owned(),
                why: "CC and CXX may name a program only; flags come in as -DCMAKE_C_FLAGS= and -DCMAKE_CXX_FLAGS=",
            }),
        };
    }
    usual
        .iter()
        .find_map(|name| env.find(name))
        .ok_or_else(|| missing(format!("{what} ({})", usual.join(", "))))
}

/// Hashes the compiler's predefined macros for this CPU: machines with the same hash get the same code.
async fn hash_cpu_features(env: &BuildEnvironment, cxx: &Path, cancel: &CancellationToken) -> Result<String> {
    let ask = async |flag| {
        let arguments = [flag, "-dM", "-E", "-x", "c++", "/dev/null"];
        program_output(env, cxx, &arguments, "asking what a native build means", cancel).await
    };
    let macros = match ask("-march=native").await {
        // Older clang on ARM supports only `-mcpu=native`.
        Err(BuilderError::Program { .. }) => ask("-mcpu=native").await?,
        other => other?,
    };
    let mut lines: Vec<&str> = macros.lines().collect();
    lines.sort_unstable();
    Ok(hex::encode(&Sha256::digest(lines.join("\n"))[..8]))
}

/// cmake and ninja from `PATH`; if one is missing or too old, both from PyPI, with ccache if `PATH` has no compiler
/// cache.
pub(crate) async fn find_drivers(
    env: &BuildEnvironment,
    backend: ComputeBackend,
    cache: &Path,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<BuildDrivers> {
    let oldest = if backend.has_gpu() { MIN_GPU_CMAKE } else { MIN_CMAKE };
    let launcher = venv::installed_launcher(env);
    if let (Some(cmake), Some(ninja)) = (env.find("cmake"), env.find("ninja")) {
        let found =
            tokio::try_join!(tool_with_version(env, cmake, cancel), tool_with_version(env, ninja, cancel));
        match found {
            Ok((cmake, ninja)) if is_new_enough(&cmake.version, oldest) => {
                return Ok(BuildDrivers { cmake, ninja, launcher });
            }
            Ok((cmake, _)) => reporter.report(BuildEvent::Note(format!("{} is too old", cmake.version))),
            Err(BuilderError::Cancelled) => return Err(BuilderError::Cancelled),
            Err(broken) => reporter.report(BuildEvent::Note(broken.to_string())),
        }
    }
    let venv = PythonVenv::new(cache);
    venv.ensure_created(env, reporter, cancel).await.map_err(|error| match error {
        // Suggest cmake and ninja themselves, which are simpler to install than a Python for installing them.
        BuilderError::MissingProgram { program, package: "python3 python3-venv" } => {
            BuilderError::MissingProgram {
                program: format!("cmake and ninja, and {program} to install them"),
                package: "cmake ninja-build",
            }
        }
        other => other,
    })?;
    let (cmake, ninja) = (venv.program("cmake"), venv.program("ninja"));
    let (cmake, ninja) =
        tokio::try_join!(tool_with_version(env, cmake, cancel), tool_with_version(env, ninja, cancel))?;
    Ok(BuildDrivers { cmake, ninja, launcher: launcher.or_else(|| venv.compiler_cache()) })
}

fn is_new_enough(version: &str, oldest: (u32, u32)) -> bool {
    let number = version.rsplit(' ').next().unwrap_or(version);
    let mut parts = number.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= oldest,
        // An unreadable version passes.
        _ => true,
    }
}

#[cfg(test)]
mod tests;
