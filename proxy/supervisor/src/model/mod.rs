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
//! nothing is left to do. So nothing depends on seeing each event. A lease that ended while a generation
//! was being closed, a request that came between two steps, two wake-ups merged into one: the inspection
//! finds them all.
//!
//! A turn awaits nothing. Slow work runs in a helper task, which reports with a message that names its
//! generation.
//!
//! State, kept in types with their own methods:
//!
//! | file | job |
//! |---|---|
//! | `context` | what the tasks of all models share |
//! | `unit`, `recipe` | one machine and its process; command and options of a process |
//! | `timers` | deadlines |
//! | `health` | health of one generation |
//! | `replacement` | replacements under way, and the last ones |
//! | `needs` | results of checking what the next process needs |
//! | `experience` | values learned from earlier processes |
//! | `operators` | operators who wait for an answer |
//! | `message`, `mailbox` | messages to the task |
//!
//! Actions of the task:
//!
//! | file | job |
//! |---|---|
//! | `act` | carries out the machine's effects |
//! | `reports` | handles the helpers' reports |
//! | `sample` | schedules memory readings and handles them |
//! | `loading` | asks the loader for room |
//! | `idle` | unloads models without requests |
//! | `look` | checks that a new process would find its files |
//! | `judge` | applies the recycle policy |
//! | `reclaim` | asks a process to give memory back |
//! | `bequeath`, `inherit` | handover to the next instance, takeover from the previous one |
//! | `pin` | pins set by operators |
//! | `degrade` | a process that lost its GPU |
//! | `replace` | replacements from decision to ledger entry |
//! | `replace_mode` | sequential or overlap |
//! | `room` | memory left for prompts |
//! | `warm` | carries over conversations |
//! | `spread` | applies a client's settings to all processes |
//! | `settle` | derives actions from the whole state |
//! | `start_search` | finds the option that lets a dying process start |
//! | `control` | restart, drain, reload, removal, end |
//! | `show` | the view |
//! | `words` | sentences for events |

mod act;
pub(crate) mod bequeath;
pub(crate) mod context;
mod control;
mod degrade;
mod experience;
mod fallback;
mod health;
mod idle;
mod inherit;
mod judge;
mod line_sink;
mod loading;
mod look;
pub(crate) mod mailbox;
mod message;
mod needs;
mod operators;
mod pin;
mod recipe;
mod reclaim;
mod replace;
mod replace_mode;
mod replacement;
mod reports;
mod room;
mod sample;
mod settle;
mod show;
mod spread;
mod start_search;
mod timers;
mod unit;
mod warm;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::cooldown::RecycleCooldown;
use warden_policies::lifecycle::{LifecycleEffect, LifecycleEvent, LifecycleTimer};
use warden_policies::loading::ModelId;
use warden_policies::replacement_cost::LullHistory;

use self::experience::ModelExperience;
use self::fallback::ConfiguredCommand;
use self::loading::LoadState;
use self::mailbox::{TaskInbox, TaskOutbox, mailbox};
pub(crate) use self::message::{ControlMessage, HelperReport, TaskMessage};
use self::needs::NeedsState;
use self::operators::OperatorRequests;
use self::pin::ManualPin;
use self::reclaim::ReclaimCounts;
use self::replacement::ReplacementTracker;
use self::start_search::DeadStarts;
use self::timers::ModelTimers;
use self::unit::{LiveGeneration, ProcessUnit, UnitId, UnitRole};
use self::warm::UnloadedState;
use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::LeaseQueue;
use crate::memory::loading::LoadingReport;
use crate::model::bequeath::ModelWill;
use crate::model::context::FleetContext;
use crate::process::failure::StartLateness;
use crate::spec::{SharedSpec, WatchConfig};
use crate::view::event::EventKind;
use crate::view::log::LogRing;

