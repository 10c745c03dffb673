//! Resolves the loaded configuration for each crate: makes paths absolute, converts budgets to bytes,
//! checks names. This module reads facts about files but starts no process; [`binary`] runs the binaries.

pub mod binary;
mod cancel;
mod contradictions;
pub mod dirs;
mod doors;
pub mod flags;
pub mod keys;
pub mod mitigations;
mod model;
pub(crate) mod model_mitigations;
mod names;
mod other_program;
pub mod own_sets;
mod places;
pub mod proofs;
mod remotes;
mod resolved;
mod resolver;
mod rules;
pub mod server_facts;
mod start_switches;
pub mod store;
pub mod telemetry;

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use warden_policies::{MemoryLimit, ModelName, ServerFacts, is_pattern};
use warden_supervisor::private_dir::ADMIN_SOCKET;
use warden_supervisor::spec::{FleetConfig, SharedBudgets, SharedSpec, WatchConfig};

use self::dirs::WardenDirs;
use self::model::ModelResolver;
use self::own_sets::OwnSets;
use self::resolver::ConfigResolver;
use crate::machine::HostMachine;
use crate::problem::{ConfigProblem, ConfigProblems, quoted_key};
use crate::settings::{ConfigSettings, ModelConfig};
use crate::source::layers::LoadedConfig;

pub use self::model::LaunchSettings;
pub use self::resolved::{GatewayRules, ListenerAddresses, ResolvedConfig, ResolvedModel};

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

impl ConfigResolver<'_> {
    fn resolve_models(&mut self) -> (Vec<SharedSpec>, Vec<ResolvedModel>) {
        let mut sets = OwnSets::default();
        let models = self.loaded.models.iter().map(|(name, model)| {
            let mut one = ModelResolver { config: &mut *self, sets: &mut sets, name, model };
            let rules = Arc::new(one.rules());
            let (spec, mitigations) = one.resolve_spec();
            one.check_choice();
            one.check_command();
            let (choice, choice_place) = one.binary_choice();
            let resolved = ResolvedModel {
                rules,
                choice,
                choice_place,
                mitigations,
                build: None,
                flags: None,
                cancel: model.run.cancel,
            };
            (SharedSpec::new(spec, ServerFacts::default()), resolved)
        });
        models.unzip()
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
}
