//! A running instance: gateway, fleet and admin, started in the order in which failures are cheapest to
//! report.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_gateway::{
    Gateway, GatewayConfig, GatewayControl, GatewayError, GatewayGauges, GatewayPulse, StopTokens, TlsState,
};
use warden_policies::ModelName;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{ApplyReport, Fleet, WorkKind, run_detached};

use super::certificate;
use super::leaving::LeaveControl;
use super::live::gateway_config;
use super::manager::{ActivatedSockets, LoopAnswers, ServiceManager};
use super::measure;
use super::observe::{RequestObserver, log_events};
use super::reload::needs_restart;
use super::upgrade::inquiry::SelfTest;
use super::upgrade::new::{InheritedAdmin, InheritedSockets, ReceivedHandover};
use super::upgrade::order::{UpgradeOrder, UpgradeOrders};
use crate::access_log::AccessLog;
use crate::admin::answer::{AdminConfig, AdminState, InstanceInfo, budgets_by_model, next_binaries};
use crate::admin::canary::CanarySettings;
use crate::admin::instance::InstanceDirs;
use crate::admin::metrics::MetricsRegistry;
use crate::admin::page::door::SignInGuard;
use crate::admin::page::holds::planned_needs;
use crate::admin::server::{GivenSockets, PulseSender, RestoredSocket, bind_listeners, inherit_listeners};
use crate::clock;
use crate::config::changes::{ConfigChanges, compare_loaded};
use crate::config::machine::HostMachine;
use crate::config::resolve::ResolvedConfig;
use crate::config::show::DisplayedConfig;
use crate::events_file::EventsFile;
use crate::exit::CommandError;
use crate::otel::{RequestTracer, SpanExporter};
use crate::probe::board::ProbeBoard;
use crate::probe::{keeper, listen};
use crate::request_recorder::RecorderSet;
use crate::series;

mod succession;

use succession::{RecordingTasks, SocketCopies};

/// A running instance.
pub(crate) struct RunningInstance {
    resolved: ResolvedConfig,
    address: SocketAddr,
    /// Addresses of all hosts but the first.
    other_addresses: Vec<SocketAddr>,
    admin_address: Option<SocketAddr>,
    /// Addresses of the probe listener and of the `HAProxy` agent.
    probes: (Option<SocketAddr>, Option<SocketAddr>),
    leaving: Arc<LeaveControl>,
    fleet: Fleet,
    gauges: Arc<GatewayGauges>,
    gateway: GatewayControl,
    access: AccessLog,
    recorders: RecorderSet,
    tls: Option<Arc<TlsState>>,
    told: watch::Sender<AdminConfig>,
    /// Tokens that end the gateway: no new connections, running requests continue.
    ends: StopTokens,
    /// Cancelled when the program ends, and when a successor takes over.
    retiring: CancellationToken,
    gateway_done: CancellationToken,
    /// Ends the admin interface and watchers.
    stop: CancellationToken,
    tasks: TaskTracker,
    /// Tasks that record the fleet, and the token that ends them.
    books: RecordingTasks,
    exporting: ExporterTask,
    claim: InstanceDirs,
    /// Duplicates of the sockets for a successor; empty if no upgrade is possible any more, or it has taken
    /// place.
    copies: Mutex<SocketCopies>,
    admin_given: bool,
    /// Duplicate of the admin socket, if the socket had to be created again.
    restored_admin_socket: RestoredSocket,
    /// Cancelled when the successor has the admin sockets.
    admin_handed_over: CancellationToken,
    /// Orders to upgrade.
    orders: Option<mpsc::Receiver<UpgradeOrder>>,
    /// Path of the admin socket for programs.
    admin_socket: PathBuf,
    /// Asks the gateway's loops whether they are responsive.
    pulse: GatewayPulse,
    admin_pulse: PulseSender,
    /// Starts processes outside of the fleet.
    nursery: NurseryHandle,
    inquiry: SelfTest,
}

impl RunningInstance {
    /// Claims the directories, binds the port or takes the given sockets, starts the fleet, opens the admin
    /// routes.
    pub(crate) async fn start(
        resolved: ResolvedConfig,
        machine: &HostMachine,
        nursery: NurseryHandle,
        sockets: ActivatedSockets,
    ) -> Result<Self, CommandError> {
        Box::pin(Self::start_after(resolved, machine, nursery, sockets, None)).await
    }

