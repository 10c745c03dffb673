//! Runs legs one after the other with one command line, and combines their findings.

use tokio_util::sync::CancellationToken;
use warden_experiment::crash::{self, CrashRecurrence, WorkloadCrash};
use warden_experiment::{LegEnd, LegReading, Workload, blame_across};
use warden_policies::MemoryKind;
use warden_policies::growth::{GrowthBlame, GrowthVerdict};
use warden_supervisor::SoloSpec;

use crate::error::{DiagnoseError, RequiredCapability};
use crate::lab::Lab;
use crate::leg::{LegProgress, LegResult, LegSpec, run_leg};

/// Server and workloads of an experiment.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// Server to test.
    pub spec: SoloSpec,
    /// Workloads in running order.
    pub workloads: Vec<Workload>,
    /// Most readings per leg.
    pub steps: u64,
    /// True to end a leg once more readings would not change its result.
    pub early: bool,
}

/// Result of an experiment.
#[derive(Debug, Default)]
pub struct ExperimentOutcome {
    /// Finished legs.
    pub legs: Vec<LegResult>,
    /// Workloads that were not run.
    pub skipped: Vec<SkippedWorkload>,
    /// True if the user interrupted the experiment before all legs were run.
    pub interrupted: bool,
    /// True if the server failed to start for one leg, although it started for another.
    pub failed: bool,
}

/// A workload that the server cannot do.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SkippedWorkload {
    /// Workload that was not run.
    pub workload: Workload,
    /// Reason.
    pub why: String,
}

impl ExperimentOutcome {
    /// Returns true if any leg found a leak.
    pub fn leaks(&self) -> bool {
        self.legs.iter().any(|leg| leg.finding.leaks())
    }

    /// Returns true if any leg ended because the server crashed.
    pub fn crashed(&self) -> bool {
        self.legs.iter().any(|leg| leg.finding.crash.is_some())
    }

    /// Returns true if any leg ended because the server did not work, or was killed from outside.
    pub fn server_failed(&self) -> bool {
        self.legs.iter().any(|leg| matches!(leg.finding.ended, LegEnd::Failed { .. } | LegEnd::Killed { .. }))
    }

    /// Returns true if every leg was too short for a verdict.
    pub fn is_inconclusive(&self) -> bool {
        !self.legs.is_empty() && self.legs.iter().all(|leg| leg.finding.is_too_short())
    }

    /// Returns true if a kind of memory may leak, and none is known to leak.
    pub fn is_in_doubt(&self) -> bool {
        !self.leaks() && self.legs.iter().any(|leg| leg.finding.worst().is_some_and(GrowthVerdict::grows))
    }
}

impl Experiment {
    pub(crate) fn leg(&self, spec: SoloSpec, workload: Workload, early: bool) -> LegSpec {
        LegSpec { spec, workload, steps: self.steps, early }
    }

