//! The task of one model: the only owner of its processes' life-cycle machines.
//!
//! ```text
//!   helpers --reports--+                         +--> Shared: open, close, forget, refuse
//!   operators --control+--> turn: handle one     +--> processes: spawn, probe, TERM, KILL
//!   Shared --wake------+    message or timer,    +--> journal, ledger, view
//!   timers ------------+    then settle
//! ```
//!
//! A turn handles one thing and then *settles*: it looks at the whole state and does what it asks for, until nothing is
//! left to do. So nothing depends on having seen an edge: a lease that ended while a generation was being closed, a
//! caller that came between two steps, a wake-up that was merged with another are all found by looking.
//!
//! Nothing is awaited within a turn. Whatever takes time is a helper task, which reports by a message with the generation
//! that it was about.
//!
//! | file | job |
//! |---|---|
//! | `unit` | one machine and its process |
//! | `act` | carries out the machine's effects |
//! | `hear` | handles the helpers' reports |
//! | `sample` | when memory is read, and what a reading changes |
//! | `watched` | what the readings of one generation add up to |
//! | `needs` | whether a new process would find what it needs, and when that changes |
//! | `judge` | the recycle policy, and what follows from it |
//! | `degrade` | a process that lost its GPU |
//! | `replace` | replacements from decision to ledger entry |
//! | `way` | in sequence or by overlap |
//! | `room` | what room memory has for prompts |
//! | `settle` | what the whole state asks for |
//! | `control` | restart, drain, reload, removal, end |
//! | `show` | the view |
//! | `words` | sentences for events |

mod act;
mod control;
mod degrade;
mod hear;
mod judge;
mod message;
mod needs;
mod replace;
mod room;
mod sample;
mod settle;
mod show;
mod spread;
mod unit;
mod watched;
mod way;
mod words;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warden_policies::Reason;
use warden_policies::lifecycle::{Event, Timer};
use warden_policies::moment::Lulls;
use warden_policies::restraint::Restraint;

pub(crate) use self::message::{Control, Message, Report};
use self::replace::Replacement;
use self::unit::{Role, Unit, UnitId};
use crate::clock;
use crate::context::Context;
use crate::event::EventKind;
use crate::ledger::LedgerEntry;
use crate::log::LogRing;
use crate::shared::Shared;
use crate::spec::{Command, ModelSpec, Watch};
use crate::view::Modalities;

/// See the module.
#[derive(Debug)]
pub(crate) struct Model {
    context: Arc<Context>,
    shared: Arc<Shared>,
    logs: Arc<LogRing>,
    spec: ModelSpec,
    watch: Watch,
    inbox: mpsc::UnboundedReceiver<Message>,
    /// For helpers to report with.
    outbox: mpsc::UnboundedSender<Message>,
    helpers: JoinSet<()>,
    /// Writers of what was learnt: unlike helpers they are waited for at the end.
    writers: JoinSet<()>,
    units: Vec<Unit>,
    next_unit: u64,
    /// Processes are to run even if nobody waits.
    wanted: bool,
    end: Option<End>,
    replacements: Vec<Replacement>,
    /// The last complete replacement of each replica.
    replaced: Vec<LedgerEntry>,
    restarts: Vec<control::Restart>,
    drains: Vec<control::Drain>,
    restraint: Restraint,
    /// From spawn to ready, as it was the last time.
    load_time: Option<Duration>,
    lulls: Lulls,
    /// What prompts cost, as far as it was learnt.
    prices: room::Prices,
    /// No replacement because of the configuration before this time: the last one failed.
    configuration_at: Option<Instant>,
    /// When a process that has lost its GPU is looked at again.
    recovery: Option<degrade::Recovery>,
    recycles: Vec<(Reason, u64)>,
    crashes: u64,
    n_ctx: Option<u64>,
    modalities: Option<Modalities>,
    note: Option<String>,
    /// Ended processes whose memory is still looked for.
    dying: Vec<warden_policies::GenerationId>,
    /// Until then what leaves may make room before the first process is made.
    room_until: Option<Instant>,
    /// Since when the clock of the queue stands.
    stands: Option<Instant>,
    needs: needs::Needs,
    /// What the last process was started with that became ready.
    ready_with: Option<Command>,
    /// Answers to operators, given when the picture shows what they tell.
    answers: Answers,
    /// The fleet's picture shows us; not after a removal, when another model may have taken the name.
    shown: bool,
    /// Something worth showing has changed.
    dirty: bool,
    /// Grows with everything done in a turn, to see when nothing is left to do.
    steps: u64,
}

/// Why the task ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The model is no longer configured.
    Removed,
    /// Everything ends; leases may run until this time.
    Shutdown(Instant),
}

#[derive(Default)]
struct Answers(Vec<Box<dyn FnOnce() + Send>>);

impl std::fmt::Debug for Answers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} answers", self.0.len())
    }
}

/// How often a new model looks whether those that leave are gone.
const LOOK_FOR_ROOM: Duration = Duration::from_millis(50);

/// More rounds than any state can need: a bound that keeps a mistake here from taking a core for ever.
const ROUNDS: usize = 64;

