//! "Drop-in" mode: turns a llama-server command line into a configuration with one model.
//!
//! Listening flags become settings of llama-warden. The model gets the name that llama-server would report.
//! All other flags go to the child unchanged. As with llama-server, the model loads at once and answers to
//! every name.

use std::ffi::OsStr;
use std::path::Path;

use crate::config::arguments::{self, ListeningFlag};
use crate::config::machine::HostMachine;
use crate::config::source::layers::FlagSetting;
use crate::config::source::tree::{ConfigNode, ConfigValue};
use crate::exit::CommandError;

/// Flags that llama-server answers by itself instead of serving.
const ANSWERED_BY_THE_BINARY: [&str; 8] =
    ["--version", "--help", "-h", "--usage", "--list-devices", "-cl", "--cache-list", "--completion-bash"];

/// Returns whether the program was started as `llama-server`.
pub(crate) fn is_alias(argv0: Option<&OsStr>) -> bool {
    argv0.map(Path::new).and_then(Path::file_name) == Some(OsStr::new("llama-server"))
}

/// Returns whether the real binary must answer this command line.
pub(crate) fn is_question(args: &[String]) -> bool {
    args.iter().any(|word| ANSWERED_BY_THE_BINARY.contains(&word.as_str()))
}

/// Converts a llama-server command line to settings.
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

/// Shutdown deadline in place of llama-server. Callers expect llama-server to end at once, so llama-warden
/// waits for clients no longer.
const DROPIN_SHUTDOWN_DEADLINE: &str = "1s";

/// Further settings that match llama-server when started under its name, unless the operator set them.
pub(crate) fn dropin_defaults(machine: &HostMachine) -> Option<FlagSetting> {
    let ours = machine.var("LLAMA_WARDEN_SERVER__SHUTDOWN_DEADLINE").is_some();
    (!ours).then(|| {
        FlagSetting::raw("the name llama-server", &["server", "shutdown_deadline"], DROPIN_SHUTDOWN_DEADLINE)
    })
}

/// Reads llama-server's own variables for listening, unless those of llama-warden are set.
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
    use super::*;
    use crate::config::source::layers::{ConfigSources, load_config};

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn machine(env: &[(&str, &str)]) -> HostMachine {
        let mut machine = HostMachine::read();
        machine.env = env.iter().map(|(key, value)| (key.into(), value.into())).collect();
        machine
    }

    fn loaded(args: &str, env: &[(&str, &str)]) -> crate::config::source::layers::LoadedConfig {
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
