//! `diagnose --bisect`: finds the mitigations that stop the growth of the experiment, and the lines for the
//! configuration.
//!
//! ```text
//!   Outcome of the experiment ── workloads that leak ──> candidates ──> SwitchTrials ──> CureReport
//!                                                                                --write ──> the file
//! ```

use tokio_util::sync::CancellationToken;
use warden_diagnose::cure::{SwitchTrials, Trying};
use warden_diagnose::report::{Added, CureReport};
use warden_diagnose::{Experiment, Lab, Outcome};
use warden_experiment::bisect::{Conclusion, Outcome as Ended};
use warden_experiment::{Finding, Workload};

use super::candidates::{Candidates, Purpose};
use super::target::Target;
use super::trials::{self, Trials};
use crate::cli::ConfigArgs;
use crate::cli::progress::Lines;
use crate::config::machine::Machine;
use crate::config::resolve::resolve;
use crate::exit::Failure;
use crate::out;

/// Searches for mitigations that stop the growth.
pub(super) async fn run(
    target: &Target,
    machine: &Machine,
    experiment: &Experiment,
    outcome: &Outcome,
    lab: &Lab,
    stop: &CancellationToken,
) -> Result<CureReport, Failure> {
    let leaks = |finding: &Finding| finding.series.iter().any(|found| found.verdict.grows());
    let known: Vec<Finding> = outcome
        .legs
        .iter()
        .map(|leg| &leg.finding)
        .filter(|one| leaks(one) && one.crash.is_none())
        .cloned()
        .collect();
    if known.is_empty() {
        return Ok(nothing(outcome));
    }
    let trials = Trials::new(target, machine, outcome, Purpose::Growth)?;
    let mut workloads: Vec<Workload> = known.iter().map(|one| one.workload).collect();
    workloads.dedup();
    let switches = SwitchTrials {
        base: Experiment { workloads, ..experiment.clone() },
        switches: trials.found.switches.len(),
        clashes: trials.found.clashes.clone(),
        with: &|arm| trials.with(arm),
    };
    let mut lines = Lines::new();
    let mut watch = |trying: Trying<'_>| trials.show("bisect", &trying, &mut lines);
    let conclusion = switches.stop_growth(lab, &known, &mut watch, stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured(&conclusion.cure)?;
    let Candidates { switches, not_tried, .. } = trials.found;
    Ok(CureReport { added, switches, not_tried, conclusion, mitigations })
}

/// Report for an experiment in which nothing leaks, or whose readings do not suffice.
fn nothing(outcome: &Outcome) -> CureReport {
    let short: Vec<&str> = outcome
        .legs
        .iter()
        .map(|leg| &leg.finding)
        .filter(|one| one.is_too_short())
        .map(|one| one.workload.as_str())
        .collect();
    let ended = if outcome.legs.is_empty() {
        Ended::NotKnown { why: "nothing was run, so nobody knows whether anything leaks".to_owned() }
    } else if short.is_empty() {
        Ended::NothingToCure
    } else {
        let why = format!("there are too few readings of {} to say whether anything leaks", short.join(", "));
        Ended::NotKnown { why }
    };
    let conclusion = Conclusion {
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
        added: Added::default(),
    }
}

/// Formats the report: conclusions, lines for the configuration, tried and untried candidates.
pub(super) fn text(report: &CureReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("cure: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &lines(&report.mitigations, &report.added, name);
        let cure = report.conclusion.cure.iter().filter_map(|at| report.switches.get(*at));
        text.extend(cure.map(|switch| format!("# {}: {}\n", switch.item, switch.does)));
    }
    text + &trials::text(&report.rows(), &report.left_out())
}

/// Describes the lines to write, and the place for them.
pub(super) fn lines(mitigations: &[String], added: &Added, name: Option<&str>) -> String {
    match name {
        Some(name) => format!(
            "\nin the configuration:\n[models.{}]\nmitigations = {}\n",
            crate::config::problem::quoted(name),
            list(mitigations)
        ),
        None => format!("\nwithout llama-warden:\n{}\n", added.line()),
    }
}

/// Writes the mitigations into the configuration file.
pub(super) fn write(
    mitigations: &[String],
    model: &str,
    config: &ConfigArgs,
    machine: &Machine,
) -> Result<(), Failure> {
    let Some(path) = &config.config else { return Ok(()) };
    if mitigations.is_empty() {
        out::error_line("nothing was written: there is no cure");
        return Ok(());
    }
    super::write::write(path, model, mitigations, |new| {
        let config = ConfigArgs { config: Some(new.to_owned()), ..config.clone() };
        let loaded = config.load(machine, Vec::new())?;
        resolve(&loaded, machine, false)?;
        Ok(())
    })?;
    out::error_line(&format!("written to {}", path.display()));
    Ok(())
}

/// Formats a list as TOML.
fn list(items: &[String]) -> String {
    items.iter().collect::<toml_edit::Array>().to_string().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_diagnose::report::{NotTried, Switch};
    use warden_experiment::bisect::Track;

    #[test]
    fn a_cure_is_told_with_the_lines_to_write_and_what_was_not_tried() {
        let mut report =
            nothing(&Outcome { legs: Vec::new(), skipped: Vec::new(), interrupted: false, failed: false });
        let unknown = text(&report, Some("m"));
        report.switches = vec![Switch {
            item: "no-cuda-graphs".to_owned(),
            title: "computes without CUDA graphs".to_owned(),
            does: "GGML_CUDA_DISABLE_GRAPHS=1".to_owned(),
            against: None,
        }];
        report.not_tried =
            vec![NotTried { item: "pool-purge".to_owned(), why: "it needs another build".to_owned() }];
        report.conclusion.outcome = Ended::Cured;
        report.conclusion.stopped =
            vec![Track { workload: Workload::SameImage, series: warden_policies::MemoryKind::Host }];
        report.conclusion.cure = vec![0];
        report.mitigations = vec!["cache-ram=512".to_owned(), "no-cuda-graphs".to_owned()];
        report.added.env = vec![("GGML_CUDA_DISABLE_GRAPHS".to_owned(), "1".to_owned())];
        insta::assert_snapshot!([unknown, text(&report, Some("org/m")), text(&report, None)].concat());
    }
}
