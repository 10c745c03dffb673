//! One running instance: gateway, fleet and admin, started in the order in which failures are cheapest to tell.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_gateway::{Control, Gateway, GatewayConfig, GatewayError, Gauges, Tls};
use warden_supervisor::Fleet;
use warden_supervisor::nursery::NurseryHandle;

use super::certificate;
use super::leaving::Leaving;
use super::live::live;
use super::measure;
use super::observe::{Watcher, events};
use super::reload::needs_restart;
use crate::access_log::AccessLog;
use crate::admin::answer::{Admin, Instance, Told, budgets, next_binaries};
use crate::admin::canary::Tries;
use crate::admin::instance::Claim;
use crate::admin::metrics::Metrics;
use crate::admin::page::holds::plans;
use crate::admin::server::bind;
use crate::clock;
use crate::config::machine::Machine;
use crate::config::resolve::Resolved;
use crate::config::show::Kept;
use crate::events_file::EventsFile;
use crate::exit::Failure;
use crate::otel::{Exporter, Tracer};
use crate::probe::board::Board;
use crate::probe::{keeper, listen};
use crate::request_recorder::Recorders;
use crate::series;

/// A running instance.
pub(crate) struct Server {
    resolved: Resolved,
    address: SocketAddr,
    /// Those of the second host and all after it.
    others: Vec<SocketAddr>,
    admin_address: Option<SocketAddr>,
    /// Where probes are answered, and where `HAProxy` is.
    probes: (Option<SocketAddr>, Option<SocketAddr>),
    leaving: Arc<Leaving>,
    fleet: Fleet,
    gauges: Arc<Gauges>,
    gateway: Control,
    access: AccessLog,
    recorders: Recorders,
    tls: Option<Arc<Tls>>,
    told: watch::Sender<Told>,
    /// Ends the gateway: no new connections, running requests go on.
    accepting: CancellationToken,
    gateway_done: CancellationToken,
    /// Ends admin and watchers.
    stop: CancellationToken,
    tasks: TaskTracker,
    exporting: Exporting,
    claim: Claim,
    /// For processes beside the fleet's.
    nursery: NurseryHandle,
}

