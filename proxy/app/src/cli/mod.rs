//! The command line: parses arguments and dispatches to the module of each command.
//!
//! Arguments come in two stages: as typed (the structs here), then resolved against configuration and machine
//! ([`warden_config`]). This module makes no decisions.

use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;

use crate::exit::CommandError;
use crate::out;

pub(crate) mod build;
pub(crate) mod builds;
mod builds_between;
pub(crate) mod canary;
mod config;
mod control;
mod diagnose;
mod history;
mod import;
mod keys;
mod mitigations;
mod patches;
mod plan;
mod policy;
pub(crate) mod progress;
mod quickstart;
mod report;
mod requests;
mod sample_model;
pub(crate) mod serve;
mod service;
pub(crate) mod shared;
mod status;
mod top;
pub(crate) mod update;
mod upgrade;

/// Keeps llama-server up: proxy, supervisor, builder.
#[derive(Debug, Parser)]
#[command(name = "llama-warden", version, about, disable_help_subcommand = true)]
pub(crate) struct CommandLine {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Builds llama-server, serves a small model and shows a recycle under load.
    Quickstart(quickstart::QuickstartArgs),
    /// Serves models: starts, watches and replaces the llama-servers behind one address.
    Serve(Box<serve::ServeArgs>),
    /// Builds llama-server from source into the store, and verifies it.
    Build(build::BuildArgs),
    /// Lists, shows and removes builds.
    #[command(subcommand)]
    Builds(builds::BuildsCommand),
    /// Updates llama-server: builds a new version, proves it against the build in use, and makes it the
    /// default.
    Update(Box<update::UpdateArgs>),
    /// Replaces a running instance by another program (a newer llama-warden) without failing a request.
    Upgrade(upgrade::UpgradeArgs),
    /// Returns to the build that was in use before.
    Rollback(update::RollbackArgs),
    /// Lists patch sets, judges them in a source, applies and exports them.
    #[command(subcommand)]
    Patches(Box<patches::PatchesCommand>),
    /// Lists and shows mitigations against growing memory.
    #[command(subcommand)]
    Mitigations(mitigations::MitigationsCommand),
    /// Shows what policies would do: replays recordings, explains a configuration, simulates.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Shows the memory that each model needs, and which models fit together, without loading anything.
    Plan(plan::PlanArgs),
    /// Creates a configuration from that of llama-swap, a router's presets, Ollama's models, or a command
    /// line.
    Import(import::ImportArgs),
    /// Finds out whether a server's memory leaks, and with which work: experiments with fresh processes.
    Diagnose(Box<diagnose::DiagnoseArgs>),
    /// Creates API keys, and checks a file of them.
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Writes a small model with random weights, for trials.
    SampleModel(sample_model::SampleModelArgs),
    /// Shows the models of a running instance.
    Status(control::QueryArgs),
    /// Shows models and their memory live on the terminal.
    Top(Box<top::TopArgs>),
    /// Replaces the processes of a model; requests wait or go to the next process.
    Restart(control::ModelArgs),
    /// Drains and stops a model; the next request starts it again. `--all` sends balancers away from the
    /// instance.
    Drain(control::DrainArgs),
    /// Asks the processes of a model to return unused memory; they keep serving.
    Reclaim(control::ModelQueryArgs),
    /// Keeps a model loaded: no other model evicts it, until llama-warden restarts.
    Pin(control::ModelArgs),
    /// Allows eviction of a model again, even if its configuration pins it.
    Unpin(control::ModelArgs),
    /// Tries another build of llama-server next to a model's own, and says whether it is worse.
    #[command(subcommand)]
    Canary(Box<canary::CanaryCommand>),
    /// Shows the output of a model's processes.
    Logs(control::LogsArgs),
    /// Shows the events of the models.
    Events(control::EventsArgs),
    /// Shows past events of the models, in this and earlier instances: replacements, failures, events.
    History(history::HistoryArgs),
    /// Shows running and recent requests, and cancels one.
    Requests(Box<requests::RequestsArgs>),
    /// Collects the files for a bug report in one archive, without secrets, and lists them first.
    Report(report::ReportArgs),
    /// Lists and releases requests that may have killed their server.
    #[command(subcommand)]
    Quarantine(control::QuarantineCommand),
    /// Checks, shows or describes the configuration.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Runs llama-warden as a service: writes, removes or prints the unit for systemd.
    #[command(subcommand)]
    Service(service::ServiceCommand),
    /// Prints a completion script for a shell.
    Completions {
        /// Shell to complete for.
        #[arg(value_parser = PossibleValuesParser::new(["bash", "zsh", "fish"]).try_map(|name| name.parse::<Shell>()))]
        shell: Shell,
    },
    /// Writes manual pages.
    Man {
        /// Folder for the pages, one per command. Created if missing.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Prints the version.
    Version,
}

/// If started as `llama-server`, parses llama-server's command line.
pub(crate) fn run() -> Result<(), CommandError> {
    let mut words = std::env::args_os();
    if serve::is_alias(words.next().as_deref()) {
        let args = words.map(|word| {
            word.into_string().map_err(|word| {
                CommandError::usage(format!("the argument {} is not text", word.display()), "use UTF-8")
            })
        });
        return serve::run_as_llama_server(args.collect::<Result<_, _>>()?);
    }
    match CommandLine::parse().command {
        CliCommand::Quickstart(args) => quickstart::run(args),
        CliCommand::Serve(args) => serve::run(*args),
        CliCommand::Build(args) => build::run(args),
        CliCommand::Update(args) => update::run(*args),
        CliCommand::Rollback(args) => update::rollback(&args),
        CliCommand::Builds(command) => builds::run(command),
        CliCommand::Patches(command) => patches::run(*command),
        CliCommand::Mitigations(command) => mitigations::run(&command),
        CliCommand::Policy(command) => policy::run(command),
        CliCommand::Plan(args) => plan::run(&args),
        CliCommand::Import(args) => import::run(&args),
        CliCommand::Diagnose(args) => diagnose::run(*args),
        CliCommand::Keys(command) => keys::run(command),
        CliCommand::SampleModel(args) => sample_model::run(&args),
        CliCommand::Status(args) => control::status(&args),
        CliCommand::Top(args) => top::run(*args),
        CliCommand::Restart(args) => control::restart(&args),
        CliCommand::Upgrade(args) => upgrade::run(&args),
        CliCommand::Drain(args) => control::drain(&args),
        CliCommand::Reclaim(args) => control::reclaim(&args),
        CliCommand::Pin(args) => control::pin(&args, true),
        CliCommand::Unpin(args) => control::pin(&args, false),
        CliCommand::Canary(command) => canary::run(&command),
        CliCommand::History(args) => history::run(&args),
        CliCommand::Logs(args) => control::logs(&args),
        CliCommand::Events(args) => control::events(&args),
        CliCommand::Requests(args) => requests::run(&args),
        CliCommand::Report(args) => report::run(&args),
        CliCommand::Quarantine(command) => control::quarantine(&command),
        CliCommand::Config(command) => config::run(command),
        CliCommand::Service(command) => service::run(&command),
        CliCommand::Completions { shell } => completions(shell),
        CliCommand::Man { folder } => man(&folder),
        CliCommand::Version => out::print_line(&format!("llama-warden {}", env!("CARGO_PKG_VERSION"))),
    }
}

/// Hides values of the environment, which generated pages must not show.
fn command_without_env() -> clap::Command {
    fn quiet(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(quiet)
    }
    quiet(CommandLine::command())
}

fn completions(shell: Shell) -> Result<(), CommandError> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command_without_env(), "llama-warden", &mut text);
    out::print_text(&String::from_utf8_lossy(&text))
}