impl Model {
    pub(crate) fn new(
        context: Arc<Context>,
        shared: Arc<Shared>,
        logs: Arc<LogRing>,
        spec: ModelSpec,
        watch: Watch,
    ) -> (Self, mpsc::UnboundedSender<Message>) {
        let (outbox, inbox) = mpsc::unbounded_channel();
        let lulls = Lulls::new(&warden_policies::defaults().moment, context.now());
        let mut model = Self {
            context,
            shared,
            logs,
            wanted: spec.preload,
            spec,
            watch,
            inbox,
            outbox: outbox.clone(),
            helpers: JoinSet::new(),
            writers: JoinSet::new(),
            units: Vec::new(),
            next_unit: 0,
            end: None,
            replacements: Vec::new(),
            replaced: Vec::new(),
            restarts: Vec::new(),
            drains: Vec::new(),
            restraint: Restraint::default(),
            load_time: None,
            lulls,
            prices: room::Prices::default(),
            configuration_at: None,
            recovery: None,
            recycles: Vec::new(),
            crashes: 0,
            n_ctx: None,
            modalities: None,
            note: None,
            dying: Vec::new(),
            room_until: None,
            stands: None,
            needs: needs::Needs::default(),
            ready_with: None,
            answers: Answers::default(),
            shown: true,
            dirty: true,
            steps: 0,
        };
        model.set_replicas();
        model.context.publisher.update(model.show());
        (model, outbox)
    }

    /// Those who leave go first: until they are gone, or this time has passed, no process is made.
    pub(crate) fn wait_for_room(&mut self) {
        self.room_until = Some(clock::after(Instant::now(), self.spec.timing.stop_grace));
    }

    /// Runs until the model is removed or the fleet ends, and all its processes are reaped.
    pub(crate) async fn run(mut self) {
        loop {
            self.settle();
            if std::mem::take(&mut self.dirty) && self.shown {
                self.context.publisher.update(self.show());
            }
            for answer in std::mem::take(&mut self.answers.0) {
                answer();
            }
            if self.is_over() {
                while self.writers.join_next().await.is_some() {}
                for generation in self.dying {
                    self.context.census.gone(generation);
                }
                if self.end == Some(End::Removed) {
                    self.context.leaving.fetch_sub(1, Ordering::SeqCst);
                }
                return;
            }
            let deadline = self.next_deadline();
            let shared = Arc::clone(&self.shared);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(Message::Report(generation, report)) => self.hear(generation, report),
                    Some(Message::Looked(made_of, sight)) => self.looked(*made_of, sight),
                    Some(Message::Control(control)) => self.control(control),
                    // Cannot be: we hold a sender ourselves.
                    None => return,
                },
                () = shared.wake.notified() => self.spread_settings(),
                () = sleep_until(deadline) => self.fire(Instant::now()),
                Some(_) = self.helpers.join_next(), if !self.helpers.is_empty() => {}
                Some(_) = self.writers.join_next(), if !self.writers.is_empty() => {}
            }
        }
    }

    fn settle(&mut self) {
        for _ in 0..ROUNDS {
            let before = self.steps;
            self.settle_once();
            if self.steps == before {
                return;
            }
        }
        tracing::error!(model = %self.spec.name, "the state of the model does not settle");
    }

    /// Ours at least; `None` if nothing is timed.
    fn next_deadline(&self) -> Option<Instant> {
        let of_units = self.units.iter().flat_map(|unit| {
            let live = unit.live.as_ref();
            [
                unit.timer.map(|(_, at)| at),
                live.and_then(|live| live.probe_at),
                live.and_then(|live| live.sample_at),
                live.and_then(|live| live.idle_sample_at).map(|(at, _)| at),
                live.and_then(|live| live.judge_at),
            ]
        });
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room_until.map(|until| until.min(clock::again(Instant::now(), LOOK_FOR_ROOM)));
        let of_model = [self.end_deadline(), self.configuration_at, self.needs.next(), recovery, room];
        of_units.flatten().chain(of_model.into_iter().flatten()).min()
    }

    /// Does what is due.
    fn fire(&mut self, now: Instant) {
        for id in self.ids() {
            let Some(unit) = self.unit_mut(id) else { continue };
            if let Some((timer, _)) = unit.timer.take_if(|(_, at)| *at <= now) {
                if timer == Timer::Start
                    && let Some(live) = &mut unit.live
                {
                    live.timed_out = true;
                }
                if timer == Timer::Drain && self.may_drain_on(id) {
                    self.drain_later(id);
                } else {
                    self.step(id, Event::Timer(timer));
                }
            }
            self.fire_probe(id, now);
            self.fire_samples(id, now);
        }
        if self.configuration_at.is_some_and(|at| at <= now) {
            self.configuration_at = None;
        }
        self.recover(now);
        self.fire_look(now);
    }

    fn ids(&self) -> Vec<UnitId> {
        self.units.iter().map(|unit| unit.id).collect()
    }

    fn unit(&self, id: UnitId) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.id == id)
    }

    fn unit_mut(&mut self, id: UnitId) -> Option<&mut Unit> {
        self.units.iter_mut().find(|unit| unit.id == id)
    }

    fn current(&self, replica: u32) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.role == Role::Current && unit.replica == replica)
    }

    fn add_unit(&mut self, replica: u32, role: Role) -> UnitId {
        let id = UnitId(self.next_unit);
        self.next_unit += 1;
        self.units.push(Unit::new(id, replica, role));
        self.changed();
        id
    }

    /// Something was done: look again, and show it.
    fn changed(&mut self) {
        self.steps += 1;
        self.dirty = true;
    }

    /// Answers an operator at the end of the turn.
    fn answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        // Fails if the operator has left.
        self.answers.0.push(Box::new(move || drop(reply.send(answer))));
        self.steps += 1;
    }

    fn tell(&self, generation: Option<warden_policies::GenerationId>, kind: EventKind) {
        self.context.journal.tell(Some(&self.spec.name), generation, kind);
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Whole milliseconds, for the ledger and events.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