    /// Like [`Self::start`], after a predecessor. What the predecessor hands over is not changed before the
    /// predecessor has given it up.
    pub(super) async fn start_after(
        resolved: ResolvedConfig,
        machine: &HostMachine,
        nursery: NurseryHandle,
        given: ActivatedSockets,
        inheritance: Option<ReceivedHandover>,
    ) -> Result<Self, CommandError> {
        let (begun, mut claim, left, leaves, will) = if let Some(inheritance) = inheritance {
            let ReceivedHandover { begun, lock, sockets, is_leaving: leaves, will } = inheritance;
            (begun, InstanceDirs::inherit(&resolved.dirs, lock), Some(sockets), leaves, Some(will))
        } else {
            let begun = CancellationToken::new();
            begun.cancel();
            (begun, InstanceDirs::take(&resolved.dirs)?, None, false, None)
        };
        let (public, admin_sockets, left) = if let Some(InheritedSockets { public, admin, probes }) = left {
            (Some(public), Some(admin), probes)
        } else {
            (None, None, Vec::new())
        };
        if !given.is_empty() {
            tracing::info!("serving on sockets that the service manager has opened");
        }
        let access = AccessLog::start(resolved.access_log.as_deref(), &resolved.settings.log)?;
        let mut recorders = RecorderSet::default();
        recorders.open(&resolved)?;
        let config = GatewayConfig::new(&resolved.settings.server, &resolved.settings.upstream);
        let config = match &resolved.collector {
            Some(collector) => config.with_traces(collector.numbers.ratio),
            None => config,
        };
        let gateway = match public {
            Some(public) => Gateway::inherit(config, public),
            None => Gateway::bind_or_adopt(config, given.public).await,
        };
        let gateway = gateway.map_err(|error| gateway_failure(&error))?;
        let public = gateway.sockets().map_err(|error| socket_failure(&error))?;
        let address = gateway.local_addr();
        let others = gateway.local_addrs()[1..].to_vec();
        let gauges = gateway.gauges();
        let (control, requests) = (gateway.control(), gateway.requests());
        let (tls, pulse) = (gateway.tls(), gateway.pulse());
        control.update(gateway_config(&resolved, &recorders));
        let pause = resolved.settings.server.accept_pause;
        let listeners = if let Some(InheritedAdmin { socket, address, from_manager: given }) = admin_sockets {
            inherit_listeners(socket, address, given, pause).map_err(|error| socket_failure(&error))?
        } else {
            let given = GivenSockets { unix: given.admin, tcp: given.admin_tcp };
            bind_listeners(&resolved.addresses.admin_socket, resolved.addresses.admin, given, pause).await?
        };
        let admin_given = listeners.given();
        let (operators, admin_stays) =
            (listeners.sockets().map_err(|error| socket_failure(&error))?, listeners.handed_over());
        let (admin_socket, admin_pulse) = (listeners.path().to_owned(), listeners.pulse());
        let admin_remade = listeners.restored();
        let admin_address = listeners.address();
        let probe = listen::ProbeListeners::bind(resolved.addresses.probe, resolved.addresses.agent, left)?;
        let probe_sockets = probe.sockets().map_err(|error| socket_failure(&error))?;
        let probes = probe.addresses();
        let unmeasured = measure::MeasureJob::new(&resolved, nursery.clone());
        let fleet = match will {
            Some(will) => Fleet::start_after(resolved.fleet.clone(), nursery.clone(), will).await?,
            None => Fleet::start(resolved.fleet.clone(), nursery.clone()).await?,
        };
        let metrics = Arc::new(MetricsRegistry::new());
        let (stop, ends, gateway_done) =
            (CancellationToken::new(), StopTokens::default(), CancellationToken::new());
        let instance = InstanceInfo {
            pid: machine.pid,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            address: address.to_string(),
            admin_socket: admin_socket.to_string_lossy().into_owned(),
            started_at: clock::now_text(),
            ledger: fleet.ledger_path().to_string_lossy().into_owned(),
            data_dir: resolved.dirs.data.to_string_lossy().into_owned(),
            memory_anon: None,
        };
        let tasks = TaskTracker::new();
        let places = machine.registration_dirs();
        if let Some(again) = claim.announce(&resolved.dirs.state, places.first(), &instance)? {
            tasks.spawn(stop.clone().run_until_cancelled_owned(again));
        }
        // Tasks that only one program at a time may run begin after the takeover.
        let once = |task: BoxFuture<'static, ()>| {
            let (begun, stop) = (begun.clone(), stop.clone());
            async move {
                tokio::select! {
                    () = begun.cancelled() => task.await,
                    () = stop.cancelled() => {}
                }
            }
        };
        let now = AdminConfig {
            budgets: budgets_by_model(&resolved.fleet.models),
            servers: resolved.servers(machine),
            binaries: next_binaries(&resolved.fleet.models),
            bound: resolved.bound_models(),
            tries: canary_settings(&resolved),
            plans: planned_needs(&resolved.fleet.models),
            configuration: shown_configuration(&resolved, machine, Vec::new()),
        };
        let (tell, told) = watch::channel(now);
        let file = EventsFile::new(&resolved.dirs.state, machine.pid);
        let kept = series::SeriesStore::new(&resolved.settings.series, &resolved.dirs.state);
        let books = RecordingTasks {
            tasks: TaskTracker::new(),
            closed: stop.child_token(),
            series: kept.clone(),
            state: fleet.state_writer().clone(),
        };
        books.tasks.spawn(log_events(
            fleet.clone(),
            metrics.clone(),
            told.clone(),
            file,
            books.closed.clone(),
        ));
        if let Some(job) = unmeasured {
            tasks.spawn(once(job.run(fleet.clone(), stop.clone()).boxed()));
        }
        let recording = series::record_fleet(kept.clone(), fleet.clone(), books.closed.clone());
        books.tasks.spawn(once(recording.boxed()));
        let (upgrades, orders) = UpgradeOrders::new();
        let leaving = Arc::new(LeaveControl::new(gauges.clone()));
        if leaves {
            leaving.begin();
        }
        let board =
            Arc::new(ProbeBoard::new(resolved.settings.probe.clone(), gauges.clone(), metrics.probe_pace()));
        // Viewers of the page on the public listener must not delay its end.
        let retiring = ends.stop.child_token();
        let admin = AdminState {
            leaving: leaving.clone(),
            probe: Arc::new(resolved.settings.probe.clone()),
            connections: resolved.settings.server.connections,
            fleet: fleet.clone(),
            metrics: metrics.clone(),
            config: told,
            gauges: gauges.clone(),
            gateway: control.clone(),
            access: access.clone(),
            requests,
            caller: "llama-warden".into(),
            instance: Arc::new(instance),
            page: Arc::default(),
            captures: recorders.captures(),
            series: kept,
            upgrades,
            stop: stop.clone(),
        };
        let door = SignInGuard::new(AdminState { stop: retiring.clone(), ..admin.clone() });
        let gateway = gateway.with_page(Arc::new(door)).accepting_from(begun.clone());
        let inquiry = SelfTest::new(gateway.inward(), admin.clone());
        if probes.0.is_some() || probes.1.is_some() {
            tasks.spawn(keeper::keep_board(board.clone(), admin.clone(), stop.clone()));
            let all = pulse_checks(&pulse, &admin_pulse, &fleet);
            tasks.spawn(keeper::watch_loops(board.clone(), all, retiring.clone()));
        }
        let until = stop.clone();
        let probing = async move {
            if let Err(failure) = probe.serve(board, until) {
                tracing::error!("probes are not answered: {}", failure.lines().join("; "));
            }
        };
        tasks.spawn(once(probing.boxed()));
        tasks.spawn(once(listeners.serve(admin).boxed()));
        let (tracer, exporter) =
            resolved.collector.clone().map(|to| RequestTracer::new(to, metrics.clone())).unzip();
        let exporting = ExporterTask::start(exporter);
        let watcher = RequestObserver { metrics, access: access.clone(), fleet: fleet.clone(), tracer };
        let served = gateway.serve(fleet.clone(), Arc::new(watcher), ends.clone());
        if let Some(tls) = tls.clone() {
            let (every, warn) = (resolved.settings.server.tls_check, resolved.settings.server.tls_warn);
            tasks.spawn(certificate::watch_certificate(tls, gauges.clone(), every, warn, stop.clone()));
        }
        let done = gateway_done.clone().drop_guard();
        tasks.spawn(async move {
            let _done = done;
            served.await;
        });
        Ok(Self {
            resolved,
            address,
            other_addresses: others,
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
            ends,
            retiring,
            gateway_done,
            stop,
            tasks,
            books,
            exporting,
            claim,
            copies: Mutex::new(SocketCopies { public, operators, probes: probe_sockets }),
            admin_given,
            restored_admin_socket: admin_remade,
            admin_handed_over: admin_stays,
            orders: Some(orders),
            admin_socket,
            pulse,
            admin_pulse,
            nursery,
            inquiry,
        })
    }

    /// The public address, with the port that was bound.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Addresses of the second and further hosts.
    pub(crate) fn other_addresses(&self) -> &[SocketAddr] {
        &self.other_addresses
    }

    /// The URL scheme for clients.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }

    /// The TCP address of the admin routes, if there is one.
    pub(crate) fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Addresses of the probe listener and of the `HAProxy` agent, if there are any.
    pub(crate) const fn probes(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        self.probes
    }

    /// Announces the end of the program to load balancers. Returns how long requests are still accepted.
    pub(crate) fn announce_stop(&self) -> Duration {
        self.leaving.end(self.resolved.settings.probe.drain_delay)
    }

    pub(crate) fn admin_socket(&self) -> &Path {
        &self.admin_socket
    }

    /// Starts to report status and pulse to the service manager. `signals`: asks the loop that handles
    /// signals and orders.
    pub(crate) fn attend_manager(&self, manager: &Arc<ServiceManager>, signals: PulseSender) {
        let told = manager.clone().report_status(self.fleet.clone(), self.gauges.clone(), self.stop.clone());
        self.tasks.spawn(told);
        let all = pulse_checks(&self.pulse, &self.admin_pulse, &self.fleet);
        let all = move || {
            let hears = ("the signal loop".to_owned(), signals.ask());
            std::iter::once(hears).chain(all()).collect()
        };
        self.tasks.spawn(manager.clone().feed_watchdog(all, self.retiring.clone()));
    }

    pub(crate) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Path of the ledger.
    pub(crate) fn ledger(&self) -> PathBuf {
        self.fleet.ledger_path().to_owned()
    }

    /// Returns the number of requests between their head and the end of their answer.
    pub(crate) fn in_flight(&self) -> usize {
        self.gauges.in_flight.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Resolves if the gateway ends unexpectedly, so that nothing can be served.
    pub(crate) async fn wait_gateway_failure(&self) -> CommandError {
        self.gateway_done.cancelled().await;
        CommandError::failed("the listener ended unexpectedly")
    }

    /// Reopens the file of the access log, which may have been renamed: on its own thread, because its disk
    /// may hang.
    pub(crate) fn reopen_logs(&self) -> oneshot::Receiver<()> {
        let ((done, opened), access) = (oneshot::channel(), self.access.clone());
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
        // Open recorders first, because this may fail; then nothing of the new configuration is applied.
        self.recorders.open_while_serving(&new).await?;
        let kept_back = needs_restart(&self.resolved, &new);
        for section in &kept_back {
            tracing::warn!(target: "config", "[{section}] has changed: that takes effect at the next start of llama-warden");
        }
        let mut fleet = new.fleet.clone();
        fleet.runtime_dir.clone_from(&self.resolved.fleet.runtime_dir);
        fleet.state_dir.clone_from(&self.resolved.fleet.state_dir);
        let before = self.told.borrow().configuration.as_ref().map(|kept| Arc::clone(&kept.loaded));
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
        if let Some(job) = measure::MeasureJob::new(&new, self.nursery.clone()) {
            self.tasks.spawn(job.run(self.fleet.clone(), self.stop.clone()));
        }
        let servers = new.servers(machine);
        let binaries = next_binaries(&fleet.models);
        self.told.send_replace(AdminConfig {
            budgets: budgets_by_model(&fleet.models),
            servers,
            binaries,
            bound: new.bound_models(),
            tries: canary_settings(&new),
            plans: planned_needs(&fleet.models),
            configuration: shown_configuration(&new, machine, kept_back),
        });
        self.gateway.update(gateway_config(&new, &self.recorders));
        if let Some(tls) = self.tls.clone() {
            self.tasks.spawn(async move { certificate::reload_certificate(&tls).await });
        }
        self.resolved.fleet = fleet;
        self.resolved.dirs.models.clone_from(&new.dirs.models);
        Ok(())
    }

    /// The receiver of orders to upgrade. Only once.
    pub(super) fn orders(&mut self) -> Option<mpsc::Receiver<UpgradeOrder>> {
        self.orders.take()
    }

    /// Interval of updates of llama-server; zero: never.
    pub(crate) const fn update_interval(&self) -> Duration {
        self.resolved.settings.update.every
    }

    /// Folders of models.
    pub(crate) fn folders(&self) -> &[PathBuf] {
        &self.resolved.dirs.models
    }

    /// Stops accepting, lets running requests finish up to the deadline, and stops the children.
    pub(crate) async fn stop(self, deadline: Duration) {
        self.forget_sockets();
        self.ends.stop.cancel();
        // The fleet waits for leases; the gateway's last bytes to clients get the same time. Requests on
        // their way are admitted.
        let fleet = async {
            let grace = self.resolved.settings.server.stopped_keep_alive.min(deadline);
            // Also those on their way to our predecessor, which go to our processes.
            let ended = async {
                self.gateway_done.cancelled().await;
                self.fleet.handover().predecessors_ended().await;
            };
            let _ = tokio::time::timeout(grace, ended).await;
            // The processes are killed after their grace. A process that is left then is a bug of ours,
            // which must not delay the exit.
            let stops = self.resolved.fleet.models.iter().map(|model| model.lifecycle.stop_grace);
            let grace_of_all = stops.max().unwrap_or_default().saturating_mul(2);
            let limit = grace_of_all.saturating_add(deadline).saturating_add(STOP_MARGIN);
            let left = deadline.saturating_sub(grace);
            if tokio::time::timeout(limit, self.fleet.shutdown(left)).await.is_err() {
                tracing::error!(?limit, "not all models have ended in time: ending without waiting for them");
            }
        };
        let gateway = tokio::time::timeout(deadline, self.gateway_done.cancelled());
        let _ = tokio::join!(fleet, gateway);
        self.stop.cancel();
        self.tasks.close();
        // The token ends admin answers and watchers; a client that does not read must not delay us.
        self.books.tasks.close();
        let all = async { tokio::join!(self.tasks.wait(), self.books.tasks.wait()) };
        let tasks = tokio::time::timeout(self.resolved.settings.upstream.connect_timeout, all);
        let _ = tokio::join!(tasks, self.exporting.end());
        self.books.finish().await;
        self.access.flush();
        self.claim.remove().await;
    }
}

