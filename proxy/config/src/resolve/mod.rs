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
    AdmissionSpec, FallbackSpec, FleetConfig, ModelSpec, RequestSpec, ServerCommand, SharedBudgets,
    SharedSpec, StartSpec, WatchConfig,
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
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems, owned_path, quoted_key};
use crate::settings::{ConfigSettings, ModelConfig};
use crate::source::layers::LoadedConfig;

/// Resolved settings for the parts of the program.
#[derive(Clone, Debug)]
pub struct ResolvedConfig {
    /// All settings except those of models; the paths of the TLS files are absolute.
    pub settings: ConfigSettings,
    /// Directories of llama-warden.
    pub dirs: WardenDirs,
    /// Addresses of the listeners other than the public one.
    pub addresses: ListenerAddresses,
    /// All models and their settings; [`binary`] fills in the binaries.
    pub fleet: FleetConfig,
    /// Settings of models that the fleet does not need, in the order of its models.
    pub models: Vec<ResolvedModel>,
    /// Rules of the gateway.
    pub gateway: GatewayRules,
    /// Binaries from outside the store that must still be measured; [`binary`] fills them in.
    pub unmeasured: Vec<UnmeasuredBinary>,
    /// Another store in which builds are searched for.
    pub other_store: Option<PathBuf>,
    /// File of the access log; `None` if it is part of the log.
    pub access_log: Option<PathBuf>,
    /// OpenTelemetry collector for traces of requests.
    pub collector: Option<TraceCollector>,
    /// Settings that are allowed but probably unintended.
    pub warnings: Vec<ConfigProblem>,
    /// The configuration as written, if it is kept for display.
    pub written: Option<Arc<LoadedConfig>>,
}

/// Addresses of the listeners other than the public one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerAddresses {
    /// Unix socket of the admin routes.
    pub admin_socket: PathBuf,
    /// TCP address of the admin routes.
    pub admin: Option<SocketAddr>,
    /// Address for probes.
    pub probe: Option<SocketAddr>,
    /// Address for agent checks of `HAProxy`.
    pub agent: Option<SocketAddr>,
}

/// Rules of the gateway that belong to no single model.
#[derive(Clone, Debug)]
pub struct GatewayRules {
    /// Request rules of remote models, in their order.
    pub remotes: Vec<Arc<ModelRules>>,
    /// Names that clients may use but that have no process of their own.
    pub by_name: BTreeMap<String, VirtualName>,
    /// API keys; `None` if clients need no key.
    pub keys: Option<Vec<KeySpec>>,
    /// Host names by which clients may address this server; never `Auto`.
    pub names: HostNames,
}

/// Settings of a model that its fleet does not need.
#[derive(Clone, Debug)]
pub struct ResolvedModel {
    /// Request rules.
    pub rules: Arc<ModelRules>,
    /// Binary that the configuration asks for.
    pub choice: BinaryChoice,
    /// Source of the choice.
    pub choice_place: ConfigPlace,
    /// Mitigations.
    pub mitigations: ModelMitigations,
    /// Facts about the llama-server; [`binary`] fills them in.
    pub build: Option<BuildFacts>,
    /// Flags that the llama-server lists; [`binary`] fills them in.
    pub flags: Option<Arc<FlagList>>,
    /// File for recorded requests.
    pub record_requests: Option<PathBuf>,
    /// Way of stopping work for disconnected clients.
    pub cancel: CancelMode,
}

impl ResolvedConfig {
    /// Returns the names of models whose configuration names a build or a program.
    pub fn bound_models(&self) -> Vec<String> {
        let all = self.models.iter().zip(&self.fleet.models);
        let bound = all.filter(|(model, _)| model.choice != BinaryChoice::Newest);
        bound.map(|(_, spec)| spec.name.as_str().to_owned()).collect()
    }

