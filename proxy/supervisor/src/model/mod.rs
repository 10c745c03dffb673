//! The task of one model: the only owner of its processes' life-cycle machines.
//!
//! ```text
//!   helpers --reports--+                         +--> Leases: open, close, forget, refuse
//!   operators --control+--> turn: handle one     +--> processes: spawn, probe, TERM, KILL
//!   Leases --wake------+    message or timer,    +--> journal, ledger, view
//!   timers ------------+    then settle
//! ```
//!
//! A turn handles one message or timer and then *settles*: it inspects the whole state and acts on it until
//! nothing is left to do. The task may therefore miss an event: the inspection finds its effect.
//!
//! A turn awaits nothing. Slow work runs in a helper task, which reports with a message that names its
//! generation.
//!
//! [`ModelTask`] owns parts, each with its own state and methods:
//!
//! | folder or file | part |
//! |---|---|
//! | `context`, `environment` | state shared with other models; settings, leases, log |
//! | `message` | messages to the task, and its helpers |
//! | `life`, `operators` | end and timers of the task; operators who wait |
//! | `experience`, `warm` | values learned from earlier processes, and conversations |
//! | `unit` | life-cycle machines, each with its timer and process |
//! | `generation` | one process: its recipe, probes, timers, health and reclaims |
//! | `lifecycle` | effects of the machines, probes, reports of helpers |
//! | `recycling` | memory readings, the recycle policy, reclaims, lost GPUs |
//! | `replacement` | replacements: checks before one, pace, steps, result |
//! | `loading` | room in memory, and starts that fail |
//! | `control`, `settle`, `show` | orders; actions that follow from the whole state; the view |
//! | `handover`, `remaining` | the handover between two instances, and the service after it |

pub(crate) mod context;
mod control;
mod environment;
mod experience;
mod generation;
mod handover;
mod life;
mod lifecycle;
mod loading;
pub(crate) mod message;
mod operators;
mod recycling;
mod remaining;
mod replacement;
mod settle;
mod show;
mod unit;
pub(crate) mod warm;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::{BackendPhase, LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::replacement_cost::LullHistory;

use self::context::FleetContext;
use self::environment::TaskEnvironment;
use self::experience::ModelExperience;
use self::generation::{process_recipe, take_due};
use self::life::{ROOM_CHECK_INTERVAL, TaskEnd, TaskLife};
use self::loading::room::{LoadState, ModelRoom};
pub(crate) use self::message::{ControlMessage, TaskMessage};
use self::message::{ModelWill, TaskMail, TaskOutbox};
use self::operators::OperatorRequests;
use self::remaining::RemainingTask;
use self::replacement::ReplacementTracker;
use self::unit::{ProcessUnit, UnitList};
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::memory::loading::LoadingReport;
use crate::process::failure::StartLateness;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::log::LogRing;

pub(crate) struct ModelTask {
    env: TaskEnvironment,
    mail: TaskMail,
    units: UnitList,
    room: ModelRoom,
    replacements: ReplacementTracker,
    operators: OperatorRequests,
    experience: ModelExperience,
    life: TaskLife,
}

/// Limit of settling rounds: a bug must not occupy a core for ever.
const ROUNDS: usize = 64;

impl ModelTask {
    pub(crate) fn new(
        context: Arc<FleetContext>,
        leases: Arc<LeaseQueue>,
        logs: Arc<LogRing>,
        spec: SharedSpec,
        watch: WatchConfig,
        will: Option<ModelWill>,
    ) -> (Self, TaskOutbox) {
        let lulls = LullHistory::new(&warden_policies::defaults().moment, context.now());
        let mut model = Self {
            mail: TaskMail::new(),
            units: UnitList::default(),
            room: ModelRoom::new(Arc::clone(&context.loading), spec.name.clone(), spec.run.preload),
            replacements: ReplacementTracker::new(lulls),
            operators: OperatorRequests::default(),
            experience: ModelExperience::default(),
            life: TaskLife::new(),
            env: TaskEnvironment { context, leases, logs, spec, watch },
        };
        model.set_replicas();
        model.env.enable_conversations();
        model.env.watch_answers();
        model.experience.follow_warm_mode(&model.env);
        model.room.join(&model.env, model.mail.outbox.clone());
        if let Some(will) = will {
            model.inherit_will(will);
        }
        if model.room.wanted && model.env.context.predecessor.begun.is_cancelled() {
            // Ask here and not in the task, so that models ask in the order of the configuration.
            model.may_start();
        }
        model.env.context.records.publisher.update(model.model_view());
        let outbox = model.mail.outbox.clone();
        (model, outbox)
    }

