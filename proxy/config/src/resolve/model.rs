//! Resolves one model: its command, its binary and its start settings; checks its file, directory and flags.

use std::path::{Path, PathBuf};

use warden_patches::mitigation::BuildFacts;
use warden_policies::{ModelName, defaults, loading};
use warden_supervisor::spec::{
    AdmissionSpec, FallbackSpec, ModelSpec, RequestSpec, ServerCommand, StartSpec,
};

use super::doors::{KEY_VARIABLE, KEYS_STOP_HERE};
use super::mitigations::{MitigatedCommand, ModelMitigations};
use super::own_sets::OwnSets;
use super::resolver::ConfigResolver;
use super::store::{self, BinaryChoice};
use crate::arguments::{self, ListeningFlag};
use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, quoted_key};
use crate::settings::ModelConfig;
use crate::source::layers::LoadedConfig;

/// Variables that change the address or protocol of llama-server, so that llama-warden could not reach it.
const ACCESS_VARIABLES: [&str; 3] =
    ["LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"];

/// In drop-in mode, also removes variables that llama-warden itself obeys instead of the server.
pub(super) fn with_access_variables(mut removed: Vec<String>, drop_in: bool) -> Vec<String> {
    if drop_in {
        removed.extend(ACCESS_VARIABLES.map(str::to_owned));
    }
    removed
}

/// Resolves one model. Problems are added to those of the whole configuration.
pub(super) struct ModelResolver<'r, 'a> {
    pub(super) config: &'r mut ConfigResolver<'a>,
    pub(super) sets: &'r mut OwnSets,
    pub(super) name: &'a str,
    pub(super) model: &'a ModelConfig,
}

impl ModelResolver<'_, '_> {
    pub(super) fn message(&self, what: &str) -> String {
        format!("model `{}`: {what}", self.name)
    }

    fn place(&self, keys: &[&str]) -> ConfigPlace {
        self.config.place(&[&["models", self.name][..], keys].concat())
    }

    pub(super) fn report(&mut self, keys: &[&str], what: &str, hint: impl Into<String>) {
        self.config.report(&[&["models", self.name][..], keys].concat(), self.message(what), hint);
    }

    pub(super) fn warn(&mut self, keys: &[&str], what: &str, hint: impl Into<String>) {
        self.config.warn(&[&["models", self.name][..], keys].concat(), self.message(what), hint);
    }

    pub(super) fn resolve_spec(&mut self) -> (ModelSpec, ModelMitigations) {
        let model = self.model;
        let mut args = match model.command.as_slice() {
            [_, words @ ..] => words.to_vec(),
            [] => model.args.clone(),
        };
        if let Some(file) = &model.model {
            if arguments::model_path(&args).is_some() {
                let what = "the file is given in `model` and again in `args`";
                self.report(&["model"], what, "keep one of them");
            }
            let file = self.config.absolute(file).to_string_lossy().into_owned();
            args.splice(0..0, ["-m".to_owned(), file]);
        }
        let mitigations = self.mitigations(args);
        // Include effects that the build may not support; [`super::binary`] removes them later.
        let MitigatedCommand { args, env, env_remove, .. } = mitigations.command(&[]);
        if model.wrapper.first().is_some_and(String::is_empty) {
            let hint = "begin it with a program: `wrapper = [\"nice\", \"-n\", \"5\"]`";
            self.report(&["wrapper"], "`wrapper` begins with an empty word", hint);
        }
        let directory = model.directory.as_ref().map(|path| self.config.absolute(path));
        self.check_directory(directory.as_deref());
        if !model.runs_other_program() {
            self.check_file(&args, directory.as_deref());
            let all: Vec<String> = args.iter().chain(&model.fallback).cloned().collect();
            self.check_listening(&all);
        }
        let policy = &model.policy.common;
        let spec = ModelSpec {
            name: ModelName::new(self.name),
            aliases: model.aliases.clone(),
            command: ServerCommand {
                wrapper: model.wrapper.clone(),
                binary: PathBuf::new(),
                args,
                env,
                env_remove: with_access_variables(env_remove, self.config.any_name),
                directory,
                kind: model.server_kind(),
            },
            run: model.run,
            requests: RequestSpec {
                queue: model.queue,
                max_in_flight: model.max_in_flight,
                admission: AdmissionSpec { mode: policy.admission, policy: defaults().admission.clone() },
                quarantine: model.quarantine,
            },
            ttl: model.ttl,
            // Memory needs and exclusions are filled in later: they depend on the command and all models.
            loading: loading::LoadSpec {
                gpus: model.gpus.clone(),
                pin: model.run.pin,
                never_with: Vec::new(),
                ..loading::LoadSpec::default()
            },
            start: StartSpec {
                fallback: (!model.fallback.is_empty())
                    .then(|| FallbackSpec { args: model.fallback.clone(), needs: None }),
                cache_bounds: mitigations.applied_cache_bounds(),
                // The switches are filled in together with the binary.
                ..StartSpec::default()
            },
            lifecycle: model.lifecycle,
            recycle: model.policy.to_recycle_policy(Some(self.config.machine.memory)),
            oom_score_adj: self.config.loaded.settings.child.oom_score_adj,
            canary_of: None,
        };
        (spec, mitigations)
    }