impl Server {
    /// Claims the directories, binds the port, starts the fleet, opens the admin routes.
    pub(crate) async fn start(
        resolved: Resolved,
        machine: &Machine,
        nursery: NurseryHandle,
    ) -> Result<Self, Failure> {
        let mut claim = Claim::take(&resolved.dirs, machine)?;
        let access = AccessLog::start(resolved.access_log.as_deref(), &resolved.log)?;
        let mut recorders = Recorders::default();
        recorders.open(&resolved)?;
        let config = GatewayConfig::new(&resolved.server, &resolved.upstream);
        let config = match &resolved.collector {
            Some(collector) => config.traced(collector.numbers.ratio),
            None => config,
        };
        let gateway = Gateway::bind(config).await.map_err(|error| gateway_failure(&error))?;
        let address = gateway.local_addr();
        let others = gateway.local_addrs()[1..].to_vec();
        let gauges = gateway.gauges();
        let (control, requests) = (gateway.control(), gateway.requests());
        let tls = gateway.tls();
        control.update(live(&resolved, &recorders));
        let listeners =
            bind(&resolved.admin_socket, resolved.admin_address, resolved.server.accept_pause).await?;
        let admin_address = listeners.address();
        let probe = listen::Listeners::bind(resolved.probe_address, resolved.agent_address)?;
        let probes = probe.addresses();
        let unmeasured = measure::Job::new(&resolved, nursery.clone());
        let fleet = Fleet::start(resolved.fleet.clone(), nursery.clone()).await?;
        let metrics = Arc::new(Metrics::new());
        let (stop, accepting, gateway_done) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let instance = Instance {
            pid: machine.pid,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            address: address.to_string(),
            admin_socket: resolved.admin_socket.to_string_lossy().into_owned(),
            started_at: clock::now_text(),
            ledger: fleet.ledger_path().to_string_lossy().into_owned(),
            data_dir: resolved.dirs.data.to_string_lossy().into_owned(),
            memory_anon: None,
        };
        claim.announce(&resolved.dirs.state, machine.meeting_places().first(), &instance)?;
        let tasks = TaskTracker::new();
        let now = Told {
            budgets: budgets(&resolved.fleet.models),
            servers: resolved.servers(machine),
            binaries: next_binaries(&resolved.fleet.models),
            bound: resolved.bound(),
            tries: tries(&resolved),
            plans: plans(&resolved.fleet.models),
            configuration: shown(&resolved, machine, Vec::new()),
        };
        let (tell, told) = watch::channel(now);
        let file = EventsFile::new(&resolved.dirs.state, machine.pid);
        tasks.spawn(events(fleet.clone(), metrics.clone(), told.clone(), file, stop.clone()));
        if let Some(job) = unmeasured {
            tasks.spawn(job.run(fleet.clone(), stop.clone()));
        }
        let kept = series::Store::new(&resolved.series, &resolved.dirs.state);
        tasks.spawn(series::record(kept.clone(), fleet.clone(), stop.clone()));
        let leaving = Arc::new(Leaving::new(gauges.clone()));
        let board = Arc::new(Board::new(resolved.probe.clone(), gauges.clone()));
        let admin = Admin {
            leaving: leaving.clone(),
            probe: Arc::new(resolved.probe.clone()),
            connections: resolved.server.connections,
            fleet: fleet.clone(),
            metrics: metrics.clone(),
            told,
            gauges: gauges.clone(),
            gateway: control.clone(),
            access: access.clone(),
            requests,
            by: "llama-warden".into(),
            instance: Arc::new(instance),
            page: Arc::default(),
            series: kept,
            stop: stop.clone(),
        };
        if probes.0.is_some() || probes.1.is_some() {
            tasks.spawn(keeper::keep(board.clone(), admin.clone(), stop.clone()));
        }
        probe.serve(board, stop.clone())?;
        tasks.spawn(listeners.serve(admin));
        let (tracer, exporter) =
            resolved.collector.clone().map(|to| Tracer::new(to, metrics.clone())).unzip();
        let exporting = Exporting::start(exporter, stop.clone());
        let watcher = Watcher { metrics, access: access.clone(), fleet: fleet.clone(), tracer };
        let served = gateway.serve(fleet.clone(), Arc::new(watcher), accepting.clone());
        if let Some(tls) = tls.clone() {
            let (every, warn) = (resolved.server.tls_check, resolved.server.tls_warn);
            tasks.spawn(certificate::watch(tls, gauges.clone(), every, warn, stop.clone()));
        }
        let done = gateway_done.clone().drop_guard();
        tasks.spawn(async move {
            let _done = done;
            served.await;
        });
        Ok(Self {
            resolved,
            address,
            others,
            admin_address,
            probes,
            leaving,
            fleet,
            gauges,
            gateway: control,
            access,
            recorders,
            tls,
            told: tell,
            accepting,
            gateway_done,
            stop,
            tasks,
            exporting,
            claim,
            nursery,
        })
    }

    /// The public address, with the port that was really bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The addresses of the second host and all after it.
    pub(crate) fn others(&self) -> &[SocketAddr] {
        &self.others
    }

    /// What clients write in front of the address.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The admin routes' address over TCP, if there is one.
    pub(crate) fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Where probes are answered, and where `HAProxy` is, if anywhere.
    pub(crate) const fn probes(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        self.probes
    }

    /// Tells balancers that we end, and for how long requests are still taken.
    pub(crate) fn leave(&self) -> Duration {
        self.leaving.end(self.resolved.probe.drain_delay)
    }

    pub(crate) fn admin_socket(&self) -> &Path {
        &self.resolved.admin_socket
    }