fn man(folder: &Path) -> Result<(), CommandError> {
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command_without_env(), folder));
    written.map_err(|error| {
        CommandError::hinted(
            format!("cannot write the pages to {}: {error}", folder.display()),
            "name a folder that we may write to",
        )
    })?;
    out::print_line(&format!(
        "pages are in {}: `man -l {}`",
        folder.display(),
        folder.join("llama-warden.1").display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    /// Help pages of a command and its subcommands, for a narrow terminal and without values of the
    /// environment.
    fn pages(command: &mut clap::Command) -> String {
        let own = format!("{}\n", command.render_long_help());
        let below = command.get_subcommands_mut().filter(|below| !below.is_hide_set());
        below.fold(own, |all, below| all + &"-".repeat(100) + "\n" + &pages(below))
    }

    fn quiet(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(quiet)
    }

    #[test]
    fn every_command_explains_itself() {
        let mut all = quiet(CommandLine::command()).term_width(100);
        all.build();
        insta::assert_snapshot!("help", all.render_long_help());
        let mut of = std::collections::BTreeMap::<&str, String>::new();
        for command in all.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
            let group = match command.get_name() {
                "quickstart" | "sample-model" | "completions" | "man" | "version" => "help_to_try_things",
                "build" | "builds" => "help_of_builds",
                "patches" | "mitigations" => "help_of_cures",
                "serve" | "service" | "config" | "keys" | "import" => "help_of_serving",
                "policy" | "diagnose" => "help_of_experiments",
                _ => "help_of_an_instance",
            };
            of.entry(group).or_default().extend(["=".repeat(100), "\n".to_owned(), pages(command)]);
        }
        for (group, text) in of {
            insta::assert_snapshot!(group, text);
        }
    }

    #[test]
    fn a_wrong_value_is_told_with_the_right_form() {
        let wrong = [
            "build --backend gpu",
            "build --arch portable,",
            "build --arch 90,gfx1201",
            "history --since yesterday-ish",
            "diagnose --workload poems",
            "policy replay a.jsonl --cache-ram much",
            "policy replay a.jsonl --starts-at 25:00",
            "policy replay a.jsonl --host-memory 12GB.of.ram",
            "policy simulate --leak 1MiB --hours 0",
            "policy simulate --leak 1MiB --images 2",
            "policy simulate --leak 1MiB --load-time soon",
        ];
        let first = |line: &str| {
            let words = std::iter::once("llama-warden").chain(line.split(' '));
            let told = CommandLine::try_parse_from(words).unwrap_err().to_string();
            format!("{line}\n    {}\n", told.lines().next().unwrap_or_default())
        };
        insta::assert_snapshot!(wrong.map(first).concat());
    }
}
