//! Facts about this machine and process that a configuration is resolved against: memory, directories, PATH.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use warden_policies::book::MachineCapacity as Room;
use warden_policies::{ByteSize, loading};
use warden_sensors::gpu::GpuSensors;

/// Facts about this machine and process that a configuration depends on.
#[derive(Clone, Debug)]
pub struct HostMachine {
    /// Usable memory: that of the machine, or the limit of the container.
    pub memory: ByteSize,
    /// User id of this process.
    pub uid: u32,
    /// PID of this process, which is a part of the default runtime directory.
    pub pid: u32,
    /// Executable of this process, so that it is never mistaken for a llama-server.
    pub exe: Option<PathBuf>,
    /// Working directory.
    pub cwd: PathBuf,
    /// Home directory from the system's user database, used if `HOME` is not set.
    pub listed_home: Option<PathBuf>,
    /// Environment variables.
    pub env: Vec<(OsString, OsString)>,
}

impl HostMachine {
    /// Reads the facts from the environment and the kernel.
    pub fn read() -> Self {
        let info = rustix::system::sysinfo();
        let of_host = info.totalram.saturating_mul(u64::from(info.mem_unit));
        Self {
            // Use the container's limit: a percentage of the host's memory might exceed it.
            memory: ByteSize(warden_sensors::host_totals().map_or(of_host, |totals| totals.total)),
            uid: rustix::process::getuid().as_raw(),
            pid: warden_supervisor::instance_pid(),
            exe: std::env::current_exe().ok().and_then(|path| path.canonicalize().ok()),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            listed_home: std::env::home_dir(),
            env: std::env::vars_os().collect(),
        }
    }

    /// Value of a variable; `None` if the variable is unset or empty.
    pub fn var(&self, name: &str) -> Option<&OsString> {
        self.env.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value)
    }

    /// All variables that are valid UTF-8.
    pub fn text_vars(&self) -> Vec<(String, String)> {
        let text = |(key, value): &(OsString, OsString)| {
            Some((key.to_str()?.to_owned(), value.to_str()?.to_owned()))
        };
        self.env.iter().filter_map(text).collect()
    }

    /// Home directory: `HOME`, else the entry in the user database. Ignores the entry `/`, which services
    /// without a home have.
    pub fn home(&self) -> Option<PathBuf> {
        let listed = || self.listed_home.clone().filter(|home| home.is_absolute() && *home != Path::new("/"));
        self.var("HOME").map(PathBuf::from).or_else(listed)
    }

    /// A directory of the XDG specification, or its default in the home directory; `None` without a home.
    fn xdg(&self, variable: &str, under_home: &str) -> Option<PathBuf> {
        // By the specification, a relative path in these variables is invalid and must be ignored.
        let base = self.var(variable).map(PathBuf::from).filter(|path| path.is_absolute());
        Some(base.or_else(|| Some(self.home()?.join(under_home)))?.join("llama-warden"))
    }

    /// Default directory of the configuration.
    pub fn config_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_CONFIG_HOME", ".config")
    }

    /// Default directory for the ledger and for data of instances.
    pub fn state_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_STATE_HOME", ".local/state")
    }

    /// Default directory for builds, used if `paths.data_dir` is not set.
    pub fn data_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_DATA_HOME", ".local/share")
    }

    /// Default directory for files that can be created again.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_CACHE_HOME", ".cache")
    }

    /// Parent of the private socket directory; short, because a Unix socket's path has at most 107 bytes.
    pub fn runtime_base(&self) -> PathBuf {
        // The user must own this directory; after `su` the variable may name the previous user's.
        let usable = |path: &PathBuf| {
            let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir);
            facts.is_some_and(|facts| facts.uid() == self.uid || facts.uid() == 0)
        };
        match self.var("XDG_RUNTIME_DIR").map(PathBuf::from).filter(usable) {
            Some(base) => base,
            None => self.temporary_base(),
        }
    }

    /// Directory in which the private directory is created if `XDG_RUNTIME_DIR` is not usable.
    pub fn temporary_base(&self) -> PathBuf {
        PathBuf::from(format!("/tmp/llama-warden-{}", self.uid))
    }

    /// Directories in which instances of this user and the system service register themselves, whatever
    /// directories they are configured with. This process writes to the first of these.
    pub fn registration_dirs(&self) -> Vec<PathBuf> {
        let all = [
            self.runtime_base(),
            PathBuf::from(format!("/run/user/{}", self.uid)),
            self.temporary_base(),
            PathBuf::from("/run/llama-warden"),
        ];
        let mut places: Vec<PathBuf> = Vec::new();
        for place in all {
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Finds a program in PATH, but never this process's own executable, under whatever name it is installed.
    pub fn find_in_path(&self, program: &str) -> Option<PathBuf> {
        let dirs: Vec<PathBuf> = std::env::split_paths(self.var("PATH")?).collect();
        let mut candidates = dirs.into_iter().map(|dir| dir.join(program));
        candidates.find(|path| is_executable(path) && path.canonicalize().ok() != self.exe)
    }
}

/// Returns true if a path is a file that this process may execute.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Returns the memory in bytes of each GPU that has separate memory and reports its size.
pub fn own_memory(gpus: &GpuSensors) -> Vec<u64> {
    gpus.devices().iter().filter(|gpu| !gpu.unified).filter_map(|gpu| gpu.total).collect()
}

/// Returns the memory of a machine that models may use.
pub fn left_for_models(host: u64, gpus: &[u64], numbers: &loading::LoadingConfig) -> Room {
    Room {
        host: numbers.left_of_host(host),
        gpus: gpus.iter().map(|bytes| numbers.left_of_gpu(*bytes)).collect(),
    }
}