#[derive(Debug)]
pub(crate) struct ModelTask {
    context: Arc<FleetContext>,
    /// Identity by which the loader knows this model.
    who: ModelId,
    leases: Arc<LeaseQueue>,
    logs: Arc<LogRing>,
    spec: SharedSpec,
    watch: WatchConfig,
    inbox: TaskInbox,
    /// Sender for helpers' reports.
    outbox: TaskOutbox,
    helpers: JoinSet<()>,
    /// Running start searches. At the end of the task they are awaited (helpers are not), so that their
    /// processes are reaped.
    searches: JoinSet<()>,
    units: Vec<ProcessUnit>,
    next_unit: u64,
    /// True if processes should run even without waiting requests.
    wanted: bool,
    /// State of the model's request to the loader for room.
    load_state: LoadState,
    /// Number of the last request for room sent to the loader.
    last_wish: u64,
    /// Pin set by an operator, if any.
    manual_pin: Option<ManualPin>,
    /// Configured command, kept while the fallback arguments are in use.
    configured_command: Option<ConfiguredCommand>,
    /// Deaths of processes by a signal before they were ready.
    dead_starts: DeadStarts,
    end: Option<TaskEnd>,
    /// Instance of the program that decides about the processes.
    custody: TaskCustody,
    /// Processes of the next instance that requests of this instance may use.
    guests: BTreeMap<GenerationId, Arc<GenerationCell>>,
    /// Generations whose gates are open in the next instance, as last reported.
    followed: Option<BTreeSet<GenerationId>>,
    replacements: ReplacementTracker,
    reclaim_counts: ReclaimCounts,
    /// Conversations and slots kept since the model was unloaded.
    kept_state: UnloadedState,
    operators: OperatorRequests,
    cooldown: RecycleCooldown,
    experience: ModelExperience,
    crashes: u64,
    note: Option<String>,
    /// Ended processes whose memory has not come back yet.
    dying: Vec<GenerationId>,
    timers: ModelTimers,
    /// Moment since which the wait limits of queued requests are paused.
    queue_paused_at: Option<Instant>,
    needs: NeedsState,
    /// False after a removal: then another model may have the same name in the published view.
    is_published: bool,
    dirty: bool,
    /// Counts actions: if a round of settling adds none, nothing is left to do.
    steps: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskCustody {
    Ours,
    /// No instance decides until the handover has succeeded or failed.
    Frozen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskEnd {
    Removed,
    /// The whole fleet shuts down; requests may run until this time.
    Shutdown(Instant),
}

/// Interval for checking whether removed models have freed their memory.
const ROOM_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum number of rounds of settling. No state needs that many, but a bug must not occupy a core for
/// ever.
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
        let (outbox, inbox) = mailbox();
        let experience =
            ModelExperience::new(LullHistory::new(&warden_policies::defaults().moment, context.now()));
        let who = ModelId { name: spec.name.clone(), incarnation: context.loading.next_life() };
        let mut model = Self {
            context,
            who,
            leases,
            logs,
            wanted: spec.run.preload,
            spec,
            watch,
            inbox,
            outbox: outbox.clone(),
            helpers: JoinSet::new(),
            searches: JoinSet::new(),
            units: Vec::new(),
            next_unit: 0,
            load_state: LoadState::Unloaded,
            last_wish: 0,
            manual_pin: None,
            configured_command: None,
            dead_starts: DeadStarts::default(),
            end: None,
            custody: TaskCustody::Ours,
            guests: BTreeMap::new(),
            followed: None,
            replacements: ReplacementTracker::default(),
            reclaim_counts: ReclaimCounts::default(),
            kept_state: UnloadedState::default(),
            operators: OperatorRequests::default(),
            cooldown: RecycleCooldown::default(),
            experience,
            crashes: 0,
            note: None,
            dying: Vec::new(),
            timers: ModelTimers::default(),
            queue_paused_at: None,
            needs: NeedsState::default(),
            is_published: true,
            dirty: true,
            steps: 0,
        };
        model.set_replicas();
        model.enable_conversations();
        model.join_loading();
        if let Some(will) = will {
            model.inherit_will(will);
        }
        if model.wanted && model.context.begun.is_cancelled() {
            // Ask the loader here and not in the task, so that models ask in the order of the configuration.
            model.may_start();
        }
        model.context.publisher.update(model.model_view());
        (model, outbox)
    }

    /// Delays the first process until removed models are gone, for at most the stop grace period.
    pub(crate) fn wait_for_room(&mut self) {
        self.timers.room = Some(clock::after(Instant::now(), self.spec.lifecycle.stop_grace));
    }

