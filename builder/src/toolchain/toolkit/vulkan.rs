//! Vulkan: finds the shader compiler, the headers and the loader.

use std::fs;
use std::path::{Path, PathBuf};

use super::{missing_part, program_home};
use crate::builder::Builder;
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::ComputeBackend;
use crate::toolchain::{BuildTool, GpuToolkit};

/// PCI vendors whose GPUs outperform the CPU: AMD and NVIDIA. An integrated Intel GPU may be slower than
/// its CPU, and the GPU of a virtual machine is emulated by the CPU.
const FAST_GPU_VENDORS: [&str; 2] = ["0x1002", "0x10de"];

pub(crate) async fn find_vulkan(builder: &Builder) -> Result<GpuToolkit> {
    let env = &builder.env;
    let lack = |what: &str, package: &str| {
        let cure = format!("install it: apt install {package}, or name a Vulkan SDK in VULKAN_SDK");
        missing_part(ComputeBackend::Vulkan, what, cure)
    };
    let in_sdk = env.vulkan_sdk.as_ref().and_then(|sdk| env.find(sdk.join("bin").join("glslc")));
    let path = in_sdk.or_else(|| env.find("glslc")).ok_or_else(|| {
        lack("glslc is not in PATH or VULKAN_SDK", "glslc (Debian 12: glslang-tools shaderc)")
    })?;
    let header = include_folders(env)
        .into_iter()
        .map(|folder| folder.join("vulkan/vulkan_core.h"))
        .find(|file| file.exists())
        .ok_or_else(|| lack("there are no Vulkan headers (vulkan/vulkan_core.h)", "libvulkan-dev"))?;
    if !library_folders(env).iter().any(|folder| folder.join("libvulkan.so").exists()) {
        return Err(lack("there is no Vulkan loader to link with (libvulkan.so)", "libvulkan-dev"));
    }
    let text = builder.program_output(&path, &["--version"], "asking for its version").await?;
    let compiler = text.lines().next().unwrap_or_default().trim();
    let version = format!("{compiler}, headers {}", header_version(&header));
    let home = env.vulkan_sdk.clone().unwrap_or_else(|| program_home(&path));
    Ok(GpuToolkit { tool: BuildTool { path, version }, home })
}

fn include_folders(env: &BuildEnvironment) -> Vec<PathBuf> {
    let sdk = env.vulkan_sdk.iter().map(|sdk| sdk.join("include"));
    let system =
        env.system.iter().flat_map(|root| [root.join("usr/local/include"), root.join("usr/include")]);
    sdk.chain(system).collect()
}

fn library_folders(env: &BuildEnvironment) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = env.vulkan_sdk.iter().map(|sdk| sdk.join("lib")).collect();
    if let Some(system) = &env.system {
        folders.extend(["usr/local/lib", "usr/lib64", "usr/lib"].map(|name| system.join(name)));
        // Debian has a library folder per architecture.
        let entries = fs::read_dir(system.join("usr/lib")).into_iter().flatten().flatten();
        folders.extend(entries.map(|entry| entry.path()).filter(|path| path.is_dir()));
    }
    folders
}

/// Parses `275` from `#define VK_HEADER_VERSION 275`.
fn header_version(header: &Path) -> String {
    let text = fs::read_to_string(header).unwrap_or_default();
    let number = text.lines().find_map(|line| line.strip_prefix("#define VK_HEADER_VERSION "));
    number.unwrap_or("of unknown version").trim().to_owned()
}

/// Returns true if a GPU with a render node is from one of [`FAST_GPU_VENDORS`].
pub(crate) fn has_device(env: &BuildEnvironment) -> bool {
    let of = |system: &PathBuf| fs::read_dir(system.join("sys/class/drm")).into_iter().flatten().flatten();
    env.system.iter().flat_map(of).any(|entry| {
        let vendor = fs::read_to_string(entry.path().join("device/vendor")).unwrap_or_default();
        entry.file_name().to_string_lossy().starts_with("renderD")
            && FAST_GPU_VENDORS.contains(&vendor.trim())
    })
}
