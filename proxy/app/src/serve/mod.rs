//! `serve`: wires everything together, from the first check to the last reaped child.
//!
//! ```text
//!   main thread      Nursery::run: forks, and so must live as long as the children
//!   control threads  check -> claim directories -> bind port -> fleet -> admin -> "listening on" -> signals
//!   gateway threads  clients' connections, one runtime each (`warden_gateway`)
//!
//!   TERM, INT        probes report it for `probe.drain_delay` -> stop accepting -> requests end, up to the
//!                    deadline -> children stop -> exit 0
//!   a second one     exit 1 at once; the children die with the main thread (not within a second: `signals`)
//!   HUP              read the configuration again; an invalid one is ignored. Terminal closed: as TERM
//! ```

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use warden_admin::server::PulseSender;
use warden_admin::upgrade_order::{OrderReply, UpgradeOrder};
use warden_config::machine::HostMachine;
use warden_config::problem::ConfigProblem;
use warden_config::resolve::ResolvedConfig;
use warden_supervisor::nursery::{self, NurseryHandle};
use warden_supervisor::{Succession, set_root};

use crate::exit::CommandError;
use crate::{logging, out};

mod certificate;
mod first_start;
mod folders;
mod main_thread;
pub(crate) mod manager;
mod measure;
mod observe;
mod reading;
mod reload;
mod renewing;
mod server;
mod signals;
mod source;
pub(crate) mod upgrade;

use folders::FolderWatch;
pub(crate) use main_thread::with_nursery;
use main_thread::with_this_nursery;
pub(crate) use manager::ActivatedSockets;
use manager::ServiceManager;
use reading::{ConfigReader, ReadResult};
use renewing::UpdateSchedule;
pub(crate) use server::RunningInstance;
pub(crate) use signals::SignalHandlers;
use signals::{SignalRequest, second_signal_error};
pub(crate) use source::ConfigSource;
use upgrade::new::PredecessorLink;
use upgrade::old;
use upgrade::retired::RetiredProgram;
use upgrade::talk::InstancePlace;

/// Serves until a signal ends the program. Must be called on the main thread, before there is another thread.
pub(crate) fn run_serve(plan: ConfigSource) -> Result<(), CommandError> {
    upgrade::program::note_own_name();
    let (sockets, both, root, predecessor) = match Succession::from_environment() {
        None => (ActivatedSockets::take()?, nursery::nursery_channel(), None, None),
        Some(Succession { root, to_root, handover }) => {
            set_root(root);
            let both = nursery::root_nursery(to_root).map_err(|error| {
                CommandError::failed(format!("cannot listen to the first instance: {error}"))
            })?;
            (ActivatedSockets::default(), both, Some(root), Some(PredecessorLink::new(handover)))
        }
    };
    with_this_nursery(both, move |nursery| async move {
        let machine = HostMachine::read();
        // After upgrades, the service manager still knows the PID of the first program.
        let manager = Arc::new(ServiceManager::from_environment(&machine, root.unwrap_or(machine.pid)));
        let done = serve(plan, &machine, manager.clone(), sockets, nursery, predecessor.as_ref());
        let done = Box::pin(done).await;
        match (&done, &predecessor) {
            (Err(failure), None) => manager.report_failure(failure).await,
            // The predecessor continues and reports the failure; after `go` it ignores this message.
            (Err(failure), Some(predecessor)) => predecessor.report_failure(failure).await,
            (Ok(()), _) => {}
        }
        done
    })
}

async fn serve(
    plan: ConfigSource,
    machine: &HostMachine,
    manager: Arc<ServiceManager>,
    sockets: ActivatedSockets,
    nursery: NurseryHandle,
    predecessor: Option<&PredecessorLink>,
) -> Result<(), CommandError> {
    // Handle signals before anything is started, so that no signal ends the program half-way.
    let mut signals = SignalHandlers::new()?;
    let resolved = tokio::select! {
        resolved = plan.resolve(machine) => resolved?,
        () = signals.wait_end() => return Ok(()),
    };
    logging::start_logging(&resolved.settings.log, resolved.fleet.any_name)?;
    raise_file_limit();
    log_warnings(&resolved.warnings);
    let folders = FolderWatch::new(resolved.dirs.models.clone(), resolved.settings.child.models_look).await;
    let renewing = UpdateSchedule::new(resolved.settings.update.every, &resolved.dirs.state, &plan);
    let drop_in = resolved.fleet.any_name;
    let deadline = resolved.settings.server.shutdown_deadline;
    let graces = resolved.fleet.models.iter().map(|model| model.lifecycle.stop_grace);
    let longest = deadline
        .saturating_add(resolved.settings.probe.drain_delay)
        .saturating_add(graces.max().unwrap_or_default());
    let mut server = Box::pin(start_instance(resolved, machine, nursery, sockets, predecessor)).await?;
    let views = server.fleet().subscribe();
    let (turns, pulses) = PulseSender::new();
    server.attend_manager(&manager, turns);
    manager.report_ready().await;
    let mut control = ControlLoop {
        machine,
        manager: &manager,
        signals,
        folders,
        renewing,
        reading: ConfigReader::new(&plan, machine),
        pulses,
        orders: server.orders(),
    };
    let first = async {
        if drop_in { first_start::first_start_failure(views).await } else { std::future::pending().await }
    };
    tokio::pin!(first);
    loop {
        let order = match control.next_event(&mut server, first.as_mut()).await {
            ControlEvent::Order(order) => order,
            ControlEvent::End => break,
            ControlEvent::StartFailed(problem) => {
                server.stop(Duration::ZERO).await;
                return Err(problem);
            }
            ControlEvent::GatewayFailed(problem) => return Err(problem),
        };
        let upgraded = tokio::select! {
            upgraded = run_upgrade(&server, order, &mut control.signals) => upgraded,
            never = answer_pulses(&mut control.pulses) => match never {},
        };
        match upgraded {
            Ok(retired) => {
                let ControlLoop { mut signals, mut renewing, reading, .. } = control;
                renewing.ask_to_end();
                drop(reading);
                return Box::pin(retired.run_to_end(server, deadline, &mut signals)).await;
            }
            Err(old::UpgradeError::Cannot(_)) => {}
            Err(old::UpgradeError::Ends) => break,
        }
    }
    Box::pin(control.stop(server, deadline, longest)).await
}

