//! Resolves the loaded configuration for each crate: makes paths absolute, converts budgets to bytes,
//! checks names. This module reads facts about files but starts no process; [`binary`] runs the binaries.

pub mod binary;
mod cancel;
mod contradictions;
pub mod dirs;
mod doors;
pub mod flags;
mod judge;
pub mod keys;
pub mod mitigations;
pub mod own_sets;
mod places;
pub mod proofs;
pub mod server_facts;
mod start_switches;
pub mod store;
pub mod telemetry;
mod tls;

use std::collections::{BTreeMap, HashMap};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use warden_gateway::{KeySpec, ModelRules, VirtualName};
use warden_patches::mitigation::BuildFacts;
use warden_policies::modes::CancelMode;
use warden_policies::server_flags::FlagList;
use warden_policies::{HostNames, MemoryLimit, ModelName, ServerFacts, defaults, is_pattern, loading};
use warden_supervisor::private_dir::ADMIN_SOCKET;
use warden_supervisor::spec::{
    AdmissionSpec, FallbackSpec, FleetConfig, ModelSpec, ServerCommand, SharedBudgets, SharedSpec,
    WatchConfig,
};

use self::binary::BinaryChoice;
use self::dirs::WardenDirs;
use self::judge::with_access_variables;
use self::mitigations::{MitigatedCommand, ModelMitigations};
use self::own_sets::OwnSets;
use self::server_facts::UnmeasuredBinary;
use self::telemetry::TraceCollector;
use crate::advice::{AdvisedServer, AdvisedServers};
use crate::arguments;
use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, quoted_key};
use crate::settings::ModelConfig;
use crate::source::layers::LoadedConfig;

/// Resolved settings for the parts of the program.
#[derive(Clone, Debug)]
pub struct ResolvedConfig {
    /// Settings of the public listener.
    pub server: defaults::Server,
    /// Settings of connections to backends.
    pub upstream: defaults::Upstream,
    /// Log settings.
    pub log: defaults::Log,
    /// Settings of experiments (`diagnose`).
    pub diagnose: defaults::Diagnose,
    /// Settings of proofs that a build may replace another.
    pub proof: defaults::Proof,
    /// Settings of `update`.
    pub update: defaults::Update,
    /// Settings of the recorded memory history.
    pub series: defaults::Series,
    /// Settings of child processes.
    pub child: defaults::Child,
    /// Directories of llama-warden.
    pub dirs: WardenDirs,
    /// Unix socket of the admin routes.
    pub admin_socket: PathBuf,
    /// TCP address of the admin routes.
    pub admin_address: Option<SocketAddr>,
    /// Answers to probes and load balancers (`[probe]`).
    pub probe: defaults::Probe,
    /// Address for probes.
    pub probe_address: Option<SocketAddr>,
    /// Address for agent checks of `HAProxy`.
    pub agent_address: Option<SocketAddr>,
    /// All models and their settings; [`binary`] fills in the binaries according to `choices`.
    pub fleet: FleetConfig,
    /// Request rules, in the order of the models.
    pub rules: Vec<Arc<ModelRules>>,
    /// Request rules of remote models.
    pub remote_rules: Vec<Arc<ModelRules>>,
    /// Names that clients may use but that have no process of their own.
    pub by_name: BTreeMap<String, VirtualName>,
    /// Binary choice of each model, in the order of the models.
    pub choices: Vec<(BinaryChoice, ConfigPlace)>,
    /// The mitigations of each model, in the order of the models.
    pub mitigations: Vec<ModelMitigations>,
    /// Facts about the llama-server of each model, in the order of the models; [`binary`] fills them in.
    pub builds: Vec<Option<BuildFacts>>,
    /// Flags that the llama-server of each model lists, in the order of the models; [`binary`] fills them in.
    pub flags: Vec<Option<Arc<FlagList>>>,
    /// Binaries from outside the store that must still be measured; [`binary`] fills them in.
    pub unmeasured: Vec<UnmeasuredBinary>,
    /// Another store in which builds are searched for.
    pub other_store: Option<PathBuf>,
    /// API keys; `None` if clients need no key.
    pub keys: Option<Vec<KeySpec>>,
    /// Host names by which clients may address this server; never `Auto`.
    pub names: HostNames,
    /// File of the access log; `None` if it is part of the log.
    pub access_log: Option<PathBuf>,
    /// Files for recorded requests, in the order of the models.
    pub record_requests: Vec<Option<PathBuf>>,
    /// OpenTelemetry collector for traces of requests.
    pub collector: Option<TraceCollector>,
    /// Way of stopping work for disconnected clients, in the order of the models.
    pub cancel: Vec<CancelMode>,
    /// Settings that are allowed but probably unintended.
    pub warnings: Vec<ConfigProblem>,
    /// The configuration as written, if it is kept for display.
    pub written: Option<Arc<LoadedConfig>>,
}

