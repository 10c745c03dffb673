//! Progress of an experiment: one changing line on a terminal, a line for each workload elsewhere.

use warden_diagnose::LegProgress;
use warden_experiment::{LegFinding, Workload};
use warden_policies::growth::{GrowthVerdict, SeriesGrowth};
use warden_policies::sample::BackendSample;
use warden_policies::units::as_f64;
use warden_policies::{ByteSize, MemoryKind, phrases};

use crate::cli::progress::ProgressLines;

#[derive(Debug)]
pub(super) struct ExperimentDisplay {
    lines: ProgressLines,
    legs: usize,
    workloads: WorkloadCounter,
}

/// Number of workloads that were started or skipped.
#[derive(Debug, Default)]
struct WorkloadCounter {
    count: usize,
    latest: Option<Workload>,
}

impl WorkloadCounter {
    /// Returns the number of a workload. A workload that is started again, or skipped after its start, keeps
    /// its number.
    fn number_of(&mut self, workload: Workload) -> usize {
        if self.latest.replace(workload) != Some(workload) {
            self.count += 1;
        }
        self.count
    }
}

impl ExperimentDisplay {
    pub(super) fn new(legs: usize) -> Self {
        Self { lines: ProgressLines::new(), legs, workloads: WorkloadCounter::default() }
    }

    pub(super) fn show(&mut self, progress: &LegProgress<'_>) {
        match progress {
            LegProgress::Starting(workload) => {
                let text = format!(
                    "{workload} ({} of {}): {}; starting the server",
                    self.workloads.number_of(*workload),
                    self.legs,
                    workload.description()
                );
                self.lines.line(&text);
            }
            LegProgress::Ready(workload, after) => {
                self.lines.line(&format!("{workload}: ready after {:.1} s", after.as_secs_f64()));
            }
            LegProgress::Step { workload, done, of, first, now, growth } => {
                let text = format!("{workload} {done}/{of}{}", growth_text(first, now, growth));
                self.lines.change(&text, false);
            }
            LegProgress::Control(workload) => {
                self.lines
                    .line(&format!("{workload}: once more without the prompt cache, which may be what grew"));
            }
            LegProgress::Again(workload, crash) => {
                let died = crash.runs.iter().filter(|run| run.died).count();
                self.lines.line(&format!(
                    "{workload}: the server crashed at request {}; once more, to see whether it does so again \
                     ({died} of {} did)",
                    crash.at_request,
                    crash.runs.len()
                ));
            }
            LegProgress::Ended(finding) => self.lines.line(&leg_summary(finding)),
            LegProgress::Skipped(workload, why) => {
                // A workload may be skipped without a start, if an earlier one has shown that it is impossible.
                self.workloads.number_of(*workload);
                self.lines.line(&format!("{workload}: not run: {why}"));
            }
        }
    }

    pub(super) fn close(&mut self) {
        self.lines.close();
    }
}

fn growth_text(first: &BackendSample, now: &BackendSample, growth: &[SeriesGrowth]) -> String {
    let requests = now.work.requests.saturating_sub(first.work.requests);
    let one = |growth: &SeriesGrowth| {
        let from = first.charged(growth.series)?;
        let to = now.charged(growth.series)?;
        let verdict = match growth.verdict {
            GrowthVerdict::Warming => "",
            verdict => verdict.as_str(),
        };
        Some(format!("  {} {} {} {verdict}", growth.series, ByteSize(to), rate_text(from, to, requests)))
    };
    growth.iter().filter_map(one).collect::<String>().trim_end().to_owned()
}

fn rate_text(from: u64, to: u64, requests: u64) -> String {
    if requests == 0 {
        return String::new();
    }
    format!("{} a request", phrases::growth_phrase((as_f64(to) - as_f64(from)) / as_f64(requests)))
}

fn leg_summary(finding: &LegFinding) -> String {
    let one = |series: MemoryKind, verdict: GrowthVerdict| format!("{series} {}", verdict.as_str());
    let verdicts: Vec<String> = finding.series.iter().map(|found| one(found.series, found.verdict)).collect();
    format!("{}: {} requests: {}", finding.workload, finding.requests, verdicts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_and_repeated_workloads_are_counted_once() {
        let mut display = ExperimentDisplay::new(5);
        let mut show = |progress: LegProgress<'_>| {
            display.show(&progress);
            display.workloads.count
        };
        assert_eq!(show(LegProgress::Starting(Workload::ShortText)), 1);
        assert_eq!(show(LegProgress::Control(Workload::ShortText)), 1);
        assert_eq!(show(LegProgress::Starting(Workload::ShortText)), 1, "once more without the prompt cache");
        assert_eq!(show(LegProgress::Starting(Workload::SameImage)), 2);
        assert_eq!(show(LegProgress::Skipped(Workload::SameImage, "no images")), 2, "known after its start");
        assert_eq!(show(LegProgress::Skipped(Workload::ImageSizes, "no images")), 3, "never started");
        assert_eq!(show(LegProgress::Starting(Workload::LongText)), 4);
        assert_eq!(show(LegProgress::Skipped(Workload::Audio, "no audio")), 5);
    }
}
