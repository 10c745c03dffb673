//! Finds a way to start a model that does not start as configured: with its fallback arguments, or with an
//! option that a search finds for a process that dies while loading.
//!
//! The fallback arguments stay in use until the model is unloaded or reconfigured. Each command is searched
//! once:
//!
//! ```text
//!     dies, dies again ── no process runs, room is granted ──> search (a writer task) ──> finding, stored
//!                                                                                             │
//!     the `fallback` starts it ──> used from the next start on <──────────────────────────────┤
//!     another option does ──> Failed: the message has the line to write <─────────────────────┤
//!     none, or not every time ──> starts continue after pauses <──────────────────────────────┘
//! ```
//!
//! No process is started during a search, because memory may not suffice for two processes. The search ends
//! as soon as the model needs its room for anything else.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use warden_policies::ModelName;
use warden_policies::book::MemoryNeeds;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::start_search::{StartFinding, StartSwitch};

use super::loading::{LoadState, ModelRoom};
use super::unit::{ProcessUnit, UnitRole};
use super::{ModelTask, TaskMessage};
use crate::error::{BackendFailure, FailureKind};
use crate::memory::leak_history;
use crate::process::failure::StartEnd;
use crate::solo::{SoloSpec, SoloStarter};
use crate::spec::{FallbackSpec, ModelSpec, ServerCommand};
use crate::start_search::{StartSearchRun, death_at_load};
use crate::view::event::EventKind;

/// Starts that fail for lack of memory before the fallback is used. After the first one, the loader makes
/// other models free memory.
const SHORT_STARTS: u32 = 2;

/// Configured command and needs, kept while the fallback is in use.
#[derive(Debug)]
pub(super) struct ConfiguredCommand {
    command: ServerCommand,
    needs: Option<MemoryNeeds>,
}

#[derive(Debug, Default)]
pub(super) struct DeadStarts {
    command: Option<ServerCommand>,
    key: String,
    deaths: u32,
    death: String,
    finding: Option<StartFinding>,
    search: Option<(u64, CancellationToken)>,
    searches: u64,
}

impl DeadStarts {
    /// Resets the count after a successful start, or after a failure with a known cause.
    pub(super) fn forget_deaths(&mut self) {
        self.deaths = 0;
    }

    pub(super) fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// Cancels a search. Its process is gone when the result message arrives.
    pub(super) fn stop_search(&self) {
        if let Some((_, stop)) = &self.search {
            stop.cancel();
        }
    }
}

impl ModelRoom {
    fn use_fallback(&mut self, spec: &mut ModelSpec, fallback: FallbackSpec) {
        let command = spec.command.clone();
        spec.command.args.extend(fallback.args);
        let needs = std::mem::replace(&mut spec.loading.needs, fallback.needs);
        self.configured = Some(ConfiguredCommand { command, needs });
    }

    /// Restores the configured command: the next start may have more room.
    pub(super) fn restore_configured(&mut self, spec: &mut ModelSpec) {
        if let Some(ConfiguredCommand { command, needs }) = self.configured.take() {
            spec.command = command;
            spec.loading.needs = needs;
        }
    }

    /// Keeps the fallback if new settings have the same command and fallback arguments.
    pub(super) fn keep_fallback(&mut self, old: &ModelSpec, new: &mut ModelSpec) {
        let Some(whole) = self.configured.take() else { return };
        let Some(fallback) = new.fallback.clone() else { return };
        let had_same = old.fallback.as_ref().is_some_and(|known| known.args == fallback.args);
        if had_same && new.command == whole.command {
            new.command = old.command.clone();
            let needs = std::mem::replace(&mut new.loading.needs, fallback.needs);
            self.configured = Some(ConfiguredCommand { needs, ..whole });
        }
    }
}

impl ModelTask {
    /// Uses the fallback arguments for the next start, if the model has some and runs no process. Returns
    /// true if they were not in use before.
    pub(super) fn fall_back(&mut self, because: &str) -> bool {
        let Some(fallback) = self.spec.fallback.clone() else { return false };
        if self.room.configured.is_some() || self.units.any_process() {
            return false;
        }
        let message = format!("started with {} added, because {because}", fallback.args.join(" "));
        self.room.use_fallback(&mut self.spec, fallback);
        self.log_event(None, EventKind::FallsBack { message });
        self.apply_loading();
        if self.room.is_granted() {
            // This room was granted for the larger configuration.
            self.give_room_back();
        }
        self.retry_failed();
        true
    }

    /// Uses the fallback arguments of processes taken over from the previous instance.
    pub(super) fn inherit_fallback(&mut self) {
        if let Some(fallback) = self.spec.fallback.clone() {
            self.room.use_fallback(&mut self.spec, fallback);
            self.apply_loading();
        }
    }

