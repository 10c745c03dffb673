//! Backend and architectures of a build, as requested and as chosen.
//!
//! | `--arch` | CPU part | CUDA | HIP |
//! |---|---|---|---|
//! | `native` (the default) | this machine's CPU | this machine's GPUs | this machine's GPUs |
//! | `portable` | common CPUs | upstream's list of common GPUs | have to be named |
//! | `any` | every CPU of this kind, with the best instructions of each | as `portable` | have to be named |
//! | `90` or `86,89` or `gfx1201` | this machine's CPU | these GPUs | these GPUs |
//! | `portable,90` | common CPUs | these GPUs | these GPUs |
//!
//! Vulkan compiles for its GPU at run time, so only the CPU part is chosen for it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{BuilderError, Result};

/// Compute backend of a binary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeBackend {
    /// CPU only.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs, through ROCm.
    Hip,
    /// GPUs with a Vulkan driver.
    Vulkan,
}

impl ComputeBackend {
    /// All backends.
    pub const ALL: [Self; 4] = [Self::Cpu, Self::Cuda, Self::Hip, Self::Vulkan];

    /// The name in options and in patch sets.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Vulkan => "vulkan",
        }
    }

    /// Returns true for all backends except the CPU; they need a toolkit besides the C and C++ compilers.
    pub const fn has_gpu(self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

impl fmt::Display for ComputeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Requested backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best backend for which this machine has a device and a toolkit.
    #[default]
    Auto,
    /// An explicit backend.
    Explicit(ComputeBackend),
}

/// CPUs that the binary runs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CpuTarget {
    /// This machine's CPU with all its features (`-march=native`), as in upstream. On ARM, a portable build
    /// is several times slower.
    #[default]
    Native,
    /// Common current CPUs (x86-64 with AVX2, plain aarch64), for stores shared by several machines.
    Portable,
    /// Every x86-64 or aarch64: the CPU part is one library per set of instructions, next to the binary, and
    /// the server loads the best one that the CPU can run. The build can be moved to other machines.
    Any,
}

/// Requested architectures: a CPU part, and GPU architectures by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArchChoice {
    /// CPU part.
    pub cpu: CpuTarget,
    /// GPU architectures, such as `90` or `gfx1201`. Empty: this machine's, or common ones if portable.
    pub gpu: Vec<String>,
}

impl ArchChoice {
    pub(crate) fn backend(&self) -> Option<ComputeBackend> {
        let first = self.gpu.first()?;
        Some(if first.starts_with("gfx") { ComputeBackend::Hip } else { ComputeBackend::Cuda })
    }

    pub(crate) fn check(&self, backend: ComputeBackend) -> Result<()> {
        let known: fn(&str) -> bool = match backend {
            ComputeBackend::Cuda => is_cuda,
            ComputeBackend::Hip => is_hip,
            ComputeBackend::Cpu | ComputeBackend::Vulkan => |_| false,
        };
        match self.gpu.iter().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => Err(BuilderError::Target {
                given: name.clone(),
                why: format!("it is no architecture of the backend {backend}"),
                cure: match backend {
                    ComputeBackend::Cuda => {
                        "give --arch 90, or several as 86,89, or native, or portable for the common ones"
                    }
                    ComputeBackend::Hip => "give --arch gfx1201, or several as gfx1100,gfx1201, or native",
                    _ => {
                        "give --arch native or --arch portable, or the --backend that the architecture belongs to"
                    }
                }
                .into(),
            }),
        }
    }
}

/// Matches cmake's names: `90`, `90a`, `120f`, `86-real`, `75-virtual`, `all-major`, `all`.
fn is_cuda(name: &str) -> bool {
    if matches!(name, "all" | "all-major") {
        return true;
    }
    let number = name.strip_suffix("-real").or_else(|| name.strip_suffix("-virtual")).unwrap_or(name);
    let digits = number.strip_suffix(['a', 'f']).unwrap_or(number);
    matches!(digits.len(), 2..=3) && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Matches LLVM's names: `gfx1201`, `gfx90a`, `gfx9-4-generic`, `gfx90a:xnack-`.
fn is_hip(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("gfx") else { return false };
    let mut parts = rest.split(':');
    let number = parts.next().unwrap_or_default();
    let plain = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() || byte == b'-';
    number.starts_with(|letter: char| letter.is_ascii_digit())
        && number.bytes().all(plain)
        && parts.all(|feature| {
            let name = feature.strip_suffix(['+', '-']).unwrap_or_default();
            matches!(name, "xnack" | "sramecc")
        })
}

impl FromStr for BackendChoice {
    type Err = BuilderError;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let found = ComputeBackend::ALL.into_iter().find(|backend| backend.name() == text);
        found.map(Self::Explicit).ok_or_else(|| BuilderError::Target {
            given: text.to_owned(),
            why: "it is no backend".into(),
            cure: "give auto, cpu, cuda, hip or vulkan".into(),
        })
    }
}

