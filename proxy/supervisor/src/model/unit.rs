//! One life-cycle machine, its timer, and the process that it has at the moment.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use warden_policies::cooldown::Held;
use warden_policies::cooldown::working_set::Passed;
use warden_policies::health::Lost;
use warden_policies::lifecycle::{Event, Machine, Phase, Timer};
use warden_policies::reclaim::{NoReclaim, Reclaims};
use warden_policies::{Decision, GenerationId};

use super::health::HealthTracker;
use super::recipe::Recipe;
use super::reclaim::Asked;
use super::timers::Timers;
use super::warm::Packed;
use crate::error::Failure;
use crate::lease::cell::Cell;
use crate::memory::tracker::MemoryTracker;
use crate::process::Process;
use crate::process::failure::Lateness;
use crate::process::needs::Sight;
use crate::process::slot_files::SlotFiles;
use crate::spec::Command;
use crate::view::reclaim_entry::ReclaimEntry;

/// Names a unit within its model; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(pub(super) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Serves the replica.
    Current,
    /// Will serve it as soon as it is ready: the new half of an overlap.
    Successor,
    /// Drains and goes: the old half of an overlap, or a replica that is no longer configured.
    Retiring,
}

#[derive(Debug)]
pub(super) struct Unit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: Role,
    pub(super) machine: Machine,
    pub(super) timer: Option<(Timer, Instant)>,
    /// What would start it, and waits for room.
    pub(super) held: Option<Event>,
    /// Boxed: most models of a large configuration have no process, and would each reserve 1.6 KiB for one.
    pub(super) live: Option<Box<Generation>>,
    /// Starts in a row that did not get ready.
    pub(super) start_failures: u32,
    /// Why the last process ended by itself.
    pub(super) failure: Option<Failure>,
    /// What the files that it needs were like before its last start.
    pub(super) sight: Option<Sight>,
}

impl Unit {
    pub(super) fn new(id: UnitId, replica: u32, role: Role) -> Self {
        let machine = Machine::new();
        Self {
            id,
            replica,
            role,
            machine,
            timer: None,
            held: None,
            live: None,
            start_failures: 0,
            failure: None,
            sight: None,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.machine.phase()
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.live.as_ref().map(|live| live.id)
    }

    /// When something is due for it.
    pub(super) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next());
        of_life.into_iter().chain(of_process).min()
    }

    /// Whether waiting for the next start is pointless enough to tell the callers. Not while a process is a trial: then they
    /// wait for how it ends. Never after the end of a process that had served: the next start is not far.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // Its pause is over, and whoever waits now makes room for the next start.
        if self.held.is_some() {
            return false;
        }
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    /// Whether its next start may go otherwise once a file that it needs has changed.
    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

/// What the policy wants with a generation.
#[derive(Debug, Default)]
pub(super) struct Wish {
    /// What it said last, and what holds it back.
    pub(super) said: Option<(Decision, Option<Held>)>,
    /// Since when it wants it replaced.
    pub(super) since: Option<Instant>,
    /// Since when it drains although a drain or more is wanted.
    pub(super) urgent_since: Option<Instant>,
    /// It is drained at this time at the earliest: requests had outlasted its last drain.
    pub(super) not_before: Option<Instant>,
    /// The budgets that it has passed, and when.
    pub(super) passed: Passed,
}

/// A signal for a process that is still being created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Terminate,
    Kill,
}

