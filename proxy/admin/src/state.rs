//! The state from which answers, metrics and probes are made.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_config::advice::{self, AdvisedServers};
use warden_config::show::DisplayedConfig;
use warden_gateway::{GatewayControl, GatewayGauges, RequestRegistry};
use warden_policies::defaults::Probe;
use warden_policies::pool::{InstanceFacts, agent};
use warden_policies::{canary, defaults};
use warden_supervisor::{Fleet, FleetView};

use crate::access_log::AccessLog;
use crate::leaving::LeaveControl;
use crate::memory_use::{BudgetsByModel, PlannedModels};
use crate::metrics::MetricsRegistry;
use crate::metrics::pool_metrics::PoolSnapshot;
use crate::pool_facts;
use crate::series::SeriesStore;
use crate::status::{AdminStatus, AdviceView, BinariesByModel, InstanceInfo, with_running_binaries};
use crate::upgrade_order::UpgradeOrders;

/// Parts of the configuration that answers need; replaced at each reload.
#[derive(Clone, Debug, Default)]
pub struct AdminConfig {
    /// Budgets of the models.
    pub budgets: BudgetsByModel,
    /// Start commands of the servers, for advice.
    pub servers: AdvisedServers,
    /// Programs of the next processes.
    pub binaries: BinariesByModel,
    /// Models for which the configuration names a certain build or program.
    pub bound: Vec<String>,
    /// Settings of canaries.
    pub tries: CanarySettings,
    /// Planned needs of the models.
    pub plans: PlannedModels,
    /// The configuration as it is shown on the page.
    pub configuration: Option<DisplayedConfig>,
}

/// Folders of builds, and defaults for canaries, from the configuration in force.
#[derive(Clone, Debug)]
pub struct CanarySettings {
    /// Folder of the store of builds.
    pub data: PathBuf,
    /// Folder in which facts about programs are cached.
    pub cache: PathBuf,
    /// Time limit for a program to print its version.
    pub version_timeout: Duration,
    /// Defaults of a canary.
    pub numbers: canary::CanaryConfig,
}

impl Default for CanarySettings {
    fn default() -> Self {
        let child = defaults().child;
        let numbers = defaults().canary;
        let data = PathBuf::new();
        let cache = PathBuf::new();
        Self { data, cache, version_timeout: child.version_timeout, numbers }
    }
}

/// The gateway, as the admin routes use it.
#[derive(Clone)]
pub struct GatewayAccess {
    /// Keys and limits in force.
    pub control: GatewayControl,
    /// Connections, requests and bytes at present.
    pub gauges: Arc<GatewayGauges>,
    /// Requests in flight, and the latest that ended.
    pub requests: RequestRegistry,
    /// Most client connections.
    pub max_connections: usize,
}

impl GatewayAccess {
    fn is_draining(&self) -> bool {
        self.gauges.draining.load(Ordering::Relaxed)
    }

    fn is_full(&self) -> bool {
        self.gauges.connections.load(Ordering::Relaxed) >= self.max_connections
    }
}

/// Records of an instance: its access log and memory.
#[derive(Clone)]
pub struct InstanceRecords {
    /// The access log.
    pub access: AccessLog,
    /// Counts the lines that are missing in llama-warden's own log.
    pub lost_log_lines: fn() -> u64,
    /// Recorded memory.
    pub series: SeriesStore,
}

/// State from which admin answers are made. Cheap to clone.
#[derive(Clone)]
pub struct AdminState {
    /// The models.
    pub fleet: Fleet,
    /// The metrics.
    pub metrics: Arc<MetricsRegistry>,
    /// The configuration in force.
    pub config: watch::Receiver<AdminConfig>,
    /// The gateway.
    pub gateway: GatewayAccess,
    /// Records of the instance.
    pub records: InstanceRecords,
    /// Name of the caller, for events and the ledger.
    pub caller: Arc<str>,
    /// Facts about the instance.
    pub instance: Arc<InstanceInfo>,
    /// Accepts orders to upgrade.
    pub upgrades: UpgradeOrders,
    /// State of leaving.
    pub leaving: Arc<LeaveControl>,
    /// Settings of probes.
    pub probe: Arc<Probe>,
    /// Ends streamed answers when cancelled.
    pub stop: CancellationToken,
}

impl AdminState {
    /// Returns all metrics in the `OpenMetrics` format. `of_keys`: includes the metrics of API keys, whose
    /// names may identify people. Without them, the metric for endpoint pickers is included.
    pub(crate) fn metrics_text(&self, of_keys: bool) -> String {
        let budgets = self.config.borrow().budgets.clone();
        let keys = if of_keys { self.gateway.control.key_counts() } else { Vec::new() };
        let view = self.fleet.view();
        let facts = self.facts_from_view(&view);
        let pool = PoolSnapshot {
            line: Some(agent::agent_answer(&facts, self.probe.horizon.as_secs_f64())),
            facts,
            contexts: pool_facts::context_use(&view, &self.gateway.requests.context_holdings()),
            vllm: self.probe.vllm,
            pickers: !of_keys,
        };
        self.metrics.set_lost_lines(self.records.access.lost(), (self.records.lost_log_lines)());
        self.metrics.note_state(&self.fleet.state_writer().view());
        self.metrics.text(&pool, &view, &budgets, &self.gateway.gauges, &keys, own_memory())
    }

    /// Returns current facts for load balancers that spread requests over several instances.
    pub fn facts(&self) -> InstanceFacts {
        self.facts_from_view(&self.fleet.view())
    }

    fn facts_from_view(&self, view: &FleetView) -> InstanceFacts {
        pool_facts::pool_facts(view, self.gateway.is_draining(), self.gateway.is_full())
    }

    /// Returns the same state with another caller.
    #[must_use]
    pub fn with_caller(&self, by: &str) -> Self {
        Self { caller: by.into(), ..self.clone() }
    }

    pub(crate) fn status(&self) -> AdminStatus {
        let mut status = self.status_without_processes();
        let binaries = status.binaries.take().unwrap_or_default();
        status.binaries = Some(with_running_binaries(binaries, &status.fleet));
        status
    }

    /// Returns the status, without the programs of running processes.
    pub fn status_without_processes(&self) -> AdminStatus {
        let instance = InstanceInfo { memory_anon: own_memory(), ..(*self.instance).clone() };
        let config = self.config.borrow().clone();
        let fleet = (*self.fleet.view()).clone();
        let advice = advice::advise_fleet(&config.servers, &fleet).into_iter();
        let servers = config.servers.iter().filter(|(_, server)| !server.displayed_mitigations.is_empty());
        AdminStatus {
            instance,
            budgets: config.budgets,
            advice: advice.map(|(model, all)| (model, all.iter().map(AdviceView::from).collect())).collect(),
            mitigations: servers
                .map(|(model, server)| (model.clone(), server.displayed_mitigations.clone()))
                .collect(),
            binaries: Some(config.binaries),
            bound: config.bound,
            access_log: self.records.access.view(),
            state: self.fleet.state_writer().view(),
            fleet,
        }
    }
}

fn own_memory() -> Option<u64> {
    warden_sensors::host_memory(std::process::id()).ok().map(|memory| memory.anon)
}
