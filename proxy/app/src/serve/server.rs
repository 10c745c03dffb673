//! A running instance: gateway, fleet and admin, started in the order in which failures are cheapest to
//! report.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_gateway::{BoundGateway, GatewayControl, GatewayGauges, GatewayPulse, StopTokens, TlsState};
use warden_page::{PageState, SignInGuard};
use warden_policies::ModelName;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{ApplyReport, Fleet, FleetWill, WorkKind, run_detached};

use super::certificate;
use super::manager::{ActivatedSockets, ServiceManager};
use super::measure;
use super::observe::{RequestObserver, log_events};
use super::reload::{gateway_config, needs_restart};
use super::upgrade::inquiry::SelfTest;
use super::upgrade::new::ReceivedHandover;
use crate::events_file::EventsFile;
use crate::exit::CommandError;
use crate::logging;

mod opening;
mod succession;

use opening::{OpenedInstance, TakeOver};
use succession::{HandoverSockets, RecordingTasks};
use warden_admin::access_log::AccessLog;
use warden_admin::clock;
use warden_admin::instance::InstanceDirs;
use warden_admin::leaving::LeaveControl;
use warden_admin::memory_use::{budgets_by_model, planned_needs};
use warden_admin::metrics::MetricsRegistry;
use warden_admin::otel::{RequestTracer, SpanExporter};
use warden_admin::probe::board::ProbeBoard;
use warden_admin::probe::keeper;
use warden_admin::probe::listen::ProbeListeners;
use warden_admin::probe::watchdog::LoopAnswers;
use warden_admin::series::{SeriesStore, record_fleet};
use warden_admin::server::PulseSender;
use warden_admin::state::{AdminConfig, AdminState, CanarySettings, GatewayAccess, InstanceRecords};
use warden_admin::status::{InstanceInfo, next_binaries};
use warden_admin::upgrade_order::{UpgradeOrder, UpgradeOrders};
use warden_config::changes::{ConfigChanges, compare_loaded};
use warden_config::machine::HostMachine;
use warden_config::resolve::ResolvedConfig;
use warden_config::show::DisplayedConfig;

/// Extra wait for the models' processes, beyond the deadline and the stop graces.
const STOP_MARGIN: Duration = Duration::from_secs(10);

pub(crate) struct RunningInstance {
    resolved: ResolvedConfig,
    addresses: InstanceAddresses,
    fleet: Fleet,
    gateway: RunningGateway,
    admin: AdminHandle,
    access: AccessLog,
    tasks: InstanceTasks,
    claim: InstanceDirs,
    sockets: HandoverSockets,
    orders: Option<mpsc::Receiver<UpgradeOrder>>,
    /// Starts processes outside of the fleet.
    nursery: NurseryHandle,
    inquiry: SelfTest,
}

/// Addresses of an instance, with the ports that were bound.
#[derive(Clone, Debug)]
pub(crate) struct InstanceAddresses {
    /// Addresses for clients, one for each host.
    pub(crate) public: Vec<SocketAddr>,
    pub(crate) admin_socket: PathBuf,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) probe: Option<SocketAddr>,
    /// Address of the `HAProxy` agent.
    pub(crate) agent: Option<SocketAddr>,
}

struct RunningGateway {
    control: GatewayControl,
    gauges: Arc<GatewayGauges>,
    tls: Option<Arc<TlsState>>,
    pulse: GatewayPulse,
    leaving: Arc<LeaveControl>,
    /// Tokens that end the gateway: no new connections, running requests continue.
    ends: StopTokens,
    done: CancellationToken,
}

impl RunningGateway {
    fn new(gateway: &BoundGateway) -> Self {
        let gauges = gateway.gauges();
        Self {
            control: gateway.control(),
            leaving: Arc::new(LeaveControl::new(gauges.clone())),
            gauges,
            tls: gateway.tls(),
            pulse: gateway.pulse(),
            ends: StopTokens::default(),
            done: CancellationToken::new(),
        }
    }

    fn access(&self, gateway: &BoundGateway, max_connections: usize) -> GatewayAccess {
        GatewayAccess {
            control: self.control.clone(),
            gauges: self.gauges.clone(),
            requests: gateway.requests(),
            max_connections,
        }
    }
}

struct AdminHandle {
    config: watch::Sender<AdminConfig>,
    pulse: PulseSender,
}