    pub(crate) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Where replacements are recorded.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.fleet.ledger_path().to_owned()
    }

    /// Requests between their head and the end of their answer.
    pub(crate) fn in_flight(&self) -> usize {
        self.gauges.in_flight.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Resolves if the gateway ends without having been told to: there is nothing left to serve with.
    pub(crate) async fn ended(&self) -> Failure {
        self.gateway_done.cancelled().await;
        Failure::failed("the listener ended unexpectedly")
    }

    /// Opens the file of the access log anew, for whoever has renamed it.
    pub(crate) fn reopen_logs(&self) {
        self.access.reopen();
    }

    /// Takes over a new configuration, as far as that goes without a restart.
    pub(crate) async fn reload(&mut self, new: Resolved, machine: &Machine) -> Result<(), Failure> {
        // First, because it may fail: then nothing of the new configuration is taken over.
        self.recorders.open(&new)?;
        let kept_back = needs_restart(&self.resolved, &new);
        for section in &kept_back {
            tracing::warn!(target: "config", "[{section}] has changed: that takes effect at the next start of llama-warden");
        }
        let mut fleet = new.fleet.clone();
        fleet.runtime_dir.clone_from(&self.resolved.fleet.runtime_dir);
        fleet.state_dir.clone_from(&self.resolved.fleet.state_dir);
        let report = self.fleet.apply(fleet.clone()).await?;
        for setting in &report.needs_restart {
            tracing::warn!(target: "config", "{setting}: that takes effect at the next start of llama-warden");
        }
        if let Some(job) = measure::Job::new(&new, self.nursery.clone()) {
            self.tasks.spawn(job.run(self.fleet.clone(), self.stop.clone()));
        }
        let servers = new.servers(machine);
        let binaries = next_binaries(&fleet.models);
        self.told.send_replace(Told {
            budgets: budgets(&fleet.models),
            servers,
            binaries,
            bound: new.bound(),
            tries: tries(&new),
            plans: plans(&fleet.models),
            configuration: shown(&new, machine, kept_back),
        });
        self.gateway.update(live(&new, &self.recorders));
        if let Some(tls) = &self.tls {
            certificate::read(tls).await;
        }
        self.resolved.fleet = fleet;
        self.resolved.dirs.models.clone_from(&new.dirs.models);
        Ok(())
    }

    /// How often llama-server is renewed; zero: never.
    pub(crate) const fn renews_every(&self) -> Duration {
        self.resolved.update.every
    }

    /// Folders of models.
    pub(crate) fn folders(&self) -> &[PathBuf] {
        &self.resolved.dirs.models
    }

    /// Stops accepting, lets running requests end up to the deadline, stops the children.
    pub(crate) async fn stop(self, deadline: Duration) {
        self.accepting.cancel();
        // The fleet waits for leases; the gateway's own last bytes to clients get the same time.
        let fleet = self.fleet.shutdown(deadline);
        let gateway = tokio::time::timeout(deadline, self.gateway_done.cancelled());
        let _ = tokio::join!(fleet, gateway);
        self.stop.cancel();
        self.tasks.close();
        // Admin answers and watchers end by the token; a client that does not read must not hold us.
        let tasks = tokio::time::timeout(self.resolved.upstream.connect_timeout, self.tasks.wait());
        let _ = tokio::join!(tasks, self.exporting.end());
        self.access.flush();
        drop(self.claim);
    }
}

/// What the page shows of the configuration.
fn shown(resolved: &Resolved, machine: &Machine, pending: Vec<&'static str>) -> Option<Kept> {
    let loaded = resolved.written.clone()?;
    Some(Kept { loaded, machine: Arc::new(machine.clone()), pending })
}

/// Spans on their way to a collector, if there is one: they get a little time of their own when all else has ended.
struct Exporting {
    tasks: TaskTracker,
    patience: Duration,
}

impl Exporting {
    fn start(exporter: Option<Exporter>, stop: CancellationToken) -> Self {
        let (tasks, patience) =
            (TaskTracker::new(), exporter.as_ref().map_or(Duration::ZERO, Exporter::patience));
        if let Some(exporter) = exporter {
            tasks.spawn(exporter.run(stop));
        }
        Self { tasks, patience }
    }

    async fn end(&self) {
        self.tasks.close();
        if tokio::time::timeout(self.patience, self.tasks.wait()).await.is_err() {
            tracing::warn!("the last spans could not be sent in time");
        }
    }
}

fn tries(resolved: &Resolved) -> Tries {
    Tries {
        data: resolved.dirs.data.clone(),
        cache: resolved.dirs.cache.clone(),
        version_timeout: resolved.child.version_timeout,
        numbers: resolved.fleet.canary,
    }
}

fn gateway_failure(error: &GatewayError) -> Failure {
    Failure::failed(error.to_string())
}