    /// Returns the binary that the configuration asks for, and the source of the choice.
    pub(super) fn binary_choice(&self) -> (BinaryChoice, ConfigPlace) {
        let program = self.model.command.first().map(PathBuf::from);
        let key = if program.is_some() { "command" } else { "binary" };
        let (choice, keys) = match (program.as_ref().or(self.model.binary.as_ref()), &self.model.build) {
            (Some(_), Some(_)) => (BinaryChoice::Newest, Some("build")),
            // Search a name without a folder in PATH, like a shell.
            (Some(binary), None) if binary.components().count() == 1 && !binary.is_absolute() => {
                let beside = self.config.absolute(binary);
                let is_file = beside.is_file();
                let choice =
                    if is_file { BinaryChoice::Path(beside) } else { BinaryChoice::InPath(binary.clone()) };
                (choice, Some(key))
            }
            (Some(binary), None) => (BinaryChoice::Path(self.config.absolute(binary)), Some(key)),
            (None, Some(build)) => (BinaryChoice::Build(build.clone()), Some("build")),
            (None, None) => (BinaryChoice::Newest, None),
        };
        (choice, self.place(keys.as_slice()))
    }

    pub(super) fn check_choice(&mut self) {
        if self.model.binary.is_some() && self.model.build.is_some() && !self.model.runs_other_program() {
            self.report(&["build"], "both `binary` and `build` say what to run", "keep one of them");
        }
    }

    fn check_directory(&mut self, directory: Option<&Path>) {
        if let Some(path) = directory
            && !path.is_dir()
        {
            let message = self.message(&format!("there is no directory {}", path.display()));
            self.config.problems.push(ConfigProblem::new(self.place(&["directory"]), message));
        }
    }

    fn check_file(&mut self, args: &[String], directory: Option<&Path>) {
        let machine = self.config.machine;
        let key = if self.model.model.is_some() { "model" } else { "args" };
        let Some(file) = arguments::model_path(args) else {
            let in_env =
                self.model.env.contains_key("LLAMA_ARG_MODEL") || machine.var("LLAMA_ARG_MODEL").is_some();
            if arguments::remote_model(args).is_none() && !in_env {
                let hint = format!("set `model = \"file.gguf\"` in [models.{}]", quoted_key(self.name));
                self.warn(&[], "no model file is given", hint);
            }
            return;
        };
        let path = directory.unwrap_or(&machine.cwd).join(file);
        let shown = path.display();
        let complaint = match std::fs::metadata(&path) {
            Ok(facts) if facts.is_file() => return,
            Ok(_) => format!("{shown} is not a file"),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("there is no file {shown}"),
            Err(error) => format!("{shown} cannot be read: {error}"),
        };
        let hint =
            "check the path; `llama-warden sample-model -o FILE` writes a small model to try things with";
        self.report(&[key], &complaint, hint);
    }