struct InstanceTasks {
    tracker: TaskTracker,
    /// Ends the admin interface and watchers.
    stop: CancellationToken,
    /// Cancelled when the program ends, and when a successor takes over.
    retiring: CancellationToken,
    books: RecordingTasks,
    exporting: ExporterTask,
    /// Cancelled when this program has taken over completely.
    begun: CancellationToken,
}

impl InstanceTasks {
    fn new(
        stop: CancellationToken,
        running: &RunningGateway,
        books: RecordingTasks,
        exporting: ExporterTask,
        begun: CancellationToken,
    ) -> Self {
        // Viewers of the page on the public listener must not delay the listener's end.
        let retiring = running.ends.stop.child_token();
        Self { tracker: TaskTracker::new(), stop, retiring, books, exporting, begun }
    }

    fn record(
        &self,
        fleet: &Fleet,
        metrics: &Arc<MetricsRegistry>,
        config: watch::Receiver<AdminConfig>,
        file: EventsFile,
    ) {
        let books = &self.books;
        let closed = books.closed.clone();
        books.tasks.spawn(log_events(fleet.clone(), metrics.clone(), config, file, closed.clone()));
        let recording = record_fleet(books.series.clone(), fleet.clone(), closed);
        self.spawn_once(&books.tasks, recording.boxed());
    }

    /// Spawns a task that only one program at a time may run: it begins after the takeover.
    fn spawn_once(&self, tracker: &TaskTracker, task: BoxFuture<'static, ()>) {
        let begun = self.begun.clone();
        let stop = self.stop.clone();
        tracker.spawn(async move {
            tokio::select! {
                () = begun.cancelled() => task.await,
                () = stop.cancelled() => {}
            }
        });
    }
}

async fn start_fleet(
    resolved: &ResolvedConfig,
    nursery: NurseryHandle,
    will: Option<FleetWill>,
) -> Result<Fleet, CommandError> {
    let config = resolved.fleet.clone();
    match will {
        Some(will) => Ok(Fleet::start_after(config, nursery, will).await?),
        None => Ok(Fleet::start(config, nursery).await?),
    }
}

impl RunningInstance {
    /// Claims the directories, binds or takes the sockets, starts the fleet, opens the admin routes.
    pub(crate) async fn start(
        resolved: ResolvedConfig,
        machine: &HostMachine,
        nursery: NurseryHandle,
        sockets: ActivatedSockets,
    ) -> Result<Self, CommandError> {
        Box::pin(Self::start_after(resolved, machine, nursery, sockets, None)).await
    }

    /// Like [`Self::start`], but takes over from a predecessor. Sockets, directories and processes of the
    /// predecessor stay unchanged until the predecessor has given them up.
    pub(super) async fn start_after(
        resolved: ResolvedConfig,
        machine: &HostMachine,
        nursery: NurseryHandle,
        given: ActivatedSockets,
        inheritance: Option<ReceivedHandover>,
    ) -> Result<Self, CommandError> {
        let opened = OpenedInstance::open(&resolved, given, inheritance).await?;
        let OpenedInstance { mut claim, access, gateway, listeners, probe, sockets, take_over } = opened;
        let running = RunningGateway::new(&gateway);
        running.control.update(gateway_config(&resolved));
        let addresses = opening::bound_addresses(&gateway, &listeners, &probe);
        let unmeasured = measure::MeasureJob::new(&resolved, nursery.clone());
        let TakeOver { begun, leaves, will } = take_over;
        let fleet = start_fleet(&resolved, nursery.clone(), will).await?;
        let metrics = Arc::new(MetricsRegistry::new());
        let instance = instance_info(&resolved, machine, &addresses, &fleet);
        let (config, shown_config) = watch::channel(admin_config(&resolved, machine, Vec::new()));
        let series = SeriesStore::new(&resolved.settings.series, &resolved.dirs.state);
        let collector = resolved.collector.clone();
        let (tracer, exporter) = collector.map(|to| RequestTracer::new(to, metrics.clone())).unzip();
        let stop = CancellationToken::new();
        let books = RecordingTasks::new(&stop, series.clone(), fleet.state_writer().clone());
        let tasks = InstanceTasks::new(stop, &running, books, ExporterTask::start(exporter), begun.clone());
        if let Some(again) =
            claim.announce(&resolved.dirs.state, machine.registration_dirs().first(), &instance)?
        {
            tasks.tracker.spawn(tasks.stop.clone().run_until_cancelled_owned(again));
        }
        let file = EventsFile::new(&resolved.dirs.state, machine.pid);
        tasks.record(&fleet, &metrics, shown_config.clone(), file);
        if let Some(job) = unmeasured {
            tasks.spawn_once(&tasks.tracker, job.run(fleet.clone(), tasks.stop.clone()).boxed());
        }
        if leaves {
            running.leaving.begin();
        }
        let (upgrades, orders) = UpgradeOrders::new();
        let admin = AdminState {
            fleet: fleet.clone(),
            metrics: metrics.clone(),
            config: shown_config,
            gateway: running.access(&gateway, resolved.settings.server.connections),
            records: InstanceRecords { access: access.clone(), lost_log_lines: logging::lost_lines, series },
            caller: "llama-warden".into(),
            instance: Arc::new(instance),
            upgrades,
            leaving: running.leaving.clone(),
            probe: Arc::new(resolved.settings.probe.clone()),
            stop: tasks.stop.clone(),
        };
        let page = PageState::new(admin.clone());
        let door = SignInGuard::new(page.stopped_by(tasks.retiring.clone()));
        let gateway = gateway.with_page(Arc::new(door)).accepting_from(begun);
        let inquiry = SelfTest::new(gateway.inward(), admin.clone());
        let handle = AdminHandle { config, pulse: listeners.pulse() };
        let own = Self {
            resolved,
            addresses,
            fleet,
            gateway: running,
            admin: handle,
            access,
            tasks,
            claim,
            sockets,
            orders: Some(orders),
            nursery,
            inquiry,
        };
        own.serve_probes(probe, &admin);
        own.tasks.spawn_once(&own.tasks.tracker, listeners.serve(admin, Arc::new(page)).boxed());
        own.serve_gateway(gateway, metrics, tracer);
        Ok(own)
    }

