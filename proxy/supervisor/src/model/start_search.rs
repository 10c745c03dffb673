//! Searches for an option with which a process that dies while loading can start; once per command.
//!
//! ```text
//!     dies, dies again ── no process runs, room is granted ──> search (a writer task) ──> finding, stored
//!                                                                                             │
//!     the `fallback` starts it ──> used from the next start on <──────────────────────────────┤
//!     another option does ──> Failed: the message has the line to write <─────────────────────┤
//!     none, or not every time ──> starts continue after pauses <──────────────────────────────┘
//! ```
//!
//! No process is started during a search, because memory may not suffice for two processes of a large
//! model. The search ends as soon as the model needs its room for anything else.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::start_search::{StartFinding, StartSwitch};
use warden_policies::{GpuIndex, ModelName};

use super::loading::LoadState;
use super::unit::{ProcessUnit, UnitRole};
use super::{ModelTask, TaskCustody, TaskMessage};
use crate::error::BackendFailure;
use crate::memory::leak_history;
use crate::process::failure::StartEnd;
use crate::solo::{SoloSpec, SoloStarter};
use crate::spec::ServerCommand;
use crate::start_search::{StartSearchRun, death_at_load};
use crate::view::event::EventKind;

/// Deaths of processes with one command before they were ready.
#[derive(Debug, Default)]
pub(super) struct DeadStarts {
    command: Option<ServerCommand>,
    /// Key of the command in the leak history.
    key: String,
    /// Consecutive deaths with the configured command.
    deaths: u32,
    /// Description of the last death.
    death: String,
    finding: Option<StartFinding>,
    /// Number of the search under way, and the token that cancels it.
    search: Option<(u64, CancellationToken)>,
    searches: u64,
}

impl DeadStarts {
    /// Resets the count, after a successful start or a failure whose cause is known.
    pub(super) fn forget_deaths(&mut self) {
        self.deaths = 0;
    }
}

impl ModelTask {
    pub(super) fn is_searching(&self) -> bool {
        self.dead_starts.search.is_some()
    }

    /// Cancels a search. When its result message arrives, its process is gone.
    pub(super) fn stop_start_search(&self) {
        if let Some((_, stop)) = &self.dead_starts.search {
            stop.cancel();
        }
    }

    /// Handles the end of a process before it was ready, and adds known facts about such deaths to
    /// `failure`. Returns true if the next start needs a change of the configuration.
    pub(super) fn note_start_death(&mut self, end: &StartEnd<'_>, failure: &mut BackendFailure) -> bool {
        let exit = if let StartEnd::Exited(exit, _) = end { Some(*exit) } else { None };
        let Some(death) = death_at_load(exit, failure) else {
            self.dead_starts.forget_deaths();
            return false;
        };
        if self.dead_starts.command.as_ref() != Some(&self.spec.command) {
            let (key, searches) = (leak_history::process_key(&self.spec.command), self.dead_starts.searches);
            let finding = self.context.leak_history.start_finding(&key);
            let command = Some(self.spec.command.clone());
            let search = self.dead_starts.search.take();
            self.dead_starts =
                DeadStarts { command, key, finding, search, searches, ..DeadStarts::default() };
        }
        self.dead_starts.deaths += 1;
        self.dead_starts.death = death;
        let Some(finding) = self.dead_starts.finding.as_ref().filter(|finding| finding.is_lasting()) else {
            return false;
        };
        failure.message = format!("{}; {}", failure.message, finding.advice());
        finding.switch().is_some_and(|switch| !switch.is_fallback())
    }

    /// Begins a search that is due, and cancels a search that is not allowed any more.
    pub(super) fn settle_start_search(&mut self) {
        let may = self.may_search();
        if !may {
            self.stop_start_search();
            return;
        }
        let policy = warden_policies::defaults().start_search;
        match &self.dead_starts.finding {
            None if !self.is_searching() && self.dead_starts.deaths >= policy.deaths => {
                self.begin_start_search();
            }
            Some(finding) if finding.switch().is_some_and(StartSwitch::is_fallback) => {
                let because = format!("it died while it loaded: {}", self.dead_starts.death);
                self.fall_back(&because);
            }
            _ => {}
        }
    }

