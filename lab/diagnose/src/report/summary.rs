//! Summarizes the result in a sentence or two for the top of a report, without claiming more than was measured.

use warden_experiment::between::RevisionAim;
use warden_experiment::{LegEnd, LegFinding, SeriesFinding};
use warden_policies::growth::GrowthVerdict;
use warden_policies::phrases::growth_phrase;

use super::crash::crash_text;
use super::table::leg_name;
use super::{BetweenReport, DiagnoseReport};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OverallResult {
    /// A server ended by itself; memory may leak as well.
    Crashes,
    Leaks,
    Suspected,
    /// No growth was found, or nothing could be judged.
    NoGrowth,
    /// No leg ran; a revision is slower than another.
    Slower,
    /// No leg ran; a revision answers differently from another.
    Otherwise,
}

impl OverallResult {
    pub(super) fn from_report(report: &DiagnoseReport) -> Self {
        let all = || report.legs.iter().flat_map(|leg| &leg.finding.series);
        match all().map(|found| found.verdict).max() {
            _ if report.legs.iter().any(|leg| leg.finding.crash.is_some()) => Self::Crashes,
            Some(GrowthVerdict::Leaking) => Self::Leaks,
            Some(GrowthVerdict::Suspected) => Self::Suspected,
            _ if report.legs.is_empty() => match report.between.as_ref().map(|one| one.conclusion.aim) {
                Some(RevisionAim::Slowdown) => Self::Slower,
                Some(RevisionAim::Answers) => Self::Otherwise,
                _ => Self::NoGrowth,
            },
            _ => Self::NoGrowth,
        }
    }
}

fn has_verdict(found: &SeriesFinding) -> bool {
    found.verdict.is_known() && !found.is_too_short()
}

pub(super) fn headline(report: &DiagnoseReport) -> Vec<String> {
    let mut lines = Vec::new();
    let tool = report.about.under.iter().map(|tool| {
        format!("the server ran under `{tool}`: memory is that of both, and what grows may be the tool's")
    });
    let findings = || report.legs.iter().map(|leg| &leg.finding);
    let crashes: Vec<String> =
        findings().filter_map(|finding| Some(crash_text(finding, finding.crash.as_ref()?))).collect();
    for finding in findings() {
        for found in finding.series.iter().filter(|found| found.verdict.grows()) {
            let rate = found.per_request.map_or_else(|| "?".to_owned(), |slope| growth_phrase(slope.value));
            let sure = match found.verdict {
                GrowthVerdict::Leaking => "without a sign of an end",
                _ => "which may be a leak: a longer run tells",
            };
            lines.push(format!("{} under {}: {rate} a request, {sure}", found.series, leg_name(finding)));
        }
    }
    if matches!(OverallResult::from_report(report), OverallResult::Slower | OverallResult::Otherwise) {
        lines.extend(report.between.iter().flat_map(BetweenReport::sentences));
    } else if lines.is_empty() {
        lines.push(extent_text(report));
    }
    lines.extend(tool);
    lines.splice(0..0, crashes);
    for finding in findings() {
        match &finding.ended {
            LegEnd::Failed { why } => {
                lines.push(format!("the server failed under {}: {why}", leg_name(finding)));
            }
            LegEnd::Killed { why } => {
                lines.push(format!("the server was killed from outside under {}: {why}", leg_name(finding)));
            }
            _ => {}
        }
    }
    if report.interrupted {
        lines.push("it was interrupted: the results below are incomplete".to_owned());
    }
    lines
}

/// Returns how far the search reached, if it found nothing.
fn extent_text(report: &DiagnoseReport) -> String {
    let names =
        |all: &[&LegFinding]| all.iter().map(|finding| leg_name(finding)).collect::<Vec<_>>().join(", ");
    let (told, short): (Vec<&LegFinding>, Vec<&LegFinding>) = report
        .legs
        .iter()
        .map(|leg| &leg.finding)
        .partition(|finding| finding.series.iter().any(has_verdict));
    let unknown = report.vram_unknown();
    let nothing = if unknown.is_some() { "nothing leaks in host memory" } else { "nothing leaks" };
    let unknown = unknown.map_or_else(String::new, |why| format!("; VRAM is not known: {why}"));
    match (told.is_empty(), short.is_empty()) {
        (false, true) => format!("{nothing} under the workloads below{unknown}"),
        (false, false) => format!(
            "{nothing} under {}; there were too few readings to tell under {}{unknown}",
            names(&told),
            names(&short)
        ),
        (true, false) => format!("too few readings to tell whether anything leaks under {}", names(&short)),
        (true, true) => "nothing was run, so nothing is known".to_owned(),
    }
}
