//! `status`, `restart`, `drain`, `reclaim`, `pin`, `logs`, `events`: commands to a running instance.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Args;
use reqwest::Method;
use warden_policies::reclaim::ReclaimOutcome;
use warden_policies::secrets;
use warden_supervisor::{FleetEvent, LedgerEntry, LogLine, ReclaimEntry};

use super::{ConfigArgs, block_on};
use crate::admin::answer::{AdminStatus, DrainReport};
use crate::admin::client::{AdminClient, find_instance};
use crate::config::machine::HostMachine;
use crate::config::source::layers::LoadedConfig;
use crate::event_text::describe_event;
use crate::exit::CommandError;
use crate::out;

use super::status::status_table;

#[derive(Clone, Debug, Args)]
pub(crate) struct InstanceArgs {
    /// Unix socket of the instance's admin routes. Default: the only running instance.
    #[arg(long, value_name = "PATH", env = "LLAMA_WARDEN_ADMIN_SOCKET")]
    admin_socket: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
}

impl InstanceArgs {
    /// Loads the configuration of `--config`.
    pub(super) fn load(&self, machine: &HostMachine) -> Result<LoadedConfig, CommandError> {
        self.config.load(machine, Vec::new())
    }

    /// Finds the instance: by its socket, else by the named configuration, else the only running one.
    pub(super) fn client(&self) -> Result<AdminClient, CommandError> {
        if let Some(socket) = &self.admin_socket {
            return Ok(AdminClient::new(socket.clone()));
        }
        let machine = HostMachine::read();
        let loaded = self.load(&machine)?;
        let named = loaded.settings.admin.socket.as_ref().map(|path| loaded.absolute(&machine, path));
        // Compare addresses only if the operator named the file: a default file does not select an instance.
        let server = &loaded.settings.server;
        let address = server.host.parse().ok().filter(|_| self.config.config.is_some());
        let address = address.map(|ip: IpAddr| SocketAddr::new(ip, server.port).to_string());
        find_instance(named, &loaded.dirs(&machine)?.state, &machine.registration_dirs(), address.as_deref())
    }
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Model name or alias.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    model: Option<String>,
    /// Drains the whole instance: probes and balancers are asked to send nothing more. New requests are
    /// still served, and no process ends.
    #[arg(long)]
    all: bool,
    /// Takes `--all` back.
    #[arg(long, requires = "all")]
    undo: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Model name or alias.
    model: String,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReclaimArgs {
    /// Model name or alias.
    model: String,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Model name or alias.
    model: String,
    /// Follows the log.
    #[arg(long, short)]
    follow: bool,
    /// Shows strings that look like keys or tokens, which are otherwise printed as `***`.
    #[arg(long)]
    reveal: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Follows the events.
    #[arg(long, short)]
    follow: bool,
    /// Prints JSON lines, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

pub(crate) fn status(args: &StatusArgs) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    if args.json {
        let status: serde_json::Value = block_on(client.json(Method::GET, &["status"]))??;
        return out::print_json(&status);
    }
    let status: AdminStatus = block_on(client.json(Method::GET, &["status"]))??;
    // Redact: the last log lines of a process may quote a key, and operators share this output.
    out::print_text(&secrets::redact_text(&status_table(&status)))
}

pub(crate) fn restart(args: &ModelArgs) -> Result<(), CommandError> {
    #[derive(serde::Deserialize)]
    struct EntriesAnswer {
        entries: Vec<LedgerEntry>,
    }
    let client = args.instance.client()?;
    let answer: EntriesAnswer = block_on(client.json(Method::POST, &["models", &args.model, "restart"]))??;
    for entry in answer.entries {
        let text = describe_event(&warden_supervisor::EventKind::RecycleDone { entry: Box::new(entry) });
        out::print_line(&format!("{}: {text}", args.model))?;
    }
    out::print_line(&format!("{}: restarted", args.model))
}

pub(crate) fn drain(args: &DrainArgs) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    let Some(model) = &args.model else { return drain_all(&client, args.undo) };
    block_on(client.json::<serde::de::IgnoredAny>(Method::POST, &["models", model, "drain"]))??;
    out::print_line(&format!("{model}: drained and stopped; the next request starts it again"))
}

