//! GPU toolkits: nvcc, ROCm's clang, glslc. Found and checked before compilation begins, so that a
//! missing header does not fail a build after minutes.
//!
//! A toolkit's version shapes the binary, so it is part of a plan's hash; its location is not.

pub(super) mod cuda;
pub(super) mod hip;
pub(super) mod vulkan;

use std::path::{Path, PathBuf};

use super::found::GpuToolkit;
use crate::builder::Builder;
use crate::error::{BuilderError, Result};
use crate::plan::ComputeBackend;

pub(crate) async fn find_toolkit(builder: &Builder, backend: ComputeBackend) -> Result<Option<GpuToolkit>> {
    Ok(Some(match backend {
        ComputeBackend::Cpu => return Ok(None),
        ComputeBackend::Cuda => cuda::find_cuda(builder).await?,
        ComputeBackend::Hip => hip::find_rocm(builder).await?,
        ComputeBackend::Vulkan => vulkan::find_vulkan(builder).await?,
    }))
}

fn missing_part(
    backend: ComputeBackend,
    missing: impl Into<String>,
    cure: impl Into<String>,
) -> BuilderError {
    BuilderError::Toolkit { backend, missing: missing.into(), cure: cure.into() }
}

/// Subfolders with a name prefix, the highest version first (`cuda-12.10` before `cuda-12.8`).
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

/// Parent of the program's `bin` folder, after resolving links.
fn program_home(program: &Path) -> PathBuf {
    let real = program.canonicalize().unwrap_or_else(|_| program.to_owned());
    real.ancestors().nth(2).unwrap_or(Path::new("/")).to_owned()
}

#[cfg(test)]
mod tests;
