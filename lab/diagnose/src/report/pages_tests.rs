//! Reports of a leak, of none, of a crash and of a cure.

use std::fmt::Display;

use serde_json::json;
use warden_experiment::bisect::{CureOutcome as Cured, SwitchCost, TrialReport, WorkloadMemory};
use warden_experiment::crash::{CrashRecurrence, CrashRun, WorkloadCrash};
use warden_experiment::sequential::{SwitchEffect, SwitchJudgement};
use warden_experiment::survive;
use warden_experiment::{LegEnd, Workload};
use warden_policies::{GpuIndex, MemoryKind};

use super::folder::ScriptSubject;
use super::tests::{blind, cure, leg, outcome, plain, report, short};
use super::*;
use crate::client::LabRequestError;
use crate::error::RequiredCapability;
use crate::{DiagnoseError, LegResult};

fn lines<T: Display>(said: impl IntoIterator<Item = T>) -> String {
    said.into_iter().map(|one| one.to_string() + "\n").collect()
}

fn cells(rows: &[Vec<String>]) -> String {
    lines(rows.iter().map(|row| row.join(" | ")))
}

fn told(outcome: &ExperimentOutcome) -> String {
    let findings: Vec<&LegFinding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
    let report = DiagnoseReport::new(ExperimentSetup::default(), outcome);
    cells(&table_rows(&findings, &outcome.skipped)) + "\n" + &lines(report.notes())
}

fn of(legs: Vec<LegResult>) -> ExperimentOutcome {
    ExperimentOutcome { legs, skipped: Vec::new(), interrupted: false, failed: false }
}

fn crashing() -> LegResult {
    let run = |requests, died| CrashRun { requests, died };
    let mut leg = leg(Workload::SameImage, 0);
    leg.finding.crash = Some(WorkloadCrash {
        at_request: 22,
        why: "it died of signal 6 (SIGABRT)".to_owned(),
        lines: vec!["GGML_ASSERT(n > 1) failed".to_owned(), "ggml_abort".to_owned()],
        runs: vec![run(22, true), run(21, true), run(184, false)],
        again: CrashRecurrence::Sometimes,
    });
    leg.finding.ended = LegEnd::Crashed { why: "it died of signal 6 (SIGABRT)".to_owned() };
    leg
}

#[test]
fn a_leak_is_told_beside_what_is_steady_and_what_was_not_run() {
    insta::assert_snapshot!(told(&outcome()));
}

#[test]
fn what_keeps_a_leg_from_being_judged_is_told() {
    let mut ended = [
        LegEnd::OutOfTime,
        LegEnd::OutOfMemory { why: "the machine has 100.0 MiB left".to_owned() },
        LegEnd::Interrupted,
        LegEnd::Killed { why: "signal 9 (SIGKILL)".to_owned() },
        LegEnd::Failed { why: "5 requests in a row failed: 400: no".to_owned() },
    ]
    .map(|ended| {
        let mut leg = leg(Workload::LongText, 0);
        leg.finding.ended = ended;
        leg
    })
    .to_vec();
    ended[0].refused = Some(RefusedRequests { requests: 5, why: "400: no images".to_owned() });
    ended.extend([short(Workload::ShortText), blind(Workload::Conversation)]);
    ended.push(leg(Workload::OutputLengths, 300 * 1024));
    insta::assert_snapshot!(told(&of(ended)));
}

#[test]
fn the_report_of_a_leak_has_all_that_a_maintainer_needs() {
    let report = DiagnoseReport { attribution: vec!["host grows, called in f".to_owned()], ..report() };
    insta::assert_snapshot!(report.to_markdown(ScriptSubject::Leg(report.legs.last().unwrap())));
}

#[test]
fn a_script_says_what_it_shows_and_how_it_is_run() {
    let folder = tempfile::tempdir().unwrap();
    report().write_folder(folder.path(), &plain()).unwrap();
    insta::assert_snapshot!(std::fs::read_to_string(folder.path().join("reproduce.sh")).unwrap());
}

#[test]
fn the_report_of_no_leak_says_how_far_was_looked() {
    let report = DiagnoseReport::new(report().about, &of(vec![leg(Workload::LongText, 0)]));
    insta::assert_snapshot!(report.to_markdown(ScriptSubject::Nothing));
}