fn drain_all(client: &AdminClient, undo: bool) -> Result<(), CommandError> {
    let wishes: &[(&str, String)] = if undo { &[("undo", "1".to_owned())] } else { &[] };
    let left: DrainReport = block_on(client.json_with(Method::POST, &["drain"], wishes))??;
    out::print_line(&if left.draining {
        format!(
            "load balancers are told to send no more requests; {} requests run, and new ones are still served",
            left.in_flight
        )
    } else {
        "load balancers are told that it is available again".to_owned()
    })
}

pub(crate) fn pin(args: &ModelArgs, pinned: bool) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    let verb = if pinned { "pin" } else { "unpin" };
    block_on(client.json::<serde::de::IgnoredAny>(Method::POST, &["models", &args.model, verb]))??;
    let what = if pinned {
        "pinned: never unloaded for another model"
    } else {
        "may be unloaded for another model from now on"
    };
    out::print_line(&format!("{}: {what}, until llama-warden restarts", args.model))
}

pub(crate) fn reclaim(args: &ReclaimArgs) -> Result<(), CommandError> {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Answer {
        entries: Vec<ReclaimEntry>,
    }
    let client = args.instance.client()?;
    let answer: Answer = block_on(client.json(Method::POST, &["models", &args.model, "reclaim"]))??;
    if args.json {
        out::print_json(&answer)?;
    }
    for entry in answer.entries.iter().filter(|_| !args.json) {
        out::print_line(&format!("{} {}: {}", entry.model, entry.generation, entry.sentence()))?;
    }
    let of = |outcome| answer.entries.iter().filter(|entry| entry.outcome == outcome).count();
    if of(ReclaimOutcome::Nobody) > 0 && of(ReclaimOutcome::Nobody) == answer.entries.len() {
        return Err(CommandError::hinted(
            format!("the build of `{}` cannot be asked to give memory back", args.model),
            "`llama-warden build` makes one with the fixes `reclaim-heap` and `reclaim-cuda`",
        ));
    }
    let silent = of(ReclaimOutcome::NoAnswer);
    if silent > 0 {
        return Err(CommandError::hinted(
            format!("{silent} of {} processes of `{}` did not answer", answer.entries.len(), args.model),
            "a process answers between two computations: `llama-warden status` shows whether it makes progress",
        ));
    }
    Ok(())
}

pub(crate) fn logs(args: &LogsArgs) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    // The instance redacts secrets unless `--reveal` is given.
    let each = |line: &str, log: Option<LogLine>| match log {
        Some(log) => out::print_line(&format!("[{} {}] {}", log.model, log.generation, log.text)),
        None => out::print_line(line),
    };
    let wishes: Vec<&str> = [(args.follow, "follow"), (args.reveal, "reveal")]
        .into_iter()
        .filter_map(|(is, wish)| is.then_some(wish))
        .collect();
    block_on(client.lines(&["models", &args.model, "logs"], &wishes, each))?
}

pub(crate) fn events(args: &EventsArgs) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    let each = |line: &str, event: Option<FleetEvent>| match event {
        Some(event) if !args.json => {
            let model = event.model.as_ref().map(|model| format!("{model} ")).unwrap_or_default();
            let generation = event.generation.map(|generation| format!("{generation} ")).unwrap_or_default();
            out::print_line(&format!(
                "{} {model}{generation}{}",
                event.at,
                secrets::redact_text(&describe_event(&event.kind))
            ))
        }
        _ => out::print_line(line),
    };
    let wishes: &[&str] = if args.follow { &["follow"] } else { &[] };
    block_on(client.lines(&["events"], wishes, each))?
}
