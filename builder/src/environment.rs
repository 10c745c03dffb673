//! The crate's only access to environment variables, and the search for programs.
//!
//! Variables that change a compiler's output (`CFLAGS` and its like) are removed from child processes: a
//! plan's hash covers the cmake options, so flags have to be given as cmake options.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use tempfile::TempDir;
use tokio::process::Command;

use crate::error::{Result, io_error};

/// Variables removed from every child of a build: they change the result and are not part of its plan.
const OUTPUT_SHAPING_VARIABLES: [&str; 24] = [
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "LDFLAGS",
    "ASMFLAGS",
    "CMAKE_GENERATOR",
    "CMAKE_BUILD_TYPE",
    "CMAKE_TOOLCHAIN_FILE",
    "CMAKE_PREFIX_PATH",
    "CMAKE_C_COMPILER_LAUNCHER",
    "CMAKE_CXX_COMPILER_LAUNCHER",
    "CMAKE_CUDA_COMPILER_LAUNCHER",
    "CMAKE_HIP_COMPILER_LAUNCHER",
    "MAKEFLAGS",
    "CUDAARCHS",
    "CUDACXX",
    "CUDAFLAGS",
    "CUDAHOSTCXX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "HIPCXX",
    "HIPFLAGS",
    // With it, ggml leaves out AVX2 from a portable build, which is then six times slower.
    "SOURCE_DATE_EPOCH",
];

/// Default search paths of compilers and linkers. Nix and conda depend on these variables, so they are
/// kept, and they are part of a plan: a build with other values is another build.
const SEARCH_PATH_VARIABLES: [&str; 8] = [
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "LD_RUN_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "SDKROOT",
];

/// Returns `GIT_CONFIG_PARAMETERS`, in which git passes settings to child processes.
pub(crate) fn git_settings() -> OsString {
    std::env::var_os("GIT_CONFIG_PARAMETERS").unwrap_or_default()
}

/// Search paths for programs, and the compilers chosen by the user.
#[derive(Clone, Debug, Default)]
pub struct BuildEnvironment {
    /// `PATH`: folders separated by colons.
    pub path: OsString,
    /// `CPATH`, `LIBRARY_PATH` and the like: default search paths of compilers.
    pub searched: BTreeMap<String, OsString>,
    /// `CC`, if set and not empty.
    pub cc: Option<OsString>,
    /// `CXX`, if set and not empty.
    pub cxx: Option<OsString>,
    /// `CUDACXX`, if set and not empty: the nvcc to use.
    pub cudacxx: Option<OsString>,
    /// `CUDA_HOME` and `CUDA_PATH`: folders of CUDA toolkits.
    pub cuda_homes: Vec<PathBuf>,
    /// `HIP_PATH` and `ROCM_PATH`: folders of ROCm.
    pub rocm_homes: Vec<PathBuf>,
    /// `VULKAN_SDK`: folder of a Vulkan SDK.
    pub vulkan_sdk: Option<PathBuf>,
    /// Root folder of the usual paths of toolkits and devices, normally `/`; `None` disables that search.
    pub system: Option<PathBuf>,
}