    /// Returns the facts about each model's server that advice depends on.
    pub fn servers(&self, machine: &HostMachine) -> AdvisedServers {
        let inherited: Arc<[String]> = machine.text_vars().into_iter().map(|(name, _)| name).collect();
        let models = self.fleet.models.iter().zip(&self.models).map(|(spec, model)| {
            let server = AdvisedServer::from_spec(spec, model.build.as_ref(), &model.mitigations, &inherited);
            (spec.name.as_str().to_owned(), server)
        });
        models.collect()
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
        let MitigatedCommand { args, env, env_remove, .. } = mitigations.command(&[]);
        Ok(LaunchSettings {
            args,
            env,
            env_remove,
            mitigations: mitigations.ids(),
            facts: store::chosen_build(&data, &choice).map(|build| build.facts),
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
    let (mut specs, models) = resolver.resolve_models();
    resolver.resolve_companions(&mut specs);
    resolver.check_names();
    let (remotes, remote_rules): (Vec<_>, Vec<_>) = resolver.resolve_remotes().into_iter().unzip();
    let by_name = resolver.resolve_names(&models, &remotes, &remote_rules);
    resolver.check_runtime_dir(&dirs, &specs);
    resolver.check_state_dir(&dirs);
    let settings = ConfigSettings { server: resolver.server(), ..loaded.settings.clone() };
    resolver.check_log_level();
    let others = remotes.iter().map(|spec| (spec.name.clone(), spec.aliases.clone()));
    let others = others.chain(by_name.keys().map(|name| (ModelName::new(name), Vec::new())));
    let keys = resolver.resolve_keys(&specs, others.collect());
    resolver.check_origins();
    let names = resolver.host_names();
    resolver.check_contradictions(&specs);
    resolver.warn_about_internal();
    resolver.warn_about_skipped();
    let addresses = resolver.listener_addresses(&dirs);
    let access_log = resolver.resolve_file(&settings.log.access);
    let collector = resolver.resolve_collector();
    let fleet = FleetConfig {
        models: specs,
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
    if !resolver.problems.is_empty() {
        return Err(ConfigProblems(resolver.problems));
    }
    Ok(ResolvedConfig {
        settings,
        dirs,
        addresses,
        fleet,
        models,
        gateway: GatewayRules { remotes: remote_rules, by_name, keys, names },
        unmeasured: Vec::new(),
        other_store: None,
        access_log,
        collector,
        warnings: resolver.warnings,
        written: None,
    })
}

pub(crate) struct ConfigResolver<'a> {
    pub(crate) loaded: &'a LoadedConfig,
    pub(crate) machine: &'a HostMachine,
    pub(crate) any_name: bool,
    pub(crate) problems: Vec<ConfigProblem>,
    pub(crate) warnings: Vec<ConfigProblem>,
    own: OwnSets,
}

impl<'a> ConfigResolver<'a> {
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

    pub(crate) fn place(&self, key: &[&str]) -> ConfigPlace {
        self.loaded.place(&owned_path(key))
    }

    pub(crate) fn report(&mut self, key: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        self.problems.push(ConfigProblem::new(self.place(key), message).with_hint(hint));
    }

    pub(crate) fn warn(&mut self, key: &[&str], message: impl Into<String>, hint: impl Into<String>) {
        self.warnings.push(ConfigProblem::new(self.place(key), message).with_hint(hint));
    }

    pub(crate) fn absolute(&self, path: &Path) -> PathBuf {
        self.loaded.absolute(self.machine, path)
    }

    fn resolve_models(&mut self) -> (Vec<SharedSpec>, Vec<ResolvedModel>) {
        let mut specs = Vec::new();
        let mut models = Vec::new();
        for (name, model) in &self.loaded.models {
            let rules = Arc::new(self.model_rules(name, model));
            let (spec, mitigations) = self.resolve_model(name, model);
            let (choice, choice_place) = self.binary_choice(name, model);
            specs.push(SharedSpec::new(spec, ServerFacts::default()));
            models.push(ResolvedModel {
                rules,
                choice,
                choice_place,
                mitigations,
                build: None,
                flags: None,
                record_requests: model.record_requests.as_ref().map(|path| self.absolute(path)),
                cancel: model.run.cancel,
            });
        }
        (specs, models)
    }

    /// Sets which models are loaded together with a model, and which are never loaded at the same time.
    fn resolve_companions(&mut self, specs: &mut [SharedSpec]) {
        let models = &self.loaded.models;
        for (spec, (name, model)) in specs.iter_mut().zip(models) {
            let shares = |other: &ModelConfig| other.groups.iter().any(|group| model.groups.contains(group));
            let others = models.iter().filter(|(other, model)| other != name && shares(model));
            spec.loading.never_with = others.map(|(other, ..)| ModelName::new(other)).collect();
            spec.loading.companions = self.loaded_with(name, model);
        }
    }

    /// Warns about compiled-in numbers that the configuration sets.
    fn warn_about_internal(&mut self) {
        self.warnings.extend(self.loaded.internal.iter().map(|(key, place)| {
            let message = format!(
                "`{key}` replaces a number that is compiled in: it is for tests, and may change without notice"
            );
            ConfigProblem::new(place.clone(), message).with_hint("leave it out")
        }));
    }

    fn warn_about_skipped(&mut self) {
        for name in &self.loaded.skipped_models {
            let message = format!(
                "model `{name}` names no file, and the folders of models have none of that name: it is left out"
            );
            let hint = "it is added when its file appears; or name one with `model`";
            self.warn(&["models", name], message, hint);
        }
    }

    fn listener_addresses(&mut self, dirs: &WardenDirs) -> ListenerAddresses {
        let settings = &self.loaded.settings;
        let socket = settings.admin.socket.as_ref().map(|path| self.absolute(path));
        ListenerAddresses {
            admin_socket: socket.unwrap_or_else(|| dirs.runtime.join(ADMIN_SOCKET)),
            admin: self.admin_address(),
            probe: self.probe_address("address", &settings.probe.address),
            agent: self.probe_address("agent", &settings.probe.agent),
        }
    }

    fn admin_address(&mut self) -> Option<SocketAddr> {
        let key = ["admin", "address"];
        let text = self.loaded.settings.admin.address.as_deref()?;
        let Some(address) = text.to_socket_addrs().ok().and_then(|mut all| all.next()) else {
            let message = format!("`admin.address`: `{text}` is no address with a port");
            self.report(&key, message, "write it like `127.0.0.1:9090`");
            return None;
        };
        if !address.ip().is_loopback() {
            let message = format!(
                "`admin.address`: `{text}` can be reached from other machines, and admin routes ask for no key"
            );
            self.report(&key, message, "use a loopback address like `127.0.0.1:9090`");
        }
        Some(address)
    }

    /// Resolves an address for probes, which may be public because it offers no actions.
    fn probe_address(&mut self, key: &str, text: &str) -> Option<SocketAddr> {
        let address = text.to_socket_addrs().ok().and_then(|mut all| all.next());
        if address.is_none() && !text.is_empty() {
            let message = format!("`probe.{key}`: `{text}` is no address with a port");
            self.report(&["probe", key], message, "write it like `0.0.0.0:8081`");
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

    fn check_names(&mut self) {
        let mut owners: HashMap<&String, (&str, &String)> = HashMap::new();
        let loaded = self.loaded;
        let models = loaded.models.iter().map(|(name, model)| ("models", name, &model.aliases));
        let remotes = loaded.settings.remotes.iter().map(|(name, remote)| ("remotes", name, &remote.aliases));
        for (table, name, aliases) in models.chain(remotes) {
            let aliases = aliases.iter().map(|alias| (alias, vec![table, name, "aliases"]));
            for (key, path) in std::iter::once((name, vec![table, name])).chain(aliases) {
                if key.is_empty() {
                    let message = format!("model `{name}`: a name must not be empty");
                    self.problems.push(ConfigProblem::new(self.place(&path), message));
                } else if is_pattern(key) {
                    let message = format!("model `{name}`: `{key}` is a pattern, and a model has names");
                    let hint = format!(
                        "patterns are in `[names]`: `[names.{}]` with `models = [{}]`",
                        quoted_key(key),
                        toml::Value::from(name.as_str())
                    );
                    self.report(&path, message, hint);
                } else if let Some(other) = owners.insert(key, (table, name)) {
                    let who = if other == (table, name) {
                        "twice by this model".to_owned()
                    } else {
                        format!("by model `{}`, too", other.1)
                    };
                    let message = format!("model `{name}`: the name `{key}` is used {who}");
                    self.report(&path, message, "every name and alias must be unique");
                }
            }
        }
    }

    fn resolve_model(&mut self, name: &str, model: &ModelConfig) -> (ModelSpec, ModelMitigations) {
        let mut args = model.args.clone();
        if let Some(file) = &model.model {
            if arguments::model_path(&args).is_some() {
                let message = format!("model `{name}`: the file is given in `model` and again in `args`");
                self.report(&["models", name, "model"], message, "keep one of them");
            }
            args.splice(0..0, ["-m".to_owned(), self.absolute(file).to_string_lossy().into_owned()]);
        }
        let mitigations = self.mitigations(name, model, args);
        // Include effects that the build may not support; [`binary`] removes them later.
        let MitigatedCommand { args, env, env_remove, .. } = mitigations.command(&[]);
        if model.wrapper.first().is_some_and(String::is_empty) {
            let message = format!("model `{name}`: `wrapper` begins with an empty word");
            let hint = "begin it with a program: `wrapper = [\"nice\", \"-n\", \"5\"]`";
            self.report(&["models", name, "wrapper"], message, hint);
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
                // The switches are filled in together with the binary.
                ..StartSpec::default()
            },
            lifecycle: model.lifecycle,
            recycle,
            oom_score_adj: self.loaded.settings.child.oom_score_adj,
            canary_of: None,
        };
        (spec, mitigations)
    }

    fn binary_choice(&mut self, name: &str, model: &ModelConfig) -> (BinaryChoice, ConfigPlace) {
        let (choice, key) = match (&model.binary, &model.build) {
            (Some(_), Some(_)) => {
                let message = format!("model `{name}`: both `binary` and `build` say what to run");
                self.report(&["models", name, "build"], message, "keep one of them");
                (BinaryChoice::Newest, "build")
            }
            // Search a name without a folder in PATH, like a shell.
            (Some(binary), None) if binary.components().count() == 1 && !binary.is_absolute() => {
                let beside = self.absolute(binary);
                let is_file = beside.is_file();
                let choice =
                    if is_file { BinaryChoice::Path(beside) } else { BinaryChoice::InPath(binary.clone()) };
                (choice, "binary")
            }
            (Some(binary), None) => (BinaryChoice::Path(self.absolute(binary)), "binary"),
            (None, Some(build)) => (BinaryChoice::Build(build.clone()), "build"),
            (None, None) => return (BinaryChoice::Newest, self.place(&["models", name])),
        };
        (choice, self.place(&["models", name, key]))
    }
}