impl FromStr for ArchChoice {
    type Err = BuilderError;

    /// Parses names separated by commas or semicolons, including `native` and `portable`.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Err(BuilderError::Target {
                given: text.to_owned(),
                why: why.into(),
                cure: "give native, portable, any, GPUs such as 90 or gfx1201, or both: portable,90".into(),
            })
        };
        let mut cpu = None;
        let mut gpu: Vec<String> = Vec::new();
        for name in text.split([',', ';']).map(str::trim) {
            match name {
                "native" | "portable" | "any" if cpu.is_some() => {
                    return refuse("`native`, `portable` and `any` are about the one CPU part");
                }
                "native" => cpu = Some(CpuTarget::Native),
                "portable" => cpu = Some(CpuTarget::Portable),
                "any" => cpu = Some(CpuTarget::Any),
                name if is_cuda(name) || is_hip(name) => gpu.push(name.to_owned()),
                _ => return refuse("it is no architecture that any backend has"),
            }
        }
        if gpu.iter().any(|name| is_hip(name)) && gpu.iter().any(|name| is_cuda(name)) {
            return refuse("it names architectures of two backends");
        }
        Ok(Self { cpu: cpu.unwrap_or_default(), gpu })
    }
}

impl From<ComputeBackend> for BackendChoice {
    fn from(backend: ComputeBackend) -> Self {
        Self::Explicit(backend)
    }
}

impl From<CpuTarget> for ArchChoice {
    fn from(cpu: CpuTarget) -> Self {
        Self { cpu, gpu: Vec::new() }
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Explicit(backend) => backend.fmt(f),
        }
    }
}

impl fmt::Display for CpuTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl fmt::Display for ArchChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.cpu != CpuTarget::Native || self.gpu.is_empty() {
            self.cpu.fmt(f)?;
            f.write_str(if self.gpu.is_empty() { "" } else { "," })?;
        }
        f.write_str(&self.gpu.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(text: &str) -> ArchChoice {
        text.parse().unwrap()
    }

    #[test]
    fn the_cpu_part_and_the_gpus_are_told_apart() {
        assert_eq!(wish("native"), ArchChoice::default());
        assert_eq!(wish("portable"), CpuTarget::Portable.into());
        assert_eq!(wish("any,90"), ArchChoice { cpu: CpuTarget::Any, gpu: vec!["90".into()] });
        assert_eq!(wish("any,90").to_string(), "any,90");
        assert_eq!(wish("90"), ArchChoice { cpu: CpuTarget::Native, gpu: vec!["90".into()] });
        assert_eq!(
            wish("portable,86-real; 89"),
            ArchChoice { cpu: CpuTarget::Portable, gpu: vec!["86-real".into(), "89".into()] }
        );
        for text in ["native", "portable", "90,90a", "portable,gfx1201", "all-major", "gfx90a:xnack-"] {
            assert_eq!(wish(text).to_string(), text);
        }
    }

    #[test]
    fn what_is_no_architecture_is_refused_with_what_there_is() {
        for (text, why) in [
            ("", "no architecture"),
            ("sm_90", "no architecture"),
            ("9", "no architecture"),
            ("gfx", "no architecture"),
            ("gfx1201:fast+", "no architecture"),
            ("90;-DX=1", "no architecture"),
            ("native,portable", "one CPU part"),
            ("90,gfx1201", "two backends"),
        ] {
            let error = text.parse::<ArchChoice>().unwrap_err();
            assert!(error.to_string().contains(why), "{text}: {error}");
            assert!(error.hint().unwrap().contains("gfx1201"), "{text}");
        }
    }

    #[test]
    fn an_architecture_of_another_backend_is_refused() {
        for (text, backend) in [
            ("gfx1201", ComputeBackend::Cuda),
            ("90", ComputeBackend::Hip),
            ("90", ComputeBackend::Cpu),
            ("90", ComputeBackend::Vulkan),
        ] {
            let error = wish(text).check(backend).unwrap_err();
            assert!(error.to_string().contains(backend.name()), "{error}");
        }
        wish("90;all-major").check(ComputeBackend::Cuda).unwrap();
        wish("gfx9-4-generic").check(ComputeBackend::Hip).unwrap();
        wish("portable").check(ComputeBackend::Vulkan).unwrap();
    }

    #[test]
    fn backends_are_read_as_they_are_shown() {
        for backend in ComputeBackend::ALL {
            assert_eq!(backend.name().parse::<BackendChoice>().unwrap(), backend.into());
        }
        assert_eq!("auto".parse::<BackendChoice>().unwrap().to_string(), "auto");
        assert!("opencl".parse::<BackendChoice>().unwrap_err().hint().unwrap().contains("vulkan"));
    }
}