impl ResolvedConfig {
    /// Returns the names of models whose configuration names a build or a program.
    pub fn bound_models(&self) -> Vec<String> {
        let all = self.choices.iter().zip(&self.fleet.models);
        let bound = all.filter(|((choice, _), _)| *choice != BinaryChoice::Newest);
        bound.map(|(_, model)| model.name.as_str().to_owned()).collect()
    }

    /// Returns the facts about each model's server that advice depends on.
    pub fn servers(&self, machine: &HostMachine) -> AdvisedServers {
        let inherited: Arc<[String]> = machine.text_vars().into_iter().map(|(name, _)| name).collect();
        let models = self.fleet.models.iter().zip(&self.builds).zip(&self.mitigations);
        models
            .map(|((spec, facts), mitigations)| {
                let server = AdvisedServer::from_spec(spec, facts.as_ref(), mitigations, &inherited);
                (spec.name.as_str().to_owned(), server)
            })
            .collect()
    }
}

/// Start settings of a model's server, as far as they can be known without running a program.
pub struct LaunchSettings {
    /// Words of the command line.
    pub args: Vec<String>,
    /// Variables to set.
    pub env: Vec<(String, String)>,
    /// Variables to remove.
    pub env_remove: Vec<String>,
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
        let mut resolver = ConfigResolver::new(self, machine);
        let mitigations = resolver.mitigations(name, model, model.args.clone());
        let (choice, _) = resolver.binary_choice(name, model);
        if !resolver.problems.is_empty() {
            return Err(ConfigProblems(resolver.problems));
        }
        let data = self.dirs(machine)?.data;
        let built = match &choice {
            BinaryChoice::Build(id) => store::find_build(&data, Some(id)),
            BinaryChoice::Newest => store::find_build(&data, None),
            BinaryChoice::Path(_) | BinaryChoice::InPath(_) => Ok(None),
        };
        let MitigatedCommand { args, env, env_remove, .. } = mitigations.command(&[]);
        // Ignore a damaged store: here it only costs facts, and a start reports it.
        Ok(LaunchSettings {
            args,
            env,
            env_remove,
            mitigations: mitigations.ids(),
            facts: built.ok().flatten().map(|build| build.facts),
        })
    }
}

