//! `diagnose --bisect`: finds the mitigations that stop the growth of the experiment, and the lines for the
//! configuration.
//!
//! ```text
//!   Outcome of the experiment ── workloads that leak ──> candidates ──> SwitchTrials ──> CureReport
//!                                                                                --write ──> the file
//! ```

use tokio_util::sync::CancellationToken;
use warden_diagnose::cure::{SwitchTrials, TrialProgress};
use warden_diagnose::report::{CommandChanges, CureReport};
use warden_diagnose::{Experiment, ExperimentOutcome, Lab};
use warden_experiment::bisect::{CureConclusion, CureOutcome as Ended};
use warden_experiment::{LegFinding, Workload};

use super::candidates::{SearchPurpose, SwitchCandidates};
use super::target::DiagnoseTarget;
use super::trials::{self, MitigationTrials};
use crate::cli::ConfigArgs;
use crate::cli::progress::ProgressLines;
use crate::config::machine::HostMachine;
use crate::config::resolve::resolve_config;
use crate::exit::CommandError;
use crate::out;

/// Searches for mitigations that stop the growth.
pub(super) async fn run(
    target: &DiagnoseTarget,
    machine: &HostMachine,
    experiment: &Experiment,
    outcome: &ExperimentOutcome,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<CureReport, CommandError> {
    let leaks = |finding: &LegFinding| finding.series.iter().any(|found| found.verdict.grows());
    let known: Vec<LegFinding> = outcome
        .legs
        .iter()
        .map(|leg| &leg.finding)
        .filter(|one| leaks(one) && one.crash.is_none())
        .cloned()
        .collect();
    if known.is_empty() {
        return Ok(report_without_growth(outcome));
    }
    let trials = MitigationTrials::new(target, machine, outcome, SearchPurpose::Growth)?;
    let mut workloads: Vec<Workload> = known.iter().map(|one| one.workload).collect();
    workloads.dedup();
    let switches = SwitchTrials {
        base: Experiment { workloads, ..experiment.clone() },
        switches: trials.found.switches.len(),
        clashes: trials.found.clashes.clone(),
        with: &|arm| trials.server_with(arm),
    };
    let mut lines = ProgressLines::new();
    let mut watch = |trying: TrialProgress<'_>| trials.show("bisect", &trying, &mut lines);
    let conclusion = switches.stop_growth(lab, &known, &mut watch, stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured_mitigations(&conclusion.cure)?;
    let SwitchCandidates { switches, not_tried, .. } = trials.found;
    Ok(CureReport { added, switches, not_tried, conclusion, mitigations })
}

/// Report for an experiment in which nothing leaks, or whose readings do not suffice.
fn report_without_growth(outcome: &ExperimentOutcome) -> CureReport {
    let short: Vec<&str> = outcome
        .legs
        .iter()
        .map(|leg| &leg.finding)
        .filter(|one| one.is_too_short())
        .map(|one| one.workload.as_str())
        .collect();
    let ended = if outcome.legs.is_empty() {
        Ended::NotKnown { why: "nothing was run, so it is not known whether anything leaks".to_owned() }
    } else if short.is_empty() {
        Ended::NothingToCure
    } else {
        let why = format!("there are too few readings of {} to say whether anything leaks", short.join(", "));
        Ended::NotKnown { why }
    };
    let conclusion = CureConclusion {
        outcome: ended,
        leaking: Vec::new(),
        cure: Vec::new(),
        stopped: Vec::new(),
        by_track: Vec::new(),
        trials: Vec::new(),
        legs: 0,
    };
    CureReport {
        switches: Vec::new(),
        not_tried: Vec::new(),
        conclusion,
        mitigations: Vec::new(),
        added: CommandChanges::default(),
    }
}

/// Formats the report: conclusions, lines for the configuration, tried and untried candidates.
pub(super) fn cure_text(report: &CureReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("cure: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &config_lines(&report.mitigations, &report.added, name);
        let cure = report.conclusion.cure.iter().filter_map(|at| report.switches.get(*at));
        text.extend(cure.map(|switch| format!("# {}: {}\n", switch.item, switch.does)));
    }
    text + &trials::trials_text(&report.rows(), &report.left_out())
}

/// Describes the lines to write and the section for them; without a model's name, the command line.
pub(super) fn config_lines(mitigations: &[String], added: &CommandChanges, name: Option<&str>) -> String {
    match name {
        Some(name) => format!(
            "\nin the configuration:\n[models.{}]\nmitigations = {}\n",
            crate::config::problem::quoted_key(name),
            toml_list(mitigations)
        ),
        None => format!("\nwithout llama-warden:\n{}\n", added.command_line()),
    }
}

/// Writes the mitigations into the configuration file.
pub(super) fn write_to_config(
    mitigations: &[String],
    model: &str,
    config: &ConfigArgs,
    machine: &HostMachine,
) -> Result<(), CommandError> {
    let Some(path) = &config.config else { return Ok(()) };
    if mitigations.is_empty() {
        out::error_line("nothing was written: there is no cure");
        return Ok(());
    }
    super::write::write_mitigations(path, model, mitigations, |new| {
        let config = ConfigArgs { config: Some(new.to_owned()), ..config.clone() };
        let loaded = config.load(machine, Vec::new())?;
        resolve_config(&loaded, machine, false)?;
        Ok(())
    })?;
    out::error_line(&format!("written to {}", path.display()));
    Ok(())
}

/// Formats a list as TOML.
fn toml_list(items: &[String]) -> String {
    items.iter().collect::<toml_edit::Array>().to_string().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_diagnose::report::{TrialSwitch, UntriedSwitch};
    use warden_experiment::bisect::WorkloadMemory;

    #[test]
    fn a_cure_is_told_with_the_lines_to_write_and_what_was_not_tried() {
        let mut report = report_without_growth(&ExperimentOutcome {
            legs: Vec::new(),
            skipped: Vec::new(),
            interrupted: false,
            failed: false,
        });
        let unknown = cure_text(&report, Some("m"));
        report.switches = vec![TrialSwitch {
            item: "no-cuda-graphs".to_owned(),
            title: "computes without CUDA graphs".to_owned(),
            does: "GGML_CUDA_DISABLE_GRAPHS=1".to_owned(),
            against: None,
        }];
        report.not_tried =
            vec![UntriedSwitch { item: "pool-purge".to_owned(), why: "it needs another build".to_owned() }];
        report.conclusion.outcome = Ended::Cured;
        report.conclusion.stopped =
            vec![WorkloadMemory { workload: Workload::SameImage, series: warden_policies::MemoryKind::Host }];
        report.conclusion.cure = vec![0];
        report.mitigations = vec!["cache-ram=512".to_owned(), "no-cuda-graphs".to_owned()];
        report.added.env = vec![("GGML_CUDA_DISABLE_GRAPHS".to_owned(), "1".to_owned())];
        insta::assert_snapshot!(
            [unknown, cure_text(&report, Some("org/m")), cure_text(&report, None)].concat()
        );
    }
}
