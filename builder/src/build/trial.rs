//! Verifies the new server of a GPU build, also on a machine without that GPU.
//!
//! | machine | verification |
//! |---|---|
//! | has GPUs that the build is for | the sample model runs on them |
//! | has other GPUs or unknown ones | GPUs are hidden: compiling for them may take minutes, or fail |
//! | has no GPU | the server falls back to the CPU |
//! | has no driver | the toolkit's stub of the driver library lets the server start |

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::builder::Builder;
use crate::error::{BuilderError, Result, io_error};
use crate::plan::{BuildPlan, ComputeBackend};
use crate::toolchain::{cuda_architectures, driver_stub, hip_architectures};
use crate::verify::{TrialSettings, VerifyResults, verify_with};

/// The CUDA driver's library; every CUDA build links to it.
const CUDA_DRIVER_LIBRARY: &str = "libcuda.so.1";

pub(super) async fn verify_binary(
    builder: &Builder,
    plan: &BuildPlan,
    binary: &Path,
    timeout: std::time::Duration,
    folder: &Path,
) -> Result<VerifyResults> {
    let backend = plan.recipe.backend;
    let mut trial = TrialSettings {
        timeout,
        gpu: backend.has_gpu(),
        hide_gpus: false,
        libraries: None,
        variables: Vec::new(),
    };
    let built = &plan.recipe.gpu;
    let here = gpu_architectures(builder, plan).await?;
    if let Some(other) = here.iter().find(|here| !built.iter().any(|built| runs_on(backend, built, here))) {
        trial.hide_gpus = true;
        let list = if built.is_empty() { "upstream's list".to_owned() } else { built.join(", ") };
        builder.reporter.note(format!(
            "verified on the CPU: the build is for {list}, which need not run on this machine's GPU ({other})"
        ));
    }
    let first = verify_with(binary, &trial, &builder.reporter, &builder.cancel).await;
    let Err(BuilderError::Verify { why, .. }) = &first else { return first };
    let stub = plan.toolkit.as_ref().and_then(|toolkit| driver_stub(&toolkit.home));
    match stub {
        Some(stub) if backend == ComputeBackend::Cuda && why.contains(CUDA_DRIVER_LIBRARY) => {
            builder.reporter.note(format!(
                "this machine has no NVIDIA driver ({CUDA_DRIVER_LIBRARY}): verified on the CPU, with the toolkit's \
                 stand-in for it"
            ));
            trial.libraries = Some(link_driver_stub(&stub, folder)?);
            verify_with(binary, &trial, &builder.reporter, &builder.cancel).await
        }
        _ => first,
    }
}

fn link_driver_stub(stub: &Path, folder: &Path) -> Result<PathBuf> {
    let folder = folder.join("driver");
    std::fs::create_dir_all(&folder).map_err(io_error("creating", &folder))?;
    let link = folder.join(CUDA_DRIVER_LIBRARY);
    symlink(stub, &link).map_err(io_error("creating", link))?;
    Ok(folder)
}

/// Architectures of this machine's GPUs, for backends that compile for them ahead of time.
async fn gpu_architectures(builder: &Builder, plan: &BuildPlan) -> Result<Vec<String>> {
    let Some(toolkit) = &plan.toolkit else { return Ok(Vec::new()) };
    match plan.recipe.backend {
        ComputeBackend::Cuda => cuda_architectures(builder, &toolkit.tool.path).await,
        ComputeBackend::Hip => hip_architectures(builder, &toolkit.home).await,
        ComputeBackend::Cpu | ComputeBackend::Vulkan => Ok(Vec::new()),
    }
}

/// Returns true if code for the GPU architecture `built` runs on `here` without slow compilation at run time.
fn runs_on(backend: ComputeBackend, built: &str, here: &str) -> bool {
    if backend == ComputeBackend::Hip {
        return built.split(':').next() == here.split(':').next();
    }
    if built.starts_with("all") {
        return true;
    }
    let digits = built.split('-').next().unwrap_or_default();
    let exact = digits.ends_with('a');
    let number = |text: &str| text.trim_end_matches(['a', 'f']).parse::<u32>().unwrap_or_default();
    let (built_for, here) = (number(digits), number(here));
    let code = !built.ends_with("-virtual");
    // Within a generation, later GPUs run code of earlier ones.
    code && (built_for == here || (!exact && built_for / 10 == here / 10 && built_for < here))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_its_own_architecture_and_on_later_ones_of_its_generation() {
        for (built, here, expected) in [
            ("90", "90", true),
            ("90a-real", "90", true),
            ("86-real", "89", true),
            ("89", "86", false),
            ("86", "90", false),
            ("120a", "121", false),
            ("120", "121", true),
            ("90-virtual", "90", false),
            ("all-major", "75", true),
        ] {
            assert_eq!(runs_on(ComputeBackend::Cuda, built, here), expected, "{built} on {here}");
        }
        assert!(
            runs_on(ComputeBackend::Hip, "gfx90a:xnack-", "gfx90a")
                && !runs_on(ComputeBackend::Hip, "gfx1100", "gfx1201")
        );
    }
}
