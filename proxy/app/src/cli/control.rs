//! `status`, `restart`, `drain`, `reclaim`, `pin`, `logs`, `events`, `quarantine`: commands to a running instance.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, Subcommand};
use reqwest::Method;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::json;
use warden_admin::answer::DrainReport;
use warden_admin::client::{AdminClient, find_instance};
use warden_admin::error::AdminError;
use warden_admin::status::AdminStatus;
use warden_config::machine::HostMachine;
use warden_config::source::layers::LoadedConfig;
use warden_policies::reclaim::ReclaimOutcome;
use warden_policies::secrets;
use warden_supervisor::{FleetEvent, LedgerEntry, LogLine, ModelView, ReclaimEntry};

use super::shared::{ConfigArgs, block_on};
use super::status::status_table;
use crate::exit::CommandError;
use crate::out;

#[derive(Clone, Debug, Args)]
pub(crate) struct InstanceArgs {
    /// Unix socket of the instance's admin routes. Default: the only running instance.
    #[arg(long, value_name = "PATH", env = "LLAMA_WARDEN_ADMIN_SOCKET")]
    admin_socket: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigArgs,
}

impl InstanceArgs {
    pub(super) fn load(&self, machine: &HostMachine) -> Result<LoadedConfig, CommandError> {
        self.config.load(machine, Vec::new())
    }

    /// Selects the instance by its socket, else by the named configuration, else the only running one.
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
        let state = loaded.dirs(&machine)?.state;
        Ok(find_instance(named, &state, &machine.registration_dirs(), address.as_deref())?)
    }

    pub(super) fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        segments: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, CommandError> {
        let client = self.client()?;
        Ok(block_on(client.json_with(method, segments, query))??)
    }
}

