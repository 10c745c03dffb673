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

use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::life::TaskLife;
use crate::model::loading::dead_starts::DeadStarts;
use crate::model::loading::room::{LoadState, ModelRoom};
use crate::model::message::{TaskMail, TaskMessage};
use crate::model::unit::{ProcessUnit, UnitId, UnitList, UnitRole};
use crate::solo::{SoloSpec, SoloStarter};
use crate::start_search::StartSearchRun;
use crate::view::event::EventKind;

impl ModelTask {
    /// Uses the fallback arguments for the next start, if the model has some and runs no process. Returns
    /// true if they were not in use before.
    pub(crate) fn fall_back(&mut self, because: &str) -> bool {
        if self.units.any_process() || !self.room.fall_back(&mut self.env, because) {
            return false;
        }
        if self.room.is_granted() {
            // This room was granted for the larger configuration.
            self.room.give_back(&mut self.replacements, &mut self.life);
        }
        let failed = self.units.forget_failures();
        self.revive_all(failed);
        true
    }
}

impl ModelRoom {
    /// Uses the fallback arguments. Returns false without such, or if they are in use.
    fn fall_back(&mut self, env: &mut TaskEnvironment, because: &str) -> bool {
        if self.configured.is_some() {
            return false;
        }
        let Some(fallback) = env.spec.start.fallback.clone() else { return false };
        let message = format!("started with {} added, because {because}", fallback.args.join(" "));
        self.use_fallback(&mut env.spec, fallback);
        env.log_event(None, EventKind::FallsBack { message });
        self.report_settings(env);
        true
    }
}

impl DeadStarts {
    /// Begins or stops a search. `is_free`: nothing else uses the model's room. Returns why to use the fallback
    /// arguments if the search found that they help.
    pub(crate) fn settle(
        &mut self,
        env: &TaskEnvironment,
        mail: &mut TaskMail,
        room: &ModelRoom,
        units: &UnitList,
        life: &mut TaskLife,
        is_free: bool,
    ) -> Option<String> {
        let waits = |unit: &ProcessUnit| {
            unit.role == UnitRole::Current && unit.phase() == BackendPhase::Backoff && unit.start_failures > 0
        };
        let may_search = life.end.is_none()
            // A canary's search would compete with the model that serves.
            && env.spec.canary_of.is_none()
            && matches!(room.state, LoadState::Granted { asking: None, .. })
            && is_free
            && !units.any_process()
            && units.all.iter().any(waits)
            && self.command.as_ref() == Some(&env.spec.command);
        if !may_search {
            self.stop_search();
            return None;
        }
        let policy = warden_policies::defaults().start_search;
        match &self.finding {
            None if self.search.is_none() && self.deaths >= policy.deaths => {
                self.begin_search(env, mail, room);
                if self.is_searching() {
                    life.note_action();
                }
                None
            }
            Some(finding) if finding.switch().is_some_and(StartSwitch::is_fallback) => {
                Some(format!("it died while it loaded: {}", self.death))
            }
            _ => None,
        }
    }

    /// Handles the result of a search. Returns the events of units that need a changed configuration.
    pub(crate) fn note_result(
        &mut self,
        env: &TaskEnvironment,
        units: &mut UnitList,
        life: &mut TaskLife,
        number: u64,
        finding: StartFinding,
    ) -> Vec<(UnitId, LifecycleEvent)> {
        let Some((_, stop)) = self.search.take_if(|(own, _)| *own == number) else { return Vec::new() };
        life.note_action();
        if stop.is_cancelled() || self.command.as_ref() != Some(&env.spec.command) {
            return Vec::new();
        }
        if finding.is_lasting() {
            let keep = env.watch.sensors.priors_kept;
            let history = &env.context.leak_history;
            history.keep_start_finding(&self.key, &env.spec.name, finding.clone(), keep);
        }
        env.log_event(None, EventKind::StartSearched { finding: finding.clone() });
        let needs_change = finding.switch().is_some_and(|switch| !switch.is_fallback());
        let mut stuck = Vec::new();
        for unit in units.all.iter_mut().filter(|unit| unit.start_failures > 0) {
            if let Some(failure) = &mut unit.failure {
                failure.message = format!("{}; {}", failure.message, finding.advice());
            }
            if needs_change {
                stuck.push((unit.id, LifecycleEvent::Stuck));
            }
        }
        self.finding = Some(finding);
        stuck
    }

    /// Begins a search unless there is nothing to try.
    fn begin_search(&mut self, env: &TaskEnvironment, mail: &mut TaskMail, room: &ModelRoom) {
        let mut switches = env.spec.start.switches.clone();
        if let Some(fallback) = &env.spec.start.fallback
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
            &env.context.paths.runtime_dir,
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
