//! `llama-warden diagnose`: runs experiments with fresh servers to find out whether memory leaks, and with
//! which requests. An experiment has a leg for each workload.
//!
//! ```text
//!   arguments ── target: command with mitigations ──> Experiment (warden_diagnose) ──> table, JSON
//!                                             Ctrl-C ──> ends the leg; prints the table so far
//!   --bisect    experiments with and without mitigations: finds those that stop the growth
//!   --between   experiments with builds of commits: finds the commit that introduced the growth
//!   --against   the same requests to two builds: proves whether one may replace the other
//!   --isolation more conversations than slots: finds out whether the server mixes them
//!   --report    a shareable folder with a script that shows the growth
//! ```

pub(crate) mod against;
mod args;
mod between;
mod bisect;
mod candidates;
mod diagnosis;
mod display;
mod isolation;
mod outputs;
mod starts;
mod target;
mod trace;

use tokio_util::sync::CancellationToken;
use warden_config::machine::HostMachine;
use warden_diagnose::report::{CureReport, SurvivalReport};
use warden_diagnose::{DiagnoseError, DiagnoseReport, Experiment, ExperimentOutcome, LegProgress};
use warden_experiment::{LegFinding, fewest_readings};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::start_search::may_be_load_death;

pub(crate) use self::args::DiagnoseArgs;
use self::diagnosis::{DiagnosisRun, open_lab, wait_or_interrupt};
use self::display::ExperimentDisplay;
pub(crate) use self::outputs::describe_machine as machine_facts;
use self::target::DiagnoseTarget;
use self::trace::TraceRecorder;
use crate::exit::CommandError;
use crate::out;
use crate::serve::{SignalHandlers, with_nursery};

/// Must be called on the main thread, because the nursery forks.
pub(crate) fn run(args: DiagnoseArgs) -> Result<(), CommandError> {
    with_nursery(|nursery| diagnose(args, nursery))
}

async fn diagnose(args: DiagnoseArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    if args.between.between.is_some() {
        return Box::pin(between::run(&args, nursery)).await;
    }
    if args.against.against.is_some() {
        return Box::pin(against::run(&args, nursery)).await;
    }
    if args.isolation.isolation {
        return Box::pin(isolation::run(&args, nursery)).await;
    }
    Box::pin(run_experiment(&args, nursery)).await
}

/// Finds the server to test, and prints the configuration's warnings and the server's program.
async fn find_target(
    args: &DiagnoseArgs,
    machine: &HostMachine,
    signals: &mut SignalHandlers,
) -> Result<DiagnoseTarget, CommandError> {
    let target = tokio::select! {
        target = DiagnoseTarget::find(args, machine) => target?,
        () = signals.wait_leave() => return Err(CommandError::INTERRUPTED),
    };
    for warning in &target.resolved.warnings {
        out::error_line(&format!("warning: {warning}"));
    }
    out::error_line(&target.program_line());
    Ok(target)
}

async fn run_experiment(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    let workloads = args.workloads();
    outputs::check_outputs(args)?;
    // Install the handlers before any process starts: a signal must not end the program and leave servers
    // running.
    let mut signals = SignalHandlers::new()?;
    let machine = HostMachine::read();
    let mut tracing = args.trace.then(|| TraceRecorder::prepare(args.tracer.as_ref())).transpose()?;
    let target = find_target(args, &machine, &mut signals).await?;
    let about = target.about(warden_admin::clock::now_text(), &machine);
    let mut spec = target.spec.clone();
    let numbers = target.resolved.settings.diagnose.clone();
    if let Some(tracing) = &mut tracing {
        tracing.apply(&mut spec.command)?;
    }
    let (lab, sockets) = open_lab(nursery, &target.resolved, &target.model().lifecycle, numbers)?;
    let steps = args.requests.unwrap_or(lab.numbers.requests);
    let fewest = fewest_readings(&lab.growth, &lab.numbers);
    if steps < fewest {
        out::error_line(&format!(
            "warning: {steps} requests are too few for a verdict: it takes `--requests {fewest}` or more"
        ));
    }
    let experiment = Experiment { spec, workloads, steps, early: true };
    let run = DiagnosisRun { args, machine, target, experiment, lab, stop: CancellationToken::new() };
    let mut outcome = match run.run_legs(tracing.as_mut(), &mut signals).await? {
        Err(DiagnoseError::Start(failure)) if may_be_load_death(&failure) => {
            let finding = starts::search_start_switch(&run, &mut signals).await?;
            drop(sockets);
            return starts::report_finding(&run, &finding, DiagnoseError::Start(failure).into());
        }
        outcome => outcome?,
    };
    if let Some(tracing) = &tracing {
        tracing.apply_to_verdicts(&mut outcome);
    }
    // Box the large future: it contains whole experiments.
    let found = Box::pin(run.follow_up(&outcome, &mut signals)).await;
    drop(sockets);
    let FollowUpResults { cure, survival, failure } = found;
    let mut report = DiagnoseReport { cure, survival, ..DiagnoseReport::new(about, &outcome) };
    report.about.system = outputs::describe_system(&run.target, outputs::first_props(&outcome)).await;
    if let Some(tracing) = &tracing {
        tracing.add_to_report(&mut report)?;
    }
    run.print_report(&outcome, &report)?;
    run.write_outputs(&outcome, &report, failure)?;
    exit_for_findings(&outcome, run.stop.is_cancelled())
}