    /// Delays the first process until removed models are gone, at most by the stop grace period.
    pub(crate) fn wait_for_room(&mut self) {
        self.life.timers.room = Some(clock::after(Instant::now(), self.env.spec.lifecycle.stop_grace));
    }

    /// Runs until the model is removed or the fleet ends, and all its processes are reaped.
    ///
    /// `self` is boxed because an async function stores its arguments twice.
    pub(crate) async fn run(mut self: Box<Self>) {
        loop {
            if std::mem::take(&mut self.life.is_frozen)
                && !self.mail.wait_while_frozen(&self.env, &self.units).await
            {
                let Self { env, mail, units, operators, .. } = *self;
                return RemainingTask::new(env, mail, units, operators).run().await;
            }
            self.settle();
            if std::mem::take(&mut self.life.is_dirty) && self.life.is_published {
                self.env.context.records.publisher.update(self.model_view());
            }
            self.operators.send_answers();
            let is_gone = !self.units.any_process() && !self.experience.dead_starts.is_searching();
            if self.life.end.is_some() && is_gone || self.life.is_overdue(self.env.spec.lifecycle.stop_grace)
            {
                if !is_gone {
                    let pids: Vec<u32> = self.units.lives().filter_map(|live| live.child.pid()).collect();
                    let model = &self.env.spec.name;
                    tracing::error!(%model, ?pids, "processes still run although they were killed");
                }
                while self.mail.searches.join_next().await.is_some() {}
                for generation in std::mem::take(&mut self.life.dying) {
                    self.env.context.fleet_memory.remove_generation(generation);
                }
                if self.life.end == Some(TaskEnd::Removed) {
                    self.room.report(LoadingReport::Removed);
                    self.env.context.leaving.fetch_sub(1, Ordering::SeqCst);
                }
                return;
            }
            let of_units = self.units.all.iter().filter_map(ProcessUnit::due_next);
            let of_model = self.life.timers.next_deadline(Instant::now());
            let end = self.life.end_deadline(self.env.spec.lifecycle.stop_grace);
            let expiries = self.experience.kept_state.iter().map(|kept| kept.until);
            let deadline =
                of_units.chain(of_model).chain(end).chain(expiries).chain(self.experience.next_sweep).min();
            let leases = Arc::clone(&self.env.leases);
            tokio::select! {
                message = self.mail.inbox.recv() => match message {
                    Some(TaskMessage::Report(generation, report)) => self.take_report(generation, report),
                    Some(TaskMessage::Looked(made_of, sight)) => self.note_needs(*made_of, sight),
                    Some(TaskMessage::StartSearched(number, finding)) => {
                        let Self { env, units, life, experience, .. } = &mut *self;
                        let stuck = experience.dead_starts.note_result(env, units, life, number, *finding);
                        self.step_all(stuck);
                    }
                    Some(TaskMessage::Control(control)) => self.handle_control(control),
                    // Sending fails if the watchdog no longer waits.
                    Some(TaskMessage::Beat(question)) => {
                        let _left = question.send(());
                    }
                    // Unreachable: this task holds a sender, so the channel stays open.
                    None => return,
                },
                () = leases.wake.notified() => {
                    self.units.spread_settings(&leases, self.env.spec.lifecycle.probe_timeout, &mut self.mail);
                }
                () = sleep_until(deadline) => self.fire_timers(Instant::now()),
                Some(_) = self.mail.searches.join_next(), if !self.mail.searches.is_empty() => {}
                Some(ended) = self.mail.helpers.join_next(), if !self.mail.helpers.is_empty() => {
                    if let Err(error) = ended && error.is_panic() {
                        tracing::error!(model = %self.env.spec.name, "a task of the model ended in an internal error");
                    }
                }
            }
        }
    }

