//! Shared parts of both searches of `diagnose --bisect`: the switches to try on a model, commands with a
//! subset of them, and the text about tried and untried switches.

use std::sync::{Arc, Mutex};

use warden_diagnose::Outcome;
use warden_diagnose::cure::Trying;
use warden_diagnose::report::{Added, NotTried};
use warden_experiment::Finding;
use warden_experiment::bisect::Arm;
use warden_supervisor::SoloSpec;

use super::candidates::{self, Candidates, Purpose};
use super::target::Target;
use crate::advice::Server;
use crate::cli::progress::Lines;
use crate::config::machine::Machine;
use crate::config::resolve::mitigations::Judge;
use crate::exit::Failure;
use crate::out;
use crate::sync::lock;

pub(super) struct Trials<'a> {
    target: &'a Target,
    pub(super) found: Candidates,
    /// Mitigations that the model already has.
    configured: Vec<String>,
    judge: Mutex<Judge>,
}

impl<'a> Trials<'a> {
    /// Creates the trials that the outcome of an experiment suggests.
    pub(super) fn new(
        target: &'a Target,
        machine: &Machine,
        outcome: &Outcome,
        purpose: Purpose,
    ) -> Result<Self, Failure> {
        let findings: Vec<&Finding> = outcome.legs.iter().map(|leg| &leg.finding).collect();
        let inherited: Arc<[String]> = machine.text_vars().into_iter().map(|(name, _)| name).collect();
        let (resolved, index) = (&target.resolved, target.index);
        let build = resolved.builds[index].as_ref();
        let server =
            Server::of(&resolved.fleet.models[index], build, &resolved.mitigations[index], &inherited);
        let mut judge = Judge::default();
        let seen = candidates::seen(&findings, &server);
        let found = candidates::find(resolved, index, &seen, purpose, &mut judge).map_err(Failure::failed)?;
        let configured = resolved.mitigations[index].list().to_vec();
        Ok(Self { target, found, configured, judge: Mutex::new(judge) })
    }

    fn items(&self, switches: &[usize]) -> Vec<&str> {
        let known = switches.iter().filter_map(|at| self.found.switches.get(*at));
        known.map(|switch| switch.item.as_str()).collect()
    }

    /// The server with the switches of `arm`.
    ///
    /// # Errors
    /// The reason why they cannot be applied.
    pub(super) fn with(&self, arm: &Arm) -> Result<SoloSpec, String> {
        let mut judge = lock(&self.judge);
        let items = self.items(&arm.switches);
        let (resolved, index) = (&self.target.resolved, self.target.index);
        let own = candidates::with(resolved, index, &self.configured, &items, &mut judge)?;
        Ok(SoloSpec { command: own.command, ..self.target.spec.clone() })
    }

    /// Shows the current trial; `search` names its purpose.
    pub(super) fn show(&self, search: &str, trying: &Trying<'_>, lines: &mut Lines) {
        match trying {
            Trying::Next { arm, done, of } => {
                let name = if arm.is_baseline() {
                    "without any switch".to_owned()
                } else {
                    format!("with {}", self.items(&arm.switches).join(" and "))
                };
                lines.line(&format!("{search}, {done} of at most {of} tried: {name}"));
            }
            Trying::Leg(warden_diagnose::Progress::Step { workload, done, of, .. }) => {
                lines.change(&format!("{workload} {done}/{of}"), false);
            }
            Trying::Leg(_) => {}
        }
    }

    /// `mitigations` of the model with the cure, and the additions to its command. Empty without a cure.
    pub(super) fn cured(&self, cure: &[usize]) -> Result<(Vec<String>, Added), Failure> {
        if cure.is_empty() {
            return Ok((Vec::new(), Added::default()));
        }
        let mut mitigations = self.configured.clone();
        mitigations.extend(self.items(cure).into_iter().map(str::to_owned));
        let cured = self.with(&Arm { switches: cure.to_vec() }).map_err(Failure::failed)?;
        let before = &self.target.resolved.fleet.models[self.target.index].command;
        Ok((mitigations, Added::between(before, &cured.command)))
    }
}

/// Formats the tried and untried switches.
pub(super) fn text(rows: &[Vec<String>], left_out: &[NotTried]) -> String {
    let mut text = String::new();
    if rows.len() > 1 {
        text.extend(["\n", &out::table(rows)]);
    }
    if !left_out.is_empty() {
        text += "\nnot tried:\n";
        text.extend(left_out.iter().map(|one| format!("{}: {}\n", one.item, one.why)));
    }
    text
}
