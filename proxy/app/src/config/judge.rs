//! What is judged about one model: its file, its directory, its flags, its budgets.
//!
//! Each check adds to the problems of the resolver, so that all of them are told at once.

use std::path::Path;

use warden_policies::recycle::RecyclePolicy;
use warden_policies::{ByteSize, MemoryLimit};

use super::arguments::{self, Listening};
use super::doors::{KEY_VARIABLE, KEYS_STOP_HERE};
use super::policy::Budgets;
use super::problem::{Place, Problem, quoted};
use super::resolve::Resolver;
use super::settings::Model;

/// The prompt cache of llama-server when `--cache-ram` is not given, in MiB (`--help` of llama-server).
const CACHE_RAM_DEFAULT_MIB: u64 = 8192;

/// Variables of llama-server that say how it is reached: with them the process would not answer as we ask.
const OUR_VARIABLES: [&str; 3] =
    ["LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE"];

/// What is kept from a process: as a drop-in, also what llama-server is told by variables and we do in its place.
pub(super) fn with_ours(mut removed: Vec<String>, drop_in: bool) -> Vec<String> {
    if drop_in {
        removed.extend(OUR_VARIABLES.map(str::to_owned));
    }
    removed
}

impl Resolver<'_> {
    pub(super) fn check_directory(&mut self, name: &str, directory: Option<&Path>) {
        if let Some(path) = directory.filter(|path| !path.is_dir()) {
            let place = self.place(&["models", name, "directory"]);
            self.problems.push(Problem::new(
                place,
                format!("model `{name}`: there is no directory {}", path.display()),
            ));
        }
    }

    pub(super) fn check_file(
        &mut self,
        name: &str,
        model: &Model,
        args: &[String],
        directory: Option<&Path>,
    ) {
        let key = if model.model.is_some() { "model" } else { "args" };
        let Some(file) = arguments::model(args) else {
            let in_env =
                model.env.contains_key("LLAMA_ARG_MODEL") || self.machine.var("LLAMA_ARG_MODEL").is_some();
            if arguments::remote_model(args).is_none() && !in_env {
                let place = self.place(&["models", name]);
                let problem = Problem::new(place, format!("model `{name}`: no model file is given"));
                self.warnings
                    .push(problem.hint(format!("set `model = \"file.gguf\"` in [models.{}]", quoted(name))));
            }
            return;
        };
        let path = directory.unwrap_or(&self.machine.cwd).join(file);
        let complaint = match std::fs::metadata(&path) {
            Ok(facts) if facts.is_file() => return,
            Ok(_) => format!("model `{name}`: {} is not a file", path.display()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                format!("model `{name}`: there is no file {}", path.display())
            }
            Err(error) => format!("model `{name}`: {} cannot be read: {error}", path.display()),
        };
        let place = self.place(&["models", name, key]);
        let hint =
            "check the path; `llama-warden sample-model -o FILE` writes a small model to try things with";
        self.problems.push(Problem::new(place, complaint).hint(hint));
    }

    pub(super) fn check_listening(&mut self, name: &str, model: &Model, args: &[String]) {
        let place = self.place(&["models", name, "args"]);
        let in_env =
            ["LLAMA_ARG_HOST", "LLAMA_ARG_PORT"].into_iter().find(|key| model.env.contains_key(*key));
        if let Some(key) = in_env {
            let place = self.place(&["models", name, "env", key]);
            let problem = Problem::new(
                place,
                format!("model `{name}`: {key} in `env` says where to listen, and that is ours"),
            );
            self.problems.push(problem.hint("set `host` and `port` in [server]"));
        }
        if let Some((key, place)) = self.harmful_variable(name, model) {
            let message = format!("model `{name}`: with {key} we could not reach the process");
            let hint =
                "remove it; `tls_cert`, `tls_key` and `api_prefix` in [server] do the same for all models";
            self.problems.push(Problem::new(place, message).hint(hint));
        }
        if self.has_keys()
            && let Some(place) = self.key_variable(name, model)
        {
            let problem = Problem::new(place, format!("model `{name}`: {KEY_VARIABLE}: {KEYS_STOP_HERE}"));
            self.problems.push(problem.hint("unset it, or remove `server.keys`"));
        }
        let Some((flag, what)) = arguments::first_listening(args) else { return };
        let (why, hint) = match what {
            Listening::Certificate | Listening::PrivateKey => {
                ("TLS is ours", "set `tls_cert` and `tls_key` in [server]")
            }
            Listening::Host | Listening::Port => ("listening is ours", "set `host` and `port` in [server]"),
            Listening::Pointless => ("listening is ours", "remove it: each process has a socket of its own"),
            Listening::Prefix => ("the path of all routes is ours", "set `api_prefix` in [server]"),
            Listening::Key if self.has_keys() => (KEYS_STOP_HERE, "remove it, or `server.keys`"),
            // In drop-in mode the key is the child's to check; with many models it would have to be in each.
            Listening::Key if self.any_name => return,
            Listening::Key => (
                "keys per process are not supported with a configuration file",
                "remove it, and name a file of keys in `server.keys`",
            ),
        };
        let problem = Problem::new(place, format!("model `{name}`: `{flag}` in `args`: {why}"));
        self.problems.push(problem.hint(hint));
    }

    /// Variables are inherited, so llama-server's own count wherever they were set.
    fn harmful_variable(&self, name: &str, model: &Model) -> Option<(&'static str, Place)> {
        let mut own = OUR_VARIABLES.into_iter().filter(|key| model.env.contains_key(*key));
        // As a drop-in they say how we are reached, and the process never sees them.
        let inherits = |key: &&str| !self.any_name && self.machine.var(key).is_some();
        let mut inherited = OUR_VARIABLES.into_iter().filter(inherits);
        own.next()
            .map(|key| (key, self.place(&["models", name, "env", key])))
            .or_else(|| inherited.next().map(|key| (key, Place::Env(key.to_owned()))))
    }

    pub(super) fn recycle(&mut self, name: &str, model: &Model, args: &[String]) -> RecyclePolicy {
        let policy = &model.policy;
        let path = ["models", name, "policy"];
        let of_model = format!("model `{name}`: ");
        self.check_order(&of_model, &path, "host", policy.host, Some(self.machine.memory));
        self.check_order(&of_model, &path, "vram", policy.vram, None);
        let recycle = policy.recycle(Some(self.machine.memory));
        let bytes = |limit: Option<MemoryLimit>| limit.and_then(MemoryLimit::bytes);
        self.warn_about_cache(name, bytes(recycle.host_soft).or(bytes(recycle.host_hard)), args);
        recycle
    }

    /// Floors that are not kept cannot be tested.
    pub(super) fn check_growth(&mut self) {
        let growth = &self.loaded.settings.growth;
        if growth.kept < growth.window {
            let message =
                format!("`growth.kept` ({}) is below `growth.window` ({})", growth.kept, growth.window);
            let problem = Problem::new(self.place(&["growth", "kept"]), message);
            self.problems.push(problem.hint("keep at least as many floors as a test looks at"));
        }
    }

    /// The budgets over all backends.
    pub(super) fn check_shared(&mut self) {
        let shared = self.loaded.settings.shared;
        self.check_order("", &["shared"], "host", shared.host, Some(self.machine.memory));
        self.check_order("", &["shared"], "vram", shared.vram, None);
    }

    /// A hard budget has to be above the soft one. A share of a GPU's memory cannot be compared with a size here.
    fn check_order(
        &mut self,
        whose: &str,
        path: &[&str],
        memory: &str,
        budgets: Budgets,
        total: Option<ByteSize>,
    ) {
        let Some(wrong) = budgets.wrong_order(total) else { return };
        let full: Vec<&str> = path.iter().copied().chain([memory, "hard"]).collect();
        let problem = Problem::new(self.place(&full), format!("{whose}{wrong}"));
        self.problems.push(problem.hint(format!("`{memory}.hard` has to be the larger of the two")));
    }

    /// The prompt cache fills up by design: a budget below its bound is passed without any leak.
    fn warn_about_cache(&mut self, name: &str, budget: Option<ByteSize>, args: &[String]) {
        let cache = match arguments::cache_ram_mib(args) {
            Some(mib) => u64::try_from(mib).ok(),
            None => Some(CACHE_RAM_DEFAULT_MIB),
        };
        let (Some(budget), cache) = (budget, cache.map(ByteSize::mib)) else { return };
        if cache.is_some_and(|cache| cache < budget) {
            return;
        }
        let bound = cache.map_or("has no bound".to_owned(), |cache| format!("may grow to {cache}"));
        let key = if self
            .loaded
            .models
            .iter()
            .any(|(own, model, _)| own == name && model.policy.host.soft.is_some())
        {
            "soft"
        } else {
            "hard"
        };
        let place = self.place(&["models", name, "policy", "host", key]);
        let message =
            format!("model `{name}`: the budget of {budget} is below the prompt cache, which {bound}");
        self.warnings.push(
            Problem::new(place, message)
                .hint("lower the cache with `--cache-ram MIB` in `args`, or raise the budget"),
        );
    }
}
