//! ROCm: finds hipcc, its clang, the libraries, and this machine's GPUs.

use std::path::{Path, PathBuf};

use super::{missing_part, program_home, versioned_folders};
use crate::builder::Builder;
use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::plan::ComputeBackend;
use crate::toolchain::{BuildTool, GpuToolkit, missing_if_failed};

pub(super) async fn find_rocm(builder: &Builder) -> Result<GpuToolkit> {
    let env = &builder.env;
    let hipcc = find_hipcc(env)?;
    let home = program_home(&hipcc);
    let compiler = ["lib/llvm/bin/clang++", "llvm/bin/clang++", "bin/amdclang++"];
    let path = match compiler.iter().find_map(|name| env.find(home.join(name))) {
        Some(path) => path,
        // Debian's packages use the distribution's clang; hipconfig knows which one.
        None => configured_clang(builder, &home).await?,
    };
    for (header, package) in [("hipblas", "hipblas-dev"), ("rocblas", "rocblas-dev")] {
        // In an unknown layout, cmake does the search.
        let folder = home.join("include");
        if folder.join("hip").exists() && !folder.join(header).exists() {
            return Err(missing_part(
                ComputeBackend::Hip,
                format!("{header} is not in {}", folder.display()),
                format!("install it: apt install {package} (Debian: lib{package})"),
            ));
        }
    }
    let text = builder.program_output(&hipcc, &["--version"], "asking for its version").await?;
    let version = text.lines().next().unwrap_or_default().trim().to_owned();
    Ok(GpuToolkit { tool: BuildTool { path, version }, home })
}

/// hipcc, from environment variables with its folder, in PATH, or in the usual folders.
pub(crate) fn find_hipcc(env: &BuildEnvironment) -> Result<PathBuf> {
    let usual = env.system.iter().flat_map(|system| {
        let mut folders = vec![system.join("opt/rocm")];
        folders.extend(versioned_folders(&system.join("opt"), "rocm-"));
        folders
    });
    let inside = |home: &PathBuf| env.find(home.join("bin").join("hipcc"));
    let named = env.rocm_homes.iter().find_map(inside);
    named.or_else(|| env.find("hipcc")).or_else(|| usual.into_iter().find_map(|home| inside(&home))).ok_or_else(
        || {
            let cure = "install ROCm (Debian: apt install hipcc libhipblas-dev librocblas-dev), or name its folder in \
                        HIP_PATH";
            missing_part(ComputeBackend::Hip, "hipcc is not in PATH, HIP_PATH, ROCM_PATH or /opt/rocm", cure)
        },
    )
}

async fn configured_clang(builder: &Builder, home: &Path) -> Result<PathBuf> {
    let absent = || {
        let what = format!("ROCm in {} has no clang++", home.display());
        missing_part(
            ComputeBackend::Hip,
            what,
            "install the compiler: apt install rocm-llvm (Debian: hipcc brings its clang)",
        )
    };
    let env = &builder.env;
    let hipconfig =
        env.find(home.join("bin/hipconfig")).or_else(|| env.find("hipconfig")).ok_or_else(absent)?;
    let folder = builder.program_output(&hipconfig, &["--hipclangpath"], "asking for its compiler").await?;
    env.find(Path::new(folder.trim()).join("clang++")).ok_or_else(absent)
}

pub(crate) fn has_device(env: &BuildEnvironment) -> bool {
    env.system.iter().any(|system| system.join("dev/kfd").exists())
}

/// Distinct architectures of this machine's GPUs, such as `gfx1201`; empty if none are known.
pub(crate) async fn architectures(builder: &Builder, home: &Path) -> Result<Vec<String>> {
    for name in ["lib/llvm/bin/amdgpu-arch", "llvm/bin/amdgpu-arch", "bin/rocm_agent_enumerator"] {
        let path = home.join(name);
        let program = builder.env.find(&path).or_else(|| builder.env.find(path.file_name()?));
        let Some(program) = program else { continue };
        let asked = builder.program_output(&program, &[], "asking for the GPUs").await;
        let found = parse_names(&missing_if_failed(asked)?.unwrap_or_default());
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

/// Parses one name per line; `gfx000` is the CPU.
fn parse_names(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim);
    let mut found: Vec<String> =
        lines.filter(|line| line.starts_with("gfx") && *line != "gfx000").map(str::to_owned).collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_among_the_agents_is_no_gpu() {
        assert_eq!(parse_names("gfx000\ngfx1201\ngfx1201\ngfx1100\n"), ["gfx1100", "gfx1201"]);
    }
}