impl DiagnosisRun<'_> {
    async fn run_legs(
        &self,
        mut tracing: Option<&mut TraceRecorder>,
        signals: &mut SignalHandlers,
    ) -> Result<Result<ExperimentOutcome, DiagnoseError>, CommandError> {
        let mut display = ExperimentDisplay::new(self.experiment.workloads.len());
        let mut show = |progress: LegProgress<'_>| {
            if let Some(tracing) = &mut tracing {
                tracing.on_progress(&progress);
            }
            display.show(&progress);
        };
        // Box the large future: a leg may be repeated within it.
        let running = Box::pin(self.experiment.run(&self.lab, &mut show, &self.stop));
        let outcome = wait_or_interrupt(signals, &self.stop, running).await?;
        display.close();
        Ok(outcome)
    }

    async fn follow_up(&self, outcome: &ExperimentOutcome, signals: &mut SignalHandlers) -> FollowUpResults {
        let mut all = FollowUpResults::default();
        all.failure = Box::pin(self.run_follow_ups(outcome, signals, &mut all)).await.err();
        all
    }

    async fn run_follow_ups(
        &self,
        outcome: &ExperimentOutcome,
        signals: &mut SignalHandlers,
        all: &mut FollowUpResults,
    ) -> Result<(), CommandError> {
        let Self { args, stop, .. } = self;
        if args.bisect && !outcome.interrupted {
            let leaks = outcome.legs.iter().any(|leg| leg.finding.crash.is_none() && leg.finding.leaks());
            if leaks || !outcome.crashed() {
                let running = Box::pin(bisect::stop_growth(self, outcome));
                all.cure = Some(wait_or_interrupt(signals, stop, running).await??);
            }
            let running = Box::pin(bisect::stop_crashes(self, outcome));
            all.survival = wait_or_interrupt(signals, stop, running).await??;
        }
        Ok(())
    }

    fn print_report(&self, outcome: &ExperimentOutcome, report: &DiagnoseReport) -> Result<(), CommandError> {
        if self.args.json {
            out::print_json(report)
        } else {
            out::print_text(&findings_text(self.args, outcome, report))
        }
    }

    /// Writes the files after the report, so that a failed write does not hide the findings. Returns the
    /// first failure, which may be that of a follow-up.
    fn write_outputs(
        &self,
        outcome: &ExperimentOutcome,
        report: &DiagnoseReport,
        failure: Option<CommandError>,
    ) -> Result<(), CommandError> {
        let Self { args, machine, target, .. } = self;
        let all = [
            args.report
                .as_ref()
                .map(|path| outputs::write_report_folder(path, report, outcome, target, &machine.cwd, &[])),
            failure.map(Err),
        ];
        outputs::first_failure(all.into_iter().flatten(), out::error_line)
    }
}

#[derive(Default)]
struct FollowUpResults {
    cure: Option<CureReport>,
    survival: Vec<SurvivalReport>,
    failure: Option<CommandError>,
}

fn findings_text(args: &DiagnoseArgs, outcome: &ExperimentOutcome, report: &DiagnoseReport) -> String {
    let findings: Vec<&LegFinding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
    let mut text = String::new();
    if !findings.is_empty() || !outcome.skipped.is_empty() {
        text += &out::format_table(&warden_diagnose::report::table_rows(&findings, &outcome.skipped));
    }
    let notes = report.notes();
    if !notes.is_empty() {
        text.push('\n');
    }
    text.extend(notes.iter().map(|note| format!("{note}\n")));
    let name = args.flags.is_empty().then_some(report.about.model.as_str());
    text.extend(report.cure.iter().map(|cure| bisect::cure_text(cure, name)));
    text.extend(report.survival.iter().map(|one| bisect::survival_text(one, name)));
    text.extend(report.attribution.iter().map(|line| format!("{line}\n")));
    text
}

