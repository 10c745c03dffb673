//! Facts about this machine and this process that a configuration is resolved against: memory, directories, PATH.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use warden_policies::ByteSize;

/// The facts.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Memory that we may use: the machine's, or the container's limit.
    pub(crate) memory: ByteSize,
    /// Our user id.
    pub(crate) uid: u32,
    /// Our process id: part of the default runtime directory.
    pub(crate) pid: u32,
    /// Our own executable, so that it is never taken for a llama-server.
    pub(crate) exe: Option<PathBuf>,
    /// Working directory.
    pub(crate) cwd: PathBuf,
    /// Environment variables.
    pub(crate) env: Vec<(OsString, OsString)>,
}

impl Machine {
    /// Reads them.
    pub(crate) fn read() -> Self {
        let info = rustix::system::sysinfo();
        let of_host = info.totalram.saturating_mul(u64::from(info.mem_unit));
        Self {
            // In a container a share of the host's memory would be more than the container may have.
            memory: ByteSize(warden_sensors::host_totals().map_or(of_host, |totals| totals.total)),
            uid: rustix::process::getuid().as_raw(),
            pid: std::process::id(),
            exe: std::env::current_exe().ok().and_then(|path| path.canonicalize().ok()),
            cwd: std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
            env: std::env::vars_os().collect(),
        }
    }

    /// A variable, unless it is empty.
    pub(crate) fn var(&self, name: &str) -> Option<&OsString> {
        self.env.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value)
    }

    /// All variables that are text.
    pub(crate) fn text_vars(&self) -> Vec<(String, String)> {
        let text = |(key, value): &(OsString, OsString)| {
            Some((key.to_str()?.to_owned(), value.to_str()?.to_owned()))
        };
        self.env.iter().filter_map(text).collect()
    }

    /// A directory of the XDG base directory specification, or its place under the home directory.
    fn xdg(&self, variable: &str, under_home: &str) -> PathBuf {
        // The specification: a relative path in these variables is invalid and ignored.
        if let Some(base) = self.var(variable).map(PathBuf::from).filter(|path| path.is_absolute()) {
            return base.join("llama-warden");
        }
        let home = self.var("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from);
        home.join(under_home).join("llama-warden")
    }

    /// Ledger and instances.
    pub(crate) fn state_dir(&self) -> PathBuf {
        self.xdg("XDG_STATE_HOME", ".local/state")
    }

    /// Builds.
    pub(crate) fn data_dir(&self) -> PathBuf {
        self.xdg("XDG_DATA_HOME", ".local/share")
    }

    /// What can be made again.
    pub(crate) fn cache_dir(&self) -> PathBuf {
        self.xdg("XDG_CACHE_HOME", ".cache")
    }

    /// Sockets of this instance. Short, because a Unix socket's path has at most 107 bytes.
    pub(crate) fn runtime_dir(&self) -> PathBuf {
        let name = format!("llama-warden-{}", self.pid);
        match self.var("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_dir()) {
            Some(base) => base.join(name),
            None => PathBuf::from(format!("/tmp/llama-warden-{}", self.uid)).join(name),
        }
    }

    /// A program in PATH that is not ourselves, under whatever name we are installed.
    pub(crate) fn find_in_path(&self, program: &str) -> Option<PathBuf> {
        let dirs: Vec<PathBuf> = std::env::split_paths(self.var("PATH")?).collect();
        let mut candidates = dirs.into_iter().map(|dir| dir.join(program));
        candidates.find(|path| is_executable(path) && path.canonicalize().ok() != self.exe)
    }
}

/// Whether a path is a file that we may execute.
pub(crate) fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}