    /// Uses the fallback if starts lacked memory although other models had made room.
    pub(super) fn settle_fallback(&mut self) {
        let is_short = |unit: &&ProcessUnit| {
            unit.start_failures >= SHORT_STARTS
                && unit.failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::OutOfMemory)
        };
        let short = self.units.all.iter().find(is_short).and_then(|unit| unit.failure.clone());
        if let Some(failure) = short {
            self.fall_back(&failure.message);
        }
    }

    /// Handles a death before the process was ready, and adds known facts to `failure`. Returns true if the
    /// next start needs a changed configuration.
    pub(super) fn note_start_death(&mut self, end: &StartEnd<'_>, failure: &mut BackendFailure) -> bool {
        let exit = if let StartEnd::Exited(exit, _) = end { Some(*exit) } else { None };
        let dead = &mut self.experience.dead_starts;
        let Some(death) = death_at_load(exit, failure) else {
            dead.forget_deaths();
            return false;
        };
        if dead.command.as_ref() != Some(&self.spec.command) {
            let key = leak_history::process_key(&self.spec.command);
            *dead = DeadStarts {
                command: Some(self.spec.command.clone()),
                finding: self.context.leak_history.start_finding(&key),
                key,
                search: dead.search.take(),
                searches: dead.searches,
                ..DeadStarts::default()
            };
        }
        dead.deaths += 1;
        dead.death = death;
        let Some(finding) = dead.finding.as_ref().filter(|finding| finding.is_lasting()) else {
            return false;
        };
        failure.message = format!("{}; {}", failure.message, finding.advice());
        finding.switch().is_some_and(|switch| !switch.is_fallback())
    }

    pub(super) fn settle_start_search(&mut self) {
        if !self.may_search() {
            self.experience.dead_starts.stop_search();
            return;
        }
        let policy = warden_policies::defaults().start_search;
        let dead = &self.experience.dead_starts;
        match &dead.finding {
            None if dead.search.is_none() && dead.deaths >= policy.deaths => self.begin_start_search(),
            Some(finding) if finding.switch().is_some_and(StartSwitch::is_fallback) => {
                let because = format!("it died while it loaded: {}", dead.death);
                self.fall_back(&because);
            }
            _ => {}
        }
    }

    fn may_search(&self) -> bool {
        let waits = |unit: &ProcessUnit| {
            unit.role == UnitRole::Current && unit.phase() == BackendPhase::Backoff && unit.start_failures > 0
        };
        self.life.end.is_none()
            // A canary's search would compete with the model that serves.
            && self.spec.canary_of.is_none()
            && matches!(self.room.state, LoadState::Granted { asking: None, .. })
            && self.replacements.is_empty()
            && !self.units.any_process()
            && self.units.all.iter().any(waits)
            && self.experience.dead_starts.command.as_ref() == Some(&self.spec.command)
    }

    fn begin_start_search(&mut self) {
        let mut switches = self.spec.start_switches.clone();
        if let Some(fallback) = &self.spec.fallback
            && self.room.configured.is_none()
        {
            let line = "its `fallback` says so".to_owned();
            let args = fallback.args.clone();
            switches.insert(0, StartSwitch { args, line, ..StartSwitch::default() });
        }
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
                return self.experience.dead_starts.forget_deaths();
            }
        };
        let deaths = self.experience.dead_starts.deaths;
        self.log_event(None, EventKind::StartSearchBegan { deaths, switches: switches.len() });
        let spec = SoloSpec {
            command: self.spec.command.clone(),
            oom_score_adj: self.spec.oom_score_adj,
            socket: self.spec.run.socket,
            facts: self.spec.facts,
        };
        let dead = &mut self.experience.dead_starts;
        let mut hunt = StartSearchRun { spec, switches, deaths, death: dead.death.clone() };
        let stop = CancellationToken::new();
        dead.searches += 1;
        let number = dead.searches;
        dead.search = Some((number, stop.clone()));
        let world = Arc::clone(&self.context.world);
        let outbox = self.mail.outbox.clone();
        let limit = self.watch.sensors.read_limit;
        let gpus = self.room.replica_gpus(0, &self.spec);
        self.mail.searches.spawn(async move {
            if !gpus.is_empty()
                && let Some(only) = world.gpu_restriction(gpus, limit).await
            {
                hunt.spec.command.env.push(only);
            }
            let finding = hunt.run(&starter, &mut |_| {}, &stop).await;
            outbox.send(TaskMessage::StartSearched(number, Box::new(finding)));
        });
        self.life.note_action();
    }

    pub(super) fn note_start_search(&mut self, number: u64, finding: StartFinding) {
        let dead = &mut self.experience.dead_starts;
        let Some((_, stop)) = dead.search.take_if(|(own, _)| *own == number) else { return };
        self.life.note_action();
        if stop.is_cancelled() || dead.command.as_ref() != Some(&self.spec.command) {
            return;
        }
        if finding.is_lasting() {
            let keep = self.watch.sensors.priors_kept;
            let history = &self.context.leak_history;
            history.keep_start_finding(&dead.key, &self.spec.name, finding.clone(), keep);
        }
        self.log_event(None, EventKind::StartSearched { finding: finding.clone() });
        let needs_change = finding.switch().is_some_and(|switch| !switch.is_fallback());
        for id in self.units.ids() {
            let Some(unit) = self.units.get_mut(id).filter(|unit| unit.start_failures > 0) else { continue };
            if let Some(failure) = &mut unit.failure {
                failure.message = format!("{}; {}", failure.message, finding.advice());
            }
            if needs_change {
                self.step_machine(id, LifecycleEvent::Stuck);
            }
        }
        self.experience.dead_starts.finding = Some(finding);
    }
}
