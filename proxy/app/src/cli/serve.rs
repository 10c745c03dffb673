//! `llama-warden serve`, also when the program is started under the name `llama-server`.

use std::os::unix::process::CommandExt;

use clap::Args;

use super::{ConfigArgs, dropin};
use crate::config::machine::HostMachine;
use crate::config::resolve::store;
use crate::config::source::layers::FlagSetting;
use crate::config::source::tree::{ConfigNode, ConfigValue};
use crate::exit::CommandError;
use crate::serve::ConfigSource;

#[derive(Debug, Default, Args)]
#[command(
    after_help = "Drop-in: `llama-warden serve -- -m model.gguf -c 4096 --port 9000` takes what llama-server takes."
)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Address to listen on (`server.host`).
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on, 0 for any (`server.port`).
    #[arg(long)]
    port: Option<String>,
    /// Unix socket of the admin routes (`admin.socket`).
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<String>,
    /// Loopback address of the admin routes (`admin.address`).
    #[arg(long, value_name = "HOST:PORT")]
    admin_address: Option<String>,
    /// Directory of ledger and instances (`paths.state_dir`).
    #[arg(long, value_name = "DIR")]
    state_dir: Option<String>,
    /// llama-server for models that name none (`defaults.binary`).
    #[arg(long, value_name = "PATH")]
    binary: Option<String>,
    /// Build for models that name none (`defaults.build`).
    #[arg(long, value_name = "ID")]
    build: Option<String>,
    /// Memory above which a backend is replaced when idle (`defaults.policy.host.soft`).
    #[arg(long, value_name = "SIZE")]
    memory_soft: Option<String>,
    /// Memory above which a backend is drained at once (`defaults.policy.host.hard`).
    #[arg(long, value_name = "SIZE")]
    memory_hard: Option<String>,
    /// Way to replace a generation: auto, sequential, overlap (`defaults.replace`).
    #[arg(long, value_name = "WAY")]
    replace: Option<String>,
    /// Folder of models: serves each model file in it, including later ones (`paths.models`). May be
    /// repeated.
    #[arg(long, value_name = "DIR")]
    models_dir: Vec<String>,
    /// Log format: `text` or `json` (`log.format`).
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Log level or filter (`log.level`).
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// llama-server's own flags: serves one model without a configuration file.
    #[arg(last = true, value_name = "LLAMA-SERVER FLAGS")]
    flags: Vec<String>,
}

impl ServeArgs {
    /// Settings of the flags, which override the environment.
    fn settings(&self) -> Vec<FlagSetting> {
        let table: [(&str, &[&str], &Option<String>); 12] = [
            ("--host", &["server", "host"], &self.host),
            ("--port", &["server", "port"], &self.port),
            ("--admin-socket", &["admin", "socket"], &self.admin_socket),
            ("--admin-address", &["admin", "address"], &self.admin_address),
            ("--state-dir", &["paths", "state_dir"], &self.state_dir),
            ("--binary", &["defaults", "binary"], &self.binary),
            ("--build", &["defaults", "build"], &self.build),
            ("--memory-soft", &["defaults", "policy", "host", "soft"], &self.memory_soft),
            ("--memory-hard", &["defaults", "policy", "host", "hard"], &self.memory_hard),
            ("--replace", &["defaults", "replace"], &self.replace),
            ("--log-format", &["log", "format"], &self.log_format),
            ("--log-level", &["log", "level"], &self.log_level),
        ];
        let given = table.into_iter().filter_map(|(flag, path, value)| {
            value.as_ref().map(|value| FlagSetting::raw(flag, path, value))
        });
        given.chain(model_folders(&self.models_dir)).collect()
    }

    /// Chooses the sources of the configuration.
    fn configuration_plan(self, machine: &HostMachine) -> Result<ConfigSource, CommandError> {
        let any_name = !self.flags.is_empty();
        if !any_name && self.config.config.is_none() && self.models_dir.is_empty() {
            return Err(CommandError::usage(
                "nothing to serve: neither --config nor llama-server's flags are given",
                "use `llama-warden serve -- -m model.gguf`, `llama-warden serve --models-dir DIR` or \
                 `llama-warden serve --config warden.toml`",
            ));
        }
        let mut flags = if any_name { dropin::dropin_settings(&self.flags, machine)? } else { Vec::new() };
        flags.extend(self.settings());
        Ok(ConfigSource { config: self.config, flags, any_name })
    }
}

