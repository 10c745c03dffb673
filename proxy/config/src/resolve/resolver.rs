//! Collects the problems of a configuration while its parts are resolved.

use std::path::{Path, PathBuf};

use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem, owned_path};
use crate::source::layers::LoadedConfig;

pub(crate) struct ConfigResolver<'a> {
    pub(crate) loaded: &'a LoadedConfig,
    pub(crate) machine: &'a HostMachine,
    pub(crate) any_name: bool,
    pub(crate) problems: Vec<ConfigProblem>,
    pub(crate) warnings: Vec<ConfigProblem>,
}

impl<'a> ConfigResolver<'a> {
    pub(crate) fn new(loaded: &'a LoadedConfig, machine: &'a HostMachine) -> Self {
        Self { loaded, machine, any_name: false, problems: Vec::new(), warnings: Vec::new() }
    }

    pub(crate) fn place(&self, key: &[&str]) -> ConfigPlace {
        self.loaded.place(&owned_path(key))
    }

    pub(crate) fn report(&mut self, key: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        self.problems.push(ConfigProblem::new(self.place(key), message).with_hint(hint));
    }

    pub(crate) fn warn(&mut self, key: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        self.warnings.push(ConfigProblem::new(self.place(key), message).with_hint(hint));
    }

    pub(crate) fn absolute(&self, path: &Path) -> PathBuf {
        self.loaded.absolute(self.machine, path)
    }

    /// Resolves a configured file relative to the configuration file; `None` if it is empty.
    pub(crate) fn resolve_file(&self, named: &str) -> Option<PathBuf> {
        (!named.is_empty()).then(|| self.absolute(Path::new(named)))
    }
}
