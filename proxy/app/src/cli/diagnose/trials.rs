//! Shared parts of both searches of `diagnose --bisect`: the switches to try on a model, commands with a
//! subset of them, and the text about tried and untried switches.

use std::sync::{Arc, Mutex};

use warden_diagnose::ExperimentOutcome;
use warden_diagnose::cure::TrialProgress;
use warden_diagnose::report::{CommandChanges, UntriedSwitch};
use warden_experiment::LegFinding;
use warden_experiment::bisect::SwitchSet;
use warden_supervisor::SoloSpec;

use super::candidates::{self, SearchPurpose, SwitchCandidates};
use super::target::DiagnoseTarget;
use crate::advice::AdvisedServer;
use crate::cli::progress::ProgressLines;
use crate::config::machine::HostMachine;
use crate::config::resolve::mitigations::MitigationChecker;
use crate::exit::CommandError;
use crate::out;
use crate::sync::lock;

pub(super) struct MitigationTrials<'a> {
    target: &'a DiagnoseTarget,
    pub(super) found: SwitchCandidates,
    /// Mitigations that the model already has.
    configured: Vec<String>,
    judge: Mutex<MitigationChecker>,
}

impl<'a> MitigationTrials<'a> {
    /// Creates the trials that the outcome of an experiment suggests.
    pub(super) fn new(
        target: &'a DiagnoseTarget,
        machine: &HostMachine,
        outcome: &ExperimentOutcome,
        purpose: SearchPurpose,
    ) -> Result<Self, CommandError> {
        let findings: Vec<&LegFinding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
        let inherited: Arc<[String]> = machine.text_vars().into_iter().map(|(name, _)| name).collect();
        let (resolved, index) = (&target.resolved, target.index);
        let model = &resolved.models[index];
        let build = model.build.as_ref();
        let spec = &resolved.fleet.models[index];
        let server = AdvisedServer::from_spec(spec, build, &model.mitigations, &inherited);
        let mut judge = MitigationChecker::default();
        let seen = candidates::leak_evidence(&findings, &server);
        let found = candidates::find_candidates(resolved, index, &seen, purpose, &mut judge)
            .map_err(CommandError::failed)?;
        let configured = model.mitigations.list().to_vec();
        Ok(Self { target, found, configured, judge: Mutex::new(judge) })
    }

    fn items(&self, switches: &[usize]) -> Vec<&str> {
        let known = switches.iter().filter_map(|at| self.found.switches.get(*at));
        known.map(|switch| switch.item.as_str()).collect()
    }

    /// The server with the switches of `arm`.
    ///
    /// # Errors
    /// The reason why the switches cannot be applied.
    pub(super) fn server_with(&self, arm: &SwitchSet) -> Result<SoloSpec, String> {
        let mut judge = lock(&self.judge);
        let items = self.items(&arm.switches);
        let (resolved, index) = (&self.target.resolved, self.target.index);
        let own = candidates::with_mitigations(resolved, index, &self.configured, &items, &mut judge)?;
        Ok(SoloSpec { command: own.command, ..self.target.spec.clone() })
    }

    /// Shows the current trial; `search` names its purpose.
    pub(super) fn show(&self, search: &str, trying: &TrialProgress<'_>, lines: &mut ProgressLines) {
        match trying {
            TrialProgress::Next { arm, done, of } => {
                let name = if arm.is_baseline() {
                    "without any switch".to_owned()
                } else {
                    format!("with {}", self.items(&arm.switches).join(" and "))
                };
                lines.line(&format!("{search}, {done} of at most {of} tried: {name}"));
            }
            TrialProgress::Leg(warden_diagnose::LegProgress::Step { workload, done, of, .. }) => {
                lines.change(&format!("{workload} {done}/{of}"), false);
            }
            TrialProgress::Leg(_) => {}
        }
    }

    /// `mitigations` of the model with the cure, and the additions to its command. Empty without a cure.
    pub(super) fn cured_mitigations(
        &self,
        cure: &[usize],
    ) -> Result<(Vec<String>, CommandChanges), CommandError> {
        if cure.is_empty() {
            return Ok((Vec::new(), CommandChanges::default()));
        }
        let mut mitigations = self.configured.clone();
        mitigations.extend(self.items(cure).into_iter().map(str::to_owned));
        let cured = self.server_with(&SwitchSet { switches: cure.to_vec() }).map_err(CommandError::failed)?;
        let before = &self.target.resolved.fleet.models[self.target.index].command;
        Ok((mitigations, CommandChanges::between(before, &cured.command)))
    }
}

/// Formats the tried and untried switches.
pub(super) fn trials_text(rows: &[Vec<String>], left_out: &[UntriedSwitch]) -> String {
    let mut text = String::new();
    if rows.len() > 1 {
        text.extend(["\n", &out::format_table(rows)]);
    }
    if !left_out.is_empty() {
        text += "\nnot tried:\n";
        text.extend(left_out.iter().map(|one| format!("{}: {}\n", one.item, one.why)));
    }
    text
}