    /// Runs until the model is removed or the fleet ends, and all its processes are reaped.
    ///
    /// `self` is boxed because an async function stores its arguments twice.
    pub(crate) async fn run(mut self: Box<Self>) {
        loop {
            if self.custody == TaskCustody::Frozen && !self.wait_while_frozen().await {
                return self.serve_remaining().await;
            }
            self.settle();
            if std::mem::take(&mut self.dirty) && self.is_published {
                self.context.publisher.update(self.model_view());
            }
            self.operators.send_answers();
            if self.is_over() {
                while self.searches.join_next().await.is_some() {}
                for generation in std::mem::take(&mut self.dying) {
                    self.context.fleet_memory.remove_generation(generation);
                }
                if self.end == Some(TaskEnd::Removed) {
                    self.report_loading(LoadingReport::Removed);
                    self.context.leaving.fetch_sub(1, Ordering::SeqCst);
                }
                return;
            }
            let deadline = self.due_next();
            let leases = Arc::clone(&self.leases);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(TaskMessage::Report(generation, report)) => self.take_report(generation, report),
                    Some(TaskMessage::Looked(made_of, sight)) => self.note_needs(*made_of, sight),
                    Some(TaskMessage::StartSearched(number, finding)) => self.note_start_search(number, *finding),
                    Some(TaskMessage::Control(control)) => self.handle_control(control),
                    // Answer the watchdog and change nothing. Sending fails if it no longer waits.
                    Some(TaskMessage::Beat(question)) => {
                        let _left = question.send(());
                    }
                    // Unreachable: this task holds a sender, so the channel stays open.
                    None => return,
                },
                () = leases.wake.notified() => self.spread_settings(),
                () = sleep_until(deadline) => self.fire_timers(Instant::now()),
                Some(_) = self.searches.join_next(), if !self.searches.is_empty() => {}
                Some(ended) = self.helpers.join_next(), if !self.helpers.is_empty() => {
                    if let Err(error) = ended && error.is_panic() {
                        tracing::error!(model = %self.spec.name, "a task of the model ended in an internal error");
                    }
                }
            }
        }
    }

    fn settle(&mut self) {
        if !self.context.begun.is_cancelled() {
            // Do nothing: the previous instance still owns the processes.
            return;
        }
        for _ in 0..ROUNDS {
            let before = self.steps;
            self.settle_once();
            if self.steps == before {
                return;
            }
        }
        tracing::error!(model = %self.spec.name, "the state of the model does not settle");
    }

    /// Next deadline; `None` without timers.
    fn due_next(&self) -> Option<Instant> {
        let of_units = self.units.iter().filter_map(ProcessUnit::due_next);
        let of_model = self.timers.next_deadline(Instant::now(), ROOM_CHECK_INTERVAL);
        of_units.chain(of_model).chain(self.end_deadline()).chain(self.kept_state.next_expiry()).min()
    }

    /// Runs the timers that are due.
    fn fire_timers(&mut self, now: Instant) {
        // Start no process while the previous instance owns the processes or a start search runs its own.
        let may_start = self.context.begun.is_cancelled() && !self.is_searching();
        for id in self.ids() {
            let Some(unit) = self.unit_mut(id) else { continue };
            if let Some((timer, at)) = &mut unit.timer
                && !may_start
                && Self::starts_process(*timer)
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
                } else if Self::starts_process(timer) {
                    self.revive(id, LifecycleEvent::Timer(timer));
                } else {
                    self.step_machine(id, LifecycleEvent::Timer(timer));
                }
            }
            self.fire_probe(id, now);
            self.fire_samples(id, now);
        }
        timers::take_due(&mut self.timers.configuration, now);
        timers::take_due(&mut self.timers.idle, now);
        self.drop_expired_state(now);
        self.recover_offload(now);
        self.fire_needs_check(now);
    }

    fn ids(&self) -> Vec<UnitId> {
        self.units.iter().map(|unit| unit.id).collect()
    }

    fn unit(&self, id: UnitId) -> Option<&ProcessUnit> {
        self.units.iter().find(|unit| unit.id == id)
    }

    fn unit_mut(&mut self, id: UnitId) -> Option<&mut ProcessUnit> {
        self.units.iter_mut().find(|unit| unit.id == id)
    }

    /// Current generation of a unit.
    fn live(&self, id: UnitId) -> Option<&LiveGeneration> {
        self.unit(id)?.live.as_deref()
    }

    fn live_mut(&mut self, id: UnitId) -> Option<&mut LiveGeneration> {
        self.unit_mut(id)?.live.as_deref_mut()
    }

    /// Current generations of all units.
    fn live_generations(&self) -> impl Iterator<Item = &LiveGeneration> {
        self.units.iter().filter_map(|unit| unit.live.as_deref())
    }

    fn generation(&self, id: UnitId) -> Option<GenerationId> {
        Some(self.live(id)?.id)
    }

    fn current_unit(&self, replica: u32) -> Option<&ProcessUnit> {
        self.units.iter().find(|unit| unit.role == UnitRole::Current && unit.replica == replica)
    }

    fn add_unit(&mut self, replica: u32, role: UnitRole) -> UnitId {
        let id = UnitId(self.next_unit);
        self.next_unit += 1;
        // Reserve exactly one: most models have one unit, and the vector would reserve four.
        self.units.reserve_exact(1);
        self.units.push(ProcessUnit::new(id, replica, role));
        self.note_action();
        id
    }

    /// Records an action, so that the state is settled again and the view published.
    fn note_action(&mut self) {
        self.steps += 1;
        self.dirty = true;
    }

    /// Queues an answer to an operator, sent at the end of the turn.
    fn answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        self.operators.queue_answer(reply, answer);
        self.steps += 1;
    }

    fn log_event(&self, generation: Option<GenerationId>, kind: EventKind) {
        self.context.journal.record(Some(&self.spec.name), generation, kind);
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
