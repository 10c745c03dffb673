//! Reports of an experiment, as JSON and as Markdown, without secrets so that they can be shared.

mod between;
mod crash;
mod cure;
mod discreet;
mod folder;
mod isolation;
mod markdown;
mod proof;
mod reproduce;
mod setup;
mod summary;
mod table;

use serde::{Deserialize, Serialize};
use warden_experiment::{LegFinding, LegReading};
use warden_policies::secrets;
use warden_supervisor::DeviceView;

pub use self::between::{BetweenReport, RevisionLabel};
pub use self::crash::SurvivalReport;
pub use self::cure::{CommandChanges, CureReport, TrialSwitch, UntriedSwitch};
pub use self::folder::{ReportFolder, foreign_file_in};
pub use self::isolation::{IsolationCure, IsolationReport, NO_REUSE};
pub use self::proof::ProofReport;
pub use self::setup::ExperimentSetup;
pub use self::table::{leg_notes, refusal_note, table_rows};
use crate::experiment::{ExperimentOutcome, SkippedWorkload};
use crate::leg::RefusedRequests;

/// Findings and readings of a leg.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegReport {
    /// Verdicts and figures.
    #[serde(flatten)]
    pub finding: LegFinding,
    /// Seconds from the spawn until the server was ready.
    pub ready_after_seconds: f64,
    /// Caches that the server's settings allow, in sentences.
    pub may_keep: Vec<String>,
    /// Reason why VRAM could not be read; `None` if it was, or if there is none to read.
    pub vram_unknown: Option<String>,
    /// Refused requests, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<RefusedRequests>,
    /// All readings.
    pub readings: Vec<LegReading>,
}

/// Whole report of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiagnoseReport {
    /// Setup of the experiment.
    pub about: ExperimentSetup,
    /// True if any leg found a leak.
    pub leaks: bool,
    /// True if the server crashed in any leg.
    #[serde(default)]
    pub crashed: bool,
    /// True if the user interrupted the experiment before all legs were run.
    pub interrupted: bool,
    /// Report on each leg.
    pub legs: Vec<LegReport>,
    /// Workloads that were not run, with reasons.
    pub skipped: Vec<SkippedWorkload>,
    /// GPUs of the machine.
    pub devices: Vec<DeviceView>,
    /// Search for switches that stop the growth, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cure: Option<CureReport>,
    /// Search for switches that stop each crash, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub survival: Vec<SurvivalReport>,
    /// Search for the revision that introduced the symptom, if requested. The rest of the report then
    /// describes an affected revision and an unaffected one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<BetweenReport>,
    /// Test if the server mixes conversations, if requested. Then there are no legs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<IsolationReport>,
    /// Memory by call site for each leg, for programs, if requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trace: Vec<serde_json::Value>,
    /// Reason why legs are missing in the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untraced: Option<String>,
    /// The trace in words, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attribution: Vec<String>,
}

impl DiagnoseReport {
    /// Creates the report of a finished experiment.
    pub fn new(about: ExperimentSetup, outcome: &ExperimentOutcome) -> Self {
        let leg = |leg: &crate::LegResult| LegReport {
            finding: leg.finding.clone(),
            ready_after_seconds: leg.ready_after.as_secs_f64(),
            may_keep: leg.allowance.clone(),
            vram_unknown: leg.vram_unknown.clone(),
            refused: leg.refused.clone(),
            readings: leg.readings.clone(),
        };
        Self {
            about,
            leaks: outcome.leaks(),
            crashed: outcome.crashed(),
            interrupted: outcome.interrupted,
            legs: outcome.legs.iter().map(leg).collect(),
            skipped: outcome.skipped.clone(),
            devices: outcome.legs.last().map(|leg| leg.devices.clone()).unwrap_or_default(),
            cure: None,
            survival: Vec::new(),
            between: None,
            isolation: None,
            trace: Vec::new(),
            untraced: None,
            attribution: Vec::new(),
        }
    }

    /// Returns notes on the table, a line each.
    pub fn notes(&self) -> Vec<String> {
        let findings: Vec<&LegFinding> = self.legs.iter().map(|leg| &leg.finding).collect();
        let refused =
            self.legs.iter().filter_map(|leg| Some(refusal_note(&leg.finding, leg.refused.as_ref()?)));
        let unknown = self.vram_unknown().map(|why| format!("VRAM is not known: {why}"));
        let all = leg_notes(&findings).into_iter().chain(refused).chain(unknown);
        // The errors of a server may quote a key.
        all.map(|note| secrets::redact_text(&note)).collect()
    }

    /// Returns the reason why VRAM of a leg could not be read, if any.
    fn vram_unknown(&self) -> Option<&str> {
        self.legs.iter().find_map(|leg| leg.vram_unknown.as_deref())
    }
}

#[cfg(test)]
mod pages_tests;
#[cfg(test)]
mod tests;