#[test]
fn a_crash_is_told_with_what_stops_it() {
    let outcome = of(vec![crashing()]);
    let run = |requests, died| json!({"requests": requests, "died": died});
    let trial = |switches: &[usize], runs: serde_json::Value, does: &str| {
        json!({
            "switches": switches, "runs": runs, "does": does, "failed": null, "tokens_per_second": 88.0,
            "memory": [[MemoryKind::Host, "steady"]],
        })
    };
    let trials = json!([
        trial(&[0], json!([run(30, true)]), "nothing"),
        trial(&[1], json!([run(184, false), run(184, false)]), "stops"),
    ]);
    let all = cure(Cured::Cured, &[]);
    let survival = |outcome, cure: &[usize]| SurvivalReport {
        workload: Workload::SameImage,
        switches: all.switches.clone(),
        not_tried: all.not_tried.clone(),
        conclusion: survive::SurvivalConclusion {
            outcome,
            cure: cure.to_vec(),
            doubt: (!cure.is_empty()).then_some(0.012),
            without: vec![CrashRun { requests: 22, died: true }, CrashRun { requests: 21, died: true }],
            tokens_per_second: Some(90.0),
            trials: serde_json::from_value(trials.clone()).unwrap(),
            legs: 5,
        },
        mitigations: Vec::new(),
        added: CommandChanges::default(),
    };
    let stopped = survival(survive::SurvivalOutcome::Cured, &[1]);
    let others = [
        survive::SurvivalOutcome::NotCured,
        survive::SurvivalOutcome::NotAgain,
        survive::SurvivalOutcome::BaselineFailed { why: "it does not start".to_owned() },
        survive::SurvivalOutcome::Interrupted,
    ];
    let others = others.map(|outcome| lines(survival(outcome, &[]).sentences())).concat();
    let text = told(&outcome) + "\n" + &cells(&stopped.rows()) + &lines(stopped.sentences()) + &others;
    let report = DiagnoseReport { survival: vec![stopped], ..DiagnoseReport::new(report().about, &outcome) };
    insta::assert_snapshot!(text + "\n---\n" + &report.to_markdown(ScriptSubject::Nothing));
}

#[test]
fn what_stops_a_leak_is_told_with_its_price() {
    let track = |series| WorkloadMemory { workload: Workload::SameImage, series };
    let (host, vram) = (track(MemoryKind::Host), track(MemoryKind::Vram(GpuIndex(0))));
    let judged = |does, with: f64| SwitchJudgement {
        does,
        share: Some(warden_policies::growth::IntervalEstimate { value: with / 4.0, low: 0.0, high: 1.0 }),
        without: Some(4.0 * 1_048_576.0),
        with: Some(with * 1_048_576.0),
    };
    let beside = json!({"with": 90.0, "without": 100.0, "slower": true});
    let cost = SwitchCost {
        tokens_per_second: serde_json::from_value(beside).unwrap(),
        first_token: serde_json::from_value(json!({"with": 0.21, "without": 0.2, "slower": false})).unwrap(),
    };
    let trial = |switches: &[usize], first, second, cost| TrialReport {
        switches: switches.to_vec(),
        legs: 2,
        tracks: vec![(host, first), (vram, second)],
        cost,
        crashed: None,
    };
    let (stops, nothing) = (judged(SwitchEffect::Stops, 0.01), judged(SwitchEffect::Nothing, 3.9));
    let halves = judged(SwitchEffect::Halves, 2.0);
    let of = |outcome: Cured, switches: &[usize], stopped: &[WorkloadMemory]| {
        let mut report = cure(outcome, switches);
        report.conclusion.leaking = vec![host, vram];
        report.conclusion.stopped = stopped.to_vec();
        report.conclusion.by_track = vec![(host, vec![0])];
        report.conclusion.trials.extend([
            trial(&[1], nothing, halves, SwitchCost::default()),
            trial(&[0, 1], stops, stops, cost),
        ]);
        report
    };
    let why = || "there are too few readings".to_owned();
    let reports = [
        of(Cured::Cured, &[0, 1], &[host, vram]),
        of(Cured::PartlyCured, &[1], &[host]),
        of(Cured::NotCured, &[], &[]),
        cure(Cured::NothingToCure, &[]),
        cure(Cured::NotKnown { why: why() }, &[]),
        cure(Cured::BaselineFailed { why: why() }, &[]),
        cure(Cured::Interrupted, &[]),
    ];
    let left_out = |report: &CureReport| {
        lines(report.left_out().iter().map(|one| format!("    not tried: {}: {}", one.item, one.why)))
    };
    let told = reports.iter().map(|report| lines(report.sentences()) + &left_out(report) + "\n");
    insta::assert_snapshot!(cells(&reports[0].rows()) + "\n" + &told.collect::<String>());
}

#[test]
fn what_keeps_an_experiment_from_being_run_is_told() {
    let failure = |lines: &[&str]| warden_supervisor::BackendFailure {
        kind: warden_supervisor::FailureKind::BadModel,
        message: "the model could not be loaded".to_owned(),
        lines: lines.iter().map(|&line| line.to_owned()).collect(),
        failures: 1,
    };
    let cannot = [
        RequiredCapability::Text,
        RequiredCapability::Vision,
        RequiredCapability::Audio,
        RequiredCapability::Embeddings,
    ]
    .map(|kind| {
        let why = kind.missing_text().to_owned();
        DiagnoseError::CannotDo { workload: Workload::ShortText, why, kind }
    });
    let errors = [
        DiagnoseError::Start(Box::new(failure(&[]))),
        DiagnoseError::Start(Box::new(failure(&["error: failed to open"]))),
        DiagnoseError::Interrupted,
        DiagnoseError::Own { what: "cannot make a picture", why: "odd".to_owned() },
    ];
    let told = errors.iter().chain(&cannot).map(|error| {
        let hint = error.hint().map(|hint| format!("\n    hint: {hint}"));
        format!("{error}{}", hint.unwrap_or_default())
    });
    let asked = [
        LabRequestError::Refused { status: 400, message: "no images".to_owned() },
        LabRequestError::Broken("end of file".to_owned()),
        LabRequestError::Late(std::time::Duration::from_secs(30)),
    ];
    insta::assert_snapshot!(lines(told) + &lines(asked));
}
