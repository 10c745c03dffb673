//! `llama-warden config check|show|schema`.

use clap::{Args, Subcommand};
use warden_policies::secrets;

use super::ConfigArgs;
use crate::config::machine::Machine;
use crate::config::needs;
use crate::config::problem::{Problem, Problems};
use crate::config::resolve::resolve;
use crate::config::resolve::{flags, store};
use crate::config::schema::{self, markdown};
use crate::config::show;
use crate::exit::Failure;
use crate::out;

/// What can be asked about the configuration.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Reads the configuration, checks it all, and tries each binary once.
    Check(CheckArgs),
    /// Prints the effective configuration; a comment says where each value comes from.
    Show(ShowArgs),
    /// Prints the JSON Schema of the configuration file.
    Schema(SchemaArgs),
}

/// What `config check` takes.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The file, as an alternative to --config.
    file: Option<std::path::PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
}

/// What `config show` takes.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The file, as an alternative to --config.
    file: Option<std::path::PathBuf>,
    /// Prints the compiled-in defaults with their reasons instead.
    #[arg(long)]
    defaults: bool,
    /// Shows secrets, which are `***` otherwise: keys, tokens, passwords in addresses.
    #[arg(long)]
    reveal: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

/// What `config schema` takes.
#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {
    /// Prints the keys as tables for docs/configuration.md instead.
    #[arg(long)]
    markdown: bool,
}

pub(crate) fn run(command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Check(CheckArgs { file, mut config }) => {
            config.config = file.or(config.config);
            let machine = Machine::read();
            let loaded = config.load(&machine, Vec::new())?;
            let mut resolved = resolve(&loaded, &machine, false)?;
            super::block_on(store::fill(&mut resolved, &machine))??;
            needs::fill(&mut resolved, &machine);
            let unknown = super::block_on(flags::unknown(&loaded, &resolved))?;
            warn(&unknown.ignored);
            if !unknown.refused.is_empty() {
                return Err(Problems(unknown.refused).into());
            }
            warn(&resolved.warnings);
            let count = resolved.fleet.models.len();
            out::line(&format!("ok: {}", out::counted(count, "model")))
        }
        ConfigCommand::Show(ShowArgs { defaults: true, .. }) => out::write(warden_policies::defaults::TEXT),
        ConfigCommand::Show(ShowArgs { file, mut config, reveal, .. }) => {
            config.config = file.or(config.config);
            let machine = Machine::read();
            out::write(&show::show(&config.load(&machine, Vec::new())?, &machine, reveal))
        }
        ConfigCommand::Schema(SchemaArgs { markdown: true }) => out::write(&markdown::tables()),
        ConfigCommand::Schema(SchemaArgs { markdown: false }) => out::json(schema::root()),
    }
}

/// Tells what is allowed and probably not meant.
fn warn(warnings: &[Problem]) {
    for warning in warnings {
        out::error_line(&secrets::text(&format!("warning: {warning}")));
        if let Some(hint) = &warning.hint {
            out::error_line(&format!("hint: {hint}"));
        }
    }
}
