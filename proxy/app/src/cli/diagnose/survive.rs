//! `diagnose --bisect` after a crash: finds the mitigations that stop it, and the lines for the
//! configuration.

use tokio_util::sync::CancellationToken;
use warden_diagnose::cure::{SwitchTrials, TrialProgress};
use warden_diagnose::report::SurvivalReport;
use warden_diagnose::{Experiment, ExperimentOutcome, Lab, without_prompt_cache};
use warden_experiment::LegFinding;
use warden_experiment::bisect::SwitchSet;
use warden_experiment::crash::WorkloadCrash;

use super::candidates::{SearchPurpose, SwitchCandidates};
use super::target::DiagnoseTarget;
use super::trials::{self, MitigationTrials};
use crate::cli::progress::ProgressLines;
use crate::config::machine::HostMachine;
use crate::exit::CommandError;

/// Searches for mitigations against each crash of the experiment, one crash after the other.
pub(super) async fn run(
    target: &DiagnoseTarget,
    machine: &HostMachine,
    experiment: &Experiment,
    outcome: &ExperimentOutcome,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<Vec<SurvivalReport>, CommandError> {
    let mut all = Vec::new();
    for finding in outcome.legs.iter().map(|leg| &leg.finding) {
        let Some(crash) = &finding.crash else { continue };
        if stop.is_cancelled() {
            break;
        }
        all.push(search_for_crash(target, machine, experiment, outcome, (finding, crash), lab, stop).await?);
    }
    Ok(all)
}

async fn search_for_crash(
    target: &DiagnoseTarget,
    machine: &HostMachine,
    experiment: &Experiment,
    outcome: &ExperimentOutcome,
    (finding, crash): (&LegFinding, &WorkloadCrash),
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<SurvivalReport, CommandError> {
    let purpose = SearchPurpose::Crash { on_gpu: mentions_gpu(&crash.lines) };
    let trials = MitigationTrials::new(target, machine, outcome, purpose)?;
    let with = |arm: &SwitchSet| {
        let mut spec = trials.server_with(arm)?;
        if finding.control {
            without_prompt_cache(&mut spec);
        }
        Ok(spec)
    };
    let switches = SwitchTrials {
        base: experiment.clone(),
        switches: trials.found.switches.len(),
        clashes: trials.found.clashes.clone(),
        with: &with,
    };
    let mut lines = ProgressLines::new();
    let search = format!("crash under {}", finding.workload);
    let mut watch = |trying: TrialProgress<'_>| trials.show(&search, &trying, &mut lines);
    let conclusion = switches.stop_crash(lab, finding.workload, crash, &mut watch, stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured_mitigations(&conclusion.cure)?;
    let (workload, SwitchCandidates { switches, not_tried, .. }) = (finding.workload, trials.found);
    Ok(SurvivalReport { workload, switches, not_tried, conclusion, mitigations, added })
}

/// Returns whether the last log lines are about GPU code. If so, GPU mitigations are tried first.
fn mentions_gpu(lines: &[String]) -> bool {
    lines.iter().any(|line| {
        let line = line.to_ascii_lowercase();
        ["cuda", "cublas", "hip", "rocm", "vulkan", "metal"].iter().any(|word| line.contains(word))
    })
}

/// Formats the report: conclusions, lines for the configuration, tried and untried candidates.
pub(super) fn survival_text(report: &SurvivalReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("crash: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &super::bisect::config_lines(&report.mitigations, &report.added, name);
    }
    text + &trials::trials_text(&report.rows(), &report.left_out())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_says_where_it_computes() {
        let says = |line: &str| mentions_gpu(&[line.to_owned()]);
        assert!(says("CUDA error: an illegal instruction was encountered"));
        assert!(!says("GGML_ASSERT(n > 1) failed"));
    }
}
