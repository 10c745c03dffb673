//! Metal: macOS with Xcode's command line tools.

use tokio_util::sync::CancellationToken;

use super::place::{home_of, missing};
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::backend::ComputeBackend;
use crate::toolchain::asking::said;
use crate::toolchain::found::{BuildTool, GpuToolkit};

/// Returns true on a machine with Metal.
pub(crate) const fn is_here() -> bool {
    cfg!(target_os = "macos")
}

/// Finds xcrun and its SDK.
pub(super) async fn find(env: &BuildEnvironment, cancel: &CancellationToken) -> Result<GpuToolkit> {
    if !is_here() {
        return Err(missing(
            ComputeBackend::Metal,
            "Metal is a part of macOS, and this is not macOS",
            "choose another --backend",
        ));
    }
    let path = env.find("xcrun").ok_or_else(|| {
        missing(
            ComputeBackend::Metal,
            "xcrun is not in PATH",
            "install Xcode's command line tools: xcode-select --install",
        )
    })?;
    let sdk =
        said(env, &path, &["--sdk", "macosx", "--show-sdk-version"], "asking for the SDK", cancel).await?;
    let home = home_of(&path);
    Ok(GpuToolkit { tool: BuildTool { path, version: format!("macOS SDK {}", sdk.trim()) }, home })
}