    /// True if a search may use the model's room and the CPU: a start has failed, and the model has no
    /// running process.
    fn may_search(&self) -> bool {
        let waits = |unit: &ProcessUnit| {
            unit.role == UnitRole::Current && unit.phase() == BackendPhase::Backoff && unit.start_failures > 0
        };
        self.end.is_none()
            && self.custody == TaskCustody::Ours
            // A canary runs next to a model that serves, so a search would compete with that model.
            && self.spec.canary_of.is_none()
            && matches!(self.load_state, LoadState::Granted { asking: None, .. })
            && self.replacements.is_empty()
            && self.live_generations().next().is_none()
            && self.units.iter().any(waits)
            && self.dead_starts.command.as_ref() == Some(&self.spec.command)
    }

    fn begin_start_search(&mut self) {
        let fallback = self.spec.fallback.as_ref().filter(|_| self.configured_command.is_none());
        let fallback = fallback.map(|fallback| StartSwitch {
            args: fallback.args.clone(),
            line: "its `fallback` says so".to_owned(),
            ..StartSwitch::default()
        });
        let switches: Vec<StartSwitch> =
            fallback.into_iter().chain(self.spec.start_switches.iter().cloned()).collect();
        if switches.is_empty() {
            return;
        }
        let generation = self.context.next_generation();
        let starter = SoloStarter::in_world(
            Arc::clone(&self.context.world),
            &self.context.runtime_dir,
            &self.spec.lifecycle,
            self.watch,
            ModelName::new(format!("start-{}", generation.0)),
        );
        let starter = match starter {
            Ok(starter) => starter,
            Err(error) => {
                tracing::warn!(model = %self.spec.name, %error, "cannot search for a switch that starts it");
                return self.dead_starts.forget_deaths();
            }
        };
        let (deaths, death) = (self.dead_starts.deaths, self.dead_starts.death.clone());
        self.log_event(None, EventKind::StartSearchBegan { deaths, switches: switches.len() });
        let spec = SoloSpec {
            command: self.spec.command.clone(),
            oom_score_adj: self.spec.oom_score_adj,
            socket: self.spec.run.socket,
            facts: self.spec.facts,
        };
        let mut hunt = StartSearchRun { spec, switches, deaths, death };
        let stop = CancellationToken::new();
        self.dead_starts.searches += 1;
        let number = self.dead_starts.searches;
        self.dead_starts.search = Some((number, stop.clone()));
        let (world, outbox, limit) =
            (Arc::clone(&self.context.world), self.outbox.clone(), self.watch.sensors.read_limit);
        let gpus = self.replica_gpus(0).into_iter();
        let gpus: Vec<GpuIndex> = gpus.filter_map(|gpu| u32::try_from(gpu).ok().map(GpuIndex)).collect();
        self.searches.spawn(async move {
            if !gpus.is_empty()
                && let Some(only) = world.gpu_restriction(gpus, limit).await
            {
                hunt.spec.command.env.push(only);
            }
            let finding = hunt.run(&starter, &mut |_| {}, &stop).await;
            outbox.send(TaskMessage::StartSearched(number, Box::new(finding)));
        });
        self.note_action();
    }

    pub(super) fn note_start_search(&mut self, number: u64, finding: StartFinding) {
        let Some((_, stop)) = self.dead_starts.search.take_if(|(own, _)| *own == number) else { return };
        self.note_action();
        if stop.is_cancelled() || self.dead_starts.command.as_ref() != Some(&self.spec.command) {
            return;
        }
        if finding.is_lasting() {
            let keep = self.watch.sensors.priors_kept;
            let (key, name) = (&self.dead_starts.key, &self.spec.name);
            self.context.leak_history.keep_start_finding(key, name, finding.clone(), keep);
        }
        self.log_event(None, EventKind::StartSearched { finding: finding.clone() });
        let needs_change = finding.switch().is_some_and(|switch| !switch.is_fallback());
        for id in self.ids() {
            let Some(unit) = self.unit_mut(id).filter(|unit| unit.start_failures > 0) else { continue };
            if let Some(failure) = &mut unit.failure {
                failure.message = format!("{}; {}", failure.message, finding.advice());
            }
            if needs_change {
                self.step_machine(id, LifecycleEvent::Stuck);
            }
        }
        self.dead_starts.finding = Some(finding);
    }
}