fn exit_for_findings(outcome: &ExperimentOutcome, stopped: bool) -> Result<(), CommandError> {
    let code = if outcome.interrupted || stopped {
        crate::exit::INTERRUPTED_CODE
    } else if outcome.crashed() {
        crate::exit::CRASHES_CODE
    } else if outcome.leaks() {
        crate::exit::LEAKS_CODE
    } else if outcome.server_failed() || outcome.failed {
        crate::exit::FAILURE_CODE
    } else if outcome.legs.is_empty() {
        return Err(CommandError::hinted(
            "nothing was run: the server can do none of these workloads",
            "the table says why",
        ));
    } else if outcome.is_inconclusive() || outcome.is_in_doubt() {
        crate::exit::UNDECIDED_CODE
    } else {
        return Ok(());
    };
    Err(CommandError::Reported { code })
}

impl From<DiagnoseError> for CommandError {
    fn from(error: DiagnoseError) -> Self {
        let message = error.to_string();
        let hint = error.hint();
        match error {
            DiagnoseError::Interrupted => Self::INTERRUPTED,
            DiagnoseError::Start(_) | DiagnoseError::CannotDo { .. } | DiagnoseError::Own { .. } => {
                Self::Failed { message, hint }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;
    use warden_diagnose::LegResult;
    use warden_diagnose::report::ExperimentSetup;
    use warden_experiment::{LegEnd, LegJudge, LegSpeed, Workload};
    use warden_policies::defaults;
    use warden_policies::growth::GrowthVerdict;
    use warden_policies::sample::{BackendSample, HostMemory, SampleEdge, WorkDone};
    use warden_supervisor::ServerProps;

    use super::*;

    #[derive(Parser)]
    struct DiagnoseTestCli {
        #[command(flatten)]
        args: DiagnoseArgs,
    }

    fn parse(args: &[&str]) -> DiagnoseArgs {
        DiagnoseTestCli::parse_from(std::iter::once(&"diagnose").chain(args)).args
    }

    #[test]
    fn without_a_choice_all_workloads_are_run() {
        assert_eq!(parse(&["--", "-m", "a"]).workloads(), Workload::ALL);
    }

    #[test]
    fn a_choice_keeps_its_order_and_each_workload_is_run_once() {
        let args =
            parse(&["--workload", "same-image,short-text", "--workload", "same-image", "--", "-m", "a"]);
        assert_eq!(args.workloads(), [Workload::SameImage, Workload::ShortText]);
    }

    /// A leg in which each request adds these bytes of host memory.
    fn leg(bytes: u64) -> LegResult {
        const REQUESTS: u64 = 100;
        let mut judge =
            LegJudge::new(Workload::ShortText, REQUESTS, &defaults().growth, &defaults().diagnose);
        for requests in 1..=REQUESTS {
            let work = WorkDone { requests, prompt_tokens: 60 * requests, ..WorkDone::default() };
            let anon = (400 << 20) + requests * bytes + requests * 7919 % 61 * 4096;
            let sample = BackendSample {
                at: Duration::from_millis(300 * requests),
                edge: SampleEdge::Idle,
                host: Some(HostMemory { anon, ..HostMemory::default() }),
                vram: Vec::new(),
                pools: Vec::new(),
                in_flight: 0,
                work,
                largest_prompt: 60,
                reclaims: 0,
            };
            judge.observe(sample, 0, None);
        }
        LegResult {
            finding: judge.finding(LegSpeed::default(), LegEnd::Complete),
            readings: judge.readings().to_vec(),
            props: ServerProps::default(),
            allowance: Vec::new(),
            ready_after: Duration::from_secs(1),
            vram_unknown: None,
            devices: Vec::new(),
            lines: Vec::new(),
            no_embeddings: None,
            refused: None,
            tokens_per_word: 0.0,
        }
    }

    /// Exit code, and the printed findings.
    fn exit_of(legs: Vec<LegResult>) -> (u8, String) {
        let outcome = ExperimentOutcome { legs, ..ExperimentOutcome::default() };
        let report = DiagnoseReport::new(ExperimentSetup::default(), &outcome);
        let code = exit_for_findings(&outcome, false).map_or_else(|failure| failure.code(), |()| 0);
        (code, findings_text(&parse(&["--", "-m", "a"]), &outcome, &report))
    }

    #[test]
    fn a_rise_up_to_the_end_is_undecided_and_not_the_same_as_no_leak() {
        let (code, text) = exit_of(vec![leg(0)]);
        assert_eq!(code, 0, "{text}");
        let rises = leg(300 << 10);
        assert_eq!(rises.finding.worst(), Some(GrowthVerdict::Suspected));
        let (code, text) = exit_of(vec![leg(0), rises.clone()]);
        assert_eq!(code, 5, "{text}");
        assert!(text.contains("suspected"), "{text}");
        // A leak that is sure outweighs a doubt.
        assert_eq!(exit_of(vec![rises, leg(4 << 20)]).0, 3);
    }
}
