//! `llama-warden config check|show|schema`: checks and prints the configuration.

use clap::{Args, Subcommand};
use warden_config::machine::HostMachine;
use warden_config::problem::{ConfigProblem, ConfigProblems};
use warden_config::resolve::{binary, flags, resolve_config};
use warden_config::schema::root;
use warden_config::{needs, show};
use warden_policies::secrets;

use super::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Reads and checks the whole configuration, and runs each binary once.
    Check(ConfigCheckArgs),
    /// Prints the effective configuration with the source of each value as a comment.
    Show(ConfigShowArgs),
    /// Prints the JSON Schema of the configuration file.
    Schema,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    /// Configuration file, as an alternative to --config.
    file: Option<std::path::PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigShowArgs {
    /// Configuration file, as an alternative to --config.
    file: Option<std::path::PathBuf>,
    /// Prints the compiled-in defaults with their reasons instead.
    #[arg(long)]
    defaults: bool,
    /// Shows secrets (keys, tokens, passwords in addresses), which are otherwise printed as `***`.
    #[arg(long)]
    reveal: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(crate) fn run(command: ConfigCommand) -> Result<(), CommandError> {
    match command {
        ConfigCommand::Check(ConfigCheckArgs { file, mut config }) => {
            config.config = file.or(config.config);
            let (machine, loaded) = config.read()?;
            let mut resolved = resolve_config(&loaded, &machine, false)?;
            super::shared::block_on(binary::fill_from_store(&mut resolved, &machine))??;
            needs::fill_needs(&mut resolved, &machine);
            let unknown = super::shared::block_on(flags::find_unknown_words(&loaded, &resolved))?;
            print_warnings(&unknown.ignored);
            if !unknown.refused.is_empty() {
                return Err(ConfigProblems(unknown.refused).into());
            }
            print_warnings(&resolved.warnings);
            let count = resolved.fleet.models.len();
            out::print_line(&format!("ok: {}", out::count_noun(count, "model")))
        }
        ConfigCommand::Show(ConfigShowArgs { defaults: true, .. }) => {
            out::print_text(warden_policies::defaults::DEFAULTS_TEXT)
        }
        ConfigCommand::Show(ConfigShowArgs { file, mut config, reveal, .. }) => {
            config.config = file.or(config.config);
            let machine = HostMachine::read();
            out::print_text(&show::print_config(&config.load(&machine, Vec::new())?, &machine, reveal))
        }
        ConfigCommand::Schema => out::print_json(root::root_schema()),
    }
}

/// Hides secrets, which the quoted values may contain.
pub(super) fn print_warnings(warnings: &[ConfigProblem]) {
    for warning in warnings {
        out::error_line(&secrets::redact_text(&format!("warning: {warning}")));
        if let Some(hint) = &warning.hint {
            out::error_line(&format!("hint: {hint}"));
        }
    }
}
