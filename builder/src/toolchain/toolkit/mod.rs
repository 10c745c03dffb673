//! GPU toolkits: nvcc, ROCm's clang, glslc, Xcode. Found and checked before compilation begins, so that a
//! missing header does not fail a build after minutes.
//!
//! A toolkit's version shapes the binary, so it is part of a plan's hash; its location is not. If the
//! toolkit does not support the C++ compiler, cmake reports it.

pub(super) mod cuda;
pub(super) mod hip;
pub(super) mod metal;
mod place;
pub(super) mod vulkan;

use tokio_util::sync::CancellationToken;

use super::found::GpuToolkit;
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::backend::ComputeBackend;

/// Finds and checks the toolkit of a backend; `None` for the CPU.
pub(crate) async fn find_toolkit(
    env: &BuildEnvironment,
    backend: ComputeBackend,
    cancel: &CancellationToken,
) -> Result<Option<GpuToolkit>> {
    Ok(Some(match backend {
        ComputeBackend::Cpu => return Ok(None),
        ComputeBackend::Cuda => cuda::find_cuda(env, cancel).await?,
        ComputeBackend::Hip => hip::find_rocm(env, cancel).await?,
        ComputeBackend::Vulkan => vulkan::find_vulkan(env, cancel).await?,
        ComputeBackend::Metal => metal::find_metal(env, cancel).await?,
    }))
}

#[cfg(test)]
mod tests;
