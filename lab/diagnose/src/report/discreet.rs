//! Removes secrets and quotations from a report for files. llama-server quotes recorded requests in its
//! errors ("Missing 'role' in message: {…}"). The terminal shows the whole report.

use warden_experiment::bisect::CureOutcome;
use warden_experiment::{LegEnd, Workload, survive};
use warden_policies::secrets;

use super::DiagnoseReport;

const MAX_KEPT_CHARS: usize = 80;
/// Text of ours before the server's message.
const FAILURES_MARK: &str = " requests in a row failed: ";

impl DiagnoseReport {
    pub(super) fn without_quotations(&self) -> Self {
        let mut report = self.clone();
        let is_replay = |workload| workload == Workload::Replay;
        for one in &mut report.skipped {
            hide_message(&mut one.why, is_replay(one.workload));
        }
        for leg in &mut report.legs {
            let replayed = is_replay(leg.finding.workload);
            if let Some(refused) = &mut leg.refused {
                hide_message(&mut refused.why, replayed);
            }
            // The server's last log lines may contain an API key.
            match &mut leg.finding.ended {
                LegEnd::Crashed { why } | LegEnd::Killed { why } | LegEnd::Failed { why } => {
                    hide_message(why, replayed);
                }
                LegEnd::OutOfMemory { why } => hide_message(why, false),
                LegEnd::Complete | LegEnd::Early | LegEnd::OutOfTime | LegEnd::Interrupted => {}
            }
            if let Some(crash) = &mut leg.finding.crash {
                hide_message(&mut crash.why, replayed);
                crash.lines.iter_mut().for_each(|line| hide_message(line, false));
                if replayed {
                    crash.lines.clear();
                }
            }
        }
        let replayed = report.legs.iter().any(|leg| is_replay(leg.finding.workload));
        if replayed && let Some(cure) = &mut report.cure {
            let conclusion = &mut cure.conclusion;
            for why in conclusion.trials.iter_mut().filter_map(|trial| trial.crashed.as_mut()) {
                *why = without_quotation(why);
            }
            if let CureOutcome::BaselineFailed { why } = &mut conclusion.outcome {
                *why = without_quotation(why);
            }
        }
        for one in report.survival.iter_mut().filter(|one| is_replay(one.workload)) {
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

fn hide_message(why: &mut String, replayed: bool) {
    *why = secrets::redact_text(why);
    if replayed {
        *why = without_quotation(why);
    }
}

/// Returns the text before a possible quotation, and the status.
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
    // The cut at `:` drops the last log line, so also drop its introduction.
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
