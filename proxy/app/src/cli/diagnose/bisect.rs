//! `diagnose --bisect`: finds the mitigations that stop the growth or the crashes of the experiment, and the
//! lines for the configuration.

use std::sync::{Arc, Mutex};

use warden_config::advice::AdvisedServer;
use warden_config::resolve::mitigations::MitigationChecker;
use warden_diagnose::cure::{SwitchTrials, TrialProgress};
use warden_diagnose::report::{CommandChanges, CureReport, SurvivalReport, UntriedSwitch};
use warden_diagnose::{Experiment, ExperimentOutcome, LegProgress, without_prompt_cache};
use warden_experiment::bisect::{CureConclusion, CureOutcome as Ended, SwitchSet};
use warden_experiment::crash::WorkloadCrash;
use warden_experiment::{LegFinding, Workload};
use warden_supervisor::SoloSpec;
use warden_supervisor::sync::lock;

use super::DiagnosisRun;
use super::candidates::{self, SearchPurpose, SwitchCandidates};
use super::target::DiagnoseTarget;
use crate::cli::progress::ProgressLines;
use crate::exit::CommandError;
use crate::out;

/// Returns the server with the switches of a trial, or the reason why the switches cannot be applied.
type SwitchedServer<'a> = dyn Fn(&SwitchSet) -> Result<SoloSpec, String> + Sync + 'a;

pub(super) async fn stop_growth(
    run: &DiagnosisRun<'_>,
    outcome: &ExperimentOutcome,
) -> Result<CureReport, CommandError> {
    let grows = |finding: &LegFinding| finding.series.iter().any(|found| found.verdict.grows());
    let findings = outcome.legs.iter().map(|leg| &leg.finding);
    let known: Vec<LegFinding> = findings.filter(|one| grows(one) && one.crash.is_none()).cloned().collect();
    if known.is_empty() {
        return Ok(report_without_growth(outcome));
    }
    let trials = MitigationTrials::new(run, outcome, SearchPurpose::Growth)?;
    let mut workloads: Vec<Workload> = known.iter().map(|one| one.workload).collect();
    workloads.dedup();
    let base = Experiment { workloads, ..run.experiment.clone() };
    let with = |arm: &SwitchSet| trials.server_with(arm);
    let mut lines = ProgressLines::new();
    let mut watch = |trying: TrialProgress<'_>| trials.show("bisect", &trying, &mut lines);
    let switches = trials.switches(base, &with);
    let conclusion = switches.stop_growth(&run.lab, &known, &mut watch, &run.stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured_mitigations(&conclusion.cure)?;
    let SwitchCandidates { switches, not_tried, .. } = trials.found;
    Ok(CureReport { added, switches, not_tried, conclusion, mitigations })
}

pub(super) async fn stop_crashes(
    run: &DiagnosisRun<'_>,
    outcome: &ExperimentOutcome,
) -> Result<Vec<SurvivalReport>, CommandError> {
    let mut all = Vec::new();
    for finding in outcome.legs.iter().map(|leg| &leg.finding) {
        let Some(crash) = &finding.crash else { continue };
        if run.stop.is_cancelled() {
            break;
        }
        all.push(stop_crash(run, outcome, finding, crash).await?);
    }
    Ok(all)
}

async fn stop_crash(
    run: &DiagnosisRun<'_>,
    outcome: &ExperimentOutcome,
    finding: &LegFinding,
    crash: &WorkloadCrash,
) -> Result<SurvivalReport, CommandError> {
    let purpose = SearchPurpose::Crash { on_gpu: mentions_gpu(&crash.lines) };
    let trials = MitigationTrials::new(run, outcome, purpose)?;
    let with = |arm: &SwitchSet| {
        let mut spec = trials.server_with(arm)?;
        if finding.control {
            without_prompt_cache(&mut spec);
        }
        Ok(spec)
    };
    let workload = finding.workload;
    let mut lines = ProgressLines::new();
    let search = format!("crash under {workload}");
    let mut watch = |trying: TrialProgress<'_>| trials.show(&search, &trying, &mut lines);
    let switches = trials.switches(run.experiment.clone(), &with);
    let conclusion = switches.stop_crash(&run.lab, workload, crash, &mut watch, &run.stop).await;
    lines.close();
    let conclusion = conclusion?;
    let (mitigations, added) = trials.cured_mitigations(&conclusion.cure)?;
    let SwitchCandidates { switches, not_tried, .. } = trials.found;
    Ok(SurvivalReport { workload, switches, not_tried, conclusion, mitigations, added })
}

/// Returns whether the last log lines mention GPU code, so that GPU mitigations are tried first.
fn mentions_gpu(lines: &[String]) -> bool {
    lines.iter().any(|line| {
        let line = line.to_ascii_lowercase();
        ["cuda", "cublas", "hip", "rocm", "vulkan", "metal"].iter().any(|word| line.contains(word))
    })
}

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

struct MitigationTrials<'a> {
    target: &'a DiagnoseTarget,
    found: SwitchCandidates,
    configured: Vec<String>,
    judge: Mutex<MitigationChecker>,
}

