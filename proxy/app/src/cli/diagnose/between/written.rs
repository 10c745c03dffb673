//! `diagnose --between --report DIR`: writes the shareable folder about the revision that shows the symptom.

use std::path::Path;

use tokio_util::sync::CancellationToken;
use warden_diagnose::between::NoServer;
use warden_diagnose::proof::{self, PublishedRequest, TextLengths};
use warden_diagnose::report::BetweenReport;
use warden_diagnose::{DiagnoseReport, Experiment, ExperimentOutcome, Lab, without_prompt_cache};
use warden_experiment::between::{RevisionOutcome, RevisionSymptom};
use warden_supervisor::SoloSpec;

use super::CommitSearch;
use crate::cli::diagnose::display::ExperimentDisplay;
use crate::cli::diagnose::outputs;
use crate::exit::CommandError;
use crate::out;

#[derive(Clone, Copy, Debug)]
pub(super) struct SearchRequests<'a> {
    pub(super) lengths: Option<TextLengths>,
    pub(super) base: &'a Experiment,
}

impl CommitSearch<'_> {
    /// Returns the folder of `--report` and the revision to write about; `None` if no report is written.
    pub(super) fn requested_report(&self, report: &BetweenReport) -> Option<(&Path, usize)> {
        let path = self.args.report.as_deref()?;
        match &report.conclusion.outcome {
            RevisionOutcome::Found { revision } => {
                Some((path, revision - usize::from(report.conclusion.ill_is_newer == Some(false))))
            }
            // The user can continue the search later and may still find the revision.
            RevisionOutcome::Interrupted => None,
            _ => {
                out::error_line(&format!("--report {}: nothing was found to write about", path.display()));
                None
            }
        }
    }

    /// Runs the workload that shows the symptom once more for the report. If no workload shows the symptom,
    /// the report contains the requests that do.
    pub(super) async fn write_report(
        &self,
        path: &Path,
        ill: usize,
        between: &BetweenReport,
        asked: SearchRequests<'_>,
        lab: &Lab,
        stop: &CancellationToken,
    ) -> Result<(), CommandError> {
        let Some(symptom) = &between.conclusion.symptom else { return Ok(()) };
        let target = self.target(ill).await.map_err(|none| match none {
            NoServer::Stop(failure) => failure,
            NoServer::Unavailable(why) => CommandError::failed(why),
            NoServer::Interrupted => CommandError::INTERRUPTED,
        })?;
        let mut spec = target.spec.clone();
        let (outcome, sent) = match symptom.work() {
            Some((workload, control)) => {
                if control {
                    without_prompt_cache(&mut spec);
                }
                let experiment = Experiment { spec, workloads: vec![workload], ..asked.base.clone() };
                let mut display = ExperimentDisplay::new(1);
                let outcome = experiment.run(lab, &mut |progress| display.show(&progress), stop).await?;
                display.close();
                (outcome, Vec::new())
            }
            None => (
                ExperimentOutcome::default(),
                self.symptom_requests(symptom, &spec, asked.lengths, lab, stop).await?,
            ),
        };
        if outcome.interrupted {
            return Err(CommandError::INTERRUPTED);
        }
        let about = target.about(warden_admin::clock::now_text(), self.machine);
        let mut report =
            DiagnoseReport { between: Some(between.clone()), ..DiagnoseReport::new(about, &outcome) };
        report.about.system = outputs::describe_system(&target, outputs::first_props(&outcome)).await;
        outputs::write_report_folder(path, &report, &outcome, &target, &self.machine.cwd, &sent)
    }

    async fn symptom_requests(
        &self,
        symptom: &RevisionSymptom,
        spec: &SoloSpec,
        lengths: Option<TextLengths>,
        lab: &Lab,
        stop: &CancellationToken,
    ) -> Result<Vec<PublishedRequest>, CommandError> {
        let questions: &[String] = match symptom {
            RevisionSymptom::Answers { requests } => requests,
            _ => &[],
        };
        let sent = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(CommandError::INTERRUPTED),
            sent = proof::published_requests(lab, spec, questions, lengths) => sent?,
        };
        sent.map_err(|why| {
            CommandError::failed(format!("--report: the requests could not be written: {why}"))
        })
    }
}
