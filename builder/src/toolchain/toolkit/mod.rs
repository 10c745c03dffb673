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

use super::found::Toolkit;
use crate::environment::Environment;
use crate::error::Result;
use crate::plan::backend::Backend;

/// Finds and checks the toolkit of a backend; `None` for the CPU.
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

#[cfg(test)]
mod tests;
