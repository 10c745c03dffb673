//! A life-cycle machine, its timer, and its present process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use warden_policies::cooldown::HoldReason;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::health::OffloadLoss;
use warden_policies::lifecycle::{BackendPhase, LifecycleEvent, LifecycleMachine, LifecycleTimer};
use warden_policies::reclaim::{NoReclaim, ReclaimHistory};
use warden_policies::{GenerationId, RecycleDecision};

use super::health::HealthTracker;
use super::recipe::ProcessRecipe;
use super::reclaim::PendingReclaim;
use super::timers::GenerationTimers;
use super::warm::PackProgress;
use crate::error::BackendFailure;
use crate::lease::cell::GenerationCell;
use crate::memory::tracker::MemoryTracker;
use crate::process::BackendProcess;
use crate::process::failure::StartLateness;
use crate::process::needs::NeedsCheck;
use crate::process::slot_files::SlotFiles;
use crate::spec::ServerCommand;
use crate::view::reclaim_entry::ReclaimEntry;

/// Identifies a unit within its model; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(pub(super) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitRole {
    /// Serves the replica.
    Current,
    /// Will serve once it is ready: the new process of an overlap.
    Successor,
    /// Drains and ends: the old process of an overlap, or a replica that is no longer configured.
    Retiring,
}

#[derive(Debug)]
pub(super) struct ProcessUnit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: UnitRole,
    pub(super) machine: LifecycleMachine,
    pub(super) timer: Option<(LifecycleTimer, Instant)>,
    /// Start event that waits for room.
    pub(super) held_start: Option<LifecycleEvent>,
    /// Boxed: most models of a large configuration have no process, and would each reserve 1.6 KiB for one.
    pub(super) live: Option<Box<LiveGeneration>>,
    /// Consecutive starts that did not become ready.
    pub(super) start_failures: u32,
    /// Why the last process ended by itself.
    pub(super) failure: Option<BackendFailure>,
    /// State of the needed files before the last start.
    pub(super) sight: Option<NeedsCheck>,
}

impl ProcessUnit {
    pub(super) fn new(id: UnitId, replica: u32, role: UnitRole) -> Self {
        let machine = LifecycleMachine::new();
        Self {
            id,
            replica,
            role,
            machine,
            timer: None,
            held_start: None,
            live: None,
            start_failures: 0,
            failure: None,
            sight: None,
        }
    }

    pub(super) fn phase(&self) -> BackendPhase {
        self.machine.phase()
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.live.as_ref().map(|live| live.id)
    }

    /// Next deadline of the unit.
    pub(super) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next_deadline());
        of_life.into_iter().chain(of_process).min()
    }

    /// True if requests should be refused rather than wait for the next start. Never during a trial start,
    /// whose result requests wait for, and never after the end of a process that had served, because its
    /// next start is soon.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // The pause is over. Waiting requests make the loader free the room for the next start.
        if self.held_start.is_some() {
            return false;
        }
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    /// True if a changed file may let the next start succeed.
    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

/// Policy state of a generation.
#[derive(Debug, Default)]
pub(super) struct PolicyWish {
    /// Last decision, and what holds it back.
    pub(super) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    /// Since when the policy wants the process replaced.
    pub(super) since: Option<Instant>,
    /// Since when it drains although the policy wants a drain or more.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, because requests outlasted the last one.
    pub(super) not_before: Option<Instant>,
    /// Exceeded budgets, and when they were exceeded.
    pub(super) passed: PassedBudgets,
}

/// Signal for a process that is still being created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSignal {
    Terminate,
    Kill,
}

