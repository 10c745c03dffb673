//! Checks of one model (file, directory, flags), and of contradictions in the whole configuration.
//!
//! Each check adds to the resolver's list of problems, so that all problems are reported together.

use std::collections::BTreeMap;
use std::path::Path;

use warden_policies::declared_memory::DeclaredMemory;
use warden_supervisor::spec::SharedSpec;

use super::contradictions::{self, ConfigSummary, ModelSummary};
use super::doors::{KEY_VARIABLE, KEYS_STOP_HERE};
use crate::arguments::{self, ListeningFlag};
use crate::problem::{ConfigPlace, ConfigProblem, quoted_key};
use crate::resolve::ConfigResolver;
use crate::settings::ModelConfig;

/// These change the address or protocol of llama-server, so that llama-warden could not reach it.
const ACCESS_VARIABLES: [&str; 3] =
    ["LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"];

/// In drop-in mode, also removes variables that llama-warden itself obeys instead of the server.
pub(crate) fn with_access_variables(mut removed: Vec<String>, drop_in: bool) -> Vec<String> {
    if drop_in {
        removed.extend(ACCESS_VARIABLES.map(str::to_owned));
    }
    removed
}

impl ConfigResolver<'_> {
    pub(crate) fn check_directory(&mut self, name: &str, directory: Option<&Path>) {
        if let Some(path) = directory
            && !path.is_dir()
        {
            let message = format!("model `{name}`: there is no directory {}", path.display());
            self.problems.push(ConfigProblem::new(self.place(&["models", name, "directory"]), message));
        }
    }

    pub(crate) fn check_file(
        &mut self,
        name: &str,
        model: &ModelConfig,
        args: &[String],
        directory: Option<&Path>,
    ) {
        let key = if model.model.is_some() { "model" } else { "args" };
        let Some(file) = arguments::model_path(args) else {
            let in_env =
                model.env.contains_key("LLAMA_ARG_MODEL") || self.machine.var("LLAMA_ARG_MODEL").is_some();
            if arguments::remote_model(args).is_none() && !in_env {
                let hint = format!("set `model = \"file.gguf\"` in [models.{}]", quoted_key(name));
                self.warn(&["models", name], format!("model `{name}`: no model file is given"), hint);
            }
            return;
        };
        let path = directory.unwrap_or(&self.machine.cwd).join(file);
        let shown = path.display();
        let complaint = match std::fs::metadata(&path) {
            Ok(facts) if facts.is_file() => return,
            Ok(_) => format!("model `{name}`: {shown} is not a file"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                format!("model `{name}`: there is no file {shown}")
            }
            Err(error) => format!("model `{name}`: {shown} cannot be read: {error}"),
        };
        let hint =
            "check the path; `llama-warden sample-model -o FILE` writes a small model to try things with";
        self.report(&["models", name, key], complaint, hint);
    }

    pub(crate) fn check_listening(&mut self, name: &str, model: &ModelConfig, args: &[String]) {
        for key in ["LLAMA_ARG_HOST", "LLAMA_ARG_PORT"] {
            if model.env.contains_key(key) {
                let message = format!(
                    "model `{name}`: {key} in `env` says where to listen, which llama-warden decides"
                );
                self.report(&["models", name, "env", key], message, "set `host` and `port` in [server]");
                break;
            }
        }
        if let Some((key, place)) = self.harmful_variable(name, model) {
            let message = format!("model `{name}`: with {key} we could not reach the process");
            let hint =
                "remove it; `tls_cert`, `tls_key` and `api_prefix` in [server] do the same for all models";
            self.problems.push(ConfigProblem::new(place, message).with_hint(hint));
        }
        if self.has_keys()
            && let Some(place) = self.key_variable(name, model)
        {
            let message = format!("model `{name}`: {KEY_VARIABLE}: {KEYS_STOP_HERE}");
            let hint = "unset it, or remove `server.keys`";
            self.problems.push(ConfigProblem::new(place, message).with_hint(hint));
        }
        let Some((flag, what)) = arguments::first_listening(args) else { return };
        let (why, hint) = match what {
            ListeningFlag::Certificate | ListeningFlag::PrivateKey => {
                ("llama-warden itself terminates TLS", "set `tls_cert` and `tls_key` in [server]")
            }
            ListeningFlag::Host | ListeningFlag::Port => {
                ("llama-warden itself listens", "set `host` and `port` in [server]")
            }
            ListeningFlag::Ignored => {
                ("llama-warden itself listens", "remove it: each process has a socket of its own")
            }
            ListeningFlag::Prefix => {
                ("llama-warden itself sets the path of all routes", "set `api_prefix` in [server]")
            }
            ListeningFlag::Key if self.has_keys() => (KEYS_STOP_HERE, "remove it, or `server.keys`"),
            // In drop-in mode the one llama-server may check the key; of several, each would have to.
            ListeningFlag::Key if self.any_name => return,
            ListeningFlag::Key => (
                "keys per process are not supported with a configuration file",
                "remove it, and name a file of keys in `server.keys`",
            ),
        };
        let message = format!("model `{name}`: `{flag}` in `args`: {why}");
        self.report(&["models", name, "args"], message, hint);
    }

    /// Finds a variable from [`ACCESS_VARIABLES`], set for the model or inherited from llama-warden.
    fn harmful_variable(&self, name: &str, model: &ModelConfig) -> Option<(&'static str, ConfigPlace)> {
        let mut own = ACCESS_VARIABLES.into_iter().filter(|key| model.env.contains_key(*key));
        // In drop-in mode, inherited variables configure llama-warden, and the process never sees them.
        let inherits = |key: &&str| !self.any_name && self.machine.var(key).is_some();
        let mut inherited = ACCESS_VARIABLES.into_iter().filter(inherits);
        own.next()
            .map(|key| (key, self.place(&["models", name, "env", key])))
            .or_else(|| inherited.next().map(|key| (key, ConfigPlace::Env(key.to_owned()))))
    }

    pub(crate) fn check_contradictions(&mut self, specs: &[SharedSpec]) {
        let inherited = self.machine.text_vars();
        let settings = &self.loaded.settings;
        let memory = self.machine.memory;
        let models = self.loaded.models.iter().zip(specs).map(|((name, model), spec)| {
            let command = &spec.command;
            let mut env: BTreeMap<String, String> = inherited.iter().cloned().collect();
            env.retain(|name, _| !command.env_remove.contains(name));
            env.extend(command.env.iter().cloned());
            let slots = arguments::slots(&command.args);
            let keeps = DeclaredMemory::from_command(&command.args, &env, None);
            let args = command.args.as_slice();
            ModelSummary { settings, memory, name, model, declared: keeps, args, slots }
        });
        let whole = ConfigSummary { settings, memory, models: models.collect() };
        for found in contradictions::find(&whole) {
            let problem =
                ConfigProblem::new(self.loaded.place(&found.path), found.message).with_hint(found.hint);
            if found.fatal { self.problems.push(problem) } else { self.warnings.push(problem) }
        }
    }
}
