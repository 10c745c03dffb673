//! Progress of an experiment: one changing line on a terminal, a line for each leg elsewhere.

use warden_diagnose::Progress;
use warden_experiment::Finding;
use warden_policies::growth::{Growth, Verdict};
use warden_policies::sample::Sample;
use warden_policies::units::exact;
use warden_policies::{ByteSize, MemoryKind, phrases};

use crate::cli::progress::Lines;

#[derive(Debug)]
pub(super) struct Display {
    lines: Lines,
    legs: usize,
    begun: usize,
}

impl Display {
    pub(super) fn new(legs: usize) -> Self {
        Self { lines: Lines::new(), legs, begun: 0 }
    }

    /// Shows an event.
    pub(super) fn see(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Starting(workload) => {
                self.begun += 1;
                let text = format!(
                    "{workload} ({} of {}): {}; starting the server",
                    self.begun,
                    self.legs,
                    workload.what()
                );
                self.lines.line(&text);
            }
            Progress::Ready(workload, after) => {
                self.lines.line(&format!("{workload}: ready after {:.1} s", after.as_secs_f64()));
            }
            Progress::Step { workload, done, of, first, now, growth } => {
                let text = format!("{workload} {done}/{of}{}", grown(first, now, growth));
                self.lines.change(&text, false);
            }
            Progress::Control(workload) => {
                // A control run is not a leg of its own.
                self.begun = self.begun.saturating_sub(1);
                self.lines
                    .line(&format!("{workload}: once more without the prompt cache, which may be what grew"));
            }
            Progress::Again(workload, crash) => {
                let died = crash.runs.iter().filter(|run| run.died).count();
                self.lines.line(&format!(
                    "{workload}: the server crashed at request {}; once more, to see whether it does so again ({died} of {} did)",
                    crash.at_request,
                    crash.runs.len()
                ));
            }
            Progress::Ended(finding) => self.lines.line(&ended(finding)),
            Progress::Skipped(workload, why) => {
                // A server may have started before the workload was found to be impossible.
                self.begun = self.begun.max(1);
                self.lines.line(&format!("{workload}: not run: {why}"));
            }
        }
    }

    /// Ends the changing line.
    pub(super) fn close(&mut self) {
        self.lines.close();
    }
}

/// Formats the growth of each memory so far.
fn grown(first: &Sample, now: &Sample, growth: &[Growth]) -> String {
    let requests = now.work.requests.saturating_sub(first.work.requests);
    let one = |growth: &Growth| {
        let (from, to) = (first.charged(growth.series)?, now.charged(growth.series)?);
        let verdict = match growth.verdict {
            Verdict::Warming => "",
            verdict => verdict.as_str(),
        };
        Some(format!("  {} {} {} {verdict}", growth.series, ByteSize(to), rate(from, to, requests)))
    };
    growth.iter().filter_map(one).collect::<String>().trim_end().to_owned()
}

fn rate(from: u64, to: u64, requests: u64) -> String {
    if requests == 0 {
        return String::new();
    }
    format!("{} a request", phrases::grows((exact(to) - exact(from)) / exact(requests)))
}

fn ended(finding: &Finding) -> String {
    let one = |series: MemoryKind, verdict: Verdict| format!("{series} {}", verdict.as_str());
    let verdicts: Vec<String> = finding.series.iter().map(|found| one(found.series, found.verdict)).collect();
    format!("{}: {} requests: {}", finding.workload, finding.requests, verdicts.join(", "))
}
