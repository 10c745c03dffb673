//! From what was written to what each crate is told: paths are made absolute, budgets become bytes, names are checked
//! against each other. It reads facts about files but starts nothing; [`super::binary`] tries the binaries.

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

use warden_policies::backoff::BackoffPolicy;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::restraint::RestraintPolicy;
use warden_policies::{ByteSize, ModelName, defaults};
use warden_supervisor::spec::{Command, FleetConfig, ModelSpec, Timing, Watch};

use super::arguments::{self, Listening};
use super::binary::Choice;
use super::layers::Loaded;
use super::machine::Machine;
use super::problem::{Place, Problem, Problems};
use super::settings::Model;

/// The prompt cache of llama-server when `--cache-ram` is not given, in MiB (`--help` of llama-server).
const CACHE_RAM_DEFAULT_MIB: u64 = 8192;

/// What the parts of the program are told.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// The public listener.
    pub(crate) server: defaults::Server,
    /// The connection to a backend.
    pub(crate) upstream: defaults::Upstream,
    /// Our own log.
    pub(crate) log: defaults::Log,
    /// The children.
    pub(crate) child: defaults::Child,
    /// Where things are kept.
    pub(crate) dirs: Dirs,
    /// Unix socket of the admin routes.
    pub(crate) admin_socket: PathBuf,
    /// TCP address of the admin routes.
    pub(crate) admin_address: Option<SocketAddr>,
    /// The fleet, but for the binaries: [`super::binary`] finds them by `choices`.
    pub(crate) fleet: FleetConfig,
    /// Which binary each model wants, in the order of the models.
    pub(crate) choices: Vec<(Choice, Place)>,
    /// What is allowed and probably not meant.
    pub(crate) warnings: Vec<Problem>,
}

/// Where things are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Dirs {
    /// Ledger and instances.
    pub(crate) state: PathBuf,
    /// Sockets of this instance.
    pub(crate) runtime: PathBuf,
    /// Builds.
    pub(crate) data: PathBuf,
    /// What can be made again.
    pub(crate) cache: PathBuf,
}

impl Loaded {
    /// A path as written. Paths in the file are relative to the file, so that it means the same from wherever we are
    /// started.
    pub(crate) fn absolute(&self, machine: &Machine, path: &Path) -> PathBuf {
        let base = self.file.as_deref().and_then(Path::parent).unwrap_or_else(|| Path::new(""));
        machine.cwd.join(base).join(path)
    }

    /// Where things are kept.
    pub(crate) fn dirs(&self, machine: &Machine) -> Dirs {
        let paths = &self.settings.paths;
        let or = |given: &Option<PathBuf>, default: PathBuf| {
            given.as_ref().map_or(default, |path| self.absolute(machine, path))
        };
        Dirs {
            state: or(&paths.state_dir, machine.state_dir()),
            runtime: or(&paths.runtime_dir, machine.runtime_dir()),
            data: or(&paths.data_dir, machine.data_dir()),
            cache: or(&paths.cache_dir, machine.cache_dir()),
        }
    }
}

/// Resolves a configuration. `any_name`: the one model answers to every name.
pub(crate) fn resolve(loaded: &Loaded, machine: &Machine, any_name: bool) -> Result<Resolved, Problems> {
    let mut resolver = Resolver { loaded, machine, problems: Vec::new(), warnings: Vec::new() };
    let dirs = loaded.dirs(machine);
    let (models, choices): (Vec<_>, Vec<_>) =
        loaded.models.iter().map(|(name, model, _)| resolver.model(name, model)).unzip();
    resolver.names();
    resolver.log_level();
    let settings = &loaded.settings;
    let admin_address = resolver.admin_address();
    let admin_socket = settings
        .admin
        .socket
        .as_ref()
        .map_or_else(|| dirs.runtime.join("admin.sock"), |path| resolver.absolute(path));
    let common = &loaded.defaults;
    let fleet = FleetConfig {
        models,
        any_name,
        runtime_dir: dirs.runtime.clone(),
        state_dir: dirs.state.clone(),
        watch: Watch {
            interval: settings.sensors.interval,
            idle_settle: settings.sensors.idle_settle,
            log_lines: settings.child.log_lines,
            log_line_bytes: settings.child.log_line_bytes,
            failure_lines: settings.child.failure_lines,
            events_kept: settings.child.events_kept,
            failures_told: common.lifecycle.failures_told,
            unknown_slots: common.lifecycle.unknown_slots,
            overlap_headroom: common.policy.common.overlap_headroom,
            overlap_floor: common.policy.common.overlap_floor,
        },
    };
    let Resolver { problems, warnings, .. } = resolver;
    if !problems.is_empty() {
        return Err(Problems(problems));
    }
    Ok(Resolved {
        server: settings.server.clone(),
        upstream: settings.upstream.clone(),
        log: settings.log.clone(),
        child: settings.child.clone(),
        dirs,
        admin_socket,
        admin_address,
        fleet,
        choices,
        warnings,
    })
}

