//! Verifies the new server of a GPU build, also on a machine without that GPU.
//!
//! | machine | verification |
//! |---|---|
//! | has GPUs that the build is for | the sample model runs on them |
//! | has other GPUs or unknown ones | GPUs are hidden: compiling for them may take minutes, or fail |
//! | has no GPU | the server falls back to the CPU |
//! | has no driver | the toolkit's stub of the driver library lets the server start |
//!
//! The provenance records which devices the server saw.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;

use super::Builder;
use crate::error::{Error, Result, io_error};
use crate::event::Event;
use crate::plan::{Backend, Plan};
use crate::toolchain::{cuda_architectures, driver_stub, hip_architectures};
use crate::verify::{Trial, Verified, try_out};

/// The driver's library; every CUDA build links to it.
const DRIVER: &str = "libcuda.so.1";

/// Verifies the binary of a plan. `folder` receives temporary files.
pub(super) async fn prove(
    builder: &Builder,
    plan: &Plan,
    binary: &Path,
    timeout: std::time::Duration,
    folder: &Path,
) -> Result<Verified> {
    let backend = plan.recipe.backend;
    let mut trial =
        Trial { timeout, gpu: backend.has_gpu(), hide: false, libraries: None, variables: Vec::new() };
    let built = &plan.recipe.gpu;
    let here = architectures(builder, plan).await?;
    if let Some(other) = here.iter().find(|here| !built.iter().any(|built| runs(backend, built, here))) {
        trial.hide = true;
        let list = if built.is_empty() { "upstream's list".to_owned() } else { built.join(", ") };
        builder.reporter.tell(Event::Note(format!(
            "verified on the CPU: the build is for {list}, which need not run on this machine's GPU ({other})"
        )));
    }
    let first = try_out(binary, &trial, &builder.reporter, &builder.cancel).await;
    let Err(Error::Verify { why, .. }) = &first else { return first };
    let stub = plan.toolkit.as_ref().and_then(|toolkit| driver_stub(&toolkit.home));
    match stub {
        Some(stub) if backend == Backend::Cuda && why.contains(DRIVER) => {
            builder.reporter.tell(Event::Note(format!(
                "this machine has no NVIDIA driver ({DRIVER}): verified on the CPU, with the toolkit's stand-in for it"
            )));
            trial.libraries = Some(stand_in(&stub, folder)?);
            try_out(binary, &trial, &builder.reporter, &builder.cancel).await
        }
        _ => first,
    }
}

/// Makes a folder with the stub library under the driver's name.
fn stand_in(stub: &Path, folder: &Path) -> Result<PathBuf> {
    let folder = folder.join("driver");
    std::fs::create_dir_all(&folder).map_err(io_error("creating", &folder))?;
    let link = folder.join(DRIVER);
    symlink(stub, &link).map_err(io_error("creating", link))?;
    Ok(folder)
}

/// Architectures of this machine's GPUs, for backends that compile for them ahead of time.
async fn architectures(builder: &Builder, plan: &Plan) -> Result<Vec<String>> {
    let Some(toolkit) = &plan.toolkit else { return Ok(Vec::new()) };
    let cancel: &CancellationToken = &builder.cancel;
    match plan.recipe.backend {
        Backend::Cuda => cuda_architectures(&builder.env, &toolkit.tool.path, cancel).await,
        Backend::Hip => hip_architectures(&builder.env, &toolkit.home, cancel).await,
        Backend::Cpu | Backend::Vulkan | Backend::Metal => Ok(Vec::new()),
    }
}

/// Returns true if code built for one architecture runs on another without a new compilation, which would
/// take longer than the time limit of an answer.
fn runs(backend: Backend, built: &str, here: &str) -> bool {
    if backend == Backend::Hip {
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
            assert_eq!(runs(Backend::Cuda, built, here), expected, "{built} on {here}");
        }
        assert!(runs(Backend::Hip, "gfx90a:xnack-", "gfx90a") && !runs(Backend::Hip, "gfx1100", "gfx1201"));
    }
}