async fn start_instance(
    resolved: ResolvedConfig,
    machine: &HostMachine,
    nursery: NurseryHandle,
    sockets: ActivatedSockets,
    predecessor: Option<&PredecessorLink>,
) -> Result<RunningInstance, CommandError> {
    let Some(predecessor) = predecessor else {
        let server = Box::pin(RunningInstance::start(resolved, machine, nursery, sockets)).await?;
        print_addresses(&server);
        return Ok(server);
    };
    let inheritance = predecessor.receive_handover(InstancePlace::from_configuration(&resolved)).await?;
    let begun = inheritance.begun.clone();
    let mut server =
        Box::pin(RunningInstance::start_after(resolved, machine, nursery, sockets, Some(inheritance)))
            .await?;
    let kept = predecessor.take_over(server.fleet(), &begun, server.check_answers()).await?;
    server.take_ownership();
    server.spawn_task(predecessor.clone().follow_requests(kept, server.fleet().clone()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "upgrade: this program serves from now on");
    Ok(server)
}

enum ControlEvent {
    Order(UpgradeOrder),
    End,
    /// The first start in drop-in mode failed.
    StartFailed(CommandError),
    GatewayFailed(CommandError),
}

/// Handles signals, orders and changed files while the program serves.
struct ControlLoop<'a> {
    machine: &'a HostMachine,
    manager: &'a ServiceManager,
    signals: SignalHandlers,
    folders: FolderWatch,
    renewing: UpdateSchedule,
    reading: ConfigReader,
    /// Receives pulse checks of this loop.
    pulses: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
    orders: Option<mpsc::Receiver<UpgradeOrder>>,
}

impl ControlLoop<'_> {
    /// Handles reloads and updates until another event occurs, and returns that event.
    async fn next_event(
        &mut self,
        server: &mut RunningInstance,
        mut first: Pin<&mut impl Future<Output = CommandError>>,
    ) -> ControlEvent {
        loop {
            tokio::select! {
                problem = first.as_mut() => return ControlEvent::StartFailed(problem),
                asked = self.signals.next() => match asked {
                    SignalRequest::End => return ControlEvent::End,
                    SignalRequest::Reload => self.start_reload(server).await,
                    SignalRequest::Upgrade => {
                        let caller = "a signal (USR2)".into();
                        let reply = OrderReply::discarded();
                        return ControlEvent::Order(UpgradeOrder { to: None, wait: None, caller, reply });
                    }
                },
                () = self.renewing.run_due() => {}
                () = self.folders.wait_changed() => {
                    tracing::info!(
                        "models in a folder were added or removed: the configuration is read again"
                    );
                    self.start_reload(server).await;
                }
                read = self.reading.read() => self.finish_reload(read, server).await,
                never = answer_pulses(&mut self.pulses) => match never {},
                problem = server.wait_gateway_failure() => return ControlEvent::GatewayFailed(problem),
                Some(order) = next_order(self.orders.as_mut()) => return ControlEvent::Order(order),
            }
        }
    }

    /// Starts to read the configuration. Log files are reopened at once.
    async fn start_reload(&mut self, server: &RunningInstance) {
        self.manager.report_reloading().await;
        self.reading.request_read(server.reopen_logs());
    }

    async fn finish_reload(&mut self, read: ReadResult, server: &mut RunningInstance) {
        match read {
            ReadResult::Done(read) => {
                Box::pin(apply_configuration(*read, self.machine, server)).await;
                self.folders.set_dirs(server.folders());
                self.renewing.set(server.update_interval());
            }
            ReadResult::Late(time) => {
                tracing::error!(
                    "reading the configuration again takes longer than {time:?}: does a disk hang? The old \
                     configuration stays in force until the new one is read"
                );
                self.manager.report_ready().await;
            }
        }
        if !self.reading.is_under_way() {
            self.manager.report_ready().await;
        }
    }

    /// Stops the instance, and waits for a running update. `longest`: time limit of the drain.
    async fn stop(
        self,
        server: RunningInstance,
        deadline: Duration,
        longest: Duration,
    ) -> Result<(), CommandError> {
        let Self { manager, mut signals, mut renewing, reading, mut pulses, .. } = self;
        renewing.ask_to_end();
        drop(reading);
        let telling = manager.report_stopping(server.in_flight(), longest);
        tokio::select! {
            done = Box::pin(stop_server(server, deadline, &mut signals, telling)) => done?,
            never = answer_pulses(&mut pulses) => match never {},
        }
        tokio::select! {
            () = renewing.wait_ended() => {}
            () = signals.wait_end() => {}
        }
        Ok(())
    }
}

