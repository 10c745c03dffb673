//! `diagnose --bisect` after a crash: finds the mitigations that stop it, and the lines for the
//! configuration.

use tokio_util::sync::CancellationToken;
use warden_diagnose::cure::{SwitchTrials, Trying};
use warden_diagnose::report::SurvivalReport;
use warden_diagnose::{Experiment, Lab, Outcome, without_prompt_cache};
use warden_experiment::Finding;
use warden_experiment::bisect::Arm;
use warden_experiment::crash::Crash;

use super::candidates::{Candidates, Purpose};
use super::target::Target;
use super::trials::{self, Trials};
use crate::cli::progress::Lines;
use crate::config::machine::Machine;
use crate::exit::Failure;

/// Searches for mitigations against each crash of the experiment, one crash after the other.
pub(super) async fn run(
    target: &Target,
    machine: &Machine,
    experiment: &Experiment,
    outcome: &Outcome,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<Vec<SurvivalReport>, Failure> {
    let mut all = Vec::new();
    for finding in outcome.legs.iter().map(|leg| &leg.finding) {
        let Some(crash) = &finding.crash else { continue };
        if stop.is_cancelled() {
            break;
        }
        all.push(one(target, machine, experiment, outcome, (finding, crash), lab, stop).await?);
    }
    Ok(all)
}

async fn one(
    target: &Target,
    machine: &Machine,
    experiment: &Experiment,
    outcome: &Outcome,
    (finding, crash): (&Finding, &Crash),
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<SurvivalReport, Failure> {
    let purpose = Purpose::Crash { on_gpu: speaks_of_a_gpu(&crash.lines) };
    let trials = Trials::new(target, machine, outcome, purpose)?;
    let with = |arm: &Arm| {
        let mut spec = trials.with(arm)?;
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
    let mut lines = Lines::new();
    let search = format!("crash under {}", finding.workload);
    let mut watch = |trying: Trying<'_>| trials.show(&search, &trying, &mut lines);
    let conclusion = switches.stop_crash(lab, finding.workload, crash, &mut watch, stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured(&conclusion.cure)?;
    let (workload, Candidates { switches, not_tried, .. }) = (finding.workload, trials.found);
    Ok(SurvivalReport { workload, switches, not_tried, conclusion, mitigations, added })
}

/// Returns whether the last log lines are about GPU code. If so, GPU mitigations are tried first.
fn speaks_of_a_gpu(lines: &[String]) -> bool {
    lines.iter().any(|line| {
        let line = line.to_ascii_lowercase();
        ["cuda", "cublas", "hip", "rocm", "vulkan", "metal"].iter().any(|word| line.contains(word))
    })
}

/// Formats the report: conclusions, lines for the configuration, tried and untried candidates.
pub(super) fn text(report: &SurvivalReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("crash: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &super::bisect::lines(&report.mitigations, &report.added, name);
    }
    text + &trials::text(&report.rows(), &report.left_out())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_says_where_it_computes() {
        let says = |line: &str| speaks_of_a_gpu(&[line.to_owned()]);
        assert!(says("CUDA error: an illegal instruction was encountered"));
        assert!(!says("GGML_ASSERT(n > 1) failed"));
    }
}
