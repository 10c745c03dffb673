//! A unit: a life-cycle machine, its timer, and its present process.

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

/// Identifies a unit within its model; ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(pub(super) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitRole {
    /// The unit's process serves the replica.
    Current,
    /// The unit has the new process of an overlap, which will serve once it is ready.
    Successor,
    /// The unit's process drains and ends: the old process of an overlap, or a replica that is no longer
    /// configured.
    Retiring,
}

#[derive(Debug)]
pub(super) struct ProcessUnit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: UnitRole,
    pub(super) machine: LifecycleMachine,
    pub(super) timer: Option<(LifecycleTimer, Instant)>,
    /// Event that would start a process, kept until the loader grants room.
    pub(super) held_start: Option<LifecycleEvent>,
    /// Present process. Boxed, because most models of a large configuration have none, and each would
    /// reserve 1.6 KiB.
    pub(super) live: Option<Box<LiveGeneration>>,
    /// Number of consecutive starts that did not become ready.
    pub(super) start_failures: u32,
    /// Why the last process ended by itself.
    pub(super) failure: Option<BackendFailure>,
    /// State of the files that the process needs, checked before the last start.
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

    /// True if waiting for the next start is pointless, so that requests should be refused. False during a
    /// trial start, because its result is near, and false after the end of a process that had served,
    /// because its next start is soon.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // A start waits only for room: waiting requests make the loader free it.
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

/// Wishes of the recycle policy about a generation.
#[derive(Debug, Default)]
pub(super) struct PolicyWish {
    /// Last decision, and the reason that holds it back.
    pub(super) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    /// Moment since which the policy wants the process replaced.
    pub(super) since: Option<Instant>,
    /// Moment since which the process has been draining while the policy demands at least an immediate
    /// drain.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, set because requests outlasted the last drain.
    pub(super) not_before: Option<Instant>,
    /// Budgets that the process has exceeded, and since when.
    pub(super) passed: PassedBudgets,
}

/// Signal to send to a process as soon as it has been created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSignal {
    Terminate,
    Kill,
}

/// A generation (one process of a model), from the request to create it until it is reaped.
#[derive(Debug)]
pub(super) struct LiveGeneration {
    pub(super) id: GenerationId,
    pub(super) socket: PathBuf,
    pub(super) cell: Arc<GenerationCell>,
    /// Command and options of the process, compared with the present configuration.
    pub(super) recipe: ProcessRecipe,
    pub(super) process: Option<Arc<dyn BackendProcess>>,
    pub(super) pending: Option<PendingSignal>,
    /// True if the process has answered on its socket.
    pub(super) answered: bool,
    /// Time limit that the start exceeded, if any.
    pub(super) timed_out: Option<StartLateness>,
    /// Ends the helper that reports a stalled start when dropped.
    pub(super) start_watch: Option<DropGuard>,
    pub(super) spawned: Instant,
    /// Load time of a process that the previous instance created; `None` for a process of our own.
    pub(super) adopted: Option<Duration>,
    /// Command with which the process was started, including added arguments.
    pub(super) started_with: Option<ServerCommand>,
    pub(super) ready: Option<Instant>,
    pub(super) slots: Option<u32>,
    pub(super) timers: GenerationTimers,
    pub(super) probes_lost: u32,
    /// Send time of the first of the consecutive lost probes.
    pub(super) lost_since: Option<Instant>,
    /// True if the drain has a short deadline, because the process answers no probe and generates no token.
    pub(super) short_drain: bool,
    /// Send time of the last probe. Results of earlier probes are ignored.
    pub(super) last_probe: Option<Instant>,
    /// Number of lines that the model's processes had logged at the last probe, and at the last answered
    /// probe.
    pub(super) lines_at_probe: (u64, u64),
    /// Count of tokens and complete answers at the last probe.
    pub(super) progress_at_probe: u64,
    /// Time of a logged crash, if the process has answered no probe since.
    pub(super) crash_logged_at: Option<Instant>,
    /// Time of a logged crash, if the process is known to be unresponsive.
    pub(super) crashed_at: Option<Instant>,
    /// Time at which the process refused a connection. Probes sent before it do not count.
    pub(super) doubted_at: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    /// Layers or VRAM missing on GPUs, compared with the best process with the same command.
    pub(super) degraded: Option<OffloadLoss>,
    pub(super) wish: PolicyWish,
    /// History of reclaim requests.
    pub(super) reclaims: ReclaimHistory,
    /// Reclaim request under way.
    pub(super) pending_reclaim: Option<PendingReclaim>,
    pub(super) reclaim_count: u64,
    /// Generation from which this one took over conversations.
    pub(super) warmed_from: Option<GenerationId>,
    pub(super) last_reclaim: Option<ReclaimEntry>,
    /// Why the process was not asked to give memory back at the last judgement.
    pub(super) no_reclaim: Option<NoReclaim>,
    /// True if the process is ended without a drain and with a short grace period.
    pub(super) short_grace: bool,
    /// Directory for saved slots, if the process can save slots.
    pub(super) slot_files: Option<Arc<SlotFiles>>,
    /// Progress of saving slots for the next process.
    pub(super) packed: PackProgress,
    /// Random number of this generation, which spreads replacements in time.
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

    /// Records that the probe sent at `sent` was not answered and no progress was seen since.
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Time for which the process has answered no probe and made no progress; `None` until enough probes
    /// are lost.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let since = self.lost_since.filter(|_| self.probes_lost > 0 && self.probes_lost >= probes_lost)?;
        Some(since.elapsed())
    }

    /// Sends SIGTERM, or notes to send it as soon as the process has been created.
    pub(super) fn terminate(&mut self) {
        self.cell.request_stop();
        match &self.process {
            Some(process) => process.terminate(),
            None => self.pending = self.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, or notes to send it as soon as the process has been created.
    pub(super) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.process {
            Some(process) => process.kill(),
            None => self.pending = Some(PendingSignal::Kill),
        }
    }
}
