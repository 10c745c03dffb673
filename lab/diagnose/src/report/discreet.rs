//! Removes secrets from a report for files. The terminal shows the whole report.

use warden_experiment::LegEnd;
use warden_experiment::isolation::IsolationOutcome;
use warden_policies::secrets;

use super::DiagnoseReport;

impl DiagnoseReport {
    pub(super) fn without_secrets(&self) -> Self {
        let mut report = self.clone();
        for one in &mut report.skipped {
            hide_secrets(&mut one.why);
        }
        for leg in &mut report.legs {
            if let Some(refused) = &mut leg.refused {
                hide_secrets(&mut refused.why);
            }
            // The server's last log lines may contain an API key.
            match &mut leg.finding.ended {
                LegEnd::Crashed { why }
                | LegEnd::Killed { why }
                | LegEnd::Failed { why }
                | LegEnd::OutOfMemory { why } => hide_secrets(why),
                LegEnd::Complete | LegEnd::Early | LegEnd::OutOfTime | LegEnd::Interrupted => {}
            }
            if let Some(crash) = &mut leg.finding.crash {
                hide_secrets(&mut crash.why);
                crash.lines.iter_mut().for_each(hide_secrets);
            }
        }
        if let Some(isolation) = &mut report.isolation {
            if let IsolationOutcome::Undecided { why } = &mut isolation.finding.outcome {
                hide_secrets(why);
            }
            isolation.not_tried.iter_mut().for_each(|one| hide_secrets(&mut one.why));
        }
        report
    }
}

fn hide_secrets(text: &mut String) {
    *text = secrets::redact_text(text);
}
