//! The command line: what can be asked, and who answers. Each command has its module; this one only parses and sends on.
//!
//! Arguments come in two stages: as typed (the structs here), then resolved against configuration and machine
//! ([`crate::config`]). Nothing here decides.

use std::fs::File;
use std::io;
use std::path::Path;

use clap::{Args, Parser, Subcommand};
use rustix::fs::FlockOperation;

use crate::config::machine::Machine;
use crate::config::source::layers::{FlagSetting, Loaded, Sources, load};
use crate::exit::Failure;

pub(crate) mod build;
pub(crate) mod builds;
mod builds_between;
mod builds_in_use;
pub(crate) mod canary;
mod config;
mod control;
mod diagnose;
mod dropin;
mod gpu;
pub(crate) mod growth;
mod history;
mod import;
mod keys;
mod mitigations;
mod papers;
mod patches;
mod plan;
mod policy;
pub(crate) mod progress;
mod quarantine;
mod quickstart;
mod report;
mod requests;
mod sample_model;
pub(crate) mod serve;
mod service;
mod status;
mod top;
pub(crate) mod update;
mod upgrade;

/// Keeps llama-server up: proxy, supervisor, builder.
#[derive(Debug, Parser)]
#[command(name = "llama-warden", version, about, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Builds llama-server, serves a small model and shows a recycle under load.
    Quickstart(quickstart::QuickstartArgs),
    /// Serves models: starts, watches and replaces the llama-servers behind one address.
    Serve(Box<serve::ServeArgs>),
    /// Builds llama-server from source into the store, and verifies it.
    Build(build::BuildArgs),
    /// Lists, shows and removes builds.
    #[command(subcommand)]
    Builds(builds::BuildsCommand),
    /// Renews llama-server: builds what is new, proves it beside the build in use, and brings it in.
    Update(Box<update::UpdateArgs>),
    /// Lets another program (a newer llama-warden) take the place of a running instance, without a request that fails.
    Upgrade(upgrade::UpgradeArgs),
    /// Goes back to the build that was in use before.
    Rollback(update::RollbackArgs),
    /// Lists patch sets, judges them in a source, applies, exports.
    #[command(subcommand)]
    Patches(Box<patches::PatchesCommand>),
    /// Lists and shows what can be done about memory that grows.
    #[command(subcommand)]
    Mitigations(mitigations::MitigationsCommand),
    /// Shows what policies would do: replays recordings, explains a configuration, simulates.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Shows what each model needs, and who fits together, without loading anything.
    Plan(plan::PlanArgs),
    /// Makes a configuration of llama-swap's, a router's presets, Ollama's models, or a command line.
    Import(import::ImportArgs),
    /// Finds out whether a server's memory leaks, and with which work: experiments with fresh processes.
    Diagnose(Box<diagnose::DiagnoseArgs>),
    /// Makes API keys, and checks a file of them.
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Writes a model with random weights, to try things with.
    SampleModel(sample_model::SampleModelArgs),
    /// Shows the models of a running instance.
    Status(control::StatusArgs),
    /// Shows models and their memory on the terminal, as they change.
    Top(Box<top::TopArgs>),
    /// Replaces the processes of a model; requests wait or go to the next one.
    Restart(control::ModelArgs),
    /// Drains and stops a model; the next request starts it again. With `--all`, sends balancers away from the whole instance.
    Drain(control::DrainArgs),
    /// Asks the processes of a model to give back what they hoard; they serve on.
    Reclaim(control::ReclaimArgs),
    /// Keeps a model loaded: no other model evicts it, until llama-warden restarts.
    Pin(control::ModelArgs),
    /// Lets a model leave for another one again, even if it is configured that it never does.
    Unpin(control::ModelArgs),
    /// Tries another build of llama-server with a model, beside its own, and says whether it is worse.
    #[command(subcommand)]
    Canary(Box<canary::CanaryCommand>),
    /// Shows the output of a model's processes.
    Logs(control::LogsArgs),
    /// Shows what happened to the models.
    Events(control::EventsArgs),
    /// Shows what happened to the models in this and in former instances: replacements, failures, events.
    History(history::HistoryArgs),
    /// Shows the requests in flight and those that ended last, and cancels one.
    Requests(Box<requests::RequestsArgs>),
    /// Gathers what a report of a bug needs into one archive, without secrets, and shows what is in it first.
    Report(report::ReportArgs),
    /// Lists and releases requests that may have killed their server.
    #[command(subcommand)]
    Quarantine(quarantine::QuarantineCommand),
    /// Checks, shows or describes the configuration.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Watches over a tool of `diagnose --wrap`.
    #[command(hide = true)]
    KeepWrapped(diagnose::KeeperArgs),
    /// Runs us as a service: writes the unit for systemd, removes it, prints it.
    #[command(subcommand)]
    Service(service::ServiceCommand),
    /// Prints what completes commands in a shell.
    Completions(papers::CompletionsArgs),
    /// Writes manual pages.
    Man(papers::ManArgs),
    /// Prints the version.
    Version,
}