    /// Runs the legs. Cancelling `stop` ends them early, with the results so far.
    ///
    /// # Errors
    ///
    /// The server does not start, or the user interrupted the experiment, and no leg has a result.
    pub async fn run(
        &self,
        lab: &Lab,
        watch: &mut (dyn FnMut(LegProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<ExperimentOutcome, DiagnoseError> {
        let mut outcome = ExperimentOutcome::default();
        let mut missing: Vec<(RequiredCapability, String)> = Vec::new();
        for workload in self.workloads.iter().copied() {
            if stop.is_cancelled() {
                outcome.interrupted = true;
                break;
            }
            let known = missing.iter().find(|(kind, _)| *kind == RequiredCapability::for_workload(workload));
            if let Some((_, why)) = known {
                watch(LegProgress::Skipped(workload, why));
                outcome.skipped.push(SkippedWorkload { workload, why: why.clone() });
                continue;
            }
            let leg = self.leg(self.spec.clone(), workload, self.early);
            match run_leg(lab, &leg, watch, stop).await {
                Ok(result) => {
                    let ambiguous = result.finding.is_ambiguous() && !stop.is_cancelled();
                    if let Some(why) = &result.no_embeddings {
                        missing.push((RequiredCapability::Embeddings, why.clone()));
                    }
                    if let Some(modalities) = result.props.modalities {
                        let none = [
                            (RequiredCapability::Vision, modalities.vision),
                            (RequiredCapability::Audio, modalities.audio),
                        ];
                        let none = none.into_iter().filter(|(_, has)| !has);
                        missing.extend(none.map(|(kind, _)| (kind, kind.missing_text().to_owned())));
                    }
                    outcome.interrupted |= result.finding.ended == LegEnd::Interrupted;
                    let mut result = result;
                    if let Some(crash) = &mut result.finding.crash {
                        repeat_crash(lab, &leg, crash, watch, stop).await;
                        outcome.interrupted |= stop.is_cancelled();
                    }
                    outcome.legs.push(result);
                    if ambiguous {
                        outcome.legs.extend(run_control(lab, leg, watch, stop).await);
                        outcome.interrupted |= stop.is_cancelled();
                    }
                }
                Err(DiagnoseError::CannotDo { workload, why, kind }) => {
                    watch(LegProgress::Skipped(workload, &why));
                    outcome.skipped.push(SkippedWorkload { workload, why: why.clone() });
                    missing.push((kind, why));
                }
                Err(DiagnoseError::Interrupted) if !outcome.legs.is_empty() => outcome.interrupted = true,
                // The findings of earlier legs stay.
                Err(error) if !outcome.legs.is_empty() => {
                    let why = error.to_string();
                    watch(LegProgress::Skipped(workload, &why));
                    outcome.skipped.push(SkippedWorkload { workload, why });
                    outcome.failed = true;
                }
                Err(error) => return Err(error),
            }
        }
        assign_blame(&mut outcome.legs, lab);
        Ok(outcome)
    }
}

/// Repeats a leg in fresh processes until it is known if the crash recurs.
async fn repeat_crash(
    lab: &Lab,
    leg: &LegSpec,
    crash: &mut WorkloadCrash,
    watch: &mut (dyn FnMut(LegProgress<'_>) + Send),
    stop: &CancellationToken,
) {
    let leg = LegSpec { early: false, ..leg.clone() };
    while crash.again == CrashRecurrence::Undecided && !stop.is_cancelled() {
        watch(LegProgress::Again(leg.workload, crash));
        // If the repetition fails, the findings stay as they are.
        let Ok(result) = run_leg(lab, &leg, &mut |_| (), stop).await else { return };
        let Some(run) = result.finding.as_crash_run() else { return };
        crash.runs.push(run);
        crash.again = crash::judge_recurrence(&lab.numbers.crash, &crash.runs);
    }
}

/// Repeats a leg without the prompt cache. If the repetition fails, the findings stay as they are.
async fn run_control(
    lab: &Lab,
    mut leg: LegSpec,
    watch: &mut (dyn FnMut(LegProgress<'_>) + Send),
    stop: &CancellationToken,
) -> Option<LegResult> {
    without_prompt_cache(&mut leg.spec);
    watch(LegProgress::Control(leg.workload));
    match run_leg(lab, &leg, watch, stop).await {
        Ok(mut result) => {
            result.finding.control = true;
            Some(result)
        }
        Err(error) => {
            watch(LegProgress::Skipped(leg.workload, &error.to_string()));
            None
        }
    }
}

/// Switches the server's prompt cache off.
pub fn without_prompt_cache(spec: &mut SoloSpec) {
    // llama-server uses the last occurrence of a flag.
    spec.command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
}

fn assign_blame(legs: &mut [LegResult], lab: &Lab) {
    let suspected =
        |leg: &LegResult, series| leg.finding.series_of(series).is_some_and(|found| found.verdict.grows());
    let mut all: Vec<MemoryKind> =
        legs.iter().flat_map(|leg| leg.finding.series.iter().map(|found| found.series)).collect();
    all.sort_unstable();
    all.dedup();
    for series in all {
        if !legs.iter().any(|leg| suspected(leg, series)) {
            continue;
        }
        let readings: Vec<&[LegReading]> = legs.iter().map(|leg| leg.readings.as_slice()).collect();
        let together = blame_across(series, &readings, &lab.growth);
        let clear = matches!(together, GrowthBlame::Pays { .. });
        for leg in legs.iter_mut().filter(|leg| suspected(leg, series)) {
            let found = leg.finding.series.iter_mut().find(|found| found.series == series);
            if let Some(found) = found.filter(|found| clear || found.blame.is_none()) {
                found.blame = Some(together.clone());
            }
        }
    }
}
