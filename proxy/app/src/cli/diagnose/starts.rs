//! `diagnose` of a server that dies while it loads: tries switches one by one until it starts, and prints
//! the configuration line.

use tokio_util::sync::CancellationToken;
use warden_diagnose::Lab;
use warden_policies::start_search::{StartFinding, StartOutcome, StartSwitch};
use warden_supervisor::{SoloSpec, StartSearchRun};

use super::target::DiagnoseTarget;
use crate::exit::CommandError;
use crate::out;

/// Searches for a switch with which the server starts.
pub(super) async fn search_start_switch(
    target: &DiagnoseTarget,
    spec: SoloSpec,
    lab: &Lab,
    stop: &CancellationToken,
) -> StartFinding {
    let model = &target.resolved.fleet.models[target.index];
    let hunt =
        StartSearchRun { spec, switches: model.start_switches.clone(), deaths: 0, death: String::new() };
    let mut watch = |switch: Option<&StartSwitch>| match switch {
        Some(switch) => out::error_line(&format!("start: with `{}`", switch.words())),
        None => out::error_line("start: as configured"),
    };
    hunt.run(&lab.starter, &mut watch, stop).await
}

/// Stores the finding for `serve`, which then does not search again.
pub(super) fn store_finding(target: &DiagnoseTarget, finding: &StartFinding) {
    if !finding.is_lasting() {
        return;
    }
    let model = &target.resolved.fleet.models[target.index];
    let (state, keep) = (&target.resolved.dirs.state, target.watch.sensors.priors_kept);
    let kept = warden_supervisor::remember_start(state, &model.name, &model.command, finding.clone(), keep);
    if let Err(error) = kept {
        out::error_line(&format!("warning: the finding cannot be kept in {}: {error}", state.display()));
    }
}

/// Prints the finding, as text or as JSON.
pub(super) fn print_finding(
    target: &DiagnoseTarget,
    finding: &StartFinding,
    json: bool,
) -> Result<(), CommandError> {
    if json {
        return out::print_json(&serde_json::json!({ "model": target.name, "start": finding }));
    }
    finding.lines().iter().try_for_each(|line| out::print_line(line))
}

/// The mitigation that starts the server, for `--write`. Empty if words of `args` conflict with it.
pub(super) fn writable_cures(finding: &StartFinding) -> Vec<String> {
    let item = finding.switch().filter(|switch| switch.line.starts_with("write `mitigations"));
    item.map(|switch| switch.item.clone()).into_iter().collect()
}

/// Maps the finding to the result of the command: a server that dies at each start counts as a crash.
pub(super) fn exit_for_finding(finding: &StartFinding, failure: CommandError) -> CommandError {
    match finding.outcome {
        StartOutcome::Found { .. } | StartOutcome::NoSwitch => {
            CommandError::Reported { code: crate::exit::CRASHES_CODE }
        }
        StartOutcome::NotEveryTime | StartOutcome::Otherwise { .. } | StartOutcome::GivenUp => failure,
    }
}