/// Resolves a configuration. With `any_name`, the single model answers to every name.
///
/// # Errors
/// Values are wrong, or contradict each other.
pub fn resolve_config(
    loaded: &LoadedConfig,
    machine: &HostMachine,
    any_name: bool,
) -> Result<ResolvedConfig, ConfigProblems> {
    let mut resolver = ConfigResolver { any_name, ..ConfigResolver::new(loaded, machine) };
    let dirs = loaded.dirs(machine)?;
    let (mut models, mut choices, mut mitigations) = (Vec::new(), Vec::new(), Vec::new());
    let mut rules = Vec::new();
    for (name, model) in &loaded.models {
        rules.push(Arc::new(resolver.model_rules(name, model)));
        let (spec, choice, own) = resolver.resolve_model(name, model);
        models.push(SharedSpec::new(spec, ServerFacts::default()));
        choices.push(choice);
        mitigations.push(own);
    }
    for (spec, (name, model)) in models.iter_mut().zip(&loaded.models) {
        let shares = |other: &ModelConfig| other.groups.iter().any(|group| model.groups.contains(group));
        let others = loaded.models.iter().filter(|(other, model)| other != name && shares(model));
        spec.loading.never_with = others.map(|(other, ..)| ModelName::new(other)).collect();
        spec.loading.companions = resolver.loaded_with(name, model);
    }
    resolver.check_names();
    let (remotes, remote_rules): (Vec<_>, Vec<_>) = resolver.resolve_remotes().into_iter().unzip();
    let by_name = resolver.resolve_names(&rules, &remotes, &remote_rules);
    resolver.check_runtime_dir(&dirs, &models);
    resolver.check_state_dir(&dirs);
    let server = resolver.server();
    resolver.check_log_level();
    let others = remotes.iter().map(|spec| (spec.name.clone(), spec.aliases.clone()));
    let others = others.chain(by_name.keys().map(|name| (ModelName::new(name), Vec::new())));
    let keys = resolver.resolve_keys(&models, others.collect());
    resolver.check_origins();
    let names = resolver.host_names();
    resolver.check_contradictions(&models);
    let settings = &loaded.settings;
    resolver.warnings.extend(loaded.internal.iter().map(|(key, place)| {
        let message = format!(
            "`{key}` replaces a number that is compiled in: it is for tests, and may change without notice"
        );
        ConfigProblem::new(place.clone(), message).with_hint("leave it out")
    }));
    resolver.warnings.extend(loaded.skipped_models.iter().map(|name| {
        let place = loaded.place(&["models".to_owned(), name.clone()]);
        let message = format!(
            "model `{name}` names no file, and the folders of models have none of that name: it is left out"
        );
        ConfigProblem::new(place, message)
            .with_hint("it is added when its file appears; or name one with `model`")
    }));
    let admin_address = resolver.admin_address();
    let probe_address = resolver.probe_address("address", &settings.probe.address);
    let agent_address = resolver.probe_address("agent", &settings.probe.agent);
    let access_log = resolver.resolve_file(&settings.log.access);
    let collector = resolver.resolve_collector();
    let admin_socket = settings
        .admin
        .socket
        .as_ref()
        .map_or_else(|| dirs.runtime.join(ADMIN_SOCKET), |path| resolver.absolute(path));
    let fleet = FleetConfig {
        models,
        remotes,
        any_name,
        shared: resolver.shared_budgets(),
        loading: settings.loading.clone(),
        growth: settings.growth.clone(),
        health: settings.health.clone(),
        canary: settings.canary,
        runtime_dir: dirs.runtime.clone(),
        state_dir: dirs.state.clone(),
        watch: WatchConfig { sensors: settings.sensors, child: settings.child },
    };
    let ConfigResolver { problems, warnings, .. } = resolver;
    if !problems.is_empty() {
        return Err(ConfigProblems(problems));
    }
    Ok(ResolvedConfig {
        server,
        upstream: settings.upstream.clone(),
        log: settings.log.clone(),
        diagnose: settings.diagnose.clone(),
        proof: settings.proof.clone(),
        update: settings.update.clone(),
        series: settings.series,
        child: settings.child,
        dirs,
        admin_socket,
        admin_address,
        probe: settings.probe.clone(),
        probe_address,
        agent_address,
        fleet,
        rules,
        remote_rules,
        by_name,
        choices,
        keys,
        names,
        access_log,
        collector,
        builds: vec![None; mitigations.len()],
        flags: vec![None; mitigations.len()],
        other_store: None,
        unmeasured: Vec::new(),
        record_requests: loaded
            .models
            .iter()
            .map(|(_, model)| model.record_requests.as_ref().map(|path| loaded.absolute(machine, path)))
            .collect(),
        cancel: loaded.models.iter().map(|(_, model)| model.run.cancel).collect(),
        mitigations,
        warnings,
        written: None,
    })
}

/// State of a resolution.
pub(crate) struct ConfigResolver<'a> {
    pub(crate) loaded: &'a LoadedConfig,
    pub(crate) machine: &'a HostMachine,
    pub(crate) any_name: bool,
    pub(crate) problems: Vec<ConfigProblem>,
    pub(crate) warnings: Vec<ConfigProblem>,
    own: OwnSets,
}

impl<'a> ConfigResolver<'a> {
    /// Creates a resolver without findings.
    pub(crate) fn new(loaded: &'a LoadedConfig, machine: &'a HostMachine) -> Self {
        Self {
            loaded,
            machine,
            any_name: false,
            problems: Vec::new(),
            warnings: Vec::new(),
            own: OwnSets::default(),
        }
    }
}

