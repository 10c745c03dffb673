//! Chooses the backend: the requested one, or the best of those that build and run on this machine, with the
//! reason in words.

use super::found::{ChosenBackend, GpuToolkit};
use super::toolkit::{self, cuda, hip, vulkan};
use crate::builder::Builder;
use crate::error::{BuilderError, Result};
use crate::plan::{ArchChoice, BackendChoice, ComputeBackend, CpuTarget};

pub(crate) async fn choose_backend(
    builder: &Builder,
    wish: BackendChoice,
    arch: &ArchChoice,
) -> Result<ChosenBackend> {
    let (backend, why) = match wish {
        BackendChoice::Explicit(backend) => (backend, String::new()),
        BackendChoice::Auto => choose_automatically(builder, arch).await?,
    };
    arch.check(backend)?;
    let toolkit = toolkit::find_toolkit(builder, backend).await?;
    let gpu = match &toolkit {
        Some(toolkit) => gpu_architectures(builder, backend, toolkit, arch).await?,
        None => Vec::new(),
    };
    let why = match &toolkit {
        Some(toolkit) if !why.is_empty() => {
            format!("{why}; {} at {}", toolkit.tool.version, toolkit.tool.path.display())
        }
        _ => why,
    };
    Ok(ChosenBackend { backend, why, toolkit, gpu })
}

/// The first backend with both a device and a toolkit. Reports backends that lack only one of them.
async fn choose_automatically(builder: &Builder, arch: &ArchChoice) -> Result<(ComputeBackend, String)> {
    if let Some(backend) = arch.backend() {
        return Ok((backend, format!("--arch {arch} names its GPUs")));
    }
    let env = &builder.env;
    let mut nearly = Vec::new();
    let candidates = [
        (
            ComputeBackend::Cuda,
            "an NVIDIA device",
            "nvcc",
            "CUDACXX",
            cuda::has_device(env),
            cuda::find_nvcc(env),
        ),
        (
            ComputeBackend::Hip,
            "an AMD device",
            "hipcc",
            "HIP_PATH",
            hip::has_device(env),
            hip::find_hipcc(env),
        ),
    ];
    for (backend, device, compiler, variable, has_device, found) in candidates {
        match (has_device, found) {
            (true, Ok(_)) => return Ok((backend, format!("{device} is there"))),
            (true, Err(_)) => nearly.push(format!(
                "{device} is there but {compiler} is not: install its toolkit, or give --backend {backend} with \
                 {variable}"
            )),
            (false, Ok(path)) => nearly.push(format!(
                "{compiler} is at {} but no such device is here: to build for another machine, give --backend \
                 {backend} and --arch",
                path.display()
            )),
            (false, Err(_)) => {}
        }
    }
    if vulkan::has_device(env) {
        match vulkan::find_vulkan(builder).await {
            Ok(_) => nearly.insert(0, "a GPU with a Vulkan driver is there".into()),
            Err(BuilderError::Cancelled) => return Err(BuilderError::Cancelled),
            Err(error) => {
                nearly.push(format!("a GPU is there, but {error}"));
                return Ok((ComputeBackend::Cpu, nearly.join("; ")));
            }
        }
        return Ok((ComputeBackend::Vulkan, nearly.join("; ")));
    }
    if nearly.is_empty() {
        nearly.push("no GPU of NVIDIA or AMD is here".into());
    }
    Ok((ComputeBackend::Cpu, nearly.join("; ")))
}

async fn gpu_architectures(
    builder: &Builder,
    backend: ComputeBackend,
    toolkit: &GpuToolkit,
    arch: &ArchChoice,
) -> Result<Vec<String>> {
    let named = |cure: &str| BuilderError::Target {
        given: arch.to_string(),
        why: format!("no GPU of the backend {backend} can be seen here"),
        cure: cure.into(),
    };
    match (backend, arch.gpu.is_empty(), arch.cpu) {
        (ComputeBackend::Cpu | ComputeBackend::Vulkan, ..)
        | (ComputeBackend::Cuda, true, CpuTarget::Portable | CpuTarget::Any) => {
            // For CUDA, name no architectures: upstream has a list per toolkit of those that compile. cmake's
            // `all-major` may include architectures for which some parts do not compile.
            Ok(Vec::new())
        }
        (ComputeBackend::Cuda | ComputeBackend::Hip, false, _) => Ok(arch.gpu.clone()),
        (ComputeBackend::Hip, true, CpuTarget::Portable | CpuTarget::Any) => Err(BuilderError::Target {
            given: arch.to_string(),
            why: "ROCm has no list of common architectures".into(),
            cure: "name them: --arch portable,gfx1100,gfx1201".into(),
        }),
        (ComputeBackend::Cuda, true, CpuTarget::Native) => {
            let found = cuda::architectures(builder, &toolkit.tool.path).await?;
            // Code for exactly these GPUs, like cmake's `native`, but named in the plan.
            let real: Vec<String> = found.iter().map(|number| format!("{number}-real")).collect();
            let cure = "name the architecture, such as --arch 90 (nvidia-smi --query-gpu=compute_cap tells it on \
                        the machine that has the GPU)";
            if real.is_empty() { Err(named(cure)) } else { Ok(real) }
        }
        (ComputeBackend::Hip, true, CpuTarget::Native) => {
            let found = hip::architectures(builder, &toolkit.home).await?;
            let cure = "name the architecture, such as --arch gfx1201 (rocminfo tells it on the machine that has the \
                        GPU)";
            if found.is_empty() { Err(named(cure)) } else { Ok(found) }
        }
    }
}
