//! cmake options: ours for every build, those of the backend, and the user's that are accepted.

use super::extras::{DownloadLibrary, ExtrasChoice, OLD_PAGE_OPTION, PAGE_OPTION};
use super::target::{ComputeBackend, CpuTarget};
use crate::error::{BuilderError, Result};
use crate::source::ExaminedSource;

/// Options of a build for any CPU. Only ggml is made of libraries ([`SHARED_GGML`]), which the binary and its
/// libraries find next to themselves. No version in the libraries' names, because packages have no links, and
/// no OpenMP, which would be one more library to install.
///
/// cmake ignores the last option. It is part of the build's id, so change its number with [`SHARED_GGML`] or
/// [`WORKING_DIRECTORY_SEARCH`].
const ANY_CPU_OPTIONS: [(&str, &str); 7] = [
    ("GGML_BACKEND_DL", "ON"),
    ("GGML_CPU_ALL_VARIANTS", "ON"),
    ("GGML_OPENMP", "OFF"),
    ("CMAKE_PLATFORM_NO_VERSIONED_SONAME", "ON"),
    ("CMAKE_BUILD_WITH_INSTALL_RPATH", "ON"),
    ("CMAKE_INSTALL_RPATH", "$ORIGIN"),
    ("LLAMA_WARDEN_SHARED_GGML", "2"),
];

/// Lines with which ggml also searches the working directory for a CPU variant. They are removed from a build
/// for any CPU: another user may have put a library there.
pub(crate) const WORKING_DIRECTORY_SEARCH: [&str; 2] =
    ["search_paths.push_back(cwd);", "search_paths.push_back(fs::current_path());"];

/// Content of a file that cmake includes at the beginning of ggml, for [`CpuTarget::Any`]: upstream has one switch
/// for all libraries, and loads CPU variants only with it. llama.cpp itself stays in the binary, because an
/// exception does not always pass from a library to a binary if each has its own C++ runtime.
pub(crate) const SHARED_GGML: &str = "set(BUILD_SHARED_LIBS ON)\n";

/// Options of every build: a static Release build of the server with the extras. Only npm uses the network.
pub(super) fn fixed_options(source: &ExaminedSource, arch: CpuTarget, extras: &ExtrasChoice) -> Vec<String> {
    let native = match arch {
        CpuTarget::Native => "ON",
        CpuTarget::Portable | CpuTarget::Any => "OFF",
    };
    let switch = |on: bool| if on { "ON" } else { "OFF" };
    let revision = &source.revision;
    let mut options: Vec<String> = [
        ("CMAKE_BUILD_TYPE", "Release"),
        // The store and the supervisor expect a single binary.
        ("BUILD_SHARED_LIBS", "OFF"),
        ("GGML_NATIVE", native),
        ("LLAMA_OPENSSL", switch(extras.linked == DownloadLibrary::OpenSsl)),
        // HTTPS option of sources from before OpenSSL replaced curl.
        ("LLAMA_CURL", switch(extras.linked == DownloadLibrary::Curl)),
        ("LLAMA_BUILD_TESTS", "OFF"),
        ("LLAMA_BUILD_APP", "OFF"),
        ("LLAMA_BUILD_UI", switch(extras.npm)),
        // Otherwise the build would download the page from a bucket.
        ("LLAMA_USE_PREBUILT_UI", "OFF"),
        // Old sources have the server among the examples.
        ("LLAMA_BUILD_EXAMPLES", if source.server.starts_with("examples") { "ON" } else { "OFF" }),
        ("LLAMA_BUILD_SERVER", "ON"),
    ]
    .map(|(name, value)| format!("-D{name}={value}"))
    .into();
    if arch == CpuTarget::Any {
        options.extend(ANY_CPU_OPTIONS.map(|(name, value)| format!("-D{name}={value}")));
    }
    if extras.old_switch_off {
        // Set the older option only where needed: in newer sources it overrides the newer one.
        options.push(format!("-D{OLD_PAGE_OPTION}=OFF"));
    }
    // Set number and commit, else cmake asks git, which may find a repository around the work folder.
    options.push(format!("-DLLAMA_BUILD_NUMBER={}", revision.build_number.unwrap_or(0)));
    options.push(format!("-DLLAMA_BUILD_COMMIT={}", revision.short_commit()));
    options
}

