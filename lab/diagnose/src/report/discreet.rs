//! Removes foreign text from a report for files. If the requests were recorded ones, it leaves out the
//! server's messages: llama-server quotes requests in its errors ("Missing 'role' in message: {…}"). The
//! terminal shows the whole report.

use warden_experiment::bisect::CureOutcome;
use warden_experiment::{LegEnd, Workload, survive};
use warden_policies::secrets;

use super::DiagnoseReport;

/// Limit of kept characters of a server's message.
const MAX_KEPT_CHARS: usize = 80;
/// Our own words before the server's message.
const FAILURES_MARK: &str = " requests in a row failed: ";

impl DiagnoseReport {
    /// A copy of the report for other readers.
    pub(super) fn without_quotations(&self) -> Self {
        let mut report = self.clone();
        for refused in report.legs.iter_mut().filter_map(|leg| leg.refused.as_mut()) {
            refused.why = secrets::redact_text(&refused.why);
        }
        for one in &mut report.skipped {
            one.why = secrets::redact_text(&one.why);
        }
        // The last words of a server may quote a key.
        for finding in report.legs.iter_mut().map(|leg| &mut leg.finding) {
            if let LegEnd::Crashed { why }
            | LegEnd::Killed { why }
            | LegEnd::Failed { why }
            | LegEnd::OutOfMemory { why } = &mut finding.ended
            {
                *why = secrets::redact_text(why);
            }
            if let Some(crash) = &mut finding.crash {
                crash.why = secrets::redact_text(&crash.why);
                crash.lines.iter_mut().for_each(|line| *line = secrets::redact_text(line));
            }
        }
        let mut replayed = false;
        for leg in report.legs.iter_mut().filter(|leg| leg.finding.workload == Workload::Replay) {
            replayed = true;
            if let Some(refused) = &mut leg.refused {
                refused.why = without_quotation(&refused.why);
            }
            if let LegEnd::Crashed { why } | LegEnd::Killed { why } | LegEnd::Failed { why } =
                &mut leg.finding.ended
            {
                *why = without_quotation(why);
            }
            if let Some(crash) = &mut leg.finding.crash {
                crash.why = without_quotation(&crash.why);
                crash.lines.clear();
            }
        }
        for one in report.skipped.iter_mut().filter(|one| one.workload == Workload::Replay) {
            one.why = without_quotation(&one.why);
        }
        let conclusion = report.cure.as_mut().map(|cure| &mut cure.conclusion);
        if let Some(conclusion) = conclusion.filter(|_| replayed) {
            for why in conclusion.trials.iter_mut().filter_map(|trial| trial.crashed.as_mut()) {
                *why = without_quotation(why);
            }
            if let CureOutcome::BaselineFailed { why } = &mut conclusion.outcome {
                *why = without_quotation(why);
            }
        }
        for one in report.survival.iter_mut().filter(|one| one.workload == Workload::Replay) {
            for why in one.conclusion.trials.iter_mut().filter_map(|trial| trial.failed.as_mut()) {
                *why = without_quotation(why);
            }
            if let survive::SurvivalOutcome::BaselineFailed { why } = &mut one.conclusion.outcome {
                *why = without_quotation(why);
            }
        }
        report
    }
}

/// The status, and the text before a possible quotation.
fn without_quotation(why: &str) -> String {
    let is_status = |end: &str| end.strip_suffix(')').is_some_and(|number| number.parse::<u16>().is_ok());
    let (said, status) = match why.rsplit_once(" (status ") {
        Some((said, end)) if is_status(end) => (said, format!(" (status {end}")),
        _ => (why, String::new()),
    };
    let (ours, said) = match said.split_once(FAILURES_MARK) {
        Some((count, said)) if count.parse::<u64>().is_ok() => (format!("{count}{FAILURES_MARK}"), said),
        _ => (String::new(), said),
    };
    let kept: String =
        said.split([':', '{', '"', '\n']).next().unwrap_or_default().chars().take(MAX_KEPT_CHARS).collect();
    // The last line of a log is removed whole.
    format!("{ours}{}{status}", kept.trim_end().trim_end_matches("; its last line"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_quotes_is_cut_and_the_status_stays() {
        for (why, kept) in [
            (
                "Missing 'role' in message: {\"content\":\"a secret\"} (status 400)",
                "Missing 'role' in message (status 400)",
            ),
            (
                "4 requests in a row failed: no role: secret (status 400)",
                "4 requests in a row failed: no role (status 400)",
            ),
            ("it was killed (signal 11); its last line: secret", "it was killed (signal 11)"),
            ("a request failed: http://server/a?secret", "a request failed"),
            ("no such tool \"secret\" (status secret)", "no such tool"),
            ("no images (status 500)", "no images (status 500)"),
        ] {
            assert_eq!(without_quotation(why), kept);
        }
        assert_eq!(without_quotation(&"ф".repeat(500)).chars().count(), MAX_KEPT_CHARS);
    }
}
