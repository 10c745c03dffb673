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
//! | file | part |
//! |---|---|
//! | `context` | state shared by the tasks of all models |
//! | `message` | messages to the task, and its helpers |
//! | `unit` | machines and their processes |
//! | `health` | health of one generation; a process that lost its GPU |
//! | `loading` | room in memory, asked of the loader |
//! | `replacement` | replacements under way, and the last ones |
//! | `experience` | values learned from earlier processes |
//!
//! Actions of the task:
//!
//! | file | job |
//! |---|---|
//! | `act` | carries out the machine's effects |
//! | `control` | restart, drain, reload, removal, end; operators who wait |
//! | `handover`, `remaining` | handover between instances; requests that remain after it |
//! | `judge` | applies the recycle policy |
//! | `look` | checks that a new process would find its files |
//! | `probes` | sends probes |
//! | `reclaim` | asks a process to give memory back |
//! | `replace` | replacements from decision to ledger entry |
//! | `reports` | handles the helpers' reports |
//! | `sample` | memory readings; memory left for prompts |
//! | `settle` | derives actions from the whole state |
//! | `show`, `words` | the view; sentences for events |
//! | `spread` | applies a client's settings to all processes |
//! | `start_search` | finds a way to start a model that does not start |
//! | `unload` | pins set by operators; unloads models without requests |
//! | `warm` | carries over conversations |

