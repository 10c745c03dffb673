//! `llama-warden serve`, also under the program name `llama-server`.
//!
//! "Drop-in" mode turns a llama-server command line into a configuration with one model. Listening flags
//! become settings of llama-warden; all other flags go to the child unchanged. The model has the name that
//! llama-server would report. As with llama-server, the model loads at once and answers to every name.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;

use clap::Args;
use warden_config::arguments::{self, ListeningFlag};
use warden_config::machine::HostMachine;
use warden_config::resolve::store;
use warden_config::source::layers::FlagSetting;
use warden_config::source::tree::{ConfigNode, ConfigValue};

use super::shared::ConfigArgs;
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
    /// Flags override the environment.
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

    fn configuration_plan(self, machine: &HostMachine) -> Result<ConfigSource, CommandError> {
        let any_name = !self.flags.is_empty();
        if !any_name && self.config.config.is_none() && self.models_dir.is_empty() {
            return Err(CommandError::usage(
                "nothing to serve: neither --config nor llama-server's flags are given",
                "use `llama-warden serve -- -m model.gguf`, `llama-warden serve --models-dir DIR` or \
                 `llama-warden serve --config warden.toml`",
            ));
        }
        let mut flags = if any_name { dropin_settings(&self.flags, machine)? } else { Vec::new() };
        flags.extend(self.settings());
        Ok(ConfigSource { config: self.config, flags, any_name })
    }
}

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

pub(crate) fn run(args: ServeArgs) -> Result<(), CommandError> {
    crate::serve::run_serve(args.configuration_plan(&HostMachine::read())?)
}

pub(crate) fn run_as_llama_server(args: Vec<String>) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    if is_question(&args) {
        return exec_real_server(&args, &machine);
    }
    // Like llama-server, take the model from the environment if there are no flags.
    let args = ServeArgs {
        flags: if args.is_empty() { vec!["--jinja".to_owned()] } else { args },
        ..ServeArgs::default()
    };
    let mut plan = args.configuration_plan(&machine)?;
    plan.flags.extend(dropin_defaults(&machine));
    crate::serve::run_serve(plan)
}

/// Executes the real llama-server, which itself answers flags such as `--help`.
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

/// With these flags, llama-server prints an answer instead of serving.
const ANSWERED_BY_THE_BINARY: [&str; 8] =
    ["--version", "--help", "-h", "--usage", "--list-devices", "-cl", "--cache-list", "--completion-bash"];

pub(crate) fn is_alias(argv0: Option<&OsStr>) -> bool {
    argv0.map(Path::new).and_then(Path::file_name) == Some(OsStr::new("llama-server"))
}

/// Returns whether the real llama-server must answer this command line.
pub(crate) fn is_question(args: &[String]) -> bool {
    args.iter().any(|word| ANSWERED_BY_THE_BINARY.contains(&word.as_str()))
}

pub(crate) fn dropin_settings(
    args: &[String],
    machine: &HostMachine,
) -> Result<Vec<FlagSetting>, CommandError> {
    let split = arguments::split_listening(args);
    let mut settings = from_environment(machine);
    for (flag, value, what) in &split.listening {
        match what {
            ListeningFlag::Host
                if value.split(',').any(|host| host.trim().strip_suffix(".sock").is_some()) =>
            {
                return Err(CommandError::usage(
                    format!("{flag} {value}: we listen on addresses, not on Unix sockets"),
                    "give host names or addresses, like `--host 127.0.0.1`",
                ));
            }
            ListeningFlag::Host => settings.push(FlagSetting::raw(flag, &["server", "host"], value)),
            ListeningFlag::Certificate => {
                settings.push(FlagSetting::raw(flag, &["server", "tls_cert"], value));
            }
            ListeningFlag::PrivateKey => settings.push(FlagSetting::raw(flag, &["server", "tls_key"], value)),
            ListeningFlag::Port => settings.push(FlagSetting::raw(flag, &["server", "port"], value)),
            ListeningFlag::Prefix => settings.push(FlagSetting::raw(flag, &["server", "api_prefix"], value)),
            ListeningFlag::Ignored | ListeningFlag::Key => {}
        }
    }
    let mut names = arguments::aliases(args);
    names.dedup();
    let env = |name: &str| machine.var(name).map(|value| value.to_string_lossy().into_owned());
    if names.is_empty() {
        let source = arguments::model_path(args).or_else(|| arguments::remote_model(args)).map(str::to_owned);
        names.extend(source.or_else(|| env("LLAMA_ARG_MODEL")).or_else(|| env("LLAMA_ARG_HF_REPO")));
    }
    let mut names = names.into_iter();
    let name = names.next().unwrap_or_else(|| "default".to_owned());
    let text = |text: String| ConfigNode::new(ConfigValue::Text(text));
    let mut model = ConfigNode::table();
    let mut set = |key: &str, value: ConfigNode| model.set(&[key.to_owned()], value);
    set("args", ConfigNode::new(ConfigValue::List(split.args.into_iter().map(text).collect())));
    set("aliases", ConfigNode::new(ConfigValue::List(names.map(text).collect())));
    set("preload", ConfigNode::new(ConfigValue::Bool(true)));
    settings.push(FlagSetting {
        flag: "command line".to_owned(),
        path: vec!["models".to_owned(), name],
        value: model,
    });
    Ok(settings)
}

/// Callers expect llama-server to end at once, so llama-warden waits for its clients only briefly.
const DROPIN_SHUTDOWN_DEADLINE: &str = "1s";

