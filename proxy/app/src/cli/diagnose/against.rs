//! `diagnose --against OLD`: proves whether one build may replace another.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use warden_config::arguments;
use warden_config::machine::HostMachine;
use warden_config::resolve::binary::BinaryChoice;
use warden_config::resolve::flags;
use warden_diagnose::Experiment;
use warden_diagnose::between::SearchEvent;
use warden_diagnose::proof::{ComparedBuilds, ProofProgress, build_side};
use warden_diagnose::report::ProofReport;
use warden_experiment::proof::{BuildSide, ProofRuling};
use warden_policies::defaults::Proof;
use warden_policies::server_flags::FlagList;
use warden_supervisor::nursery::NurseryHandle;

use super::display::ExperimentDisplay;
use super::target::{self, DiagnoseTarget};
use super::{DiagnoseArgs, open_lab, outputs, wait_or_interrupt};
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    let Some(old) = args.against.against.as_deref() else { return Ok(()) };
    outputs::check_outputs(args)?;
    let mut signals = SignalHandlers::new()?;
    let machine = HostMachine::read();
    let (old, new) = tokio::select! {
        found = resolve_both(args, &machine, old) => found?,
        () = signals.wait_leave() => return Err(CommandError::INTERRUPTED),
    };
    let report = Box::pin(prove(args, nursery, &mut signals, old, new)).await?;
    print_report(args, &report)?;
    exit_for_verdict(&report)
}

/// Compares two builds for `update`, with the caller's limits.
pub(crate) async fn compare(
    args: &DiagnoseArgs,
    nursery: NurseryHandle,
    signals: &mut SignalHandlers,
    proof: Proof,
) -> Result<ProofReport, CommandError> {
    let machine = HostMachine::read();
    let old = args.against.against.as_deref().unwrap_or_default();
    let (old, mut new) = Box::pin(resolve_both(args, &machine, old)).await?;
    new.resolved.settings.proof = proof;
    Box::pin(prove(args, nursery, signals, old, new)).await
}

async fn resolve_both(
    args: &DiagnoseArgs,
    machine: &HostMachine,
    old: &str,
) -> Result<(DiagnoseTarget, DiagnoseTarget), CommandError> {
    let chosen = if old.contains('/') {
        target::typed_program(Path::new(old), machine)
    } else {
        BinaryChoice::Build(old.to_owned())
    };
    let old = DiagnoseTarget::find_with_program(args, machine, Some(("--against", chosen)), None).await?;
    let new = DiagnoseTarget::find(args, machine).await?;
    if old.spec.command.binary == new.spec.command.binary {
        return Err(CommandError::usage(
            format!("both are {}", new.spec.command.binary.display()),
            "name the new one with `--build ID` or `--binary PATH`",
        ));
    }
    Ok((old, new))
}

async fn prove(
    args: &DiagnoseArgs,
    nursery: NurseryHandle,
    signals: &mut SignalHandlers,
    old: DiagnoseTarget,
    new: DiagnoseTarget,
) -> Result<ProofReport, CommandError> {
    for warning in &new.resolved.warnings {
        out::error_line(&format!("warning: {warning}"));
    }
    out::error_line(&format!("old: {}", old.program_line()));
    out::error_line(&format!("new: {}", new.program_line()));
    let timeout = new.resolved.settings.child.version_timeout;
    let flags = tokio::join!(
        flags::known_flags(&old.spec.command, timeout),
        flags::known_flags(&new.spec.command, timeout)
    );
    let flags = flags.0.zip(flags.1);
    if flags.is_none() {
        out::error_line("warning: one of them does not list its flags (`--help`), so they are not compared");
    }
    let names = |list: &FlagList| list.names().map(str::to_owned).collect();
    let numbers = new.resolved.settings.diagnose.clone();
    let steps = args.requests.unwrap_or(numbers.requests);
    let workloads = if args.against.no_growth { Vec::new() } else { args.workloads() };
    let pair = ComparedBuilds {
        old: old.spec.clone(),
        new: new.spec.clone(),
        flags: flags.map(|(old, new)| (names(&old), names(&new))),
        used: new.spec.command.args.iter().map(|word| arguments::normal_flag(word)).collect(),
        paths: warden_gateway::paths().map(str::to_owned).collect(),
        work: Experiment { spec: new.spec.clone(), workloads, steps, early: true },
    };
    let (lab, sockets) = open_lab(nursery, &new.resolved, &new.model().lifecycle, numbers)?;
    let stop = CancellationToken::new();
    let legs = pair.work.workloads.len();
    let mut display = ExperimentDisplay::new(legs);
    let mut watch = |proving: ProofProgress<'_>| match proving {
        ProofProgress::Next(side, round) => {
            out::error_line(&format!("round {round}: the {} build", side_label(side)));
        }
        ProofProgress::Searching(SearchEvent::Next(ask, _)) => {
            display.close();
            out::error_line(&format!("growth and crashes: the {} build", side_label(build_side(*ask))));
            display = ExperimentDisplay::new(if ask.is_end { legs } else { 1 });
        }
        ProofProgress::Searching(SearchEvent::Leg(progress)) => display.show(progress),
        ProofProgress::Searching(SearchEvent::OnceMore(why)) => {
            display.close();
            out::error_line(&format!("once more, because {why}"));
        }
        ProofProgress::Searching(SearchEvent::Record(_)) => display.close(),
    };
    let running = Box::pin(pair.prove(&lab, &mut watch, &stop));
    let proof = wait_or_interrupt(signals, &stop, running).await?;
    display.close();
    drop(sockets);
    Ok(ProofReport::new(old.program_line(), new.program_line(), proof?))
}

const fn side_label(side: BuildSide) -> &'static str {
    match side {
        BuildSide::Old => "old",
        BuildSide::New => "new",
    }
}

fn print_report(args: &DiagnoseArgs, report: &ProofReport) -> Result<(), CommandError> {
    if args.json {
        return out::print_json(report);
    }
    let mut text = out::format_table(&report.rows());
    text.extend([format!("\n{}\n", report.sentence())]);
    text.extend(report.reasons.iter().map(|line| format!("- {line}\n")));
    text.extend(report.notes.iter().map(|line| format!("note: {line}\n")));
    out::print_text(&text)
}

fn exit_for_verdict(report: &ProofReport) -> Result<(), CommandError> {
    let code = match report.verdict {
        ProofRuling::Better | ProofRuling::Same => return Ok(()),
        ProofRuling::Worse => crate::exit::LEAKS_CODE,
        ProofRuling::Unknown if report.proof.interrupted => crate::exit::INTERRUPTED_CODE,
        ProofRuling::Unknown => crate::exit::UNDECIDED_CODE,
    };
    Err(CommandError::Reported { code })
}
