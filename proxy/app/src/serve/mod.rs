//! `serve`: everything wired together, from the first check to the last child reaped.
//!
//! ```text
//!   main thread      Nursery::run: forks, and so must live as long as the children
//!   control threads  check -> claim directories -> bind port -> fleet -> admin -> "listening on" -> signals
//!   gateway threads  clients' connections, one runtime each (`warden_gateway`)
//!
//!   TERM, INT        probes say so, for `probe.drain_delay` -> stop accepting -> requests end, up to the deadline -> children stop -> exit 0
//!   a second one     exit 1 at once; the children die with the main thread (not within a second: see `signals`)
//!   HUP              read the configuration again; what is wrong keeps the old one. The end of our terminal: as TERM
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use warden_supervisor::nursery::{self, NurseryHandle};

use crate::cli::ConfigArgs;
use crate::config::machine::Machine;
use crate::config::needs;
use crate::config::problem::{Place, Problem};
use crate::config::resolve::store;
use crate::config::resolve::{Resolved, resolve};
use crate::config::source::layers::FlagSetting;
use crate::exit::Failure;
use crate::{logging, out};

mod certificate;
mod describe;
mod first_start;
mod folders;
pub(crate) mod leaving;
mod live;
mod measure;
mod observe;
mod reload;
mod renewing;
mod server;
mod signals;

pub(crate) use describe::describe;
use folders::Folders;
use renewing::Renewing;
pub(crate) use server::Server;
use signals::Asked;
pub(crate) use signals::Signals;

/// How to read the configuration, now and at every reload.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// File and `--set`.
    pub(crate) config: ConfigArgs,
    pub(crate) flags: Vec<FlagSetting>,
    /// Drop-in: the one model answers to every name.
    pub(crate) any_name: bool,
}

impl Plan {
    /// Reads and resolves it all, and tries the binaries.
    pub(crate) async fn resolve(&self, machine: &Machine) -> Result<Resolved, Failure> {
        self.resolve_with(machine, |_| Ok(())).await
    }

    /// The same; `change` has the last word before the binaries are tried.
    pub(crate) async fn resolve_with(
        &self,
        machine: &Machine,
        change: impl FnOnce(&mut Resolved) -> Result<(), Failure> + Send,
    ) -> Result<Resolved, Failure> {
        let mut resolved = self.as_configured(machine)?;
        change(&mut resolved)?;
        store::fill(&mut resolved, machine).await?;
        needs::fill(&mut resolved, machine);
        Ok(resolved)
    }

    /// What is configured: no binary is looked for, and none tried.
    pub(crate) fn as_configured(&self, machine: &Machine) -> Result<Resolved, Failure> {
        let loaded = self.config.load(machine, self.flags.clone())?;
        if loaded.models.is_empty() && loaded.folders.is_empty() && loaded.settings.remotes.is_empty() {
            let place = self
                .config
                .config
                .as_ref()
                .map_or(Place::Nowhere, |path| Place::File { path: path.clone(), line: 0 });
            let problem = Problem::new(place, "no model is configured");
            let hint = "add a section like `[models.\"name\"]` with `model = \"file.gguf\"`, or use `llama-warden serve -- -m file.gguf`";
            return Err(Failure::Config(problem.hint(hint).into()));
        }
        let mut resolved = resolve(&loaded, machine, self.any_name)?;
        resolved.written = Some(Arc::new(loaded));
        Ok(resolved)
    }
}

/// Serves until told to end. Call it on the main thread.
pub(crate) fn run(plan: Plan) -> Result<(), Failure> {
    with_nursery(|nursery| serve(plan, nursery))
}

/// Clients are served by threads of the gateway's own. Of these here, one that is busy for a moment must not hold up
/// everything else.
const CONTROL_THREADS: usize = 2;

/// Gives the main thread to the nursery and the work to other threads, until the work is done.
pub(crate) fn with_nursery<F, W>(work: F) -> Result<(), Failure>
where
    F: FnOnce(NurseryHandle) -> W + Send + 'static,
    W: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))?;
    let (nursery, handle) = nursery::channel();
    let stop = StopOnDrop(handle.clone());
    let work = runtime.spawn(async move {
        let _stop = stop;
        work(handle).await
    });
    nursery.run();
    let done = runtime.block_on(work);
    // Whatever still runs was told to end and did not: it must not hold up the exit.
    runtime.shutdown_background();
    done.unwrap_or_else(|_| Err(Failure::failed("llama-warden ended because of the internal error above")))
}

