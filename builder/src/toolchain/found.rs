//! The programs of a build, as values.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::ComputeBackend;

/// A program with its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildTool {
    /// Absolute path.
    pub path: PathBuf,
    /// First line of its version output.
    pub version: String,
}

/// The compilers of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildCompilers {
    /// C compiler.
    pub c: BuildTool,
    /// C++ compiler.
    pub cxx: BuildTool,
    /// Target triple of the C++ compiler, such as `x86_64-linux-gnu`.
    pub target: String,
    /// For native builds, a hash of the CPU features known to the compiler; empty for portable builds.
    pub cpu: String,
}

/// Programs that run the compilers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildDrivers {
    /// Generates the build files.
    pub cmake: BuildTool,
    /// Runs the compilers.
    pub ninja: BuildTool,
    /// Path of `ccache` or `sccache`, if there is one.
    pub launcher: Option<PathBuf>,
}

/// Toolkit of a GPU backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuToolkit {
    /// Compiler with a version that identifies the whole toolkit.
    pub tool: BuildTool,
    /// Folder of the toolkit.
    pub home: PathBuf,
}

impl GpuToolkit {
    /// cmake options with the toolkit's location, which is not part of a plan: it does not change the build.
    pub(crate) fn options(&self, backend: ComputeBackend, cxx: &Path) -> Vec<OsString> {
        let option = |name: &str, path: &Path| {
            let mut option = OsString::from(format!("-D{name}="));
            option.push(path);
            option
        };
        match backend {
            ComputeBackend::Cuda => vec![
                option("CMAKE_CUDA_COMPILER", &self.tool.path),
                // Otherwise nvcc uses the first gcc in PATH, which may not be the plan's compiler.
                option("CMAKE_CUDA_HOST_COMPILER", cxx),
            ],
            ComputeBackend::Hip => vec![option("CMAKE_HIP_COMPILER", &self.tool.path)],
            ComputeBackend::Vulkan => vec![option("Vulkan_GLSLC_EXECUTABLE", &self.tool.path)],
            ComputeBackend::Cpu => Vec::new(),
        }
    }

    pub(crate) fn variables(&self, backend: ComputeBackend) -> Vec<(&'static str, &Path)> {
        match backend {
            // Read by ggml's own cmake files.
            ComputeBackend::Hip => vec![("ROCM_PATH", &self.home), ("HIP_PATH", &self.home)],
            _ => Vec::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChosenBackend {
    pub(crate) backend: ComputeBackend,
    /// Reason in words; empty if the user asked for this backend.
    pub(crate) why: String,
    pub(crate) toolkit: Option<GpuToolkit>,
    /// GPU architectures compiled ahead of time, in cmake's syntax; empty: upstream's list, or none.
    pub(crate) gpu: Vec<String>,
}