async fn next_order(orders: Option<&mut mpsc::Receiver<UpgradeOrder>>) -> Option<UpgradeOrder> {
    match orders {
        Some(orders) => orders.recv().await,
        None => None,
    }
}

fn print_addresses(server: &RunningInstance) {
    let addresses = server.addresses();
    let scheme = server.scheme();
    let public = addresses.public.iter().map(|address| format!("listening on {scheme}://{address}"));
    let socket = format!("admin socket {}", addresses.admin_socket.display());
    let admin = addresses.admin.map(|address| format!("admin address http://{address}"));
    let probe = addresses.probe.map(|address| format!("probe address http://{address}"));
    let agent = addresses.agent.map(|address| format!("agent address {address}"));
    for line in public.chain([socket]).chain(admin).chain(probe).chain(agent) {
        // Ignore errors: standard output may be closed, which is no reason not to serve.
        drop(out::print_line(&line));
    }
}

/// Upgrades to another program. Returns the work left for this one; after a failure, nothing has changed.
async fn run_upgrade(
    server: &RunningInstance,
    order: UpgradeOrder,
    signals: &mut SignalHandlers,
) -> Result<RetiredProgram, old::UpgradeError> {
    let UpgradeOrder { to, wait, caller: by, reply } = order;
    server.fleet().log_operator_action(None, "upgrade", &by);
    let stays = match Box::pin(old::hand_over(server, to, wait, signals)).await {
        Ok((upgraded, retired)) => {
            reply.send(Ok(upgraded));
            return Ok(retired);
        }
        Err(stays) => stays,
    };
    tracing::error!("no upgrade, everything continues as before: {stays}");
    server.fleet().log_operator_action(None, &format!("upgrade, which failed: {stays}"), &by);
    reply.send(Err(stays.to_string()));
    Err(stays)
}

async fn stop_server(
    server: RunningInstance,
    deadline: Duration,
    signals: &mut SignalHandlers,
    telling: impl Future<Output = ()>,
) -> Result<(), CommandError> {
    tokio::pin!(telling);
    let delay = server.announce_stop();
    if !delay.is_zero() {
        tracing::info!(?delay, "draining: load balancers are notified; requests are still accepted");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            problem = server.wait_gateway_failure() => return Err(problem),
            () = signals.wait_end() => return Err(second_signal_error()),
            () = &mut telling => return Ok(()),
        }
    }
    tracing::info!(
        in_flight = server.in_flight(),
        ?deadline,
        "stopping: no new requests; running ones may end"
    );
    tokio::select! {
        () = server.stop(deadline) => {
            tracing::info!("stopped");
            Ok(())
        }
        () = signals.wait_end() => Err(second_signal_error()),
        // `telling` never resolves; it ends with the other branches.
        () = telling => Ok(()),
    }
}

/// Answers pulse checks while the loop waits for something else.
async fn answer_pulses(asked: &mut mpsc::UnboundedReceiver<oneshot::Sender<()>>) -> Infallible {
    while let Some(question) = asked.recv().await {
        // Sending fails if the asker has gone, which does not matter.
        let _left = question.send(());
    }
    std::future::pending().await
}

async fn apply_configuration(
    read: Result<ResolvedConfig, CommandError>,
    machine: &HostMachine,
    server: &mut RunningInstance,
) {
    match read {
        Ok(resolved) => {
            log_warnings(&resolved.warnings);
            if let Err(problem) = server.reload(resolved, machine).await {
                for line in problem.lines() {
                    tracing::error!("reload: {line}");
                }
            }
        }
        Err(problem) => {
            tracing::error!("the configuration was not reloaded; the old one stays");
            for line in problem.lines() {
                tracing::error!("reload: {line}");
            }
        }
    }
}

/// Raises the soft limit of open files. Each client needs a file, and often a second one for its backend. The
/// usual soft limit of 1024 is meant for programs that use select(2), which llama-warden does not.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files");
    }
}

fn log_warnings(warnings: &[ConfigProblem]) {
    for warning in warnings {
        let hint = warning.hint.as_deref().unwrap_or_default();
        tracing::warn!(target: "config", hint, "{warning}");
    }
}