/// Converts folders of models on the command line to a setting; `None` without folders.
pub(crate) fn model_folders(dirs: &[String]) -> Option<FlagSetting> {
    let absolute =
        |dir: &String| std::path::absolute(dir).map_or_else(|_| dir.clone(), |dir| dir.display().to_string());
    let all: Vec<ConfigNode> =
        dirs.iter().map(|dir| ConfigNode::new(ConfigValue::Text(absolute(dir)))).collect();
    (!all.is_empty()).then(|| FlagSetting {
        flag: "flag --models-dir".to_owned(),
        path: vec!["paths".to_owned(), "models".to_owned()],
        value: ConfigNode::new(ConfigValue::List(all)),
    })
}

/// Serves until llama-warden is told to end.
pub(crate) fn run(args: ServeArgs) -> Result<(), CommandError> {
    crate::serve::run_serve(args.configuration_plan(&HostMachine::read())?)
}

/// Acts like llama-server with these arguments.
pub(crate) fn run_as_llama_server(args: Vec<String>) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    if dropin::is_question(&args) {
        return exec_real_server(&args, &machine);
    }
    // Like llama-server, take the model from the environment if there is no flag.
    let args = ServeArgs {
        flags: if args.is_empty() { vec!["--jinja".to_owned()] } else { args },
        ..ServeArgs::default()
    };
    let mut plan = args.configuration_plan(&machine)?;
    plan.flags.extend(dropin::dropin_defaults(&machine));
    crate::serve::run_serve(plan)
}

/// Executes the real llama-server, which answers questions like `--help` itself.
fn exec_real_server(args: &[String], machine: &HostMachine) -> Result<(), CommandError> {
    let built = match machine.data_dir() {
        Some(data) => store::find_build(&data, None).map_err(CommandError::failed)?,
        None => None,
    };
    let built = built.map(|build| build.facts.binary);
    let binary = built.or_else(|| machine.find_in_path("llama-server")).ok_or_else(|| {
        CommandError::hinted(
            "there is no llama-server: no build in the store, and none in PATH but llama-warden itself",
            "build one with `llama-warden build`",
        )
    })?;
    let error = std::process::Command::new(&binary).args(args).exec();
    Err(CommandError::failed(format!("cannot run {}: {error}", binary.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::source::layers::{ConfigSources, load_config};
    use clap::Parser;

    fn parse(args: &[&str]) -> ServeArgs {
        #[derive(Parser)]
        struct ServeTestCli {
            #[command(flatten)]
            args: ServeArgs,
        }
        ServeTestCli::parse_from(std::iter::once(&"serve").chain(args)).args
    }

    #[test]
    fn everything_after_the_dashes_is_llama_servers() {
        let args = parse(&["--port", "1", "--", "-m", "a.gguf", "--port", "2", "--set", "x"]);
        assert_eq!(args.flags, ["-m", "a.gguf", "--port", "2", "--set", "x"]);
        let plan = args.configuration_plan(&HostMachine::read()).unwrap();
        assert!(plan.any_name);
        let loaded = load_config(ConfigSources { flags: plan.flags, ..ConfigSources::default() }).unwrap();
        assert_eq!(loaded.settings.server.port, 1, "our own flag comes over llama-server's");
        assert_eq!(loaded.models[0].1.args, ["-m", "a.gguf", "--set", "x"]);
    }

    #[test]
    fn each_flag_sets_the_key_that_its_help_names() {
        let args = parse(&[
            "--memory-soft",
            "1GiB",
            "--replace",
            "overlap",
            "--log-format",
            "json",
            "--",
            "-m",
            "a",
        ]);
        let plan = args.configuration_plan(&HostMachine::read()).unwrap();
        let loaded = load_config(ConfigSources { flags: plan.flags, ..ConfigSources::default() }).unwrap();
        assert_eq!(loaded.settings.log.format, "json");
        assert_eq!(loaded.models[0].1.policy.host.soft, "1GiB".parse().ok());
    }

    #[test]
    fn with_nothing_to_serve_the_hint_shows_both_ways() {
        let failure = ServeArgs::default().configuration_plan(&HostMachine::read()).unwrap_err();
        assert_eq!(failure.code(), 2);
        assert!(failure.lines()[1].contains("-- -m"));
    }
}
