//! CUDA: finds nvcc, its libraries, and this machine's GPUs.

use std::fs;
use std::path::{Path, PathBuf};

use super::{missing_part, program_home, versioned_folders};
use crate::builder::Builder;
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::ComputeBackend;
use crate::toolchain::{BuildTool, GpuToolkit, missing_if_failed};

const INSTALL_HINT: &str = "install the CUDA toolkit (Debian: apt install nvidia-cuda-toolkit; or NVIDIA's own \
                            packages), or name its nvcc in CUDACXX";

pub(super) async fn find_cuda(builder: &Builder) -> Result<GpuToolkit> {
    let env = &builder.env;
    let path = find_nvcc(env)?;
    let text = builder.program_output(&path, &["--version"], "asking for its version").await?;
    let home = program_home(&path);
    // cuBLAS's header is next to the runtime's. In an unknown layout, cmake does the search.
    let has = |header: &str| include_folders(env, &home).iter().any(|folder| folder.join(header).exists());
    if has("cuda_runtime.h") && !has("cublas_v2.h") {
        return Err(missing_part(
            ComputeBackend::Cuda,
            format!("cuBLAS (cublas_v2.h) is not in {}", home.display()),
            "install the rest of the CUDA toolkit (NVIDIA's packages: apt install cuda-libraries-dev-VERSION)",
        ));
    }
    Ok(GpuToolkit { tool: BuildTool { path, version: nvcc_version(&text) }, home })
}

/// nvcc, from environment variables, in PATH, or in the usual folders.
pub(crate) fn find_nvcc(env: &BuildEnvironment) -> Result<PathBuf> {
    if let Some(wish) = &env.cudacxx {
        let absent = || {
            let name = Path::new(wish).display();
            missing_part(
                ComputeBackend::Cuda,
                format!("nvcc is not at `{name}`, which CUDACXX names"),
                INSTALL_HINT,
            )
        };
        return env.find(wish).ok_or_else(absent);
    }
    let usual = env.system.iter().flat_map(|system| {
        let mut folders = vec![system.join("usr/local/cuda")];
        folders.extend(versioned_folders(&system.join("usr/local"), "cuda-"));
        folders.push(system.join("opt/cuda"));
        folders
    });
    let inside = |home: &PathBuf| env.find(home.join("bin").join("nvcc"));
    let named = env.cuda_homes.iter().find_map(inside);
    named
        .or_else(|| env.find("nvcc"))
        .or_else(|| usual.into_iter().find_map(|home| inside(&home)))
        .ok_or_else(|| {
            missing_part(
                ComputeBackend::Cuda,
                "nvcc is not in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda",
                INSTALL_HINT,
            )
        })
}

fn include_folders(env: &BuildEnvironment, home: &Path) -> Vec<PathBuf> {
    let mut folders = vec![home.join("include")];
    folders.extend(target_folders(home).into_iter().map(|target| target.join("include")));
    // Debian's package installs the headers here.
    folders.extend(env.system.iter().map(|system| system.join("usr/include")));
    folders
}

fn target_folders(home: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.join("targets")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Extracts `nvcc 13.0.88` from `Cuda compilation tools, release 13.0, V13.0.88`.
fn nvcc_version(text: &str) -> String {
    let line = text.lines().find(|line| line.contains("release")).or(text.lines().next()).unwrap_or_default();
    let number = line.rsplit(' ').next().and_then(|word| word.strip_prefix('V'));
    number.map_or_else(|| line.trim().to_owned(), |number| format!("nvcc {number}"))
}

/// Returns true if device files of an NVIDIA GPU exist. Asking the driver could take seconds.
pub(crate) fn has_device(env: &BuildEnvironment) -> bool {
    let files = ["dev/nvidiactl", "dev/nvidia0", "usr/lib/wsl/lib/nvidia-smi"];
    env.system.iter().any(|system| files.iter().any(|file| system.join(file).exists()))
}

/// Distinct architectures of this machine's GPUs, such as `90`; empty if there are none or they are unknown.
pub(crate) async fn architectures(builder: &Builder, nvcc: &Path) -> Result<Vec<String>> {
    let env = &builder.env;
    let smi = env
        .find("nvidia-smi")
        .or_else(|| env.system.iter().find_map(|system| env.find(system.join("usr/lib/wsl/lib/nvidia-smi"))));
    let query: [&str; 2] = ["--query-gpu=compute_cap", "--format=csv,noheader"];
    let asked = match smi {
        Some(smi) => builder.program_output(&smi, &query, "asking for the GPUs").await,
        None => Ok(String::new()),
    };
    let mut found = parse_capabilities(&missing_if_failed(asked)?.unwrap_or_default());
    // nvcc's own helper, for containers without nvidia-smi.
    let helper = nvcc.with_file_name("__nvcc_device_query");
    if found.is_empty() && env.find(&helper).is_some() {
        let asked = builder.program_output(&helper, &[], "asking for the GPUs").await;
        found = parse_capabilities(&missing_if_failed(asked)?.unwrap_or_default());
    }
    Ok(found)
}

/// Parses compute capabilities: `9.0` and `90` give `90`; `8.6,8.9` gives `86` and `89`.
fn parse_capabilities(text: &str) -> Vec<String> {
    let words = text.split([',', '\n']).map(|word| word.trim().replace('.', ""));
    let number =
        |word: &String| matches!(word.len(), 2..=3) && word.bytes().all(|byte| byte.is_ascii_digit());
    let mut found: Vec<String> = words.filter(number).collect();
    found.sort_by_key(|number| number.parse::<u32>().unwrap_or_default());
    found.dedup();
    found
}

/// The toolkit's stub of `libcuda.so.1`, with which programs start without a driver and find no GPU.
pub(crate) fn driver_stub(home: &Path) -> Option<PathBuf> {
    let mut folders = vec![home.join("lib64/stubs"), home.join("lib/stubs")];
    folders.extend(target_folders(home).into_iter().map(|target| target.join("lib/stubs")));
    folders.into_iter().map(|folder| folder.join("libcuda.so")).find(|file| file.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_compiler() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nBuilt on Wed\nCuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0";
        assert_eq!(nvcc_version(text), "nvcc 13.0.88");
        assert_eq!(nvcc_version("something else\nmore"), "something else");
    }

    #[test]
    fn capabilities_are_read_as_both_programs_tell_them() {
        assert_eq!(parse_capabilities("12.0\n8.6\n8.6\n"), ["86", "120"]);
        assert_eq!(parse_capabilities("89,90"), ["89", "90"]);
        assert_eq!(parse_capabilities("NVIDIA-SMI has failed\n[N/A]"), Vec::<String>::new());
    }
}