/// A generation, from the request to create it until it is reaped.
#[derive(Debug)]
pub(super) struct LiveGeneration {
    pub(super) id: GenerationId,
    pub(super) socket: PathBuf,
    pub(super) cell: Arc<GenerationCell>,
    /// Recipe of the process, compared with the present configuration.
    pub(super) recipe: ProcessRecipe,
    pub(super) process: Option<Arc<dyn BackendProcess>>,
    pub(super) pending: Option<PendingSignal>,
    /// The socket has answered.
    pub(super) answered: bool,
    /// The start exceeded the time limit.
    pub(super) timed_out: Option<StartLateness>,
    /// Guard of the helper that reports a stalled start.
    pub(super) start_watch: Option<DropGuard>,
    pub(super) spawned: Instant,
    /// Load time, if the previous instance made the process.
    pub(super) adopted: Option<Duration>,
    /// Exact command of the process.
    pub(super) started_with: Option<ServerCommand>,
    pub(super) ready: Option<Instant>,
    pub(super) slots: Option<u32>,
    pub(super) timers: GenerationTimers,
    pub(super) probes_lost: u32,
    /// When the first lost probe was sent.
    pub(super) lost_since: Option<Instant>,
    /// The drain is short, because the process answers no probe and moves no token.
    pub(super) short_drain: bool,
    /// When the last probe was sent. Results of earlier ones are ignored.
    pub(super) last_probe: Option<Instant>,
    /// Log lines of the model's processes at the last probe, and at the last probe that was answered.
    pub(super) lines_at_probe: (u64, u64),
    /// Tokens and complete answers at the last probe.
    pub(super) progress_at_probe: u64,
    /// When it logged a crash, if it has answered no probe since.
    pub(super) crash_logged_at: Option<Instant>,
    /// When it logged a crash, if it is known to answer no probe.
    pub(super) crashed_at: Option<Instant>,
    /// Probes sent before this time do not count: the process refused a connection since.
    pub(super) doubted_at: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    /// Offload lost, compared with the best process with the same command.
    pub(super) degraded: Option<OffloadLoss>,
    pub(super) wish: PolicyWish,
    /// History of reclaim requests.
    pub(super) reclaims: ReclaimHistory,
    /// Reclaim request under way.
    pub(super) pending_reclaim: Option<PendingReclaim>,
    pub(super) reclaim_count: u64,
    /// Generation whose conversations it took over.
    pub(super) warmed_from: Option<GenerationId>,
    pub(super) last_reclaim: Option<ReclaimEntry>,
    /// Why it was not asked at the last judgement.
    pub(super) no_reclaim: Option<NoReclaim>,
    /// The process is ended without a drain and with a short grace.
    pub(super) short_grace: bool,
    /// Slot directory, if it saves slots.
    pub(super) slot_files: Option<Arc<SlotFiles>>,
    /// Progress of saving slots for the next process.
    pub(super) packed: PackProgress,
    /// Random number of this generation, for jitter.
    pub(super) random: f64,
}

impl LiveGeneration {
    pub(super) fn new(
        id: GenerationId,
        socket: PathBuf,
        cell: Arc<GenerationCell>,
        recipe: ProcessRecipe,
        memory: MemoryTracker,
        health: HealthTracker,
    ) -> Self {
        Self {
            id,
            socket,
            cell,
            recipe,
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
            timers: GenerationTimers::default(),
            probes_lost: 0,
            lost_since: None,
            short_drain: false,
            last_probe: None,
            lines_at_probe: (0, 0),
            progress_at_probe: 0,
            crash_logged_at: None,
            crashed_at: None,
            doubted_at: None,
            idle_seen: None,
            memory: Box::new(memory),
            health: Box::new(health),
            degraded: None,
            wish: PolicyWish::default(),
            reclaims: ReclaimHistory::default(),
            pending_reclaim: None,
            reclaim_count: 0,
            warmed_from: None,
            last_reclaim: None,
            no_reclaim: None,
            short_grace: false,
            slot_files: None,
            packed: PackProgress::NotYet,
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
        self.cell.request_stop();
        match &self.process {
            Some(process) => process.terminate(),
            None => self.pending = self.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, now or once there is a process.
    pub(super) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.process {
            Some(process) => process.kill(),
            None => self.pending = Some(PendingSignal::Kill),
        }
    }
}
