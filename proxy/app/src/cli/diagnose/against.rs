//! `diagnose --against OLD`: proves whether one build may replace another.
//!
//! ```text
//!   OLD, and the build of --build, --binary or the configuration ── same arguments ──> Pair ──> table, JSON
//! ```

use std::path::Path;

use clap::Args;
use tokio_util::sync::CancellationToken;
use warden_diagnose::between::SearchEvent;
use warden_diagnose::proof::{Pair, Proving, side};
use warden_diagnose::report::ProofReport;
use warden_diagnose::{Experiment, Lab};
use warden_experiment::proof::{Ruling, Side};
use warden_policies::defaults::Proof;
use warden_policies::server_flags::FlagList;
use warden_supervisor::Starter;
use warden_supervisor::nursery::NurseryHandle;

use super::display::Display;
use super::target::{self, Target};
use super::{DiagnoseArgs, interruptible, outputs};
use crate::admin::instance;
use crate::config::arguments;
use crate::config::machine::Machine;
use crate::config::resolve::binary::Choice;
use crate::config::resolve::flags;
use crate::exit::Failure;
use crate::out;
use crate::serve::Signals;

#[derive(Debug, Args)]
pub(crate) struct AgainstArgs {
    /// Compares the build with OLD (a build id or the path of a llama-server): answers, speed, start,
    /// memory, flags, routes, growth.
    #[arg(
        long,
        value_name = "OLD",
        conflicts_with_all = ["between", "bisect", "headroom", "trace", "wrap", "html", "report", "replay"]
    )]
    against: Option<String>,
    /// Skips the search for growth and crashes, which takes the longest.
    #[arg(long, requires = "against", conflicts_with = "workload")]
    no_growth: bool,
}

impl DiagnoseArgs {
    /// Returns whether two builds are compared.
    pub(super) const fn compares(&self) -> bool {
        self.against.against.is_some()
    }
}

/// Compares the build with OLD and prints the report.
pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), Failure> {
    let Some(old) = args.against.against.as_deref() else { return Ok(()) };
    outputs::prepare(args)?;
    let mut signals = Signals::new()?;
    let machine = Machine::read();
    let (old, new) = tokio::select! {
        found = both(args, &machine, old) => found?,
        () = signals.leave() => return Err(Failure::INTERRUPTED),
    };
    let report = Box::pin(prove(args, nursery, &mut signals, old, new)).await?;
    show(args, &report)?;
    end(&report)
}

/// Compares two builds for another command, with limits given by the caller.
pub(crate) async fn compare(
    args: &DiagnoseArgs,
    nursery: NurseryHandle,
    signals: &mut Signals,
    proof: Proof,
) -> Result<ProofReport, Failure> {
    let machine = Machine::read();
    let old = args.against.against.as_deref().unwrap_or_default();
    let (old, mut new) = both(args, &machine, old).await?;
    new.resolved.proof = proof;
    Box::pin(prove(args, nursery, signals, old, new)).await
}

/// Resolves the servers of both builds, the old one first.
async fn both(args: &DiagnoseArgs, machine: &Machine, old: &str) -> Result<(Target, Target), Failure> {
    let chosen =
        if old.contains('/') { target::file(Path::new(old), machine) } else { Choice::Build(old.to_owned()) };
    let old = Target::with(args, machine, Some(("--against", chosen)), None).await?;
    let new = Target::find(args, machine).await?;
    if old.spec.command.binary == new.spec.command.binary {
        return Err(Failure::usage(
            format!("both are {}", new.spec.command.binary.display()),
            "name the new one with `--build ID` or `--binary PATH`",
        ));
    }
    Ok((old, new))
}

async fn prove(
    args: &DiagnoseArgs,
    nursery: NurseryHandle,
    signals: &mut Signals,
    old: Target,
    new: Target,
) -> Result<ProofReport, Failure> {
    for warning in &new.warnings {
        out::error_line(&format!("warning: {warning}"));
    }
    out::error_line(&format!("old: {}", old.program()));
    out::error_line(&format!("new: {}", new.program()));
    let timeout = new.resolved.child.version_timeout;
    let flags =
        tokio::join!(flags::known(&old.spec.command, timeout), flags::known(&new.spec.command, timeout));
    let flags = flags.0.zip(flags.1);
    if flags.is_none() {
        out::error_line("warning: one of them does not list its flags (`--help`), so they are not compared");
    }
    let names = |list: &FlagList| list.names().map(str::to_owned).collect();
    let numbers = new.resolved.diagnose.clone();
    let steps = args.requests.unwrap_or(numbers.requests);
    let workloads = if args.against.no_growth { Vec::new() } else { args.workloads()? };
    let pair = Pair {
        old: old.spec.clone(),
        new: new.spec.clone(),
        flags: flags.map(|(old, new)| (names(&old), names(&new))),
        used: new.spec.command.args.iter().map(|word| arguments::normal(word)).collect(),
        paths: warden_gateway::paths().map(str::to_owned).collect(),
        work: Experiment { spec: new.spec.clone(), workloads, steps, early: true, replay: None },
    };
    let sockets = instance::private_dir(&new.runtime_dir)?;
    let starter = Starter::new(nursery, sockets.path(), &new.lifecycle, new.watch)?;
    let lab = Lab { numbers, proof: new.resolved.proof.clone(), ..Lab::new(starter, new.growth.clone()) };
    let stop = CancellationToken::new();
    let legs = pair.work.workloads.len();
    let mut display = Display::new(legs);
    let mut watch = |proving: Proving<'_>| match proving {
        Proving::Next(side, round) => out::error_line(&format!("round {round}: the {} build", word(side))),
        Proving::Searching(SearchEvent::Next(ask, _)) => {
            display.close();
            out::error_line(&format!("growth and crashes: the {} build", word(side(*ask))));
            display = Display::new(if ask.is_end { legs } else { 1 });
        }
        Proving::Searching(SearchEvent::Leg(progress)) => display.see(progress),
        Proving::Searching(SearchEvent::OnceMore(why)) => {
            display.close();
            out::error_line(&format!("once more, because {why}"));
        }
        Proving::Searching(SearchEvent::Record(_)) => display.close(),
    };
    let running = Box::pin(pair.prove(&lab, &mut watch, &stop));
    let proof = interruptible(signals, &stop, running).await?;
    display.close();
    drop(sockets);
    Ok(ProofReport::new(old.program(), new.program(), proof?))
}

const fn word(side: Side) -> &'static str {
    match side {
        Side::Old => "old",
        Side::New => "new",
    }
}

fn show(args: &DiagnoseArgs, report: &ProofReport) -> Result<(), Failure> {
    if args.json {
        return out::json(report);
    }
    let mut text = out::table(&report.rows());
    text.extend([format!("\n{}\n", report.sentence())]);
    text.extend(report.reasons.iter().map(|line| format!("- {line}\n")));
    text.extend(report.notes.iter().map(|line| format!("note: {line}\n")));
    out::write(&text)
}

/// Maps the verdict to an exit code.
fn end(report: &ProofReport) -> Result<(), Failure> {
    let code = match report.verdict {
        Ruling::Better | Ruling::Same => return Ok(()),
        Ruling::Worse => crate::exit::LEAKS,
        Ruling::Unknown if report.proof.interrupted => crate::exit::INTERRUPTED,
        Ruling::Unknown => crate::exit::TOO_FEW,
    };
    Err(Failure::Told { code })
}
