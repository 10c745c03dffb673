//! `diagnose --isolation`: tests if a server mixes conversations, and with `--bisect` which known mitigation
//! stops that.

use tokio_util::sync::CancellationToken;
use warden_config::machine::HostMachine;
use warden_config::resolve::flags;
use warden_config::resolve::mitigations::MitigationChecker;
use warden_diagnose::isolation::{
    ISOLATION_REQUESTS, IsolationExperiment, IsolationProgress, IsolationRun, with_one_slot,
};
use warden_diagnose::report::{IsolationCure, IsolationReport, NO_REUSE, UntriedSwitch};
use warden_diagnose::{DiagnoseError, DiagnoseReport, ExperimentOutcome, Lab};
use warden_experiment::isolation::{IsolationOutcome, judge_cure};
use warden_supervisor::SoloSpec;
use warden_supervisor::nursery::NurseryHandle;

use super::candidates::with_mitigations;
use super::target::DiagnoseTarget;
use super::{DiagnoseArgs, find_target, open_lab, outputs, wait_or_interrupt};
use crate::cli::progress::ProgressLines;
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

/// Entries of `mitigations` that the list of known defects names against mixing.
const KNOWN_CURES: [&str; 2] = ["no-cache-idle-slots", "cache-ram=0"];

pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    outputs::check_outputs(args)?;
    let mut signals = SignalHandlers::new()?;
    let machine = HostMachine::read();
    let target = find_target(args, &machine, &mut signals).await?;
    let about = target.about(warden_admin::clock::now_text(), &machine);
    let timeout = target.resolved.settings.child.version_timeout;
    let known = flags::known_flags(&target.spec.command, timeout).await;
    let experiment = IsolationExperiment {
        spec: target.spec.clone(),
        has_prompt_cache: known.is_none_or(|known| known.knows("--cache-ram")),
        requests: args.requests.and_then(|count| usize::try_from(count).ok()).unwrap_or(ISOLATION_REQUESTS),
    };
    let numbers = target.resolved.settings.diagnose.clone();
    let (lab, sockets) = open_lab(nursery, &target.resolved, &target.model().lifecycle, numbers)?;
    let stop = CancellationToken::new();
    let mut lines = ProgressLines::new();
    let mut watch = |progress: IsolationProgress<'_>| show(&mut lines, progress);
    // Box the large future: it contains several processes.
    let testing = Box::pin(test(args, &target, &lab, &experiment, &mut watch, &stop));
    let tested = wait_or_interrupt(&mut signals, &stop, testing).await?;
    lines.close();
    drop(sockets);
    let (run, isolation) = tested?;
    let sent = run.published(&lab);
    let mut report = DiagnoseReport::new(about, &ExperimentOutcome::default());
    report.interrupted = run.interrupted || stop.is_cancelled();
    report.about.system = outputs::describe_system(&target, run.props).await;
    report.isolation = Some(isolation);
    print_report(args, &report)?;
    if let Some(path) = &args.report {
        let outcome = ExperimentOutcome::default();
        outputs::write_report_folder(path, &report, &outcome, &target, &machine.cwd, &sent)?;
    }
    exit_for_outcome(&run, report.interrupted)
}

