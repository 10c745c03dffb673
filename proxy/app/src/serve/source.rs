//! The sources of the configuration of an instance.

use std::sync::Arc;

use warden_config::machine::HostMachine;
use warden_config::needs;
use warden_config::problem::{ConfigPlace, ConfigProblem};
use warden_config::resolve::{ResolvedConfig, binary, resolve_config};
use warden_config::source::layers::FlagSetting;

use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;

/// Sources of the configuration, read at the start and at every reload.
#[derive(Clone, Debug)]
pub(crate) struct ConfigSource {
    /// Configuration file and `--set` options.
    pub(crate) config: ConfigArgs,
    pub(crate) flags: Vec<FlagSetting>,
    /// Drop-in mode: every model name resolves to the only model.
    pub(crate) any_name: bool,
}

impl ConfigSource {
    /// Reads and resolves the configuration, and runs the binaries once to check them.
    pub(crate) async fn resolve(&self, machine: &HostMachine) -> Result<ResolvedConfig, CommandError> {
        self.resolve_with(machine, |_| Ok(())).await
    }

    /// Like [`Self::resolve`], with a `change` applied before the binaries are checked.
    pub(crate) async fn resolve_with(
        &self,
        machine: &HostMachine,
        change: impl FnOnce(&mut ResolvedConfig) -> Result<(), CommandError> + Send,
    ) -> Result<ResolvedConfig, CommandError> {
        let mut resolved = self.as_configured(machine)?;
        change(&mut resolved)?;
        binary::fill_from_store(&mut resolved, machine).await?;
        needs::fill_needs(&mut resolved, machine);
        Ok(resolved)
    }

    /// Returns the configuration without looking for or running any binary.
    pub(crate) fn as_configured(&self, machine: &HostMachine) -> Result<ResolvedConfig, CommandError> {
        let loaded = self.config.load(machine, self.flags.clone())?;
        if loaded.models.is_empty() && loaded.folders.is_empty() && loaded.settings.remotes.is_empty() {
            let place = self
                .config
                .config
                .as_ref()
                .map_or(ConfigPlace::Nowhere, |path| ConfigPlace::whole_file(path));
            let problem = ConfigProblem::new(place, "no model is configured");
            let hint = "add a section like `[models.\"name\"]` with `model = \"file.gguf\"`, or use \
                        `llama-warden serve -- -m file.gguf`";
            return Err(CommandError::Config(problem.with_hint(hint).into()));
        }
        let mut resolved = resolve_config(&loaded, machine, self.any_name)?;
        resolved.written = Some(Arc::new(loaded));
        Ok(resolved)
    }
}