impl From<AdminError> for CommandError {
    fn from(error: AdminError) -> Self {
        match error {
            AdminError::Usage { message, hint } => Self::Usage { message, hint },
            AdminError::Failed { message, hint } => Self::Failed { message, hint },
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct QueryArgs {
    /// Prints JSON, for programs.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    pub(super) instance: InstanceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ModelQueryArgs {
    /// Model name or alias.
    pub(super) model: String,
    #[command(flatten)]
    pub(super) query: QueryArgs,
}

#[derive(Serialize, Deserialize)]
pub(super) struct ProcessEntries<T> {
    pub(super) entries: Vec<T>,
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

pub(crate) fn status(args: &QueryArgs) -> Result<(), CommandError> {
    if args.json {
        return out::print_json(&args.instance.ask::<serde_json::Value>(Method::GET, &["status"], &[])?);
    }
    let status: AdminStatus = args.instance.ask(Method::GET, &["status"], &[])?;
    // The last log lines of a process may quote a key, and operators share this output.
    out::print_text(&secrets::redact_text(&status_table(&status)))
}

pub(crate) fn restart(args: &ModelArgs) -> Result<(), CommandError> {
    let answer: ProcessEntries<LedgerEntry> =
        args.instance.ask(Method::POST, &["models", &args.model, "restart"], &[])?;
    for entry in answer.entries {
        out::print_line(&format!("{}: {}", args.model, entry.sentence()))?;
    }
    out::print_line(&format!("{}: restarted", args.model))
}

pub(crate) fn drain(args: &DrainArgs) -> Result<(), CommandError> {
    let Some(model) = &args.model else { return drain_all(&args.instance, args.undo) };
    args.instance.ask::<IgnoredAny>(Method::POST, &["models", model, "drain"], &[])?;
    out::print_line(&format!("{model}: drained and stopped; the next request starts it again"))
}

fn drain_all(instance: &InstanceArgs, undo: bool) -> Result<(), CommandError> {
    let wishes: &[(&str, String)] = if undo { &[("undo", "1".to_owned())] } else { &[] };
    let left: DrainReport = instance.ask(Method::POST, &["drain"], wishes)?;
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
    let verb = if pinned { "pin" } else { "unpin" };
    args.instance.ask::<IgnoredAny>(Method::POST, &["models", &args.model, verb], &[])?;
    let what = if pinned {
        "pinned: never unloaded for another model"
    } else {
        "may be unloaded for another model from now on"
    };
    out::print_line(&format!("{}: {what}, until llama-warden restarts", args.model))
}

pub(crate) fn reclaim(args: &ModelQueryArgs) -> Result<(), CommandError> {
    let ModelQueryArgs { model, query: QueryArgs { json, instance } } = args;
    let answer: ProcessEntries<ReclaimEntry> =
        instance.ask(Method::POST, &["models", model, "reclaim"], &[])?;
    if *json {
        out::print_json(&answer)?;
    } else {
        for entry in &answer.entries {
            out::print_line(&format!("{} {}: {}", entry.model, entry.generation, entry.sentence()))?;
        }
    }
    let entries = answer.entries;
    if !entries.is_empty() && entries.iter().all(|entry| entry.outcome == ReclaimOutcome::Nobody) {
        return Err(CommandError::hinted(
            format!("the build of `{model}` cannot be asked to give memory back"),
            "`llama-warden build` makes one with the fixes `reclaim-heap` and `reclaim-cuda`",
        ));
    }
    let silent = entries.iter().filter(|entry| entry.outcome == ReclaimOutcome::NoAnswer).count();
    if silent > 0 {
        return Err(CommandError::hinted(
            format!("{silent} of {} processes of `{model}` did not answer", entries.len()),
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
    let mut wishes = Vec::new();
    wishes.extend(args.follow.then_some("follow"));
    wishes.extend(args.reveal.then_some("reveal"));
    block_on(client.lines(&["models", &args.model, "logs"], &wishes, each))?
}

pub(crate) fn events(args: &EventsArgs) -> Result<(), CommandError> {
    let client = args.instance.client()?;
    let each = |line: &str, event: Option<FleetEvent>| match event {
        Some(event) if !args.json => out::print_line(&event_line(&event)),
        _ => out::print_line(line),
    };
    let wishes: &[&str] = if args.follow { &["follow"] } else { &[] };
    block_on(client.lines(&["events"], wishes, each))?
}

pub(super) fn event_line(event: &FleetEvent) -> String {
    let FleetEvent { at, model, generation, kind, .. } = event;
    let model = model.as_ref().map(|model| format!("{model} ")).unwrap_or_default();
    let generation = generation.map(|generation| format!("{generation} ")).unwrap_or_default();
    format!("{at} {model}{generation}{}", secrets::redact_text(&kind.sentence()))
}

#[derive(Debug, Subcommand)]
pub(crate) enum QuarantineCommand {
    /// Lists refused or suspected requests, by their fingerprints.
    List(QueryArgs),
    /// Releases requests, so that they are served like others again.
    Release(QuarantineReleaseArgs),
}

#[derive(Debug, Args)]
pub(crate) struct QuarantineReleaseArgs {
    /// Model, or fingerprint of one request (at least eight digits of it). Default: all requests.
    #[arg(value_name = "MODEL|FINGERPRINT")]
    which: Option<String>,
    #[command(flatten)]
    instance: InstanceArgs,
}

pub(crate) fn quarantine(command: &QuarantineCommand) -> Result<(), CommandError> {
    match command {
        QuarantineCommand::List(args) => list_quarantine(args),
        QuarantineCommand::Release(args) => release_requests(args),
    }
}

fn list_quarantine(args: &QueryArgs) -> Result<(), CommandError> {
    let status: AdminStatus = args.instance.ask(Method::GET, &["status"], &[])?;
    let models = &status.fleet.models;
    if args.json {
        let all = models.iter().map(|model| (model.name.to_string(), json!(model.quarantine)));
        return out::print_json(&serde_json::Value::Object(all.collect()));
    }
    out::print_text(&quarantine_table(models))
}

fn quarantine_table(models: &[Arc<ModelView>]) -> String {
    let mut rows = Vec::new();
    for model in models {
        for known in &model.quarantine.requests {
            let state = if known.refused { "refused" } else { "suspected" };
            rows.push(vec![
                model.name.to_string(),
                known.fingerprint.to_string(),
                state.to_owned(),
                known.deaths.to_string(),
                known.refusals.to_string(),
                format!("{} s", known.left_s),
            ]);
        }
    }
    if rows.is_empty() {
        return "no request is refused or suspected\n".to_owned();
    }
    out::table(["MODEL", "FINGERPRINT", "STATE", "DEATHS", "REFUSED", "TIME LEFT"], rows)
}

fn release_requests(args: &QuarantineReleaseArgs) -> Result<(), CommandError> {
    #[derive(serde::Deserialize)]
    struct ReleaseAnswer {
        released: usize,
    }
    let mut segments = vec!["quarantine", "release"];
    segments.extend(args.which.as_deref());
    let answer: ReleaseAnswer = args.instance.ask(Method::POST, &segments, &[])?;
    out::print_line(&format!("{} request(s) released", answer.released))
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;
    use warden_policies::quarantine::{QuarantinedRequest, RequestFingerprint};
    use warden_supervisor::{ModelState, QuarantineView};

    use super::*;

    #[test]
    fn what_is_known_is_listed_with_how_long_it_lasts() {
        let known = |print, refused| QuarantinedRequest {
            fingerprint: RequestFingerprint(print),
            refused,
            left_s: 90,
            deaths: 2,
            refusals: 3,
        };
        let requests = vec![known(0xabc, true), known(0xdef, false)];
        let model = ModelView {
            state: ModelState::Loaded,
            was_ready: true,
            quarantine: QuarantineView { requests, quarantined: 1, refusals: 3 },
            ..ModelView::unloaded(ModelName::new("m"))
        };
        insta::assert_snapshot!(quarantine_table(&[Arc::new(model)]) + "\n" + &quarantine_table(&[]));
    }
}
