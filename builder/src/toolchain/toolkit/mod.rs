//! What makes code for GPUs: nvcc, ROCm's clang, glslc, Xcode. Found and checked before anything is compiled, because a
//! build that fails after minutes for want of a header is the worst way to learn of it.
//!
//! A toolkit's version shapes the binary, so it is part of a plan's hash; where it lies is not. What a toolkit does not
//! like about the C++ compiler is left to cmake's own error.

pub(super) mod cuda;
pub(super) mod hip;
pub(super) mod metal;
pub(super) mod vulkan;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::Tool;
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::plan::Backend;

/// What makes code for a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Toolkit {
    /// The compiler with a version that stands for the whole toolkit.
    pub tool: Tool,
    /// The toolkit's own folder.
    pub home: PathBuf,
}

impl Toolkit {
    /// Options for cmake that say where it is. They are not part of a plan: another place is the same build.
    pub(crate) fn options(&self, backend: Backend, cxx: &Path) -> Vec<OsString> {
        let option = |name: &str, path: &Path| {
            let mut option = OsString::from(format!("-D{name}="));
            option.push(path);
            option
        };
        match backend {
            Backend::Cuda => vec![
                option("CMAKE_CUDA_COMPILER", &self.tool.path),
                // Else nvcc takes the first gcc of PATH, which need not be the compiler of the plan.
                option("CMAKE_CUDA_HOST_COMPILER", cxx),
            ],
            Backend::Hip => vec![option("CMAKE_HIP_COMPILER", &self.tool.path)],
            Backend::Vulkan => vec![option("Vulkan_GLSLC_EXECUTABLE", &self.tool.path)],
            Backend::Cpu | Backend::Metal => Vec::new(),
        }
    }

    /// Variables for cmake and the compilers that say where it is.
    pub(crate) fn variables(&self, backend: Backend) -> Vec<(&'static str, &Path)> {
        match backend {
            // ggml's own cmake files look into these.
            Backend::Hip => vec![("ROCM_PATH", &self.home), ("HIP_PATH", &self.home)],
            _ => Vec::new(),
        }
    }
}

/// Finds and checks the toolkit of a backend; none for the CPU.
pub(crate) async fn find(
    env: &Environment,
    backend: Backend,
    cancel: &CancellationToken,
) -> Result<Option<Toolkit>> {
    Ok(Some(match backend {
        Backend::Cpu => return Ok(None),
        Backend::Cuda => cuda::find(env, cancel).await?,
        Backend::Hip => hip::find(env, cancel).await?,
        Backend::Vulkan => vulkan::find(env, cancel).await?,
        Backend::Metal => metal::find(env, cancel).await?,
    }))
}

fn missing(backend: Backend, missing: impl Into<String>, cure: impl Into<String>) -> Error {
    Error::Toolkit { backend, missing: missing.into(), cure: cure.into() }
}

/// Folders of the system whose name begins so, the highest version first: `cuda-12.8` comes before `cuda-12.10`
/// by name, so numbers are compared as numbers.
fn versioned_folders(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let numbers = name.strip_prefix(prefix)?.split('.').map(str::parse);
            Some((numbers.collect::<std::result::Result<_, _>>().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

/// The folder above the `bin` that a program lies in, links followed.
fn home_of(program: &Path) -> PathBuf {
    let real = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    real.ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}

#[cfg(test)]
mod tests;
