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
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent};
use warden_policies::start_search::{StartFinding, StartSwitch};

use super::environment::TaskEnvironment;
use super::message::TaskMail;
use super::room::{LoadState, ModelRoom};
use super::start_search::DeadStarts;
use super::unit::{ProcessUnit, UnitRole};
use super::{ModelTask, TaskMessage};
use crate::solo::{SoloSpec, SoloStarter};
use crate::start_search::StartSearchRun;
use crate::view::event::EventKind;

impl ModelTask {
    /// Uses the fallback arguments for the next start, if the model has some and runs no process. Returns
    /// true if they were not in use before.
    pub(super) fn fall_back(&mut self, because: &str) -> bool {
        let Some(fallback) = self.env.spec.fallback.clone() else { return false };
        if self.room.configured.is_some() || self.units.any_process() {
            return false;
        }
        let message = format!("started with {} added, because {because}", fallback.args.join(" "));
        self.room.use_fallback(&mut self.env.spec, fallback);
        self.env.log_event(None, EventKind::FallsBack { message });
        self.room.report_settings(&self.env);
        if self.room.is_granted() {
            // This room was granted for the larger configuration.
            self.give_room_back();
        }
        self.retry_failed();
        true
    }

    pub(super) fn settle_start_search(&mut self) {
        let waits = |unit: &ProcessUnit| {
            unit.role == UnitRole::Current && unit.phase() == BackendPhase::Backoff && unit.start_failures > 0
        };
        let may_search = self.life.end.is_none()
            // A canary's search would compete with the model that serves.
            && self.env.spec.canary_of.is_none()
            && matches!(self.room.state, LoadState::Granted { asking: None, .. })
            && self.replacements.is_empty()
            && !self.units.any_process()
            && self.units.all.iter().any(waits)
            && self.experience.dead_starts.command.as_ref() == Some(&self.env.spec.command);
        if !may_search {
            self.experience.dead_starts.stop_search();
            return;
        }
        let policy = warden_policies::defaults().start_search;
        let dead = &self.experience.dead_starts;
        match &dead.finding {
            None if dead.search.is_none() && dead.deaths >= policy.deaths => {
                let dead = &mut self.experience.dead_starts;
                dead.begin_search(&self.env, &mut self.mail, &self.room);
                if dead.is_searching() {
                    self.life.note_action();
                }
            }
            Some(finding) if finding.switch().is_some_and(StartSwitch::is_fallback) => {
                let because = format!("it died while it loaded: {}", dead.death);
                self.fall_back(&because);
            }
            _ => {}
        }
    }

    pub(super) fn note_start_search(&mut self, number: u64, finding: StartFinding) {
        let dead = &mut self.experience.dead_starts;
        let Some((_, stop)) = dead.search.take_if(|(own, _)| *own == number) else { return };
        self.life.note_action();
        if stop.is_cancelled() || dead.command.as_ref() != Some(&self.env.spec.command) {
            return;
        }
        if finding.is_lasting() {
            let keep = self.env.watch.sensors.priors_kept;
            let history = &self.env.context.leak_history;
            history.keep_start_finding(&dead.key, &self.env.spec.name, finding.clone(), keep);
        }
        self.env.log_event(None, EventKind::StartSearched { finding: finding.clone() });
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

impl DeadStarts {
    /// Begins a search unless there is nothing to try.
    fn begin_search(&mut self, env: &TaskEnvironment, mail: &mut TaskMail, room: &ModelRoom) {
        let mut switches = env.spec.start_switches.clone();
        if let Some(fallback) = &env.spec.fallback
            && room.configured.is_none()
        {
            let line = "its `fallback` says so".to_owned();
            let args = fallback.args.clone();
            switches.insert(0, StartSwitch { args, line, ..StartSwitch::default() });
        }
        if switches.is_empty() {
            return;
        }
        let generation = env.context.next_generation();
        let starter = SoloStarter::in_world(
            Arc::clone(&env.context.world),
            &env.context.runtime_dir,
            &env.spec.lifecycle,
            env.watch,
            ModelName::new(format!("start-{}", generation.0)),
        );
        let starter = match starter {
            Ok(starter) => starter,
            Err(error) => {
                tracing::warn!(model = %env.spec.name, %error, "cannot search for a switch that starts it");
                return self.forget_deaths();
            }
        };
        env.log_event(None, EventKind::StartSearchBegan { deaths: self.deaths, switches: switches.len() });
        let spec = SoloSpec {
            command: env.spec.command.clone(),
            oom_score_adj: env.spec.oom_score_adj,
            socket: env.spec.run.socket,
            facts: env.spec.facts,
        };
        let mut hunt = StartSearchRun { spec, switches, deaths: self.deaths, death: self.death.clone() };
        let stop = CancellationToken::new();
        self.searches += 1;
        let number = self.searches;
        self.search = Some((number, stop.clone()));
        let world = Arc::clone(&env.context.world);
        let outbox = mail.outbox.clone();
        let limit = env.watch.sensors.read_limit;
        let gpus = room.replica_gpus(0, &env.spec);
        mail.searches.spawn(async move {
            if !gpus.is_empty()
                && let Some(only) = world.gpu_restriction(gpus, limit).await
            {
                hunt.spec.command.env.push(only);
            }
            let finding = hunt.run(&starter, &mut |_| {}, &stop).await;
            outbox.send(TaskMessage::StartSearched(number, Box::new(finding)));
        });
    }
}