impl ConfigResolver<'_> {
    pub(crate) fn place(&self, path: &[&str]) -> ConfigPlace {
        let path: Vec<String> = path.iter().map(|&key| key.to_owned()).collect();
        self.loaded.place(&path)
    }

    pub(crate) fn absolute(&self, path: &Path) -> PathBuf {
        self.loaded.absolute(self.machine, path)
    }

    fn admin_address(&mut self) -> Option<SocketAddr> {
        let text = self.loaded.settings.admin.address.as_deref()?;
        let place = self.place(&["admin", "address"]);
        let Some(address) = text.to_socket_addrs().ok().and_then(|mut all| all.next()) else {
            let problem =
                ConfigProblem::new(place, format!("`admin.address`: `{text}` is no address with a port"));
            self.problems.push(problem.with_hint("write it like `127.0.0.1:9090`"));
            return None;
        };
        if !address.ip().is_loopback() {
            let message = format!(
                "`admin.address`: `{text}` can be reached from other machines, and admin routes ask for no key"
            );
            self.problems.push(
                ConfigProblem::new(place, message).with_hint("use a loopback address like `127.0.0.1:9090`"),
            );
        }
        Some(address)
    }

    /// Resolves an address for probes, which may be public because it offers no actions.
    fn probe_address(&mut self, key: &str, text: &str) -> Option<SocketAddr> {
        let address = text.to_socket_addrs().ok().and_then(|mut all| all.next());
        if address.is_none() && !text.is_empty() {
            let message = format!("`probe.{key}`: `{text}` is no address with a port");
            let problem = ConfigProblem::new(self.place(&["probe", key]), message);
            self.problems.push(problem.with_hint("write it like `0.0.0.0:8081`"));
        }
        address
    }

    fn shared_budgets(&self) -> SharedBudgets {
        let shared = self.loaded.settings.shared;
        let host = |limit: Option<MemoryLimit>| limit?.resolve(self.machine.memory);
        SharedBudgets {
            host_soft: host(shared.host.soft),
            host_hard: host(shared.host.hard),
            vram_soft: shared.vram.soft,
            vram_hard: shared.vram.hard,
        }
    }

    fn check_log_level(&mut self) {
        if let Err(problem) = crate::log_filter::log_filter(&self.loaded.settings.log.level) {
            let place = self.place(&["log", "level"]);
            self.problems.push(ConfigProblem::new(place, format!("`log.level`: {problem}")));
        }
    }

    /// Checks that no two models share a name or an alias.
    fn check_names(&mut self) {
        let mut owners: HashMap<&String, (&str, &String)> = HashMap::new();
        let loaded = self.loaded;
        let models = loaded.models.iter().map(|(name, model)| ("models", name, &model.aliases));
        let remotes = loaded.settings.remotes.iter().map(|(name, remote)| ("remotes", name, &remote.aliases));
        for (table, name, aliases) in models.chain(remotes) {
            let keys = std::iter::once((name, false)).chain(aliases.iter().map(|alias| (alias, true)));
            for (key, is_alias) in keys {
                let place =
                    if is_alias { self.place(&[table, name, "aliases"]) } else { self.place(&[table, name]) };
                if key.is_empty() {
                    self.problems
                        .push(ConfigProblem::new(place, format!("model `{name}`: a name must not be empty")));
                } else if is_pattern(key) {
                    let message = format!("model `{name}`: `{key}` is a pattern, and a model has names");
                    let hint = format!(
                        "patterns are in `[names]`: `[names.{}]` with `models = [{}]`",
                        quoted_key(key),
                        toml::Value::from(name.as_str())
                    );
                    self.problems.push(ConfigProblem::new(place, message).with_hint(hint));
                } else if let Some(other) = owners.insert(key, (table, name)) {
                    let who = if other == (table, name) {
                        "twice by this model".to_owned()
                    } else {
                        format!("by model `{}`, too", other.1)
                    };
                    let problem =
                        ConfigProblem::new(place, format!("model `{name}`: the name `{key}` is used {who}"));
                    self.problems.push(problem.with_hint("every name and alias must be unique"));
                }
            }
        }
    }

    fn resolve_model(
        &mut self,
        name: &str,
        model: &ModelConfig,
    ) -> (ModelSpec, (BinaryChoice, ConfigPlace), ModelMitigations) {
        let mut args = model.args.clone();
        if let Some(file) = &model.model {
            if arguments::model_path(&args).is_some() {
                let place = self.place(&["models", name, "model"]);
                let problem = ConfigProblem::new(
                    place,
                    format!("model `{name}`: the file is given in `model` and again in `args`"),
                );
                self.problems.push(problem.with_hint("keep one of them"));
            }
            args.splice(0..0, ["-m".to_owned(), self.absolute(file).to_string_lossy().into_owned()]);
        }
        let mitigations = self.mitigations(name, model, args);
        // Include effects that the build may not support; [`binary`] removes them later.
        let MitigatedCommand { args, env, env_remove, .. } = mitigations.command(&[]);
        if model.wrapper.first().is_some_and(String::is_empty) {
            let place = self.place(&["models", name, "wrapper"]);
            let problem =
                ConfigProblem::new(place, format!("model `{name}`: `wrapper` begins with an empty word"));
            self.problems
                .push(problem.with_hint("begin it with a program: `wrapper = [\"nice\", \"-n\", \"5\"]`"));
        }
        let directory = model.directory.as_ref().map(|path| self.absolute(path));
        self.check_directory(name, directory.as_deref());
        self.check_file(name, model, &args, directory.as_deref());
        let all: Vec<String> = args.iter().chain(&model.fallback).cloned().collect();
        self.check_listening(name, model, &all);
        let recycle = model.policy.to_recycle_policy(Some(self.machine.memory));
        let policy = &model.policy.common;
        let spec = ModelSpec {
            name: ModelName::new(name),
            aliases: model.aliases.clone(),
            command: ServerCommand {
                wrapper: model.wrapper.clone(),
                binary: PathBuf::new(),
                args,
                env,
                env_remove: with_access_variables(env_remove, self.any_name),
                directory,
            },
            run: model.run,
            queue: model.queue,
            max_in_flight: model.max_in_flight,
            ttl: model.ttl,
            // Memory needs and exclusions are filled in later, because they depend on the command and all
            // models.
            loading: loading::LoadSpec {
                gpus: model.gpus.clone(),
                pin: model.run.pin,
                never_with: Vec::new(),
                ..loading::LoadSpec::default()
            },
            fallback: (!model.fallback.is_empty())
                .then(|| FallbackSpec { args: model.fallback.clone(), needs: None }),
            // The switches are filled in together with the binary.
            start_switches: Vec::new(),
            choose_gpus: false,
            lifecycle: model.lifecycle,
            recycle,
            oom_score_adj: self.loaded.settings.child.oom_score_adj,
            admission: AdmissionSpec { mode: policy.admission, policy: defaults().admission.clone() },
            quarantine: model.quarantine,
            canary_of: None,
        };
        (spec, self.binary_choice(name, model), mitigations)
    }

    fn binary_choice(&mut self, name: &str, model: &ModelConfig) -> (BinaryChoice, ConfigPlace) {
        match (&model.binary, &model.build) {
            (Some(_), Some(_)) => {
                let place = self.place(&["models", name, "build"]);
                let problem = ConfigProblem::new(
                    place.clone(),
                    format!("model `{name}`: both `binary` and `build` say what to run"),
                );
                self.problems.push(problem.with_hint("keep one of them"));
                (BinaryChoice::Newest, place)
            }
            // Search a name without a folder in PATH, like a shell.
            (Some(binary), None) if binary.components().count() == 1 && !binary.is_absolute() => {
                let beside = self.absolute(binary);
                let choice = if beside.is_file() {
                    BinaryChoice::Path(beside)
                } else {
                    BinaryChoice::InPath(binary.clone())
                };
                (choice, self.place(&["models", name, "binary"]))
            }
            (Some(binary), None) => {
                (BinaryChoice::Path(self.absolute(binary)), self.place(&["models", name, "binary"]))
            }
            (None, Some(build)) => {
                (BinaryChoice::Build(build.clone()), self.place(&["models", name, "build"]))
            }
            (None, None) => (BinaryChoice::Newest, self.place(&["models", name])),
        }
    }
}
