//! Reads and writes `verified.toml`, next to the configuration file: the results of `patches prove` on this
//! machine.

use std::io;
use std::path::{Path, PathBuf};

use warden_patches::prove::ProofRecords;
use warden_patches::whole::{self, LossTolerance};

use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem};
use crate::source::layers::LoadedConfig;

const PROOFS_FILE: &str = "verified.toml";

/// Returns the path of the file: next to the configuration file, else in `$XDG_CONFIG_HOME/llama-warden`.
///
/// # Errors
/// There is neither a configuration file nor a home directory.
pub fn proofs_path(loaded: &LoadedConfig, machine: &HostMachine) -> Result<PathBuf, ConfigProblem> {
    let beside = loaded.file.as_deref().map(|file| loaded_folder(machine, file));
    beside.or_else(|| machine.config_dir()).map(|folder| folder.join(PROOFS_FILE)).ok_or_else(|| {
        ConfigProblem::new(ConfigPlace::Nowhere, "there is no place to record it in: HOME is not set")
            .with_hint("name a configuration file with --config: the record lies beside it")
    })
}

fn loaded_folder(machine: &HostMachine, file: &Path) -> PathBuf {
    let file = machine.cwd.join(file);
    file.parent().map_or_else(|| machine.cwd.clone(), Path::to_owned)
}

/// Returns the proofs recorded for this configuration; empty if the file does not exist or has no path.
///
/// # Errors
/// The file exists but cannot be read or parsed.
pub fn load_proofs(loaded: &LoadedConfig, machine: &HostMachine) -> Result<ProofRecords, ConfigProblem> {
    proofs_path(loaded, machine).map_or_else(|_| Ok(ProofRecords::default()), |file| read_proofs(&file))
}

/// Reads the proofs in a file; empty if the file does not exist.
///
/// # Errors
/// The file exists but cannot be read or parsed. The file stays unchanged.
pub fn read_proofs(file: &Path) -> Result<ProofRecords, ConfigProblem> {
    let place = || ConfigPlace::whole_file(file);
    let hint = "repair it, or move it away: then nothing counts as locally verified until `llama-warden \
                patches prove` shows it again";
    match std::fs::read_to_string(file) {
        Ok(text) => ProofRecords::parse(&text).map_err(|why| {
            ConfigProblem::new(place(), format!("this is no record of `patches prove`: {why}"))
                .with_hint(hint)
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ProofRecords::default()),
        Err(error) => Err(ConfigProblem::new(place(), format!("cannot be read: {error}")).with_hint(hint)),
    }
}

/// Replaces the file atomically.
///
/// # Errors
/// The file cannot be written; the previous file is kept.
pub fn write_proofs(file: &Path, proofs: &ProofRecords) -> Result<(), ConfigProblem> {
    let trouble = |error: &dyn std::fmt::Display| {
        ConfigProblem::new(ConfigPlace::whole_file(file), format!("cannot be written: {error}")).with_hint(
            "what was shown is not recorded; make the folder writable, or name another configuration",
        )
    };
    let text = proofs.to_toml().map_err(|error| trouble(&error))?;
    whole::write_atomically(file, text.as_bytes(), LossTolerance::Irreplaceable)
        .map_err(|error| trouble(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_understood_is_told_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deeper").join(PROOFS_FILE);
        assert_eq!(read_proofs(&file).unwrap(), ProofRecords::default());
        write_proofs(&file, &ProofRecords::default()).unwrap();
        assert_eq!(read_proofs(&file).unwrap(), ProofRecords::default());
        std::fs::write(&file, "schema = 9\n").unwrap();
        let problem = read_proofs(&file).unwrap_err();
        assert!(problem.message.contains("version 9") && problem.hint.is_some(), "{problem}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "schema = 9\n");
    }
}