/// One generation: from the order to create it until it is reaped.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) id: GenerationId,
    pub(super) socket: PathBuf,
    pub(super) cell: Arc<Cell>,
    /// What it was made of, to tell whether the configuration has changed since.
    pub(super) made_of: Recipe,
    pub(super) process: Option<Arc<dyn Process>>,
    pub(super) pending: Option<Pending>,
    /// Somebody has answered on its socket.
    pub(super) answered: bool,
    /// Its start took longer than it may.
    pub(super) timed_out: Option<Lateness>,
    /// Tells when its start stands still, for as long as this is here.
    pub(super) start_watch: Option<DropGuard>,
    pub(super) spawned: Instant,
    /// An instance before us made it, and it took so long to load.
    pub(super) adopted: Option<Duration>,
    /// With what exactly it was started.
    pub(super) started_with: Option<Command>,
    pub(super) ready: Option<Instant>,
    pub(super) slots: Option<u32>,
    /// When it is probed, read and judged next.
    pub(super) timers: Timers,
    pub(super) probes_lost: u32,
    /// When the first of those was sent.
    pub(super) lost_since: Option<Instant>,
    /// Its drain is short because it answers no probe and moves no token.
    pub(super) short_drain: bool,
    /// When the last probe was sent. What an earlier one found is of no interest any more.
    pub(super) asked: Option<Instant>,
    /// Lines that the model's processes had logged when the last probe was sent, and when the last one that was answered was.
    pub(super) heard: (u64, u64),
    /// Tokens and whole answers that it had given when the last probe was sent.
    pub(super) moves: u64,
    /// When it logged what a crash looks like, if it has answered no probe since.
    pub(super) alarmed: Option<Instant>,
    /// The same of one that is known to answer none.
    pub(super) crashed: Option<Instant>,
    /// Probes sent before this time prove nothing: it refused a connection since.
    pub(super) doubted: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    /// It came up with much less on GPUs than one like it had.
    pub(super) degraded: Option<Lost>,
    /// What the policy wants with it.
    pub(super) wish: Wish,
    /// What is remembered of requests to give memory back.
    pub(super) reclaims: Reclaims,
    /// The one under way.
    pub(super) asked_back: Option<Asked>,
    /// How many were made, and the last one.
    pub(super) reclaim_count: u64,
    /// The generation whose conversations it was given.
    pub(super) came_from: Option<GenerationId>,
    pub(super) last_reclaim: Option<ReclaimEntry>,
    /// Why it was not asked when it was judged last.
    pub(super) no_reclaim: Option<NoReclaim>,
    /// It is ended without draining: its grace is short.
    pub(super) hurried: bool,
    /// Where it saves slots, if it does.
    pub(super) slot_files: Option<Arc<SlotFiles>>,
    /// How far its slots are saved for the process that follows.
    pub(super) packed: Packed,
    /// This generation's random number for jitter.
    pub(super) random: f64,
}

impl Generation {
    pub(super) fn new(
        id: GenerationId,
        socket: PathBuf,
        cell: Arc<Cell>,
        made_of: Recipe,
        memory: MemoryTracker,
        health: HealthTracker,
    ) -> Self {
        Self {
            id,
            socket,
            cell,
            made_of,
            process: None,
            pending: None,
            answered: false,
            timed_out: None,
            start_watch: None,
            spawned: Instant::now(),
            adopted: None,
            started_with: None,
            ready: None,
            slots: None,
            timers: Timers::default(),
            probes_lost: 0,
            lost_since: None,
            short_drain: false,
            asked: None,
            heard: (0, 0),
            moves: 0,
            alarmed: None,
            crashed: None,
            doubted: None,
            idle_seen: None,
            memory: Box::new(memory),
            health: Box::new(health),
            degraded: None,
            wish: Wish::default(),
            reclaims: Reclaims::default(),
            asked_back: None,
            reclaim_count: 0,
            came_from: None,
            last_reclaim: None,
            no_reclaim: None,
            hurried: false,
            slot_files: None,
            packed: Packed::NotYet,
            random: rand::random(),
        }
    }

    /// A probe that was sent at this time was lost, and nothing has moved since.
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// For how long it has answered no probe and moved no token, once that is more than an accident.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let since = self.lost_since.filter(|_| self.probes_lost > 0 && self.probes_lost >= probes_lost)?;
        Some(since.elapsed())
    }

    /// SIGTERM, now or as soon as there is a process.
    pub(super) fn terminate(&mut self) {
        self.cell.tell_to_end();
        match &self.process {
            Some(process) => process.terminate(),
            None => self.pending = self.pending.or(Some(Pending::Terminate)),
        }
    }

    /// SIGKILL, now or as soon as there is a process.
    pub(super) fn kill(&mut self) {
        self.cell.tell_to_end();
        match &self.process {
            Some(process) => process.kill(),
            None => self.pending = Some(Pending::Kill),
        }
    }
}