/// Margin beyond the longest end of the models.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// The configuration for the page.
fn shown_configuration(
    resolved: &ResolvedConfig,
    machine: &HostMachine,
    pending: Vec<&'static str>,
) -> Option<DisplayedConfig> {
    let loaded = resolved.written.clone()?;
    Some(DisplayedConfig { loaded, machine: Arc::new(machine.clone()), pending })
}

/// The exporter of spans, if there is one: it gets a short time of its own after all else has ended.
struct ExporterTask {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl ExporterTask {
    fn start(exporter: Option<SpanExporter>) -> Self {
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
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

/// Asks all loops that a request depends on.
fn pulse_checks(
    pulse: &GatewayPulse,
    admin: &PulseSender,
    fleet: &Fleet,
) -> impl Fn() -> LoopAnswers + Send + 'static {
    let (pulse, admin, fleet) = (pulse.clone(), admin.clone(), fleet.clone());
    move || {
        let (admin, models) = (("the admin listener".to_owned(), admin.ask()), fleet.check_tasks());
        let models = models.into_iter().map(|(name, answer)| (format!("the task of model `{name}`"), answer));
        let loader = fleet.check_loader().map(|answer| ("the task that loads models".to_owned(), answer));
        pulse.ask().into_iter().chain([admin]).chain(loader).chain(models).collect()
    }
}

fn canary_settings(resolved: &ResolvedConfig) -> CanarySettings {
    CanarySettings {
        data: resolved.dirs.data.clone(),
        cache: resolved.dirs.cache.clone(),
        version_timeout: resolved.settings.child.version_timeout,
        numbers: resolved.fleet.canary,
    }
}

fn socket_failure(error: &io::Error) -> CommandError {
    CommandError::failed(format!("cannot use or copy a listening socket: {error}"))
}

fn gateway_failure(error: &GatewayError) -> CommandError {
    CommandError::failed(error.to_string())
}
