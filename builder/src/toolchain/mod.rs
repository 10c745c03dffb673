//! Finds the programs of a build: compilers and GPU toolkits, which must be installed, and cmake and ninja,
//! which can be downloaded.
//!
//! Compilers shape the binary, so their versions are part of a plan's hash. cmake and ninja are recorded
//! with the build but not hashed, so a plan can be made before they are installed.

pub(crate) mod amx;
mod choice;
mod extras;
mod found;
mod toolkit;
pub(crate) mod venv;

use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use sha2::{Digest, Sha256};
use tokio::process::Command;

use crate::builder::Builder;
use crate::environment::BuildEnvironment;
use crate::error::{BuilderError, Result, program_error};
use crate::plan::{ComputeBackend, CpuTarget};
use crate::process::{ChildExit, output};
pub(crate) use choice::choose_backend;
pub(crate) use extras::{find_curl, find_npm, find_openssl};
pub(crate) use found::ChosenBackend;
pub use found::{BuildCompilers, BuildDrivers, BuildTool, GpuToolkit};
pub(crate) use toolkit::cuda::{architectures as cuda_architectures, driver_stub};
pub(crate) use toolkit::hip::architectures as hip_architectures;

/// Oldest supported cmake: our usage (`-S`, `-B`, no presets) was tested from 3.18 on.
const MIN_CMAKE: (u32, u32) = (3, 18);
/// Oldest cmake for GPU builds: it knows HIP as a language (3.21) and `all-major` for CUDA (3.23).
const MIN_GPU_CMAKE: (u32, u32) = (3, 23);

pub(crate) async fn find_compilers(builder: &Builder, arch: CpuTarget) -> Result<BuildCompilers> {
    let env = &builder.env;
    let c = find_compiler(env, env.cc.as_deref(), &["cc", "gcc", "clang"], "a C compiler")?;
    let cxx = find_compiler(env, env.cxx.as_deref(), &["c++", "g++", "clang++"], "a C++ compiler")?;
    let (c, cxx_tool, target, cpu) = tokio::try_join!(
        builder.tool_with_version(c),
        builder.tool_with_version(cxx.clone()),
        builder.program_output(&cxx, &["-dumpmachine"], "asking for the target"),
        async {
            match arch {
                CpuTarget::Portable | CpuTarget::Any => Ok(String::new()),
                CpuTarget::Native => hash_cpu_features(builder, &cxx).await,
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
async fn hash_cpu_features(builder: &Builder, cxx: &Path) -> Result<String> {
    let ask = async |flag| {
        let arguments = [flag, "-dM", "-E", "-x", "c++", "/dev/null"];
        builder.program_output(cxx, &arguments, "asking what a native build means").await
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

/// cmake and ninja from `PATH`; if one is missing or too old, both from PyPI, with ccache if `PATH` has no
/// compiler cache.
pub(crate) async fn find_drivers(builder: &Builder, backend: ComputeBackend) -> Result<BuildDrivers> {
    let env = &builder.env;
    let oldest = if backend.has_gpu() { MIN_GPU_CMAKE } else { MIN_CMAKE };
    let launcher = venv::installed_launcher(env);
    if let (Some(cmake), Some(ninja)) = (env.find("cmake"), env.find("ninja")) {
        match tokio::try_join!(builder.tool_with_version(cmake), builder.tool_with_version(ninja)) {
            Ok((cmake, ninja)) if is_new_enough(&cmake.version, oldest) => {
                return Ok(BuildDrivers { cmake, ninja, launcher });
            }
            Ok((cmake, _)) => builder.reporter.note(format!("{} is too old", cmake.version)),
            Err(BuilderError::Cancelled) => return Err(BuilderError::Cancelled),
            Err(broken) => builder.reporter.note(broken.to_string()),
        }
    }
    venv::ensure_created(builder).await.map_err(|error| match error {
        // Suggest cmake and ninja themselves, which are simpler to install than a Python for installing them.
        BuilderError::MissingProgram { program, package: "python3 python3-venv" } => {
            BuilderError::MissingProgram {
                program: format!("cmake and ninja, and {program} to install them"),
                package: "cmake ninja-build",
            }
        }
        other => other,
    })?;
    let program = |name| builder.tool_with_version(venv::venv_program(builder, name));
    let (cmake, ninja) = tokio::try_join!(program("cmake"), program("ninja"))?;
    Ok(BuildDrivers { cmake, ninja, launcher: launcher.or_else(|| venv::compiler_cache(builder)) })
}

fn is_new_enough(version: &str, oldest: (u32, u32)) -> bool {
    let number = version.rsplit(' ').next().unwrap_or(version);
    let mut parts = number.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= oldest,
        // A version that cannot be parsed is accepted.
        _ => true,
    }
}

impl Builder {
    async fn tool_with_version(&self, path: PathBuf) -> Result<BuildTool> {
        let text = self.program_output(&path, &["--version"], "asking for its version").await?;
        let version = text.lines().next().unwrap_or_default().trim().to_owned();
        Ok(BuildTool { path, version })
    }

    async fn program_output(&self, program: &Path, arguments: &[&str], doing: &str) -> Result<String> {
        let mut command = self.env.command(program);
        command.args(arguments);
        self.run_program(program, doing, command).await
    }

    pub(crate) async fn run_program(&self, program: &Path, doing: &str, command: Command) -> Result<String> {
        let failed = |why: String| Err(program_error(&program.display().to_string(), doing, why));
        match output(command, &self.cancel).await {
            Ok((ChildExit::Exited(status), text)) if status.success() => Ok(text),
            Ok((ChildExit::Exited(status), text)) => failed(last_words(status, &text)),
            Ok((ChildExit::Cancelled, _)) => Err(BuilderError::Cancelled),
            Err(error) => failed(error.to_string()),
        }
    }
}

/// Maps a failure to `None`; cancellation stays an error.
fn missing_if_failed<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled),
        Err(_) => Ok(None),
    }
}

fn last_words(status: ExitStatus, text: &str) -> String {
    const LINES: usize = 8;
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(LINES)..];
    if tail.is_empty() { status.to_string() } else { format!("{status}\n{}", tail.join("\n")) }
}

#[cfg(test)]
mod tests;
