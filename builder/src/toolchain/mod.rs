//! The programs that make a build: compilers and toolkits for GPUs, which must be there, and cmake and ninja, which can
//! be obtained.
//!
//! Compilers shape the binary, so their versions are part of a plan's hash. cmake and ninja only drive them; they
//! are recorded with the build, not hashed, so a plan can be made before they are there.

mod choice;
mod extras;
mod toolkit;
pub(crate) mod venv;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::event::{Event, Reporter};
use crate::plan::{Arch, Backend};
use crate::process::{Ended, output};
pub(crate) use choice::{Chosen, choose};
pub(crate) use extras::{Curl, Npm, OpenSsl, curl, npm, openssl};
pub use toolkit::Toolkit;
pub(crate) use toolkit::cuda::{architectures as cuda_architectures, driver_stub};
pub(crate) use toolkit::hip::architectures as hip_architectures;
use venv::Venv;

/// llama.cpp asks for 3.14; the way it is driven here (`-S`, `-B`, presets off) was tried from 3.18 on.
const OLDEST_CMAKE: (u32, u32) = (3, 18);
/// The first that knows HIP as a language (3.21) and `all-major` for CUDA (3.23).
const OLDEST_CMAKE_FOR_GPUS: (u32, u32) = (3, 23);

/// A program and which one it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Absolute.
    pub path: PathBuf,
    /// The first line that it says about its version.
    pub version: String,
}

/// The compilers of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compilers {
    /// For C.
    pub c: Tool,
    /// For C++.
    pub cxx: Tool,
    /// What the C++ compiler makes code for, such as `x86_64-linux-gnu`.
    pub target: String,
    /// For native builds, a hash of what the compiler knows about this machine's CPU; empty for portable ones.
    pub cpu: String,
}

/// What drives the compilers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drivers {
    /// Makes the build files.
    pub cmake: Tool,
    /// Runs the compilers.
    pub ninja: Tool,
    /// `ccache` or `sccache`, if either is there.
    pub launcher: Option<PathBuf>,
}

/// Finds the compilers, or says which package has them.
pub(crate) async fn compilers(
    env: &Environment,
    arch: Arch,
    cancel: &CancellationToken,
) -> Result<Compilers> {
    let c = compiler(env, env.cc.as_deref(), &["cc", "gcc", "clang"], "a C compiler")?;
    let cxx = compiler(env, env.cxx.as_deref(), &["c++", "g++", "clang++"], "a C++ compiler")?;
    let (c, cxx_tool, target, cpu) = tokio::try_join!(
        versioned(env, c, cancel),
        versioned(env, cxx.clone(), cancel),
        said(env, &cxx, &["-dumpmachine"], "asking for the target", cancel),
        async {
            match arch {
                Arch::Portable => Ok(String::new()),
                Arch::Native => cpu(env, &cxx, cancel).await,
            }
        }
    )?;
    Ok(Compilers { c, cxx: cxx_tool, target: target.trim().to_owned(), cpu })
}