    fn check_listening(&mut self, args: &[String]) {
        for key in ["LLAMA_ARG_HOST", "LLAMA_ARG_PORT"] {
            if self.model.env.contains_key(key) {
                let what = format!("{key} in `env` says where to listen, which llama-warden decides");
                self.report(&["env", key], &what, "set `host` and `port` in [server]");
                break;
            }
        }
        if let Some((key, place)) = self.harmful_variable() {
            let message = self.message(&format!("with {key} we could not reach the process"));
            let hint =
                "remove it; `tls_cert`, `tls_key` and `api_prefix` in [server] do the same for all models";
            self.config.problems.push(ConfigProblem::new(place, message).with_hint(hint));
        }
        if self.config.has_keys()
            && let Some(place) = self.config.key_variable(self.name, self.model)
        {
            let message = self.message(&format!("{KEY_VARIABLE}: {KEYS_STOP_HERE}"));
            let hint = "unset it, or remove `server.keys`";
            self.config.problems.push(ConfigProblem::new(place, message).with_hint(hint));
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
            ListeningFlag::Key if self.config.has_keys() => (KEYS_STOP_HERE, "remove it, or `server.keys`"),
            // In drop-in mode the one llama-server may check the key; otherwise all would have to check it.
            ListeningFlag::Key if self.config.any_name => return,
            ListeningFlag::Key => (
                "keys per process are not supported with a configuration file",
                "remove it, and name a file of keys in `server.keys`",
            ),
        };
        self.report(&["args"], &format!("`{flag}` in `args`: {why}"), hint);
    }

    /// Finds a variable from [`ACCESS_VARIABLES`], set for the model or inherited from llama-warden.
    fn harmful_variable(&self) -> Option<(&'static str, ConfigPlace)> {
        let mut own = ACCESS_VARIABLES.into_iter().filter(|key| self.model.env.contains_key(*key));
        // In drop-in mode, inherited variables configure llama-warden, and the process never sees them.
        let inherits = |key: &&str| !self.config.any_name && self.config.machine.var(key).is_some();
        let mut inherited = ACCESS_VARIABLES.into_iter().filter(inherits);
        own.next()
            .map(|key| (key, self.place(&["env", key])))
            .or_else(|| inherited.next().map(|key| (key, ConfigPlace::Env(key.to_owned()))))
    }
}

/// Start settings of a model's server, as far as they can be known without running a program.
pub struct LaunchSettings {
    /// Command line, and variables.
    pub command: MitigatedCommand,
    /// Variables with which llama-warden bounds the caches.
    pub cache_bounds: Vec<(String, String)>,
    /// Ids of the model's mitigations.
    pub mitigations: Vec<String>,
    /// Facts from the provenance; `None` if the server is not a build in the store.
    pub facts: Option<BuildFacts>,
}

impl LoadedConfig {
    /// Resolves the start settings of a model's server. The files that they name need not exist.
    ///
    /// # Errors
    /// A value of the model is wrong.
    pub fn launch_settings(
        &self,
        machine: &HostMachine,
        name: &str,
        model: &ModelConfig,
    ) -> Result<LaunchSettings, ConfigProblems> {
        let mut config = ConfigResolver::new(self, machine);
        let mut one = ModelResolver { config: &mut config, sets: &mut OwnSets::default(), name, model };
        let mitigations = one.mitigations(model.args.clone());
        one.check_choice();
        let (choice, _) = one.binary_choice();
        if !config.problems.is_empty() {
            return Err(ConfigProblems(config.problems));
        }
        let data = self.dirs(machine)?.data;
        Ok(LaunchSettings {
            command: mitigations.command(&[]),
            cache_bounds: mitigations.applied_cache_bounds(),
            mitigations: mitigations.ids(),
            facts: store::chosen_build(&data, &choice).map(|build| build.facts),
        })
    }
}