/// However the work ends, the main thread must go on to the exit.
struct StopOnDrop(NurseryHandle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

async fn serve(plan: Plan, nursery: NurseryHandle) -> Result<(), Failure> {
    // Before anything is started, so that no signal finds us half-way with the default action.
    let mut signals = Signals::new()?;
    let machine = Machine::read();
    let resolved = tokio::select! {
        resolved = plan.resolve(&machine) => resolved?,
        () = signals.end() => return Ok(()),
    };
    logging::init(&resolved.log, resolved.fleet.any_name)?;
    raise_file_limit();
    warn(&resolved.warnings);
    let looks = resolved.child.models_look;
    let mut folders = Folders::new(resolved.dirs.models.clone(), looks).await;
    let deadline = resolved.server.shutdown_deadline;
    let mut renewing = Renewing::new(resolved.update.every, &resolved.dirs.state, &plan);
    let drop_in = resolved.fleet.any_name;
    let mut server = Box::pin(Server::start(resolved, &machine, nursery)).await?;
    let views = server.fleet().subscribe();
    // Whoever started us may have closed our output: that is no reason not to serve.
    for address in std::iter::once(server.address()).chain(server.others().iter().copied()) {
        drop(out::line(&format!("listening on {}://{address}", server.scheme())));
    }
    drop(out::line(&format!("admin socket {}", server.admin_socket().display())));
    if let Some(address) = server.admin_address() {
        drop(out::line(&format!("admin address http://{address}")));
    }
    for (what, address) in
        [("probe address http://", server.probes().0), ("agent address ", server.probes().1)]
    {
        if let Some(address) = address {
            drop(out::line(&format!("{what}{address}")));
        }
    }
    let first =
        async { if drop_in { first_start::failed(views).await } else { std::future::pending().await } };
    tokio::pin!(first);
    loop {
        tokio::select! {
            problem = &mut first => {
                server.stop(Duration::ZERO).await;
                return Err(problem);
            }
            asked = signals.next() => match asked {
                Asked::End => break,
                Asked::Reload => {
                    folders.set(&Box::pin(reload(&plan, &machine, &mut server)).await);
                    renewing.set(server.renews_every());
                }
            },
            () = renewing.go_on() => {}
            () = folders.changed() => {
                tracing::info!("models have come or gone in a folder: the configuration is read again");
                folders.set(&Box::pin(reload(&plan, &machine, &mut server)).await);
            }
            problem = server.ended() => return Err(problem),
        }
    }
    renewing.leave();
    Box::pin(stop(server, deadline, &mut signals)).await?;
    tokio::select! {
        () = renewing.ended() => {}
        () = signals.end() => {}
    }
    Ok(())
}

async fn stop(server: Server, deadline: Duration, signals: &mut Signals) -> Result<(), Failure> {
    let delay = server.leave();
    if !delay.is_zero() {
        tracing::info!(?delay, "leaving: balancers are told; requests are still taken");
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            problem = server.ended() => return Err(problem),
            () = signals.end() => return Err(Failure::failed("ended at once by a second signal")),
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
        () = signals.end() => Err(Failure::failed("ended at once by a second signal")),
    }
}

/// Returns the folders of models that there are now.
async fn reload(plan: &Plan, machine: &Machine, server: &mut Server) -> Vec<PathBuf> {
    server.reopen_logs();
    match plan.resolve(machine).await {
        Ok(resolved) => {
            warn(&resolved.warnings);
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
    server.folders().to_vec()
}

/// Every client takes a file, and often a second one to its backend: the soft limit of 1024 that shells give is for
/// programs that use select(2), and we do not.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files");
    }
}

fn warn(warnings: &[Problem]) {
    for warning in warnings {
        let hint = warning.hint.as_deref().unwrap_or_default();
        tracing::warn!(target: "config", hint, "{warning}");
    }
}
