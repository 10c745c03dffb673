//! The resolved configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use warden_gateway::{KeySpec, ModelRules, VirtualName};
use warden_patches::mitigation::BuildFacts;
use warden_policies::HostNames;
use warden_policies::modes::CancelMode;
use warden_policies::server_flags::FlagList;
use warden_supervisor::spec::FleetConfig;

use super::dirs::WardenDirs;
use super::mitigations::ModelMitigations;
use super::server_facts::UnmeasuredBinary;
use super::store::BinaryChoice;
use super::telemetry::TraceCollector;
use crate::advice::{AdvisedServer, AdvisedServers};
use crate::machine::HostMachine;
use crate::problem::{ConfigPlace, ConfigProblem};
use crate::settings::ConfigSettings;
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
    /// All models and their settings; [`super::binary`] fills in the binaries.
    pub fleet: FleetConfig,
    /// Settings of models that the fleet does not need, in the order of its models.
    pub models: Vec<ResolvedModel>,
    /// Rules of the gateway.
    pub gateway: GatewayRules,
    /// Binaries from outside the store that must still be measured; [`super::binary`] fills them in.
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
    /// Facts about the llama-server; [`super::binary`] fills them in.
    pub build: Option<BuildFacts>,
    /// Flags that the llama-server lists; [`super::binary`] fills them in.
    pub flags: Option<Arc<FlagList>>,
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
