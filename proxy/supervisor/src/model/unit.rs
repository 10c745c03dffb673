//! A life-cycle machine, its timer, and its present process.

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

/// Identifies a unit within its model; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(pub(super) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Serves the replica.
    Current,
    /// Will serve once it is ready: the new process of an overlap.
    Successor,
    /// Drains and ends: the old process of an overlap, or a replica that is no longer configured.
    Retiring,
}

#[derive(Debug)]
pub(super) struct Unit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: Role,
    pub(super) machine: Machine,
    pub(super) timer: Option<(Timer, Instant)>,
    /// Start event that waits for room.
    pub(super) held: Option<Event>,
    /// Boxed: most models of a large configuration have no process, and would each reserve 1.6 KiB for one.
    pub(super) live: Option<Box<Generation>>,
    /// Consecutive starts that did not become ready.
    pub(super) start_failures: u32,
    /// Why the last process ended by itself.
    pub(super) failure: Option<Failure>,
    /// State of the needed files before the last start.
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

    /// Next deadline of the unit.
    pub(super) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next());
        of_life.into_iter().chain(of_process).min()
    }

    /// True if requests should be refused rather than wait for the next start. Never during a trial start,
    /// whose result requests wait for, and never after the end of a process that had served, because its
    /// next start is soon.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // The pause is over. Waiting requests make the loader free the room for the next start.
        if self.held.is_some() {
            return false;
        }
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    /// True if a changed file may let the next start succeed.
    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

/// Policy state of a generation.
#[derive(Debug, Default)]
pub(super) struct Wish {
    /// Last decision, and what holds it back.
    pub(super) said: Option<(Decision, Option<Held>)>,
    /// Since when the policy wants the process replaced.
    pub(super) since: Option<Instant>,
    /// Since when it drains although the policy wants a drain or more.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, because requests outlasted the last one.
    pub(super) not_before: Option<Instant>,
    /// Exceeded budgets, and when they were exceeded.
    pub(super) passed: Passed,
}

/// Signal for a process that is still being created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Terminate,
    Kill,
}

/// A generation, from the request to create it until it is reaped.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) id: GenerationId,
    pub(super) socket: PathBuf,
    pub(super) cell: Arc<Cell>,
    /// Recipe of the process, compared with the present configuration.
    pub(super) made_of: Recipe,
    pub(super) process: Option<Arc<dyn Process>>,
    pub(super) pending: Option<Pending>,
    /// The socket has answered.
    pub(super) answered: bool,
    /// The start exceeded the time limit.
    pub(super) timed_out: Option<Lateness>,
    /// Guard of the helper that reports a stalled start.
    pub(super) start_watch: Option<DropGuard>,
    pub(super) spawned: Instant,
    /// Load time, if the previous instance made the process.
    pub(super) adopted: Option<Duration>,
    /// Exact command of the process.
    pub(super) started_with: Option<Command>,
    pub(super) ready: Option<Instant>,
    pub(super) slots: Option<u32>,
    pub(super) timers: Timers,
    pub(super) probes_lost: u32,
    /// When the first lost probe was sent.
    pub(super) lost_since: Option<Instant>,
    /// The drain is short, because the process answers no probe and moves no token.
    pub(super) short_drain: bool,
    /// When the last probe was sent. Results of earlier ones are ignored.
    pub(super) asked: Option<Instant>,
    /// Log lines of the model's processes at the last probe, and at the last probe that was answered.
    pub(super) heard: (u64, u64),
    /// Tokens and complete answers at the last probe.
    pub(super) moves: u64,
    /// When it logged a crash, if it has answered no probe since.
    pub(super) alarmed: Option<Instant>,
    /// When it logged a crash, if it is known to answer no probe.
    pub(super) crashed: Option<Instant>,
    /// Probes sent before this time do not count: the process refused a connection since.
    pub(super) doubted: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    /// Offload lost, compared with the best process with the same command.
    pub(super) degraded: Option<Lost>,
    pub(super) wish: Wish,
    /// History of reclaim requests.
    pub(super) reclaims: Reclaims,
    /// Reclaim request under way.
    pub(super) asked_back: Option<Asked>,
    pub(super) reclaim_count: u64,
    /// Generation whose conversations it took over.
    pub(super) came_from: Option<GenerationId>,
    pub(super) last_reclaim: Option<ReclaimEntry>,
    /// Why it was not asked at the last judgement.
    pub(super) no_reclaim: Option<NoReclaim>,
    /// The process is ended without a drain and with a short grace.
    pub(super) hurried: bool,
    /// Slot directory, if it saves slots.
    pub(super) slot_files: Option<Arc<SlotFiles>>,
    /// Progress of saving slots for the next process.
    pub(super) packed: Packed,
    /// Random number of this generation, for jitter.
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

    /// Records a lost probe, sent at this time, without progress since.
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Time for which the process has answered no probe and moved no token, once enough probes are lost.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let since = self.lost_since.filter(|_| self.probes_lost > 0 && self.probes_lost >= probes_lost)?;
        Some(since.elapsed())
    }

    /// Sends SIGTERM, now or once there is a process.
    pub(super) fn terminate(&mut self) {
        self.cell.tell_to_end();
        match &self.process {
            Some(process) => process.terminate(),
            None => self.pending = self.pending.or(Some(Pending::Terminate)),
        }
    }

    /// Sends SIGKILL, now or once there is a process.
    pub(super) fn kill(&mut self) {
        self.cell.tell_to_end();
        match &self.process {
            Some(process) => process.kill(),
            None => self.pending = Some(Pending::Kill),
        }
    }
}
