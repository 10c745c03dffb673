//! Facts about this machine and this process that a configuration is resolved against: memory, directories, PATH.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use warden_policies::ByteSize;

/// Facts of this machine and process that a configuration depends on.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Memory that we may use: the machine's, or the container's limit.
    pub memory: ByteSize,
    /// The effective user id.
    pub uid: u32,
    /// The process id of our instance: part of the default runtime directory.
    pub pid: u32,
    /// Our own executable, so that it is never taken for a llama-server.
    pub exe: Option<PathBuf>,
    /// Working directory.
    pub cwd: PathBuf,
    /// Our home directory according to the system's list of users, where `HOME` is not set.
    pub listed_home: Option<PathBuf>,
    /// Environment variables.
    pub env: Vec<(OsString, OsString)>,
}

impl Machine {
    /// Reads them from the environment and the kernel.
    pub fn read() -> Self {
        let info = rustix::system::sysinfo();
        let of_host = info.totalram.saturating_mul(u64::from(info.mem_unit));
        Self {
            // In a container a share of the host's memory would be more than the container may have.
            memory: ByteSize(warden_sensors::host_totals().map_or(of_host, |totals| totals.total)),
            uid: rustix::process::getuid().as_raw(),
            pid: warden_supervisor::instance::id(),
            exe: std::env::current_exe().ok().and_then(|path| path.canonicalize().ok()),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            listed_home: std::env::home_dir(),
            env: std::env::vars_os().collect(),
        }
    }

    /// A variable, unless it is empty.
    pub fn var(&self, name: &str) -> Option<&OsString> {
        self.env.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value)
    }

    /// All variables that are text.
    pub fn text_vars(&self) -> Vec<(String, String)> {
        let text = |(key, value): &(OsString, OsString)| {
            Some((key.to_str()?.to_owned(), value.to_str()?.to_owned()))
        };
        self.env.iter().filter_map(text).collect()
    }

    /// Our home directory: `HOME`, else what the system's list of users says. The root directory is nobody's home, though
    /// services without one are listed with it.
    pub fn home(&self) -> Option<PathBuf> {
        let listed = || self.listed_home.clone().filter(|home| home.is_absolute() && *home != Path::new("/"));
        self.var("HOME").map(PathBuf::from).or_else(listed)
    }

    /// A directory of the XDG base directory specification, or its place under the home directory; none without a home.
    fn xdg(&self, variable: &str, under_home: &str) -> Option<PathBuf> {
        // The specification: a relative path in these variables is invalid and ignored.
        let base = self.var(variable).map(PathBuf::from).filter(|path| path.is_absolute());
        Some(base.or_else(|| Some(self.home()?.join(under_home)))?.join("llama-warden"))
    }

    /// Where a configuration would be.
    pub fn config_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_CONFIG_HOME", ".config")
    }

    /// Ledger and instances.
    pub fn state_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_STATE_HOME", ".local/state")
    }

    /// The folder for builds, without `paths.data_dir`.
    pub fn data_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_DATA_HOME", ".local/share")
    }

    /// What can be made again.
    pub fn cache_dir(&self) -> Option<PathBuf> {
        self.xdg("XDG_CACHE_HOME", ".cache")
    }

    /// Where our private directory for sockets is made. Short, because a Unix socket's path has at most 107 bytes.
    pub fn runtime_base(&self) -> PathBuf {
        // The specification: it has to be its user's. After `su` it may still be that of the user before.
        let usable = |path: &PathBuf| {
            let facts = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_dir);
            facts.is_some_and(|facts| facts.uid() == self.uid || facts.uid() == 0)
        };
        match self.var("XDG_RUNTIME_DIR").map(PathBuf::from).filter(usable) {
            Some(base) => base,
            None => self.temporary_base(),
        }
    }

    /// Where it is made without `XDG_RUNTIME_DIR`.
    pub fn temporary_base(&self) -> PathBuf {
        PathBuf::from(format!("/tmp/llama-warden-{}", self.uid))
    }

    /// Where instances of this user, and the service of this machine, leave word of themselves whatever directories they
    /// are configured with. The first is ours to write to.
    pub fn meeting_places(&self) -> Vec<PathBuf> {
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

    /// A program in PATH that is not ourselves, under whatever name we are installed.
    pub fn find_in_path(&self, program: &str) -> Option<PathBuf> {
        let dirs: Vec<PathBuf> = std::env::split_paths(self.var("PATH")?).collect();
        let mut candidates = dirs.into_iter().map(|dir| dir.join(program));
        candidates.find(|path| is_executable(path) && path.canonicalize().ok() != self.exe)
    }
}

/// Whether a path is a file that we may execute.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