mod act;
pub(crate) mod context;
mod control;
mod experience;
pub(crate) mod handover;
mod health;
mod judge;
mod loading;
mod look;
pub(crate) mod message;
mod probes;
mod reclaim;
mod remaining;
mod replace;
mod replacement;
mod reports;
mod sample;
mod settle;
mod show;
mod spread;
mod start_search;
mod unit;
mod unload;
mod warm;
mod words;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::lifecycle::{LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::replacement_cost::LullHistory;

use self::control::OperatorRequests;
use self::experience::ModelExperience;
use self::health::OffloadRecovery;
use self::loading::ModelRoom;
pub(crate) use self::message::{ControlMessage, HelperReport, TaskMessage};
use self::message::{TaskMail, TaskOutbox};
use self::remaining::RemainingTask;
use self::replacement::ReplacementTracker;
use self::unit::{ProcessUnit, UnitId, UnitList, UnitRole, take_due};
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::memory::loading::LoadingReport;
use crate::model::context::FleetContext;
use crate::model::handover::ModelWill;
use crate::process::failure::StartLateness;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::event::EventKind;
use crate::view::log::LogRing;

pub(crate) struct ModelTask {
    context: Arc<FleetContext>,
    leases: Arc<LeaseQueue>,
    logs: Arc<LogRing>,
    spec: SharedSpec,
    watch: WatchConfig,
    mail: TaskMail,
    units: UnitList,
    room: ModelRoom,
    replacements: ReplacementTracker,
    operators: OperatorRequests,
    experience: ModelExperience,
    life: TaskLife,
}

#[derive(Debug)]
struct TaskLife {
    end: Option<TaskEnd>,
    /// True while no instance decides, until the handover has succeeded or failed.
    is_frozen: bool,
    /// False after the removal of the model: then another model may use its name in the view.
    is_published: bool,
    is_dirty: bool,
    steps: u64,
    timers: ModelTimers,
    crashes: u64,
    dying: Vec<GenerationId>,
}

impl TaskLife {
    /// Records an action, so that the task settles again and publishes the view.
    fn note_action(&mut self) {
        self.steps += 1;
        self.is_dirty = true;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskEnd {
    Removed,
    /// Requests may run until this time.
    Shutdown(Instant),
}

#[derive(Debug, Default)]
struct ModelTimers {
    /// Time for retrying a failed or delayed replacement for a new configuration.
    configuration: Option<Instant>,
    look: Option<Instant>,
    idle: Option<Instant>,
    recovery: Option<OffloadRecovery>,
    /// End of the first process's wait for the memory of removed models.
    room: Option<Instant>,
}

impl ModelTimers {
    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room.map(|until| until.min(clock::after_pause(now, ROOM_CHECK_INTERVAL)));
        [self.configuration, self.look, self.idle, recovery, room].into_iter().flatten().min()
    }
}

const ROOM_CHECK_INTERVAL: Duration = Duration::from_millis(50);

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
            leases,
            logs,
            watch,
            mail: TaskMail::new(),
            units: UnitList::default(),
            room: ModelRoom::new(Arc::clone(&context.loading), spec.name.clone(), spec.run.preload),
            replacements: ReplacementTracker::default(),
            operators: OperatorRequests::default(),
            experience: ModelExperience::new(lulls),
            life: TaskLife {
                end: None,
                is_frozen: false,
                is_published: true,
                is_dirty: true,
                steps: 0,
                timers: ModelTimers::default(),
                crashes: 0,
                dying: Vec::new(),
            },
            spec,
            context,
        };
        model.set_replicas();
        model.enable_conversations();
        model.join_loading();
        if let Some(will) = will {
            model.inherit_will(will);
        }
        if model.room.wanted && model.context.begun.is_cancelled() {
            // Ask here and not in the task, so that models ask in the order of the configuration.
            model.may_start();
        }
        model.context.publisher.update(model.model_view());
        let outbox = model.mail.outbox.clone();
        (model, outbox)
    }

    /// Delays the first process until removed models are gone, at most by the stop grace period.
    pub(crate) fn wait_for_room(&mut self) {
        self.life.timers.room = Some(clock::after(Instant::now(), self.spec.lifecycle.stop_grace));
    }

    /// Runs until the model is removed or the fleet ends, and all its processes are reaped.
    ///
    /// `self` is boxed because an async function stores its arguments twice.
    pub(crate) async fn run(mut self: Box<Self>) {
        loop {
            if self.life.is_frozen && !self.wait_while_frozen().await {
                return RemainingTask::new(self).run().await;
            }
            self.settle();
            if std::mem::take(&mut self.life.is_dirty) && self.life.is_published {
                self.context.publisher.update(self.model_view());
            }
            self.operators.send_answers();
            if self.is_over() {
                while self.mail.searches.join_next().await.is_some() {}
                for generation in std::mem::take(&mut self.life.dying) {
                    self.context.fleet_memory.remove_generation(generation);
                }
                if self.life.end == Some(TaskEnd::Removed) {
                    self.room.report(LoadingReport::Removed);
                    self.context.leaving.fetch_sub(1, Ordering::SeqCst);
                }
                return;
            }
            let deadline = self.due_next();
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                message = self.mail.inbox.recv() => match message {
                    Some(TaskMessage::Report(generation, report)) => self.take_report(generation, report),
                    Some(TaskMessage::Looked(made_of, sight)) => self.note_needs(*made_of, sight),
                    Some(TaskMessage::StartSearched(number, finding)) => self.note_start_search(number, *finding),
                    Some(TaskMessage::Control(control)) => self.handle_control(control),
                    // Sending fails if the watchdog no longer waits.
                    Some(TaskMessage::Beat(question)) => {
                        let _left = question.send(());
                    }
                    // Unreachable: this task holds a sender, so the channel stays open.
                    None => return,
                },
                () = leases.wake.notified() => self.spread_settings(),
                () = sleep_until(deadline) => self.fire_timers(Instant::now()),
                Some(_) = self.mail.searches.join_next(), if !self.mail.searches.is_empty() => {}
                Some(ended) = self.mail.helpers.join_next(), if !self.mail.helpers.is_empty() => {
                    if let Err(error) = ended && error.is_panic() {
                        tracing::error!(model = %self.spec.name, "a task of the model ended in an internal error");
                    }
                }
            }
        }
    }

    fn settle(&mut self) {
        if !self.context.begun.is_cancelled() {
            // The previous instance still owns the processes.
            return;
        }
        for _ in 0..ROUNDS {
            let before = self.life.steps;
            self.settle_once();
            if self.life.steps == before {
                return;
            }
        }
        tracing::error!(model = %self.spec.name, "the state of the model does not settle");
    }

    fn due_next(&self) -> Option<Instant> {
        let of_units = self.units.all.iter().filter_map(ProcessUnit::due_next);
        let of_model = self.life.timers.next_deadline(Instant::now());
        let expiries = self.experience.kept_state.iter().map(|kept| kept.until);
        of_units.chain(of_model).chain(self.end_deadline()).chain(expiries).min()
    }

    fn fire_timers(&mut self, now: Instant) {
        // Start no process while the previous instance owns the processes or a start search runs its own.
        let may_start = self.context.begun.is_cancelled() && !self.experience.dead_starts.is_searching();
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
                if timer == LifecycleTimer::Start {
                    self.note_late_start(id, StartLateness::NotReady(self.spec.lifecycle.start_timeout));
                } else if timer == LifecycleTimer::Drain && self.may_outlast_drain(id) {
                    self.postpone_drain(id);
                } else if timer == LifecycleTimer::Drain && self.may_drain_long(id) {
                    self.carry_out_effect(id, LifecycleEffect::Arm(timer));
                } else if starts_process(timer) {
                    self.revive(id, LifecycleEvent::Timer(timer));
                } else {
                    self.step_machine(id, LifecycleEvent::Timer(timer));
                }
            }
            self.fire_probe(id, now);
            self.fire_samples(id, now);
        }
        take_due(&mut self.life.timers.configuration, now);
        take_due(&mut self.life.timers.idle, now);
        self.drop_expired_state(now);
        self.recover_offload(now);
        self.fire_needs_check(now);
    }

    fn add_unit(&mut self, replica: u32, role: UnitRole) -> UnitId {
        self.life.note_action();
        self.units.add(replica, role)
    }

    fn answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        self.operators.answers.push(Box::new(move || drop(reply.send(answer))));
        self.life.steps += 1;
    }

    fn log_event(&self, generation: Option<GenerationId>, kind: EventKind) {
        self.context.journal.record(Some(&self.spec.name), generation, kind);
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
