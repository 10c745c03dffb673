//! What a report says, and what it keeps to itself.

use std::time::Duration;

use warden_policies::experiment::{Ended, Judge, Next, Speed, Workload};
use warden_policies::growth::{Blame, Unit};
use warden_policies::sample::{Edge, HostMemory, Sample, Work};
use warden_policies::{Series, defaults};

use super::*;
use crate::LegResult;

const MIB: u64 = 1 << 20;

fn leg(workload: Workload, leak: u64) -> LegResult {
    let mut judge = Judge::new(workload, 120, &defaults().growth, &defaults().diagnose);
    for n in 1..=120 {
        let work = Work { requests: n, prompt_tokens: 40 * n, output_tokens: 32 * n, ..Work::default() };
        let host = HostMemory { anon: 100 * MIB + n * leak + n * 7919 % 61 * 4096, ..HostMemory::default() };
        let sample = Sample {
            at: Duration::from_millis(n),
            edge: Edge::Idle,
            host: Some(host),
            vram: Vec::new(),
            pools: Vec::new(),
            in_flight: 0,
            work,
            largest_prompt: 40,
        };
        if judge.observe(sample, 0) == Next::Decided {
            break;
        }
    }
    LegResult {
        finding: judge.finding(Speed::default(), Ended::Early),
        readings: judge.readings().to_vec(),
        props: warden_supervisor::SoloProps::default(),
        allowance: Vec::new(),
        ready_after: Duration::from_secs(1),
        vram_unknown: None,
        devices: Vec::new(),
        lines: Vec::new(),
        last_words: Vec::new(),
        no_embeddings: None,
    }
}

fn outcome() -> Outcome {
    let mut leaking = leg(Workload::SameImage, 4 * MIB);
    leaking.finding.series[0].blame =
        Some(Blame::Pays { unit: Unit::Image, bytes_per_unit: 4.42 * 1_048_576.0, share: 0.98 });
    let skipped = vec![Skipped { workload: Workload::Audio, why: "the server takes no <audio>".to_owned() }];
    Outcome { legs: vec![leg(Workload::ShortText, 0), leaking], skipped, interrupted: false, failed: false }
}

fn report() -> Report {
    let command = Command {
        binary: "/opt/llama-server".into(),
        args: ["-m", "a b.gguf", "--api-key", "hush"].map(str::to_owned).to_vec(),
        env: vec![("HF_TOKEN".to_owned(), "hush".to_owned()), ("A".to_owned(), "1".to_owned())],
        env_remove: Vec::new(),
        directory: None,
    };
    Report::new(About { model: "m".to_owned(), ..About::default() }.with_command(&command), &outcome())
}

#[test]
fn the_table_tells_a_leak_from_what_is_steady_and_what_was_not_run() {
    let outcome = outcome();
    let findings: Vec<&Finding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
    let rows = rows(&findings, &outcome.skipped);
    let steady = ["short-text", "72", "host", "0", "0", "0", "yes", "steady", ""];
    assert_eq!(rows[1][2..], steady[2..], "{rows:?}");
    assert_eq!(
        (rows[2][0].as_str(), rows[2][3].as_str(), rows[2][6].as_str(), rows[2][7].as_str()),
        ("same-image", "+4.00 MiB", "no", "leaking"),
        "{rows:?}"
    );
    assert_eq!(rows[2][8], "each image 4.42 MiB");
    assert_eq!(rows[3], ["audio", "-", "not run: the server takes no <audio>"]);
}

#[test]
fn a_report_survives_json_and_keeps_secrets_to_itself() {
    let report = report();
    let text = serde_json::to_string(&report).unwrap();
    let read: Report = serde_json::from_str(&text).unwrap();
    // The last digit of a fraction may be another one.
    assert_eq!((read.legs.len(), &read.about, &read.skipped), (2, &report.about, &report.skipped));
    assert_eq!(read.legs[1].readings, report.legs[1].readings);
    assert!(report.leaks && text.contains("\"workload\":\"same-image\""));
    for text in [text, report.html()] {
        assert!(!text.contains("hush"), "{text}");
    }
    assert_eq!(
        report.about.command_line(),
        "HF_TOKEN='***' A=1 /opt/llama-server -m 'a b.gguf' --api-key '***'"
    );
}

#[test]
fn a_page_needs_nothing_else_and_escapes_what_it_is_told() {
    let page = report().html();
    for banned in ["<script", "http://", "https://", "src=", "@import", "<audio>"] {
        assert!(!page.contains(banned), "{banned}");
    }
    assert!(page.contains("A leak was found.") && page.contains("no &lt;audio&gt;"));
    assert_eq!(page.matches("<svg").count(), 2);
    assert_eq!(page.matches("<polyline").count(), 2);
    assert_eq!(page.matches("<table>").count(), page.matches("</table>").count());
}

#[test]
fn slow_growth_is_told_with_what_it_would_take_to_judge_it() {
    let slow = leg(Workload::ShortText, 300 * 1024);
    let notes = notes(&[&slow.finding]);
    assert!(notes[0].contains("--requests"), "{notes:?}");
    assert_eq!(slow.finding.of(Series::Host).unwrap().verdict, warden_policies::growth::Verdict::Steady);
}
