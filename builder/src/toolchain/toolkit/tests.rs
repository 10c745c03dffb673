//! Simulated machines with and without GPUs and toolkits: folders with scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::*;
use crate::build::tests::builder_with;
use crate::environment::BuildEnvironment;
use crate::plan::{ArchChoice, BackendChoice};
use crate::toolchain::{BuildTool, ChosenBackend, choose_backend};

const NVCC: &str =
    "echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'Cuda compilation tools, release 13.0, V13.0.88'";
const SMI: &str = "[ \"$1\" = --query-gpu=compute_cap ] && printf '9.0\\n9.0\\n'";

/// A simulated machine below one folder; its PATH is `bin`.
struct Machine {
    root: tempfile::TempDir,
    env: BuildEnvironment,
}

impl Machine {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let env = BuildEnvironment {
            path: root.path().join("bin").into(),
            system: Some(root.path().into()),
            ..BuildEnvironment::default()
        };
        Self { root, env }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn with(self, name: &str, content: &str) -> Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    fn program(self, name: &str, script: &str) -> Self {
        let path = self.path(name);
        let machine = self.with(name, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        machine
    }

    fn rocm(self) -> Self {
        self.program("opt/rocm/bin/hipcc", "echo 'HIP version: 6.4.43483'; echo more")
            .program("opt/rocm/lib/llvm/bin/clang++", "echo clang")
            .program("opt/rocm/bin/rocm_agent_enumerator", "echo gfx000; echo gfx1201")
    }

    fn vulkan(self) -> Self {
        self.program("bin/glslc", "echo shaderc v2024.0; echo spirv-tools")
            .with("usr/include/vulkan/vulkan_core.h", "// a header\n#define VK_HEADER_VERSION 275\n")
            .with("usr/lib/x86_64-linux-gnu/libvulkan.so", "")
    }

    async fn choose(&self, backend: &str, arch: &str) -> Result<ChosenBackend> {
        let wish: BackendChoice = backend.parse()?;
        let arch: ArchChoice = arch.parse()?;
        choose_backend(&builder_with(self.env.clone(), self.root.path()), wish, &arch).await
    }

    async fn refused(&self, backend: &str, arch: &str) -> String {
        let error = self.choose(backend, arch).await.unwrap_err();
        format!("{error} | {}", error.hint().unwrap_or_default())
    }
}

#[tokio::test]
async fn auto_takes_cuda_where_nvcc_and_a_device_are_and_says_so() {
    let machine = Machine::new()
        .program("usr/local/cuda/bin/nvcc", NVCC)
        .program("bin/nvidia-smi", SMI)
        .with("dev/nvidiactl", "");
    let chosen = machine.choose("auto", "native").await.unwrap();
    let nvcc = machine.path("usr/local/cuda/bin/nvcc");
    assert_eq!(chosen.backend, ComputeBackend::Cuda);
    assert_eq!(chosen.why, format!("an NVIDIA device is there; nvcc 13.0.88 at {}", nvcc.display()));
    assert_eq!(chosen.gpu, ["90-real"], "the same GPU twice is one architecture");
    assert_eq!(chosen.toolkit.unwrap().tool, BuildTool { path: nvcc, version: "nvcc 13.0.88".into() });
}

#[tokio::test]
async fn auto_says_what_lacks_for_a_gpu_and_takes_the_cpu() {
    let machine = Machine::new().with("dev/nvidia0", "");
    let chosen = machine.choose("auto", "native").await.unwrap();
    assert_eq!((chosen.backend, chosen.toolkit, chosen.gpu), (ComputeBackend::Cpu, None, Vec::new()));
    assert!(chosen.why.contains("an NVIDIA device is there but nvcc is not"), "{}", chosen.why);
    assert!(chosen.why.contains("--backend cuda with CUDACXX"), "{}", chosen.why);

    let machine = Machine::new().program("bin/nvcc", NVCC);
    let chosen = machine.choose("auto", "native").await.unwrap();
    assert_eq!(chosen.backend, ComputeBackend::Cpu);
    assert!(chosen.why.contains("no such device is here"), "{}", chosen.why);

    let chosen = Machine::new().choose("auto", "native").await.unwrap();
    assert_eq!(
        (chosen.backend, chosen.why.as_str()),
        (ComputeBackend::Cpu, "no GPU of NVIDIA or AMD is here")
    );
}

#[tokio::test]
async fn auto_takes_rocm_and_vulkan_where_those_are_whole() {
    let machine = Machine::new().rocm().with("dev/kfd", "");
    let chosen = machine.choose("auto", "native").await.unwrap();
    assert_eq!((chosen.backend, chosen.gpu), (ComputeBackend::Hip, vec!["gfx1201".to_owned()]));

    let render = "sys/class/drm/renderD128/device/vendor";
    let machine = Machine::new().vulkan().with("dev/kfd", "").with(render, "0x1002\n");
    let chosen = machine.choose("auto", "native").await.unwrap();
    assert_eq!(chosen.backend, ComputeBackend::Vulkan);
    assert!(chosen.why.contains("hipcc is not"), "what would be better is told: {}", chosen.why);
    assert_eq!(chosen.toolkit.unwrap().tool.version, "shaderc v2024.0, headers 275");

    let machine = Machine::new().vulkan().with(render, "0x1af4\n");
    let chosen = machine.choose("auto", "native").await.unwrap();
    assert_eq!(chosen.backend, ComputeBackend::Cpu, "a virtual machine's GPU is none");
}

#[tokio::test]
async fn auto_takes_the_backend_whose_architecture_is_named() {
    let machine = Machine::new().program("bin/nvcc", NVCC).rocm();
    assert_eq!(machine.choose("auto", "90").await.unwrap().backend, ComputeBackend::Cuda);
    let chosen = machine.choose("auto", "portable,gfx1100").await.unwrap();
    assert_eq!((chosen.backend, chosen.gpu), (ComputeBackend::Hip, vec!["gfx1100".to_owned()]));
    assert!(chosen.why.contains("--arch portable,gfx1100 names its GPUs"), "{}", chosen.why);
}

#[tokio::test]
async fn a_native_build_without_a_gpu_is_told_to_name_the_architecture() {
    for smi in ["exit 9", "echo 'No devices were found'"] {
        let machine = Machine::new().program("bin/nvcc", NVCC).program("bin/nvidia-smi", smi);
        let told = machine.refused("cuda", "native").await;
        assert!(
            told.contains("no GPU of the backend cuda can be seen here") && told.contains("--arch 90"),
            "{told}"
        );
        assert_eq!(machine.choose("cuda", "86,89").await.unwrap().gpu, ["86", "89"]);
        assert_eq!(machine.choose("cuda", "portable").await.unwrap().gpu, Vec::<String>::new());
    }
    let machine = Machine::new().rocm().program("opt/rocm/bin/rocm_agent_enumerator", "echo gfx000");
    assert!(machine.refused("hip", "native").await.contains("--arch gfx1201"));
    assert!(machine.refused("hip", "portable").await.contains("--arch portable,gfx1100,gfx1201"));
}

#[tokio::test]
async fn without_nvidia_smi_the_compilers_own_helper_tells_the_gpu() {
    let machine = Machine::new().program("bin/nvcc", NVCC).program("bin/__nvcc_device_query", "echo 86,89");
    assert_eq!(machine.choose("cuda", "native").await.unwrap().gpu, ["86-real", "89-real"]);
}

#[tokio::test]
async fn a_variable_says_which_toolkit_is_taken() {
    let other = "echo 'Cuda compilation tools, release 12.8, V12.8.93'";
    let mut machine = Machine::new()
        .program("bin/nvcc", NVCC)
        .program("home/bin/nvcc", "echo 'release 12.9, V12.9.1'")
        .program("named/nvcc", other);
    let version =
        async |machine: &Machine| machine.choose("cuda", "90").await.unwrap().toolkit.unwrap().tool.version;
    assert_eq!(version(&machine).await, "nvcc 13.0.88");
    machine.env.cuda_homes = vec![machine.path("nowhere"), machine.path("home")];
    assert_eq!(version(&machine).await, "nvcc 12.9.1");
    machine.env.cudacxx = Some(machine.path("named/nvcc").into());
    assert_eq!(version(&machine).await, "nvcc 12.8.93");
    machine.env.cudacxx = Some("/nonexistent/nvcc".into());
    assert!(machine.refused("cuda", "90").await.contains("`/nonexistent/nvcc`, which CUDACXX names"));
}

#[tokio::test]
async fn the_newest_of_several_toolkits_is_taken_by_number() {
    let script = |number| format!("echo 'release {number}, V{number}.1'");
    let machine = Machine::new()
        .program("usr/local/cuda-12.8/bin/nvcc", &script("12.8"))
        .program("usr/local/cuda-12.10/bin/nvcc", &script("12.10"))
        .with("usr/local/cuda-samples/readme", "");
    let chosen = machine.choose("cuda", "90").await.unwrap();
    assert_eq!(chosen.toolkit.unwrap().tool.version, "nvcc 12.10.1");
}

#[tokio::test]
async fn what_is_missing_of_a_toolkit_is_named_with_its_package() {
    let machine = Machine::new();
    for (backend, missing, cure) in [
        ("cuda", "nvcc is not in PATH", "nvidia-cuda-toolkit"),
        ("hip", "hipcc is not in PATH", "apt install hipcc"),
        ("vulkan", "glslc is not in PATH", "apt install glslc"),
    ] {
        let told = machine.refused(backend, "native").await;
        assert!(told.contains(missing) && told.contains(cure), "{told}");
    }

    let cuda = Machine::new()
        .program("usr/local/cuda/bin/nvcc", NVCC)
        .with("usr/local/cuda/targets/x86_64-linux/include/cuda_runtime.h", "");
    assert!(cuda.refused("cuda", "90").await.contains("cuBLAS (cublas_v2.h)"));
    let cuda = cuda.with("usr/local/cuda/targets/x86_64-linux/include/cublas_v2.h", "");
    cuda.choose("cuda", "90").await.unwrap();

    let hip = Machine::new().rocm().with("opt/rocm/include/hip/hip_runtime.h", "");
    assert!(hip.refused("hip", "gfx1201").await.contains("hipblas"));

    let vulkan = Machine::new().program("bin/glslc", "echo 1");
    assert!(vulkan.refused("vulkan", "native").await.contains("vulkan/vulkan_core.h"));
    let vulkan = vulkan.with("usr/include/vulkan/vulkan_core.h", "");
    assert!(vulkan.refused("vulkan", "native").await.contains("libvulkan.so"));
}

#[tokio::test]
async fn a_compiler_that_only_hipconfig_knows_is_found() {
    let machine =
        Machine::new().program("usr/bin/hipcc", "echo HIP version: 5.7").program("llvm/bin/clang++", "");
    let folder = machine.path("llvm/bin");
    let script = format!("[ \"$1\" = --hipclangpath ] && echo {}", folder.display());
    let mut machine = machine.program("usr/bin/hipconfig", &script);
    machine.env.path = machine.path("usr/bin").into();
    let chosen = machine.choose("hip", "gfx1100").await.unwrap();
    assert_eq!(chosen.toolkit.unwrap().tool.path, folder.join("clang++"));
}

#[test]
fn the_drivers_stand_in_is_found_in_the_layouts_that_there_are() {
    for place in ["lib64/stubs", "targets/x86_64-linux/lib/stubs"] {
        let machine = Machine::new().with(&format!("cuda/{place}/libcuda.so"), "");
        let found = cuda::driver_stub(&machine.path("cuda")).unwrap();
        assert_eq!(found, machine.path("cuda").join(place).join("libcuda.so"));
    }
    assert_eq!(cuda::driver_stub(Machine::new().root.path()), None);
}
