//! `diagnose` of a server that dies while it loads: tries switches one by one until it starts, and prints
//! the configuration line.

use warden_policies::start_search::{StartFinding, StartOutcome, StartSwitch};
use warden_supervisor::StartSearchRun;

use super::target::DiagnoseTarget;
use super::{DiagnosisRun, wait_or_interrupt};
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

pub(super) async fn search_start_switch(
    run: &DiagnosisRun<'_>,
    signals: &mut SignalHandlers,
) -> Result<StartFinding, CommandError> {
    let hunt = StartSearchRun {
        spec: run.experiment.spec.clone(),
        switches: run.target.model().start.switches.clone(),
        deaths: 0,
        death: String::new(),
    };
    let mut watch = |switch: Option<&StartSwitch>| match switch {
        Some(switch) => out::error_line(&format!("start: with `{}`", switch.words())),
        None => out::error_line("start: as configured"),
    };
    let running = Box::pin(hunt.run(&run.lab.starter, &mut watch, &run.stop));
    wait_or_interrupt(signals, &run.stop, running).await
}

/// Never succeeds: if the server dies at each start, the exit code is that of crashes.
pub(super) fn report_finding(
    run: &DiagnosisRun<'_>,
    finding: &StartFinding,
    failure: CommandError,
) -> Result<(), CommandError> {
    let DiagnosisRun { args, target, .. } = run;
    store_finding(target, finding);
    if run.stop.is_cancelled() {
        return Err(CommandError::INTERRUPTED);
    }
    if matches!(finding.outcome, StartOutcome::Otherwise { .. }) && finding.deaths == 0 {
        return Err(failure);
    }
    if args.json {
        out::print_json(&serde_json::json!({ "model": target.name(), "start": finding }))?;
    } else {
        finding.lines().iter().try_for_each(|line| out::print_line(line))?;
    }
    Err(match finding.outcome {
        StartOutcome::Found { .. } | StartOutcome::NoSwitch => {
            CommandError::Reported { code: crate::exit::CRASHES_CODE }
        }
        StartOutcome::NotEveryTime | StartOutcome::Otherwise { .. } | StartOutcome::GivenUp => failure,
    })
}

/// With the stored finding, `serve` need not search again.
fn store_finding(target: &DiagnoseTarget, finding: &StartFinding) {
    if !finding.is_lasting() {
        return;
    }
    let model = target.model();
    let state = &target.resolved.dirs.state;
    let keep = target.resolved.fleet.watch.sensors.priors_kept;
    let kept = warden_supervisor::remember_start(state, &model.name, &model.command, finding.clone(), keep);
    if let Err(error) = kept {
        out::error_line(&format!("warning: the finding cannot be kept in {}: {error}", state.display()));
    }
}