    fn serve_probes(&self, probe: ProbeListeners, admin: &AdminState) {
        let tasks = &self.tasks;
        let board =
            Arc::new(ProbeBoard::new(self.resolved.settings.probe.clone(), self.gateway.gauges.clone()));
        if self.addresses.probe.is_some() || self.addresses.agent.is_some() {
            tasks.tracker.spawn(keeper::keep_board(board.clone(), admin.clone(), tasks.stop.clone()));
            let checks = self.pulse_checks();
            tasks.tracker.spawn(keeper::watch_loops(board.clone(), checks, tasks.retiring.clone()));
        }
        let until = tasks.stop.clone();
        let probing = async move {
            if let Err(failure) = probe.serve(board, until) {
                tracing::error!("probes are not answered: {}", failure.lines().join("; "));
            }
        };
        tasks.spawn_once(&tasks.tracker, probing.boxed());
    }

    fn serve_gateway(
        &self,
        gateway: BoundGateway,
        metrics: Arc<MetricsRegistry>,
        tracer: Option<RequestTracer>,
    ) {
        let running = &self.gateway;
        let access = self.access.clone();
        let observer = RequestObserver { metrics, access, fleet: self.fleet.clone(), tracer };
        let serving = gateway.serve(self.fleet.clone(), Arc::new(observer), running.ends.clone());
        if let Some(tls) = running.tls.clone() {
            let server = &self.resolved.settings.server;
            self.tasks.tracker.spawn(certificate::watch_certificate(
                tls,
                running.gauges.clone(),
                server.tls_check,
                server.tls_warn,
                self.tasks.stop.clone(),
            ));
        }
        let done = running.done.clone().drop_guard();
        self.tasks.tracker.spawn(async move {
            let _done = done;
            serving.await;
        });
    }

    pub(crate) fn addresses(&self) -> &InstanceAddresses {
        &self.addresses
    }

