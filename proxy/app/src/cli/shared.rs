//! What commands share: the sources of settings, files with a lock, and a runtime.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::FlockOperation;
use warden_config::machine::HostMachine;
use warden_config::source::layers::{ConfigSources, FlagSetting, LoadedConfig, load_config};

use crate::exit::CommandError;

/// Sources of settings, next to the environment.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ConfigArgs {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", env = "LLAMA_WARDEN_CONFIG")]
    pub(crate) config: Option<PathBuf>,
    /// Sets one key, over file and environment: `--set server.port=9000`. May be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

impl ConfigArgs {
    pub(crate) fn read(&self) -> Result<(HostMachine, LoadedConfig), CommandError> {
        let machine = HostMachine::read();
        let loaded = self.load(&machine, Vec::new())?;
        Ok((machine, loaded))
    }

    /// `--set` overrides `flags`.
    pub(crate) fn load(
        &self,
        machine: &HostMachine,
        mut flags: Vec<FlagSetting>,
    ) -> Result<LoadedConfig, CommandError> {
        for text in &self.set {
            flags.push(parse_set(text)?);
        }
        Ok(load_config(ConfigSources {
            file: self.config.clone(),
            env: machine.text_vars(),
            flags,
            memory: machine.memory.0,
        })?)
    }
}

fn parse_set(text: &str) -> Result<FlagSetting, CommandError> {
    let bad = || {
        CommandError::usage(
            format!("--set {text}: this is no `KEY=VALUE`"),
            "write it like `--set server.port=9000` or `--set 'models.\"a.b\".replicas=2'`",
        )
    };
    let (key, value) = text.split_once('=').ok_or_else(bad)?;
    let keys = toml_edit::Key::parse(key).map_err(|_| bad())?;
    let path: Vec<&str> = keys.iter().map(toml_edit::Key::get).collect();
    Ok(FlagSetting::raw(&format!("--set {key}"), &path, value))
}

/// Creates the file and its folder if missing, and keeps existing content. The lock lasts until the file is
/// closed.
pub(crate) fn open_locked(path: &Path, how: FlockOperation) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = File::options().create(true).append(true).open(path)?;
    rustix::fs::flock(&file, how)?;
    Ok(file)
}

pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| CommandError::failed(format!("cannot start the runtime: {error}")))?;
    Ok(runtime.block_on(future))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_set_by_its_path_and_names_may_be_quoted() {
        let setting = parse_set("models.\"a.b\".replicas=2").unwrap();
        assert_eq!(setting.path, ["models", "a.b", "replicas"]);
        for text in ["server.port", "=1", "a b=1"] {
            assert_eq!(parse_set(text).unwrap_err().code(), 2, "{text}");
        }
        let told = ["server.port", "=1", "a b=1"].map(|text| parse_set(text).unwrap_err().lines().join("\n"));
        insta::assert_snapshot!("what_is_no_key_and_value_is_told", told.join("\n"));
    }
}