struct Resolver<'a> {
    loaded: &'a Loaded,
    machine: &'a Machine,
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
}

impl Resolver<'_> {
    fn place(&self, path: &[&str]) -> Place {
        let path: Vec<String> = path.iter().map(|&key| key.to_owned()).collect();
        self.loaded.place(&path)
    }

    fn absolute(&self, path: &Path) -> PathBuf {
        self.loaded.absolute(self.machine, path)
    }

    fn admin_address(&mut self) -> Option<SocketAddr> {
        let text = self.loaded.settings.admin.address.as_deref()?;
        let place = self.place(&["admin", "address"]);
        let Some(address) = text.to_socket_addrs().ok().and_then(|mut all| all.next()) else {
            let problem = Problem::new(place, format!("`admin.address`: `{text}` is no address with a port"));
            self.problems.push(problem.hint("write it like `127.0.0.1:9090`"));
            return None;
        };
        if !address.ip().is_loopback() {
            let message = format!(
                "`admin.address`: `{text}` can be reached from other machines, and admin routes ask for no key"
            );
            self.problems
                .push(Problem::new(place, message).hint("use a loopback address like `127.0.0.1:9090`"));
        }
        Some(address)
    }

    fn log_level(&mut self) {
        if let Err(problem) = crate::logging::filter(&self.loaded.settings.log.level) {
            let place = self.place(&["log", "level"]);
            self.problems.push(Problem::new(place, format!("`log.level`: {problem}")));
        }
    }

    /// Two models must not share a name or an alias.
    fn names(&mut self) {
        let mut owners: HashMap<String, String> = HashMap::new();
        for (name, model, _) in &self.loaded.models {
            let keys = std::iter::once((name, false)).chain(model.aliases.iter().map(|alias| (alias, true)));
            for (key, is_alias) in keys {
                let place = if is_alias {
                    self.place(&["models", name, "aliases"])
                } else {
                    self.place(&["models", name])
                };
                if key.is_empty() {
                    self.problems
                        .push(Problem::new(place, format!("model `{name}`: a name must not be empty")));
                } else if let Some(other) = owners.insert(key.clone(), name.clone()) {
                    let who = if other == *name {
                        "twice by this model".to_owned()
                    } else {
                        format!("by model `{other}`, too")
                    };
                    let problem =
                        Problem::new(place, format!("model `{name}`: the name `{key}` is used {who}"));
                    self.problems.push(problem.hint("every name and alias must be unique"));
                }
            }
        }
    }

    fn model(&mut self, name: &str, model: &Model) -> (ModelSpec, (Choice, Place)) {
        let mut args = model.args.clone();
        if let Some(file) = &model.model {
            if arguments::model(&args).is_some() {
                let place = self.place(&["models", name, "model"]);
                let problem = Problem::new(
                    place,
                    format!("model `{name}`: the file is given in `model` and again in `args`"),
                );
                self.problems.push(problem.hint("keep one of them"));
            }
            args.splice(0..0, ["-m".to_owned(), self.absolute(file).to_string_lossy().into_owned()]);
        }
        let directory = model.directory.as_ref().map(|path| self.absolute(path));
        self.check_directory(name, directory.as_deref());
        self.check_file(name, model, &args, directory.as_deref());
        self.check_listening(name, model, &args);
        let recycle = self.recycle(name, model, &args);
        let lifecycle = &model.lifecycle;
        let policy = &model.policy.common;
        let spec = ModelSpec {
            name: ModelName::new(name),
            aliases: model.aliases.clone(),
            command: Command {
                binary: PathBuf::new(),
                args,
                env: model.env.iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
                directory,
            },
            replicas: model.replicas,
            preload: model.preload,
            replace: model.replace,
            queue_depth: model.queue.depth,
            queue_wait: model.queue.wait,
            max_in_flight: model.max_in_flight,
            lifecycle: LifecyclePolicy {
                backoff: BackoffPolicy { first: lifecycle.backoff_first, cap: lifecycle.backoff_cap },
                breaker_failures: lifecycle.breaker_failures,
                breaker_window: lifecycle.breaker_window,
                stable_after: lifecycle.stable_after,
            },
            timing: Timing {
                start_timeout: lifecycle.start_timeout,
                start_probe_interval: lifecycle.start_probe_interval,
                probe_interval: lifecycle.probe_interval,
                probe_timeout: lifecycle.probe_timeout,
                probes_lost: lifecycle.probes_lost,
                suspect_timeout: lifecycle.suspect_timeout,
                drain_deadline: lifecycle.drain_deadline,
                stop_grace: lifecycle.stop_grace,
            },
            recycle,
            restraint: RestraintPolicy {
                min_interval: policy.min_interval,
                min_interval_hard: policy.min_interval_hard,
                max_futile: policy.max_futile,
            },
            oom_score_adj: self.loaded.settings.child.oom_score_adj,
        };
        (spec, self.choice(name, model))
    }

    fn choice(&mut self, name: &str, model: &Model) -> (Choice, Place) {
        match (&model.binary, &model.build) {
            (Some(_), Some(_)) => {
                let place = self.place(&["models", name, "build"]);
                let problem = Problem::new(
                    place.clone(),
                    format!("model `{name}`: both `binary` and `build` say what to run"),
                );
                self.problems.push(problem.hint("keep one of them"));
                (Choice::Newest, place)
            }
            // A bare word is looked for in PATH, as a shell would.
            (Some(binary), None) if binary.components().count() == 1 && !binary.is_absolute() => {
                let beside = self.absolute(binary);
                let choice =
                    if beside.is_file() { Choice::Path(beside) } else { Choice::InPath(binary.clone()) };
                (choice, self.place(&["models", name, "binary"]))
            }
            (Some(binary), None) => {
                (Choice::Path(self.absolute(binary)), self.place(&["models", name, "binary"]))
            }
            (None, Some(build)) => (Choice::Build(build.clone()), self.place(&["models", name, "build"])),
            (None, None) => (Choice::Newest, self.place(&["models", name])),
        }
    }

    fn check_directory(&mut self, name: &str, directory: Option<&Path>) {
        if let Some(path) = directory.filter(|path| !path.is_dir()) {
            let place = self.place(&["models", name, "directory"]);
            self.problems.push(Problem::new(
                place,
                format!("model `{name}`: there is no directory {}", path.display()),
            ));
        }
    }

    fn check_file(&mut self, name: &str, model: &Model, args: &[String], directory: Option<&Path>) {
        let key = if model.model.is_some() { "model" } else { "args" };
        let Some(file) = arguments::model(args) else {
            let in_env =
                model.env.contains_key("LLAMA_ARG_MODEL") || self.machine.var("LLAMA_ARG_MODEL").is_some();
            if arguments::remote_model(args).is_none() && !in_env {
                let place = self.place(&["models", name]);
                let problem = Problem::new(place, format!("model `{name}`: no model file is given"));
                self.warnings.push(problem.hint(format!(
                    "set `model = \"file.gguf\"` in [models.{}]",
                    super::problem::quoted(name)
                )));
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

    fn check_listening(&mut self, name: &str, model: &Model, args: &[String]) {
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
        let Some((flag, what)) = arguments::first_listening(args) else { return };
        let (why, hint) = match what {
            Listening::Host | Listening::Port => ("listening is ours", "set `host` and `port` in [server]"),
            Listening::Pointless => ("listening is ours", "remove it: each process has a socket of its own"),
            Listening::Harmful => (
                "we could not reach the process with it",
                "remove it, and put a TLS or path proxy in front of llama-warden",
            ),
            // In drop-in mode the key is the child's to check; with many models it would have to be in each.
            Listening::Key if self.loaded.file.is_none() => return,
            Listening::Key => (
                "keys per process are not supported with a configuration file",
                "remove it, and check keys in front of llama-warden",
            ),
        };
        let problem = Problem::new(place, format!("model `{name}`: `{flag}` in `args`: {why}"));
        self.problems.push(problem.hint(hint));
    }

    fn recycle(&mut self, name: &str, model: &Model, args: &[String]) -> RecyclePolicy {
        let policy = &model.policy;
        let bytes = |limit: Option<warden_policies::MemoryLimit>| {
            limit.map(|limit| limit.resolve(self.machine.memory))
        };
        let (soft, hard) = (bytes(policy.host.soft), bytes(policy.host.hard));
        if let (Some(soft), Some(hard)) = (soft, hard)
            && hard < soft
        {
            let place = self.place(&["models", name, "policy", "host", "hard"]);
            let message = format!("model `{name}`: the hard budget ({hard}) is below the soft one ({soft})");
            self.problems
                .push(Problem::new(place, message).hint("`host.hard` has to be the larger of the two"));
        }
        self.warn_about_cache(name, soft.or(hard), args);
        RecyclePolicy {
            host_soft: soft,
            host_hard: hard,
            max_requests: policy.max_requests,
            max_age: policy.max_age,
            jitter: policy.common.jitter,
            quiet_for: policy.common.quiet_for,
            quiet_within: policy.common.quiet_within,
        }
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