/// Options of the backend. `gpu`: architectures, if any are named.
pub(super) fn backend_options(backend: ComputeBackend, gpu: &[String]) -> Vec<String> {
    let gpu = gpu.join(";");
    match backend {
        ComputeBackend::Cpu => Vec::new(),
        // Without names, upstream uses its list of common architectures, because `GGML_NATIVE` is off.
        ComputeBackend::Cuda if gpu.is_empty() => vec!["-DGGML_CUDA=ON".into()],
        ComputeBackend::Cuda => vec!["-DGGML_CUDA=ON".into(), format!("-DCMAKE_CUDA_ARCHITECTURES={gpu}")],
        ComputeBackend::Hip => vec![
            "-DGGML_HIP=ON".into(),
            format!("-DGPU_TARGETS={gpu}"),
            // The option's name in older sources.
            format!("-DAMDGPU_TARGETS={gpu}"),
        ],
        ComputeBackend::Vulkan => vec!["-DGGML_VULKAN=ON".into()],
    }
}

/// Options that disable the AMX kernels; they keep the user's compiler flags.
///
/// ggml adds `-march=native`, which enables AMX whatever ggml's options are. ggml compiles the kernels if the
/// compiler predefines the macros below; `-U` undefines a macro regardless of later flags.
pub(super) fn without_amx(user: &[String]) -> Vec<String> {
    let mut options: Vec<String> =
        ["TILE", "INT8", "BF16"].map(|part| format!("-DGGML_AMX_{part}=OFF")).into();
    for flags in ["CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS"] {
        let own = option_value(user, flags).unwrap_or_default();
        let all = format!("{own} -U__AMX_TILE__ -U__AMX_INT8__ -U__AMX_BF16__");
        options.push(format!("-D{flags}={}", all.trim_start()));
    }
    options
}

/// The value of an option, with or without `-D` and a type. The last one wins, as in cmake.
pub(crate) fn option_value<'a>(options: &'a [String], wanted: &str) -> Option<&'a str> {
    let last = options.iter().rev().find(|option| option_name(option) == wanted)?;
    last.split_once('=').map(|(_, value)| value)
}

/// Normalizes a user's option to `-DNAME=VALUE`, or rejects it.
pub(super) fn normalize_option(option: &str) -> Result<String> {
    let refuse = |why| Err(BuilderError::Option { option: option.to_owned(), why });
    let bare = option.strip_prefix("-D").unwrap_or(option);
    let Some((typed, value)) = bare.split_once('=') else { return refuse("it is not NAME=VALUE") };
    let name = typed.split(':').next().unwrap_or(typed);
    let plain =
        |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-' || letter == '.';
    if name.is_empty() || !name.chars().all(plain) || name.starts_with('-') {
        return refuse("it is not NAME=VALUE");
    }
    if value.contains(['\n', '\0']) {
        return refuse("its value has a line break");
    }
    let on = is_on(value);
    match name {
        "BUILD_SHARED_LIBS" | "GGML_BACKEND_DL" | "GGML_CPU_ALL_VARIANTS" if on => {
            refuse("the store keeps one static binary; use --arch any for libraries of CPU variants")
        }
        "LLAMA_BUILD_SERVER" if !on => refuse("llama-server is what is built"),
        "GGML_NATIVE" => refuse("use --arch native or --arch portable, so that the build knows its CPU"),
        "GGML_CUDA" | "GGML_HIP" | "GGML_VULKAN" => {
            refuse("use --backend, so that the toolkit is checked and the patches fit")
        }
        "CMAKE_CUDA_ARCHITECTURES" | "CMAKE_HIP_ARCHITECTURES" | "GPU_TARGETS" | "AMDGPU_TARGETS" => {
            refuse("use --arch, so that the build knows its GPU")
        }
        "CMAKE_C_COMPILER" | "CMAKE_CXX_COMPILER" => {
            refuse("set CC and CXX, so that the build knows its compiler")
        }
        "CMAKE_CUDA_COMPILER" => refuse("set CUDACXX, so that the build knows its compiler"),
        "CMAKE_HIP_COMPILER" => refuse("set HIP_PATH, so that the build knows its compiler"),
        _ => Ok(format!("-D{bare}")),
    }
}

/// Returns true if an option requests the web page. Such an option is not passed to cmake, which would wait
/// for npm without a limit.
pub(super) fn wants_page(option: &str) -> bool {
    let value = option.split_once('=').map_or("", |(_, value)| value);
    [PAGE_OPTION, OLD_PAGE_OPTION].contains(&option_name(option)) && is_on(value)
}

pub(crate) fn is_on(value: &str) -> bool {
    matches!(value.to_ascii_uppercase().as_str(), "ON" | "1" | "YES" | "TRUE" | "Y")
}

pub(super) fn option_name(option: &str) -> &str {
    let bare = option.strip_prefix("-D").unwrap_or(option);
    bare.split(['=', ':']).next().unwrap_or(bare)
}
