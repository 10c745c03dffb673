//! Metal: macOS with Xcode's command line tools.

use tokio_util::sync::CancellationToken;

use super::place::{missing_part, program_home};
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::backend::ComputeBackend;
use crate::toolchain::asking::program_output;
use crate::toolchain::found::{BuildTool, GpuToolkit};

/// Returns true on a machine with Metal.
pub(crate) const fn is_supported() -> bool {
    cfg!(target_os = "macos")
}

/// Finds xcrun and its SDK.
pub(super) async fn find_metal(env: &BuildEnvironment, cancel: &CancellationToken) -> Result<GpuToolkit> {
    if !is_supported() {
        return Err(missing_part(
            ComputeBackend::Metal,
            "Metal is a part of macOS, and this is not macOS",
            "choose another --backend",
        ));
    }
    let path = env.find("xcrun").ok_or_else(|| {
        missing_part(
            ComputeBackend::Metal,
            "xcrun is not in PATH",
            "install Xcode's command line tools: xcode-select --install",
        )
    })?;
    let sdk =
        program_output(env, &path, &["--sdk", "macosx", "--show-sdk-version"], "asking for the SDK", cancel)
            .await?;
    let home = program_home(&path);
    Ok(GpuToolkit { tool: BuildTool { path, version: format!("macOS SDK {}", sdk.trim()) }, home })
}
