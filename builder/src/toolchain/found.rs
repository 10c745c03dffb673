//! The programs of a build, as values.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::backend::Backend;

/// A program and which one it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Absolute.
    pub path: PathBuf,
    /// The first line that it says about its version.
    pub version: String,
}

/// The compilers of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compilers {
    /// For C.
    pub c: Tool,
    /// For C++.
    pub cxx: Tool,
    /// What the C++ compiler makes code for, such as `x86_64-linux-gnu`.
    pub target: String,
    /// For native builds, a hash of what the compiler knows about this machine's CPU; empty for portable ones.
    pub cpu: String,
}

/// What drives the compilers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drivers {
    /// Makes the build files.
    pub cmake: Tool,
    /// Runs the compilers.
    pub ninja: Tool,
    /// `ccache` or `sccache`, if either is there.
    pub launcher: Option<PathBuf>,
}

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

/// The backend of a build, ready to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) backend: Backend,
    /// Why, in words; empty when it was asked for.
    pub(crate) why: String,
    /// What makes code for its GPU.
    pub(crate) toolkit: Option<Toolkit>,
    /// The GPUs that code is made for beforehand, as cmake is told; empty for backends without that, and where it is
    /// left to upstream.
    pub(crate) gpu: Vec<String>,
}
