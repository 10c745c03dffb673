//! The programs of a build, as values.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plan::backend::Backend;

/// A program with its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Absolute path.
    pub path: PathBuf,
    /// First line of its version output.
    pub version: String,
}

/// The compilers of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compilers {
    /// C compiler.
    pub c: Tool,
    /// C++ compiler.
    pub cxx: Tool,
    /// Target triple of the C++ compiler, such as `x86_64-linux-gnu`.
    pub target: String,
    /// For native builds, a hash of the CPU features known to the compiler; empty for portable builds.
    pub cpu: String,
}

/// Programs that run the compilers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drivers {
    /// Generates the build files.
    pub cmake: Tool,
    /// Runs the compilers.
    pub ninja: Tool,
    /// Path of `ccache` or `sccache`, if installed.
    pub launcher: Option<PathBuf>,
}

/// Toolkit of a GPU backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Toolkit {
    /// Compiler with a version that identifies the whole toolkit.
    pub tool: Tool,
    /// Folder of the toolkit.
    pub home: PathBuf,
}

impl Toolkit {
    /// cmake options with the toolkit's location. They are not part of a plan: a toolkit elsewhere gives
    /// the same build.
    pub(crate) fn options(&self, backend: Backend, cxx: &Path) -> Vec<OsString> {
        let option = |name: &str, path: &Path| {
            let mut option = OsString::from(format!("-D{name}="));
            option.push(path);
            option
        };
        match backend {
            Backend::Cuda => vec![
                option("CMAKE_CUDA_COMPILER", &self.tool.path),
                // Otherwise nvcc uses the first gcc in PATH, which may not be the plan's compiler.
                option("CMAKE_CUDA_HOST_COMPILER", cxx),
            ],
            Backend::Hip => vec![option("CMAKE_HIP_COMPILER", &self.tool.path)],
            Backend::Vulkan => vec![option("Vulkan_GLSLC_EXECUTABLE", &self.tool.path)],
            Backend::Cpu | Backend::Metal => Vec::new(),
        }
    }

    /// Environment variables with the toolkit's location, for cmake and the compilers.
    pub(crate) fn variables(&self, backend: Backend) -> Vec<(&'static str, &Path)> {
        match backend {
            // Read by ggml's own cmake files.
            Backend::Hip => vec![("ROCM_PATH", &self.home), ("HIP_PATH", &self.home)],
            _ => Vec::new(),
        }
    }
}

/// The backend of a build with its toolkit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) backend: Backend,
    /// Reason in words; empty if the user asked for this backend.
    pub(crate) why: String,
    pub(crate) toolkit: Option<Toolkit>,
    /// GPU architectures compiled ahead of time, in cmake's syntax; empty for backends without that, and
    /// where upstream chooses.
    pub(crate) gpu: Vec<String>,
}