impl<'a> MitigationTrials<'a> {
    fn new(
        run: &'a DiagnosisRun<'_>,
        outcome: &ExperimentOutcome,
        purpose: SearchPurpose,
    ) -> Result<Self, CommandError> {
        let target = &run.target;
        let findings: Vec<&LegFinding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
        let inherited: Arc<[String]> = run.machine.text_vars().into_iter().map(|(name, _)| name).collect();
        let DiagnoseTarget { resolved, index, .. } = target;
        let own = &resolved.models[*index].mitigations;
        let build = resolved.models[*index].build.as_ref();
        let server = AdvisedServer::from_spec(target.model(), build, own, &inherited);
        let mut judge = MitigationChecker::default();
        let seen = candidates::leak_evidence(&findings, &server);
        let found = candidates::find_candidates(resolved, *index, &seen, purpose, &mut judge)
            .map_err(CommandError::failed)?;
        Ok(Self { target, found, configured: own.list().to_vec(), judge: Mutex::new(judge) })
    }

    fn switches<'s>(&self, base: Experiment, with: &'s SwitchedServer<'s>) -> SwitchTrials<'s> {
        let SwitchCandidates { switches, clashes, .. } = &self.found;
        SwitchTrials { base, switches: switches.len(), clashes: clashes.clone(), with }
    }

    fn items(&self, switches: &[usize]) -> Vec<&str> {
        let known = switches.iter().filter_map(|at| self.found.switches.get(*at));
        known.map(|switch| switch.item.as_str()).collect()
    }

    fn server_with(&self, arm: &SwitchSet) -> Result<SoloSpec, String> {
        let mut judge = lock(&self.judge);
        let items = self.items(&arm.switches);
        let DiagnoseTarget { resolved, index, spec, .. } = self.target;
        let own = candidates::with_mitigations(resolved, *index, &self.configured, &items, &mut judge)?;
        Ok(SoloSpec { command: own.command, ..spec.clone() })
    }

    fn show(&self, search: &str, trying: &TrialProgress<'_>, lines: &mut ProgressLines) {
        match trying {
            TrialProgress::Next { arm, done, of } => {
                let name = if arm.is_baseline() {
                    "without any switch".to_owned()
                } else {
                    format!("with {}", self.items(&arm.switches).join(" and "))
                };
                lines.line(&format!("{search}, {done} of at most {of} tried: {name}"));
            }
            TrialProgress::Leg(LegProgress::Step { workload, done, of, .. }) => {
                lines.change(&format!("{workload} {done}/{of}"), false);
            }
            TrialProgress::Leg(_) => {}
        }
    }

    /// Returns the model's new `mitigations` and the flags and variables that they add. Empty without a cure.
    fn cured_mitigations(&self, cure: &[usize]) -> Result<(Vec<String>, CommandChanges), CommandError> {
        if cure.is_empty() {
            return Ok((Vec::new(), CommandChanges::default()));
        }
        let mut mitigations = self.configured.clone();
        mitigations.extend(self.items(cure).into_iter().map(str::to_owned));
        let cured = self.server_with(&SwitchSet { switches: cure.to_vec() }).map_err(CommandError::failed)?;
        Ok((mitigations, CommandChanges::between(&self.target.model().command, &cured.command)))
    }
}

pub(super) fn cure_text(report: &CureReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("cure: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &config_lines(&report.mitigations, &report.added, name);
        let cure = report.conclusion.cure.iter().filter_map(|at| report.switches.get(*at));
        text.extend(cure.map(|switch| format!("# {}: {}\n", switch.item, switch.does)));
    }
    text + &trials_text(&report.rows(), &report.left_out())
}

pub(super) fn survival_text(report: &SurvivalReport, name: Option<&str>) -> String {
    let mut text = "\n".to_owned();
    text.extend(report.sentences().iter().map(|sentence| format!("crash: {sentence}\n")));
    if !report.mitigations.is_empty() {
        text += &config_lines(&report.mitigations, &report.added, name);
    }
    text + &trials_text(&report.rows(), &report.left_out())
}

/// Formats the lines for the configuration; without a model's name, the command line.
fn config_lines(mitigations: &[String], added: &CommandChanges, name: Option<&str>) -> String {
    let Some(name) = name else { return format!("\nwithout llama-warden:\n{}\n", added.command_line()) };
    let list = mitigations.iter().collect::<toml_edit::Array>().to_string();
    let key = warden_config::problem::quoted_key(name);
    format!("\nin the configuration:\n[models.{key}]\nmitigations = {}\n", list.trim())
}

fn trials_text(rows: &[Vec<String>], left_out: &[UntriedSwitch]) -> String {
    let mut text = String::new();
    if rows.len() > 1 {
        text.extend(["\n", &out::format_table(rows)]);
    }
    if !left_out.is_empty() {
        text += "\nnot tried:\n";
        text.extend(left_out.iter().map(|one| format!("{}: {}\n", one.item, one.why)));
    }
    text
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

    #[test]
    fn the_server_says_where_it_computes() {
        let says = |line: &str| mentions_gpu(&[line.to_owned()]);
        assert!(says("CUDA error: an illegal instruction was encountered"));
        assert!(!says("GGML_ASSERT(n > 1) failed"));
    }
}