    /// The public address, with the port that was bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.addresses.public[0]
    }

    pub(crate) fn scheme(&self) -> &'static str {
        if self.gateway.tls.is_some() { "https" } else { "http" }
    }

    /// Announces the end of the program to load balancers. Returns how long requests are still accepted.
    pub(crate) fn announce_stop(&self) -> Duration {
        self.gateway.leaving.end(self.resolved.settings.probe.drain_delay)
    }

    /// Reports the state to the service manager and feeds its watchdog. `signals`: checks the signal loop.
    pub(crate) fn attend_manager(&self, manager: &Arc<ServiceManager>, signals: PulseSender) {
        let tasks = &self.tasks;
        let gauges = self.gateway.gauges.clone();
        tasks.tracker.spawn(manager.clone().report_status(self.fleet.clone(), gauges, tasks.stop.clone()));
        let checks = self.pulse_checks();
        let all = move || {
            let mut asked = vec![("the signal loop".to_owned(), signals.ask())];
            asked.extend(checks());
            asked
        };
        tasks.tracker.spawn(manager.clone().feed_watchdog(all, tasks.retiring.clone()));
    }

    /// Returns a function that checks whether the loops that a request depends on respond.
    fn pulse_checks(&self) -> impl Fn() -> LoopAnswers + Send + 'static + use<> {
        let pulse = self.gateway.pulse.clone();
        let admin = self.admin.pulse.clone();
        let fleet = self.fleet.clone();
        move || {
            let mut asked: LoopAnswers = pulse.ask().into_iter().collect();
            asked.push(("the admin listener".to_owned(), admin.ask()));
            asked
                .extend(fleet.check_loader().map(|answer| ("the task that loads models".to_owned(), answer)));
            let models = fleet.check_tasks().into_iter();
            asked.extend(models.map(|(name, answer)| (format!("the task of model `{name}`"), answer)));
            asked
        }
    }

    pub(crate) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    pub(crate) fn ledger(&self) -> PathBuf {
        self.fleet.ledger_path().to_owned()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.gateway.gauges.in_flight.load(Ordering::Relaxed)
    }

    /// Resolves if the gateway ends unexpectedly, so that nothing can be served.
    pub(crate) async fn wait_gateway_failure(&self) -> CommandError {
        self.gateway.done.cancelled().await;
        CommandError::failed("the listener ended unexpectedly")
    }

    /// Reopens the access log on its own thread, because a disk may hang. The file may have been renamed.
    pub(crate) fn reopen_logs(&self) -> oneshot::Receiver<()> {
        let (done, opened) = oneshot::channel();
        let access = self.access.clone();
        let reopen = move || {
            access.reopen();
            // The receiver may have gone.
            let _left = done.send(());
        };
        if let Err(error) = run_detached(WorkKind::Configuration, reopen) {
            tracing::error!(%error, "the access log was not opened again: lines still go into the old file");
        }
        opened
    }

    /// Applies a new configuration, except for changes that need a restart.
    pub(crate) async fn reload(
        &mut self,
        new: ResolvedConfig,
        machine: &HostMachine,
    ) -> Result<(), CommandError> {
        let kept_back = needs_restart(&self.resolved, &new);
        for section in &kept_back {
            tracing::warn!(
                target: "config",
                "[{section}] has changed: that takes effect at the next start of llama-warden"
            );
        }
        let mut fleet = new.fleet.clone();
        fleet.runtime_dir.clone_from(&self.resolved.fleet.runtime_dir);
        fleet.state_dir.clone_from(&self.resolved.fleet.state_dir);
        let before = self.admin.config.borrow().configuration.as_ref().map(|kept| Arc::clone(&kept.loaded));
        let changes = before.zip(new.written.as_ref()).map(|(old, new)| compare_loaded(&old, new));
        let ConfigChanges { keys, models } = changes.unwrap_or_default();
        let known = ApplyReport {
            changed: keys,
            updated: models.into_iter().map(ModelName::new).collect(),
            needs_restart: kept_back.iter().map(|section| format!("[{section}]")).collect(),
            ..ApplyReport::default()
        };
        let report = self.fleet.apply_with(fleet.clone(), known).await?;
        for setting in report.needs_restart.iter().filter(|setting| !setting.starts_with('[')) {
            tracing::warn!(target: "config", "{setting}: that takes effect at the next start of llama-warden");
        }
        let tasks = &self.tasks;
        if let Some(job) = measure::MeasureJob::new(&new, self.nursery.clone()) {
            tasks.tracker.spawn(job.run(self.fleet.clone(), tasks.stop.clone()));
        }
        self.admin.config.send_replace(admin_config(&new, machine, kept_back));
        self.gateway.control.update(gateway_config(&new));
        if let Some(tls) = self.gateway.tls.clone() {
            tasks.tracker.spawn(async move { certificate::reload_certificate(&tls).await });
        }
        self.resolved.fleet = fleet;
        self.resolved.dirs.models.clone_from(&new.dirs.models);
        Ok(())
    }

    /// Takes the receiver of orders to upgrade; `None` after the first call.
    pub(super) fn orders(&mut self) -> Option<mpsc::Receiver<UpgradeOrder>> {
        self.orders.take()
    }

    /// Interval of updates of llama-server; zero: never.
    pub(crate) const fn update_interval(&self) -> Duration {
        self.resolved.settings.update.every
    }

    pub(crate) fn folders(&self) -> &[PathBuf] {
        &self.resolved.dirs.models
    }

    /// Stops accepting, lets running requests finish up to the deadline, and stops the children.
    pub(crate) async fn stop(self, deadline: Duration) {
        self.sockets.forget();
        self.gateway.ends.stop.cancel();
        // The fleet waits for leases; the gateway's last bytes to clients get the same time.
        let gateway = tokio::time::timeout(deadline, self.gateway.done.cancelled());
        let _ = tokio::join!(self.stop_fleet(deadline), gateway);
        let tasks = &self.tasks;
        tasks.stop.cancel();
        tasks.tracker.close();
        // The token ends admin answers and watchers; a client that does not read must not delay the exit.
        tasks.books.tasks.close();
        let all = async { tokio::join!(tasks.tracker.wait(), tasks.books.tasks.wait()) };
        let ended = tokio::time::timeout(self.resolved.settings.upstream.connect_timeout, all);
        let _ = tokio::join!(ended, tasks.exporting.end());
        tasks.books.finish().await;
        self.access.flush();
        self.claim.remove().await;
    }

    /// Stops the fleet, after a wait in which requests on their way are still admitted.
    async fn stop_fleet(&self, deadline: Duration) {
        let grace = self.resolved.settings.server.stopped_keep_alive.min(deadline);
        // Wait for requests on their way to our predecessor, too, because they use our processes.
        let ended = async {
            self.gateway.done.cancelled().await;
            self.fleet.handover().predecessors_ended().await;
        };
        let _ = tokio::time::timeout(grace, ended).await;
        // The processes are killed after their grace; one that is left is a bug, and must not delay the exit.
        let stops = self.resolved.fleet.models.iter().map(|model| model.lifecycle.stop_grace);
        let grace_of_all = stops.max().unwrap_or_default().saturating_mul(2);
        let limit = grace_of_all.saturating_add(deadline).saturating_add(STOP_MARGIN);
        let left = deadline.saturating_sub(grace);
        if tokio::time::timeout(limit, self.fleet.shutdown(left)).await.is_err() {
            tracing::error!(?limit, "not all models have ended in time: ending without waiting for them");
        }
    }
}