/// Returns further settings for drop-in mode, unless the operator set them.
pub(crate) fn dropin_defaults(machine: &HostMachine) -> Option<FlagSetting> {
    let ours = machine.var("LLAMA_WARDEN_SERVER__SHUTDOWN_DEADLINE").is_some();
    (!ours).then(|| {
        FlagSetting::raw("the name llama-server", &["server", "shutdown_deadline"], DROPIN_SHUTDOWN_DEADLINE)
    })
}

/// Reads llama-server's listening variables, unless the operator set those of llama-warden.
fn from_environment(machine: &HostMachine) -> Vec<FlagSetting> {
    let pairs = [
        ("LLAMA_ARG_HOST", "LLAMA_WARDEN_SERVER__HOST", "host"),
        ("LLAMA_ARG_PORT", "LLAMA_WARDEN_SERVER__PORT", "port"),
        ("LLAMA_ARG_SSL_CERT_FILE", "LLAMA_WARDEN_SERVER__TLS_CERT", "tls_cert"),
        ("LLAMA_ARG_SSL_KEY_FILE", "LLAMA_WARDEN_SERVER__TLS_KEY", "tls_key"),
        ("LLAMA_ARG_API_PREFIX", "LLAMA_WARDEN_SERVER__API_PREFIX", "api_prefix"),
    ];
    let theirs = pairs.iter().filter(|(_, ours, _)| machine.var(ours).is_none());
    theirs
        .filter_map(|(name, _, key)| {
            let value = machine.var(name)?.to_string_lossy().into_owned();
            let setting = FlagSetting::raw(name, &["server", key], value);
            Some(FlagSetting { flag: format!("environment variable {name}"), ..setting })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use warden_config::source::layers::{ConfigSources, load_config};

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

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn machine(env: &[(&str, &str)]) -> HostMachine {
        let mut machine = HostMachine::read();
        machine.env = env.iter().map(|(key, value)| (key.into(), value.into())).collect();
        machine
    }

    fn loaded(args: &str, env: &[(&str, &str)]) -> warden_config::source::layers::LoadedConfig {
        let flags = dropin_settings(&words(args), &machine(env)).unwrap();
        load_config(ConfigSources { flags, ..ConfigSources::default() }).unwrap()
    }

    #[test]
    fn a_llama_server_command_line_becomes_one_model_and_our_listener() {
        let loaded =
            loaded("-m dir/model.gguf -c 4096 --port 9000 --api-key k", &[("LLAMA_ARG_HOST", "0.0.0.0")]);
        assert_eq!((loaded.settings.server.host.as_str(), loaded.settings.server.port), ("0.0.0.0", 9000));
        let (name, model) = &loaded.models[0];
        assert_eq!(name, "dir/model.gguf");
        assert_eq!(model.args, words("-m dir/model.gguf -c 4096 --api-key k"));
        assert!(model.run.preload);
    }

    #[test]
    fn the_name_is_the_alias_else_the_file_else_the_repository() {
        for (args, name) in [
            ("-m a.gguf -a one,two", "one"),
            ("-m a.gguf", "a.gguf"),
            ("-hf org/repo:Q4", "org/repo:Q4"),
            ("-c 1", "from-env.gguf"),
        ] {
            assert_eq!(loaded(args, &[("LLAMA_ARG_MODEL", "from-env.gguf")]).models[0].0, name);
        }
        assert_eq!(loaded("-a one,two", &[]).models[0].1.aliases, ["two"]);
        assert_eq!(loaded("-c 1", &[]).models[0].0, "default");
    }

    #[test]
    fn what_would_keep_us_from_the_child_is_refused_with_a_cure() {
        let told = ["--host 127.0.0.1,/tmp/x.sock", "--host /tmp/x.sock"].map(|args| {
            let failure = dropin_settings(&words(args), &machine(&[])).unwrap_err();
            assert_eq!(failure.code(), 2);
            failure.lines().join("\n")
        });
        insta::assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn certificate_key_and_prefix_become_ours_from_flags_and_variables() {
        let flags = "-m a.gguf --ssl-cert-file cert.pem --ssl-key-file key.pem --api-prefix /llm";
        let env = [
            ("LLAMA_ARG_SSL_CERT_FILE", "cert.pem"),
            ("LLAMA_ARG_SSL_KEY_FILE", "key.pem"),
            ("LLAMA_ARG_API_PREFIX", "/llm"),
        ];
        for (args, env) in [(flags, &[][..]), ("-m a.gguf", &env[..])] {
            let loaded = loaded(args, env);
            let server = &loaded.settings.server;
            let ours = (server.tls_cert.as_str(), server.tls_key.as_str(), server.api_prefix.as_str());
            assert_eq!(ours, ("cert.pem", "key.pem", "/llm"));
            assert_eq!(loaded.models[0].1.args, words("-m a.gguf"));
        }
    }

    #[test]
    fn our_own_variables_come_before_those_of_llama_server() {
        let both = machine(&[("LLAMA_ARG_PORT", "1"), ("LLAMA_WARDEN_SERVER__PORT", "2")]);
        assert!(from_environment(&both).is_empty());
    }

    #[test]
    fn the_name_llama_server_and_its_questions_are_recognised() {
        assert!(is_alias(Some(OsStr::new("/usr/bin/llama-server"))));
        assert!(!is_alias(Some(OsStr::new("llama-warden"))));
        assert!(is_question(&words("--version")) && !is_question(&words("-m x")));
    }
}
