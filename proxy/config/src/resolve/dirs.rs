//! Directories of llama-warden: the configured ones, else those of the XDG conventions.

use std::path::{Path, PathBuf};

use warden_supervisor::PrivateDir;

use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems};
use crate::source::layers::LoadedConfig;

/// Directories of llama-warden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WardenDirs {
    /// Directory for the ledger and for data of instances.
    pub state: PathBuf,
    /// Private directory for the sockets of this instance, created in `runtime_base` and removed at exit.
    pub runtime: PathBuf,
    /// Directory (configured or default) that contains `runtime`; llama-warden never removes it.
    pub runtime_base: PathBuf,
    /// Directory of the build store.
    pub data: PathBuf,
    /// Directory for files that can be created again.
    pub cache: PathBuf,
    /// Folders with model files.
    pub models: Vec<PathBuf>,
}

impl LoadedConfig {
    /// Resolves a path relative to the configuration file, not to the working directory.
    pub fn absolute(&self, machine: &HostMachine, path: &Path) -> PathBuf {
        let base = self.file.as_deref().and_then(Path::parent).unwrap_or_else(|| Path::new(""));
        machine.cwd.join(base).join(path)
    }

    /// Resolves the directories.
    ///
    /// # Errors
    /// A directory is not set and has no default on this machine, or a path is wrong.
    pub fn dirs(&self, machine: &HostMachine) -> Result<WardenDirs, ConfigProblems> {
        let paths = &self.settings.paths;
        let given = |path: &Option<PathBuf>| path.as_ref().map(|path| self.absolute(machine, path));
        let Some(state) = given(&paths.state_dir).or_else(|| machine.state_dir()) else {
            let message = format!(
                "there is no place for our state: HOME is not set, and the system's list of users has no \
                 home for user {}",
                machine.uid
            );
            let hint = "set HOME, or name directories with `paths.state_dir` and its like";
            return Err(ConfigProblem::new(ConfigPlace::Nowhere, message).with_hint(hint).into());
        };
        // Without a home directory, use folders in the configured state directory.
        let beside = |name: &str| state.join(name);
        let data = given(&paths.data_dir).or_else(|| machine.data_dir()).unwrap_or_else(|| beside("data"));
        let cache =
            given(&paths.cache_dir).or_else(|| machine.cache_dir()).unwrap_or_else(|| beside("cache"));
        let runtime_base = given(&paths.runtime_dir).unwrap_or_else(|| machine.runtime_base());
        let runtime = PrivateDir::path_for(&runtime_base, machine.pid);
        Ok(WardenDirs { state, runtime, runtime_base, data, cache, models: self.folders.clone() })
    }
}