fn compiler(
    env: &Environment,
    wish: Option<&std::ffi::OsStr>,
    usual: &[&str],
    what: &str,
) -> Result<PathBuf> {
    let missing = |program: String| Error::MissingProgram { program, package: "g++" };
    if let Some(wish) = wish {
        // `CXX="ccache g++"` is usual; ccache is found without it. Any other word would be a flag out of the plan.
        let text = wish.to_string_lossy();
        let mut words = text.split_whitespace().filter(|word| !matches!(*word, "ccache" | "sccache"));
        return match (words.next(), words.next()) {
            (Some(program), None) => {
                env.find(program).ok_or_else(|| missing(format!("{what} (`{program}`, named by CC or CXX)")))
            }
            _ => Err(Error::Option {
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

/// Hashes what the compiler predefines for this very CPU: two machines with one hash get the same code.
async fn cpu(env: &Environment, cxx: &Path, cancel: &CancellationToken) -> Result<String> {
    let ask = async |flag| {
        let arguments = [flag, "-dM", "-E", "-x", "c++", "/dev/null"];
        said(env, cxx, &arguments, "asking what a native build means", cancel).await
    };
    let macros = match ask("-march=native").await {
        // On ARM, older versions of clang know the other name only.
        Err(Error::Program { .. }) => ask("-mcpu=native").await?,
        other => other?,
    };
    let mut lines: Vec<&str> = macros.lines().collect();
    lines.sort_unstable();
    Ok(hex::encode(&Sha256::digest(lines.join("\n"))[..8]))
}

/// cmake and ninja from `PATH`; where one is missing or too old, both from PyPI.
pub(crate) async fn drivers(
    env: &Environment,
    backend: Backend,
    cache: &Path,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Drivers> {
    let oldest = if backend.has_gpu() { OLDEST_CMAKE_FOR_GPUS } else { OLDEST_CMAKE };
    let launcher = ["ccache", "sccache"].iter().find_map(|name| env.find(name));
    if let (Some(cmake), Some(ninja)) = (env.find("cmake"), env.find("ninja")) {
        let found = tokio::try_join!(versioned(env, cmake, cancel), versioned(env, ninja, cancel));
        match found {
            Ok((cmake, ninja)) if new_enough(&cmake.version, oldest) => {
                return Ok(Drivers { cmake, ninja, launcher });
            }
            Ok((cmake, _)) => reporter.tell(Event::Note(format!("{} is too old", cmake.version))),
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(broken) => reporter.tell(Event::Note(broken.to_string())),
        }
    }
    let venv = Venv::new(cache);
    venv.ready(env, reporter, cancel).await.map_err(|error| match error {
        // The shorter way out than a Python that installs them.
        Error::MissingProgram { program, package: "python3 python3-venv" } => Error::MissingProgram {
            program: format!("cmake and ninja, and {program} to install them"),
            package: "cmake ninja-build",
        },
        other => other,
    })?;
    let (cmake, ninja) = (venv.program("cmake"), venv.program("ninja"));
    let (cmake, ninja) = tokio::try_join!(versioned(env, cmake, cancel), versioned(env, ninja, cancel))?;
    Ok(Drivers { cmake, ninja, launcher })
}

fn new_enough(version: &str, oldest: (u32, u32)) -> bool {
    let number = version.rsplit(' ').next().unwrap_or(version);
    let mut parts = number.split('.').map(|part| part.parse::<u32>().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) => (major, minor) >= oldest,
        // A version that cannot be read: let it try.
        _ => true,
    }
}

async fn versioned(env: &Environment, path: PathBuf, cancel: &CancellationToken) -> Result<Tool> {
    let text = said(env, &path, &["--version"], "asking for its version", cancel).await?;
    let version = text.lines().next().unwrap_or_default().trim().to_owned();
    Ok(Tool { path, version })
}

/// What a program says when it is called so; an error when it fails.
async fn said(
    env: &Environment,
    program: &Path,
    arguments: &[&str],
    doing: &str,
    cancel: &CancellationToken,
) -> Result<String> {
    let mut command = env.command(program);
    command.args(arguments);
    finish(program, doing, output(command, cancel).await)
}

/// Turns the end of a small program into its output or an error.
pub(crate) fn finish(program: &Path, doing: &str, end: io::Result<(Ended, String)>) -> Result<String> {
    let failed = |why: String| {
        let command = program.display().to_string();
        Err(Error::Program { command, doing: doing.to_owned(), why })
    };
    match end {
        Ok((Ended::Exited(status), text)) if status.success() => Ok(text),
        Ok((Ended::Exited(status), text)) => failed(last_words(status, &text)),
        Ok((Ended::Cancelled, _)) => Err(Error::Cancelled),
        Err(error) => failed(error.to_string()),
    }
}

/// The end of what a program said before it failed.
pub(crate) fn last_words(status: ExitStatus, text: &str) -> String {
    const LINES: usize = 8;
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(LINES)..];
    if tail.is_empty() { status.to_string() } else { format!("{status}\n{}", tail.join("\n")) }
}

#[cfg(test)]
mod tests;