impl BuildEnvironment {
    /// Reads the environment of this process.
    pub fn from_process() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let folders = |names: [&str; 2]| {
            names.into_iter().filter_map(|name| variable(name).map(PathBuf::from)).collect()
        };
        Self {
            path: variable("PATH").unwrap_or_default(),
            searched: SEARCH_PATH_VARIABLES
                .into_iter()
                .filter_map(|name| Some((name.to_owned(), variable(name)?)))
                .collect(),
            cc: variable("CC"),
            cxx: variable("CXX"),
            cudacxx: variable("CUDACXX"),
            cuda_homes: folders(["CUDA_HOME", "CUDA_PATH"]),
            rocm_homes: folders(["HIP_PATH", "ROCM_PATH"]),
            vulkan_sdk: variable("VULKAN_SDK").map(PathBuf::from),
            system: Some("/".into()),
        }
    }

    /// Returns the absolute path of a program, searched as a shell does; a name with a slash is a path.
    pub fn find(&self, program: impl AsRef<Path>) -> Option<PathBuf> {
        let program = program.as_ref();
        let runs = |path: &Path| path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok();
        if program.components().count() > 1 {
            return std::path::absolute(program).ok().filter(|path| runs(path));
        }
        std::env::split_paths(&self.path)
            .filter(|folder| folder.is_absolute())
            .map(|folder| folder.join(program))
            .find(|path| runs(path))
    }

    /// A command with our `PATH` and without the variables that are not part of a plan.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("PATH", &self.path);
        // Messages are parsed, so they must not be translated. LC_ALL would make ccache compile again.
        command.env("LANGUAGE", "C");
        for name in OUTPUT_SHAPING_VARIABLES {
            command.env_remove(name);
        }
        for name in SEARCH_PATH_VARIABLES {
            match self.searched.get(name) {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }
}

/// Returns the folder of this program's file, with links resolved.
pub(crate) fn program_folder() -> Option<PathBuf> {
    // After an upgrade the file's name ends in ` (deleted)`, and its folder is still the right one.
    Some(std::env::current_exe().ok()?.parent()?.to_owned())
}

/// Returns true if a path is no link, belongs to this user or root, and not everybody may write to it.
pub(crate) fn is_kept_by(owner: u32, path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|facts| {
        !facts.is_symlink() && [0, owner].contains(&facts.uid()) && facts.mode() & 0o002 == 0
    })
}

/// Folder for short-lived files with short paths: a socket's path is limited to 107 bytes.
pub(crate) fn short_temporary_folder() -> PathBuf {
    const LONGEST: usize = 50;
    let usual = std::env::temp_dir();
    if usual.as_os_str().len() <= LONGEST { usual } else { "/tmp".into() }
}

/// Creates a folder that no other user can enter; removed on drop.
pub(crate) fn private_folder(prefix: &str, base: PathBuf) -> Result<TempDir> {
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let made = tempfile::Builder::new().prefix(prefix).permissions(private).tempdir_in(&base);
    made.map_err(io_error("creating a folder in", base))
}

pub(crate) fn remove_variables(command: &mut Command, foreign: impl Fn(&str) -> bool) {
    for (name, _) in std::env::vars_os() {
        if foreign(&name.to_string_lossy()) {
            command.env_remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_the_first_folder_that_has_it() {
        let env = BuildEnvironment {
            path: "/nonexistent:relative:/bin:/usr/bin".into(),
            ..BuildEnvironment::default()
        };
        assert_eq!(env.find("sh").unwrap(), Path::new("/bin/sh"));
        assert_eq!(env.find("/bin/sh").unwrap(), Path::new("/bin/sh"));
        assert_eq!(env.find("no-such-program"), None);
    }

    #[test]
    fn children_search_where_the_plan_says() {
        let searched = BTreeMap::from([("CPATH".to_owned(), OsString::from("/opt/include"))]);
        let env = BuildEnvironment { searched, ..BuildEnvironment::default() };
        let command = env.command(Path::new("/bin/sh"));
        let seen: BTreeMap<_, _> = command.as_std().get_envs().collect();
        assert_eq!(seen[std::ffi::OsStr::new("CPATH")], Some("/opt/include".as_ref()));
        for removed in ["LIBRARY_PATH", "SOURCE_DATE_EPOCH"] {
            assert_eq!(seen[std::ffi::OsStr::new(removed)], None, "removed, whatever this process has");
        }
    }

    #[test]
    fn a_file_that_may_not_be_run_is_no_program() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tool"), "").unwrap();
        let env = BuildEnvironment { path: folder.path().into(), ..BuildEnvironment::default() };
        assert_eq!(env.find("tool"), None);
    }
}