fn instance_info(
    resolved: &ResolvedConfig,
    machine: &HostMachine,
    addresses: &InstanceAddresses,
    fleet: &Fleet,
) -> InstanceInfo {
    InstanceInfo {
        pid: machine.pid,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        address: addresses.public[0].to_string(),
        admin_socket: addresses.admin_socket.to_string_lossy().into_owned(),
        started_at: clock::now_text(),
        ledger: fleet.ledger_path().to_string_lossy().into_owned(),
        data_dir: resolved.dirs.data.to_string_lossy().into_owned(),
        memory_anon: None,
    }
}

/// `pending`: sections that take effect at the next start.
fn admin_config(resolved: &ResolvedConfig, machine: &HostMachine, pending: Vec<&'static str>) -> AdminConfig {
    let models = &resolved.fleet.models;
    let written = resolved.written.clone();
    AdminConfig {
        budgets: budgets_by_model(models),
        servers: resolved.servers(machine),
        binaries: next_binaries(models),
        bound: resolved.bound_models(),
        tries: CanarySettings {
            data: resolved.dirs.data.clone(),
            cache: resolved.dirs.cache.clone(),
            version_timeout: resolved.settings.child.version_timeout,
            numbers: resolved.fleet.canary,
        },
        plans: planned_needs(models),
        configuration: written.map(|loaded| DisplayedConfig {
            loaded,
            machine: Arc::new(machine.clone()),
            pending,
        }),
    }
}

/// The exporter of spans, if there is one: after all else has ended, it gets a short time to finish.
struct ExporterTask {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl ExporterTask {
    fn start(exporter: Option<SpanExporter>) -> Self {
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        if let Some(exporter) = exporter {
            tasks.spawn(exporter.run(stop.clone()));
        }
        Self { tasks, stop }
    }

    /// Stops the exporter, which ends in time by itself and counts the spans that it could not send.
    async fn end(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