/// Where settings come from, besides the environment.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ConfigArgs {
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", env = "LLAMA_WARDEN_CONFIG")]
    pub(crate) config: Option<std::path::PathBuf>,
    /// Sets one key, over file and environment: `--set server.port=9000`. May be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

impl ConfigArgs {
    /// Loads all layers; `flags` come beneath `--set`.
    pub(crate) fn load(&self, machine: &Machine, mut flags: Vec<FlagSetting>) -> Result<Loaded, Failure> {
        for text in &self.set {
            flags.push(parse_set(text)?);
        }
        Ok(load(Sources {
            file: self.config.clone(),
            env: machine.text_vars(),
            flags,
            memory: machine.memory.0,
        })?)
    }
}

fn parse_set(text: &str) -> Result<FlagSetting, Failure> {
    let bad = || {
        Failure::usage(
            format!("--set {text}: this is no `KEY=VALUE`"),
            "write it like `--set server.port=9000` or `--set 'models.\"a.b\".replicas=2'`",
        )
    };
    let (key, value) = text.split_once('=').ok_or_else(bad)?;
    let keys = toml_edit::Key::parse(key).map_err(|_| bad())?;
    let path: Vec<&str> = keys.iter().map(toml_edit::Key::get).collect();
    Ok(FlagSetting::raw(&format!("--set {key}"), &path, value))
}

/// A file that is held as long as it is open, made with its folder if it is not there. What is in it stays.
fn held(path: &Path, how: FlockOperation) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let file = File::options().create(true).append(true).open(path)?;
    rustix::fs::flock(&file, how)?;
    Ok(file)
}

/// Runs a short command's future on this thread.
pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))?;
    Ok(runtime.block_on(future))
}

/// Does what was asked on the command line: of us, or of llama-server if that is the name we were started under.
pub(crate) fn run() -> Result<(), Failure> {
    let mut words = std::env::args_os();
    if dropin::is_alias(words.next().as_deref()) {
        let args = words.map(|word| {
            word.into_string().map_err(|word| {
                Failure::usage(format!("the argument {} is not text", word.display()), "use UTF-8")
            })
        });
        return serve::run_as_llama_server(args.collect::<Result<_, _>>()?);
    }
    match Cli::parse().command {
        Command::Quickstart(args) => quickstart::run(args),
        Command::Serve(args) => serve::run(*args),
        Command::Build(args) => build::run(args),
        Command::Update(args) => update::run(*args),
        Command::Rollback(args) => update::rollback(&args),
        Command::Builds(command) => builds::run(command),
        Command::Patches(command) => patches::run(*command),
        Command::Mitigations(command) => mitigations::run(&command),
        Command::Policy(command) => policy::run(command),
        Command::Plan(args) => plan::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Diagnose(args) => diagnose::run(*args),
        Command::Keys(command) => keys::run(command),
        Command::SampleModel(args) => sample_model::run(&args),
        Command::Status(args) => control::status(&args),
        Command::Top(args) => top::run(*args),
        Command::Restart(args) => control::restart(&args),
        Command::Upgrade(args) => upgrade::run(&args),
        Command::Drain(args) => control::drain(&args),
        Command::Reclaim(args) => control::reclaim(&args),
        Command::Pin(args) => control::pin(&args, true),
        Command::Unpin(args) => control::pin(&args, false),
        Command::Canary(command) => canary::run(&command),
        Command::History(args) => history::run(&args),
        Command::Logs(args) => control::logs(&args),
        Command::Events(args) => control::events(&args),
        Command::Requests(args) => requests::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Quarantine(command) => quarantine::run(&command),
        Command::Config(command) => config::run(command),
        Command::KeepWrapped(args) => diagnose::keep_wrapped(&args),
        Command::Service(command) => service::run(&command),
        Command::Completions(args) => papers::completions(&args),
        Command::Man(args) => papers::man(&args),
        Command::Version => crate::out::line(&format!("llama-warden {}", env!("CARGO_PKG_VERSION"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// The page of a command and those below it, as wide as a narrow terminal and whatever the environment says.
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
        let mut all = quiet(Cli::command()).term_width(100);
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
            let told = Cli::try_parse_from(words).unwrap_err().to_string();
            format!("{line}\n    {}\n", told.lines().next().unwrap_or_default())
        };
        insta::assert_snapshot!(wrong.map(first).concat());
        let told = ["server.port", "=1", "a b=1"].map(|text| parse_set(text).unwrap_err().lines().join("\n"));
        insta::assert_snapshot!("what_is_no_key_and_value_is_told", told.join("\n"));
    }

    #[test]
    fn a_key_is_set_by_its_path_and_names_may_be_quoted() {
        let setting = parse_set("models.\"a.b\".replicas=2").unwrap();
        assert_eq!(setting.path, ["models", "a.b", "replicas"]);
        for text in ["server.port", "=1", "a b=1"] {
            assert_eq!(parse_set(text).unwrap_err().code(), 2, "{text}");
        }
    }
}
