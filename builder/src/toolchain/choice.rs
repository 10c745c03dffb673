//! Chooses the backend: the requested one, or the best of those that build and run on this machine, with the
//! reason in words.

use tokio_util::sync::CancellationToken;

use super::found::{Chosen, Toolkit};
use super::toolkit::{self, cuda, hip, metal, vulkan};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::plan::backend::Backend;
use crate::plan::target::{Arch, ArchWish, BackendWish};

/// Chooses the backend, checks its toolkit, and determines the GPU architectures.
pub(crate) async fn choose(
    env: &Environment,
    wish: BackendWish,
    arch: &ArchWish,
    cancel: &CancellationToken,
) -> Result<Chosen> {
    let (backend, why) = match wish {
        BackendWish::This(backend) => (backend, String::new()),
        BackendWish::Auto => automatic(env, arch, cancel).await?,
    };
    arch.check(backend)?;
    let toolkit = toolkit::find(env, backend, cancel).await?;
    let gpu = match &toolkit {
        Some(toolkit) => gpus(env, backend, toolkit, arch, cancel).await?,
        None => Vec::new(),
    };
    let why = match &toolkit {
        Some(toolkit) if !why.is_empty() => {
            format!("{why}; {} at {}", toolkit.tool.version, toolkit.tool.path.display())
        }
        _ => why,
    };
    Ok(Chosen { backend, why, toolkit, gpu })
}

/// The first backend with both a device and a toolkit. Reports backends that lack only one of them.
async fn automatic(
    env: &Environment,
    arch: &ArchWish,
    cancel: &CancellationToken,
) -> Result<(Backend, String)> {
    if let Some(backend) = arch.backend() {
        return Ok((backend, format!("--arch {arch} names its GPUs")));
    }
    if metal::is_here() {
        return Ok((Backend::Metal, "this is macOS".into()));
    }
    let mut nearly = Vec::new();
    let candidates = [
        (Backend::Cuda, "an NVIDIA device", "nvcc", "CUDACXX", cuda::has_device(env), cuda::nvcc(env)),
        (Backend::Hip, "an AMD device", "hipcc", "HIP_PATH", hip::has_device(env), hip::hipcc(env)),
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
        match vulkan::find(env, cancel).await {
            Ok(_) => nearly.insert(0, "a GPU with a Vulkan driver is there".into()),
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(error) => {
                nearly.push(format!("a GPU is there, but {error}"));
                return Ok((Backend::Cpu, nearly.join("; ")));
            }
        }
        return Ok((Backend::Vulkan, nearly.join("; ")));
    }
    if nearly.is_empty() {
        nearly.push("no GPU of NVIDIA or AMD is here".into());
    }
    Ok((Backend::Cpu, nearly.join("; ")))
}

/// The GPU architectures in cmake's syntax.
async fn gpus(
    env: &Environment,
    backend: Backend,
    toolkit: &Toolkit,
    arch: &ArchWish,
    cancel: &CancellationToken,
) -> Result<Vec<String>> {
    let named = |cure: &str| Error::Target {
        given: arch.to_string(),
        why: format!("no GPU of the backend {backend} can be seen here"),
        cure: cure.into(),
    };
    match (backend, arch.gpu.is_empty(), arch.cpu) {
        (Backend::Cpu | Backend::Vulkan | Backend::Metal, ..) | (Backend::Cuda, true, Arch::Portable) => {
            // For CUDA, upstream has a list per toolkit of architectures that compile; cmake's `all-major`
            // does not know which parts fail.
            Ok(Vec::new())
        }
        (Backend::Cuda | Backend::Hip, false, _) => Ok(arch.gpu.clone()),
        (Backend::Hip, true, Arch::Portable) => Err(Error::Target {
            given: arch.to_string(),
            why: "ROCm has no list of common architectures".into(),
            cure: "name them: --arch portable,gfx1100,gfx1201".into(),
        }),
        (Backend::Cuda, true, Arch::Native) => {
            let found = cuda::architectures(env, &toolkit.tool.path, cancel).await?;
            // Code for exactly these GPUs, like cmake's `native`; named explicitly, so that the plan
            // includes them.
            let real: Vec<String> = found.iter().map(|number| format!("{number}-real")).collect();
            let cure = "name the architecture, such as --arch 90 (nvidia-smi --query-gpu=compute_cap tells it on \
                        the machine that has the GPU)";
            if real.is_empty() { Err(named(cure)) } else { Ok(real) }
        }
        (Backend::Hip, true, Arch::Native) => {
            let found = hip::architectures(env, &toolkit.home, cancel).await?;
            let cure = "name the architecture, such as --arch gfx1201 (rocminfo tells it on the machine that has the \
                        GPU)";
            if found.is_empty() { Err(named(cure)) } else { Ok(found) }
        }
    }
}
