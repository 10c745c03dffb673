//! Content of a report, and the secrets that it leaves out.

use std::time::Duration;

use warden_experiment::bisect;
use warden_experiment::{LegDecision, LegEnd, LegJudge, LegSpeed, Workload};
use warden_policies::growth::{GrowthBlame, GrowthVerdict, WorkUnit};
use warden_policies::sample::{BackendSample, HostMemory, SampleEdge, WorkDone};
use warden_policies::{MemoryKind, defaults};
use warden_supervisor::ServerCommand;

use super::folder::ScriptSubject;
use super::*;
use crate::LegResult;

pub(super) const MIB: u64 = 1 << 20;

pub(super) fn leg(workload: Workload, leak: u64) -> LegResult {
    let mut judge = LegJudge::new(workload, 120, &defaults().growth, &defaults().diagnose);
    for n in 1..=120 {
        let work =
            WorkDone { requests: n, prompt_tokens: 40 * n, output_tokens: 32 * n, ..WorkDone::default() };
        let host = HostMemory { anon: 100 * MIB + n * leak + n * 7919 % 61 * 4096, ..HostMemory::default() };
        let sample = BackendSample {
            at: Duration::from_millis(n),
            edge: SampleEdge::Idle,
            host: Some(host),
            vram: Vec::new(),
            pools: Vec::new(),
            in_flight: 0,
            work,
            largest_prompt: 40,
            reclaims: 0,
        };
        if judge.observe(sample, 0, None) == LegDecision::Decided {
            break;
        }
    }
    LegResult {
        finding: judge.finding(LegSpeed::default(), LegEnd::Early),
        readings: judge.readings().to_vec(),
        props: warden_supervisor::ServerProps::default(),
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

pub(super) fn outcome() -> ExperimentOutcome {
    let mut leaking = leg(Workload::SameImage, 4 * MIB);
    leaking.finding.series[0].blame =
        Some(GrowthBlame::Pays { unit: WorkUnit::Image, bytes_per_unit: 4.42 * 1_048_576.0, share: 0.98 });
    let skipped =
        vec![SkippedWorkload { workload: Workload::Audio, why: "the server takes no <audio>".to_owned() }];
    ExperimentOutcome {
        legs: vec![leg(Workload::ShortText, 0), leaking],
        skipped,
        interrupted: false,
        failed: false,
    }
}

pub(super) fn report() -> DiagnoseReport {
    let command = ServerCommand {
        args: ["-m", "a b.gguf", "--api-key", "hush"].map(str::to_owned).to_vec(),
        env: vec![("HF_TOKEN".to_owned(), "hush".to_owned()), ("A".to_owned(), "1".to_owned())],
        ..ServerCommand::from_binary("/opt/llama-server".into())
    };
    DiagnoseReport::new(
        ExperimentSetup { model: "m".to_owned(), ..ExperimentSetup::default() }.with_command(&command),
        &outcome(),
    )
}

#[test]
fn a_report_survives_json_and_keeps_secrets_to_itself() {
    let report = report();
    let text = serde_json::to_string(&report).unwrap();
    let read: DiagnoseReport = serde_json::from_str(&text).unwrap();
    // JSON may change the last digit of a fraction.
    assert_eq!((read.legs.len(), &read.about, &read.skipped), (2, &report.about, &report.skipped));
    assert_eq!(read.legs[1].readings, report.legs[1].readings);
    assert!(report.leaks && text.contains("\"workload\":\"same-image\""));
    assert!(!text.contains("hush"), "{text}");
    assert_eq!(
        report.about.command_line(),
        "HF_TOKEN='***' A=1 /opt/llama-server -m 'a b.gguf' --api-key '***'"
    );
}

#[test]
fn what_the_server_said_at_its_end_is_written_without_secrets() {
    let mut report = report();
    report.legs[1].finding.ended = LegEnd::Killed { why: "HF_TOKEN=hush was killed".to_owned() };
    let folder = tempfile::tempdir().unwrap();
    report.write_folder(folder.path(), &plain()).unwrap();
    for name in ["report.md", "findings.json"] {
        let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(text.contains("was killed") && !text.contains("hush"), "{name}: {text}");
    }
}

#[test]
fn slow_growth_is_told_with_what_it_would_take_to_judge_it() {
    let slow = leg(Workload::ShortText, 300 * 1024);
    let notes = leg_notes(&[&slow.finding]);
    assert!(notes[0].contains("--requests"), "{notes:?}");
    assert_eq!(slow.finding.series_of(MemoryKind::Host).unwrap().verdict, GrowthVerdict::Suspected);
}

pub(super) fn short(workload: Workload) -> LegResult {
    let mut all = leg(workload, 0);
    all.readings.truncate(3);
    let mut judge = LegJudge::new(workload, 3, &defaults().growth, &defaults().diagnose);
    for reading in &all.readings {
        judge.observe(reading.sample.clone(), 0, None);
    }
    all.finding = judge.finding(LegSpeed::default(), LegEnd::Complete);
    all
}

pub(super) fn blind(workload: Workload) -> LegResult {
    LegResult { vram_unknown: Some("no driver".to_owned()), ..leg(workload, 0) }
}

#[test]
fn no_page_says_that_nothing_leaks_where_nothing_could_be_seen() {
    let of = |legs: Vec<LegResult>, skipped: Vec<SkippedWorkload>| {
        DiagnoseReport::new(
            ExperimentSetup::default(),
            &ExperimentOutcome { legs, skipped, interrupted: false, failed: false },
        )
    };
    let skipped = vec![SkippedWorkload { workload: Workload::Audio, why: "no ears".to_owned() }];
    for (report, told) in [
        (of(Vec::new(), skipped), "nothing was run, so nothing is known"),
        (
            of(vec![short(Workload::ShortText)], Vec::new()),
            "too few readings to tell whether anything leaks under short-text",
        ),
        (
            of(vec![leg(Workload::LongText, 0), short(Workload::ShortText)], Vec::new()),
            "nothing leaks under long-text; there were too few readings to tell under short-text",
        ),
        (of(vec![leg(Workload::LongText, 0)], Vec::new()), "nothing leaks under the workloads below"),
        (
            of(vec![blind(Workload::LongText)], Vec::new()),
            "nothing leaks in host memory under the workloads below; VRAM is not known: no driver",
        ),
    ] {
        let text = report.to_markdown(ScriptSubject::Nothing);
        assert!(text.contains(told), "{told}: {text}");
    }
}

pub(super) fn cure(outcome: bisect::CureOutcome, cure: &[usize]) -> CureReport {
    let switch = |item: &str| TrialSwitch {
        item: item.to_owned(),
        title: format!("title of {item}"),
        does: "A=1".to_owned(),
        against: None,
    };
    let trial = bisect::TrialReport {
        switches: vec![0],
        legs: 2,
        tracks: Vec::new(),
        cost: bisect::SwitchCost::default(),
        crashed: Some("it died".to_owned()),
    };
    CureReport {
        switches: vec![switch("first"), switch("second")],
        not_tried: vec![UntriedSwitch {
            item: "third".to_owned(),
            why: "it needs <another> build".to_owned(),
        }],
        added: CommandChanges::default(),
        conclusion: bisect::CureConclusion {
            outcome,
            leaking: Vec::new(),
            cure: cure.to_vec(),
            stopped: Vec::new(),
            by_track: Vec::new(),
            trials: vec![trial],
            legs: 4,
        },
        mitigations: Vec::new(),
    }
}

#[test]
fn every_switch_is_in_the_table_or_among_those_not_tried_with_its_reason() {
    let cured = cure(bisect::CureOutcome::Cured, &[0]);
    let why = |report: &CureReport| {
        report.left_out().iter().map(|one| format!("{}: {}", one.item, one.why)).collect::<Vec<_>>()
    };
    let third = "third: it needs <another> build";
    assert_eq!(why(&cured), ["second: it was not needed: `first` alone stops everything", third]);
    assert_eq!(
        why(&cure(bisect::CureOutcome::Interrupted, &[])),
        ["second: it was interrupted before its turn", third]
    );
    let report = DiagnoseReport {
        cure: Some(cured),
        attribution: vec!["host grows, called in <f>".to_owned()],
        ..report()
    };
    let text = report.to_markdown(ScriptSubject::Nothing);
    for part in [
        "## With and without",
        "### Not tried",
        "`second`: it was not needed",
        third.split_once(": ").unwrap().1,
        "called in <f>",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

pub(super) fn plain() -> ReportFolder<'static> {
    ReportFolder {
        numbers: &defaults().diagnose,
        removed: &[],
        directory: std::path::Path::new("/"),
        slots: 1,
        n_ctx: None,
        tokens_per_word: 0.0,
        visit: &[],
    }
}

#[test]
fn a_leg_without_the_cache_says_so_everywhere_and_so_does_the_script() {
    let mut report = report();
    report.legs[1].finding.control = true;
    let folder = tempfile::tempdir().unwrap();
    report.write_folder(folder.path(), &plain()).unwrap();
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(read("report.md").contains("host under same-image (no cache): +4.00 MiB a request"));
    let script = read("reproduce.sh");
    assert!(
        script.contains("workload same-image (no cache)") && script.contains(" --cache-ram 0 --host"),
        "{script}"
    );
}

#[test]
fn an_older_script_goes_with_its_requests_and_what_is_not_ours_stays() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    report().write_folder(folder.path(), &plain()).unwrap();
    assert!(at("requests/0.json").is_file());
    std::fs::write(at("requests/mine.json"), "").unwrap();
    let empty =
        ExperimentOutcome { legs: Vec::new(), skipped: Vec::new(), interrupted: false, failed: false };
    let nothing = DiagnoseReport::new(ExperimentSetup::default(), &empty);
    nothing.write_folder(folder.path(), &plain()).unwrap();
    assert!(!at("reproduce.sh").exists() && !at("requests/0.json").exists());
    assert!(at("requests/mine.json").is_file() && at("report.md").is_file());
    std::fs::write(at("reproduce.sh"), "somebody else's").unwrap();
    std::fs::write(at("requests/0.json"), "").unwrap();
    nothing.write_folder(folder.path(), &plain()).unwrap();
    assert!(at("reproduce.sh").is_file() && at("requests/0.json").is_file());
}

#[test]
fn a_script_shows_growth_only_where_there_is_some() {
    let folder = tempfile::tempdir().unwrap();
    let script = |report: DiagnoseReport| {
        report.write_folder(folder.path(), &plain()).unwrap();
        std::fs::read_to_string(folder.path().join("reproduce.sh")).unwrap()
    };
    assert!(script(report()).contains("# Shows how the memory of llama-server grows under the workload"));
    let mut steady = report();
    steady.legs.truncate(1);
    assert!(script(steady).contains("# Shows the memory of llama-server under the workload short-text,"));
}

#[test]
fn a_tool_around_the_server_is_named_and_growth_is_not_the_servers_alone() {
    let mut report = report();
    let command = ServerCommand {
        wrapper: ["env", "A_KEY=hush", "valgrind"].map(str::to_owned).to_vec(),
        args: ["-m", "a b.gguf"].map(str::to_owned).to_vec(),
        ..ServerCommand::from_binary("/opt/llama-server".into())
    };
    report.about = ExperimentSetup::default().with_command(&command);
    assert!(report.about.command_line().contains("env 'A_KEY=***' valgrind /opt/llama-server -m "));
    let told = "the server ran under `env 'A_KEY=***' valgrind`: memory is that of both";
    let text = report.to_markdown(ScriptSubject::Nothing);
    assert!(text.starts_with("# Memory of llama-server and of the tool around it grows\n"), "{text}");
    assert!(text.contains(told) && text.contains("| run under |"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    report.write_folder(folder.path(), &plain()).unwrap();
    let script = std::fs::read_to_string(folder.path().join("reproduce.sh")).unwrap();
    assert!(script.contains("which this script leaves out") && !script.contains("valgrind /opt"), "{script}");
}

#[test]
fn what_a_server_may_keep_is_that_of_a_leg_with_its_cache() {
    let mut report = report();
    report.legs[0].may_keep = vec!["a prompt cache".to_owned()];
    report.legs[1].finding.control = true;
    report.legs[1].may_keep = vec!["nothing much".to_owned()];
    let text = report.to_markdown(ScriptSubject::Nothing);
    assert!(text.contains("on purpose: a prompt cache") && !text.contains("nothing much"), "{text}");
}