async fn test(
    args: &DiagnoseArgs,
    target: &DiagnoseTarget,
    lab: &Lab,
    experiment: &IsolationExperiment,
    watch: &mut (dyn FnMut(IsolationProgress<'_>) + Send),
    stop: &CancellationToken,
) -> Result<(IsolationRun, IsolationReport), CommandError> {
    let run = experiment.run(lab, watch, stop).await?;
    let truth = with_one_slot(experiment.spec.clone(), experiment.has_prompt_cache);
    let mut report = IsolationReport {
        finding: run.finding.clone(),
        cures: Vec::new(),
        not_tried: Vec::new(),
        requests: run.places(),
        order: run.order(),
        truth_args: truth.command.args[experiment.spec.command.args.len()..].to_vec(),
    };
    if run.finding.is_mixed() {
        add_cures(args, target, lab, &run, &mut report, watch, stop).await;
    }
    Ok((run, report))
}

/// Tries the known cures if the user asked for that, else lists them.
async fn add_cures(
    args: &DiagnoseArgs,
    target: &DiagnoseTarget,
    lab: &Lab,
    run: &IsolationRun,
    report: &mut IsolationReport,
    watch: &mut (dyn FnMut(IsolationProgress<'_>) + Send),
    stop: &CancellationToken,
) {
    let mut judge = MitigationChecker::default();
    let configured = target.resolved.models[target.index].mitigations.list().to_vec();
    let switched = |item: &'static str, judge: &mut MitigationChecker| -> Result<SoloSpec, String> {
        if item == NO_REUSE {
            return Ok(target.spec.clone());
        }
        let own = with_mitigations(&target.resolved, target.index, &configured, &[item], judge)?;
        if own.command == target.spec.command {
            return Err("the server runs so already".to_owned());
        }
        Ok(SoloSpec { command: own.command, ..target.spec.clone() })
    };
    for item in KNOWN_CURES.into_iter().chain([NO_REUSE]) {
        let tried = match switched(item, &mut judge) {
            Err(why) => Err(why),
            Ok(_) if !args.bisect => Err("`--bisect` tries it".to_owned()),
            Ok(_) if stop.is_cancelled() => Err("interrupted".to_owned()),
            Ok(spec) => {
                let with = (item, item != NO_REUSE);
                let found = run.try_cure(lab, &spec, with, watch, stop).await;
                found.map_err(|error: DiagnoseError| error.to_string())
            }
        };
        let complete = tried.and_then(|with| match with.outcome {
            IsolationOutcome::Undecided { why } if with.foreign.is_empty() => Err(why),
            _ => Ok((with.foreign.len(), with.answers)),
        });
        match complete {
            Ok((foreign, answers)) => {
                let without = (run.finding.foreign.len(), run.finding.answers);
                let effect = judge_cure(without, (foreign, answers));
                report.cures.push(IsolationCure { item: item.to_owned(), effect, foreign, answers });
            }
            Err(why) => report.not_tried.push(UntriedSwitch { item: item.to_owned(), why }),
        }
    }
}

fn show(lines: &mut ProgressLines, progress: IsolationProgress<'_>) {
    let IsolationProgress { process, done, of } = progress;
    if of > 0 {
        lines.change(&format!("isolation: {process}: {done}/{of}"), done == of);
        return;
    }
    let what = match process {
        "alone" => "one conversation alone".to_owned(),
        "truth" => "the right answers, with one slot and without caches".to_owned(),
        "together" => "all conversations".to_owned(),
        switch => format!("all conversations, with {switch}"),
    };
    lines.line(&format!("isolation: {what}"));
}

fn print_report(args: &DiagnoseArgs, report: &DiagnoseReport) -> Result<(), CommandError> {
    if args.json {
        return out::print_json(report);
    }
    let sentences = report.isolation.iter().flat_map(IsolationReport::sentences);
    let text: String = sentences
        // A server's error may quote a key.
        .map(|line| warden_policies::secrets::redact_text(&format!("isolation: {line}\n")))
        .collect();
    out::print_text(&text)
}

fn exit_for_outcome(run: &IsolationRun, interrupted: bool) -> Result<(), CommandError> {
    let code = match run.finding.outcome {
        _ if interrupted => crate::exit::INTERRUPTED_CODE,
        IsolationOutcome::Mixed => crate::exit::LEAKS_CODE,
        IsolationOutcome::Separate => return Ok(()),
        // The sentence above has the reason.
        IsolationOutcome::Undecided { .. } if run.failure.is_some() => crate::exit::FAILURE_CODE,
        IsolationOutcome::Undecided { .. } => crate::exit::UNDECIDED_CODE,
    };
    Err(CommandError::Reported { code })
}