    fn settle(&mut self) {
        if !self.env.context.predecessor.begun.is_cancelled() {
            // The previous instance still owns the processes.
            return;
        }
        for _ in 0..ROUNDS {
            // An answer counts as an action, but does not change the view.
            let before = (self.life.steps, self.operators.answers.len());
            self.settle_once();
            if (self.life.steps, self.operators.answers.len()) == before {
                return;
            }
        }
        tracing::error!(model = %self.env.spec.name, "the state of the model does not settle");
    }

    fn fire_timers(&mut self, now: Instant) {
        // Start no process while the previous instance owns the processes or a start search runs its own.
        let may_start =
            self.env.context.predecessor.begun.is_cancelled() && !self.experience.dead_starts.is_searching();
        for id in self.units.ids() {
            let Some(unit) = self.units.get_mut(id) else { continue };
            if let Some((timer, at)) = &mut unit.timer
                && !may_start
                && starts_process(*timer)
                && *at <= now
            {
                *at = now + ROOM_CHECK_INTERVAL;
            }
            if let Some((timer, _)) = unit.timer.take_if(|(_, at)| *at <= now) {
                let Some(unit) = self.units.get(id) else { continue };
                let stays = timer == LifecycleTimer::Drain && self.life.end.is_none();
                // The model drains for another one: its running requests are not interrupted. Without
                // requests, the drain waits only for saving slots, which has its own time limit.
                let waits = self.room.state == (LoadState::Leaving { for_another: true })
                    && unit.live.as_ref().is_some_and(|live| {
                        self.env.leases.in_flight(live.id) > 0
                            && live.may_drain_on(self.env.spec.lifecycle.probes_lost)
                    });
                if timer == LifecycleTimer::Start {
                    let lateness = StartLateness::NotReady(self.env.spec.lifecycle.start_timeout);
                    if let Some((BackendPhase::Starting, live)) = self.units.phase_and_live(id) {
                        let event = live.note_late_start(lateness);
                        self.step_machine(id, event);
                    }
                } else if stays
                    && self.operators.restarts.is_empty()
                    && self.replacements.may_outlast_drain(unit, &self.env.spec)
                {
                    self.postpone_drain(id);
                } else if stays && waits {
                    self.carry_out_effect(id, LifecycleEffect::Arm(timer));
                } else if starts_process(timer) {
                    self.revive_all(vec![(id, LifecycleEvent::Timer(timer))]);
                } else {
                    self.step_machine(id, LifecycleEvent::Timer(timer));
                }
            }
            let Self { env, mail, units, replacements, experience, .. } = self;
            mail.fire_probe(env, units, replacements, experience, id, now);
            // Until this instance decides, the previous one owns and judges the processes.
            if self.env.context.predecessor.begun.is_cancelled()
                && let Some((phase, live)) = self.units.phase_and_live(id)
                && live.fire_samples(&self.env, &mut self.mail, phase, now)
            {
                self.judge_unit(id);
            }
            self.fire_answer_probe(id, now);
        }
        take_due(&mut self.life.timers.configuration, now);
        take_due(&mut self.life.timers.idle, now);
        self.experience.drop_state(&self.env.leases, |kept| kept.until <= now);
        self.experience.sweep_store(&self.env, now);
        let is_replacing = !self.replacements.is_empty();
        if let Some(replica) = self.life.take_recovery(&self.env, &self.units, is_replacing, now) {
            self.replace_replica(replica, Reason::Degraded);
        }
        if take_due(&mut self.life.timers.look, now) {
            let made_of = process_recipe(&self.env.spec);
            let same = self.units.lives().find(|live| live.recipe == made_of);
            let running = same.and_then(|live| live.child.pid());
            self.replacements.needs.begin_check(&self.env, &mut self.mail, running, None);
        }
    }
}

const fn starts_process(timer: LifecycleTimer) -> bool {
    matches!(timer, LifecycleTimer::Backoff { .. } | LifecycleTimer::Trial)
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
