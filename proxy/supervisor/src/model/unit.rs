//! Units of a model: each with a life-cycle machine, a timer and a process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use warden_policies::cooldown::HoldReason;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::lifecycle::{
    BackendPhase, LifecycleEvent, LifecycleMachine, LifecyclePolicy, LifecycleTimer,
};
use warden_policies::{GenerationId, RecycleDecision};

use super::health::HealthTracker;
use super::reclaim::ReclaimState;
use super::warm::WarmProgress;
use crate::clock;
use crate::error::BackendFailure;
use crate::lease::cell::GenerationCell;
use crate::memory::tracker::MemoryTracker;
use crate::process::BackendProcess;
use crate::process::failure::StartLateness;
use crate::process::needs::NeedsCheck;
use crate::spec::{ModelSpec, ServerCommand, SocketMode, SpawnRequest};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitRole {
    /// The process serves the replica.
    Current,
    /// The new process of an overlap serves once it is ready.
    Successor,
    /// The old process of an overlap, or of a replica that is no longer configured, drains.
    Retiring,
}

#[derive(Debug, Default)]
pub(super) struct UnitList {
    pub(super) all: Vec<ProcessUnit>,
    next: u64,
}

impl UnitList {
    pub(super) fn add(&mut self, replica: u32, role: UnitRole) -> UnitId {
        let id = UnitId(self.next);
        self.next += 1;
        // Most models have one unit; `push` would reserve four.
        self.all.reserve_exact(1);
        self.all.push(ProcessUnit::new(id, replica, role));
        id
    }

    pub(super) fn ids(&self) -> Vec<UnitId> {
        self.all.iter().map(|unit| unit.id).collect()
    }

    pub(super) fn get(&self, id: UnitId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.id == id)
    }

    pub(super) fn get_mut(&mut self, id: UnitId) -> Option<&mut ProcessUnit> {
        self.all.iter_mut().find(|unit| unit.id == id)
    }

    pub(super) fn live(&self, id: UnitId) -> Option<&LiveGeneration> {
        self.get(id)?.live.as_deref()
    }

    pub(super) fn live_mut(&mut self, id: UnitId) -> Option<&mut LiveGeneration> {
        self.get_mut(id)?.live.as_deref_mut()
    }

    pub(super) fn phase_and_live(&mut self, id: UnitId) -> Option<(BackendPhase, &mut LiveGeneration)> {
        let unit = self.get_mut(id)?;
        let phase = unit.phase();
        Some((phase, unit.live.as_deref_mut()?))
    }

    pub(super) fn lives(&self) -> impl Iterator<Item = &LiveGeneration> {
        self.all.iter().filter_map(|unit| unit.live.as_deref())
    }

    pub(super) fn lives_mut(&mut self) -> impl Iterator<Item = &mut LiveGeneration> {
        self.all.iter_mut().filter_map(|unit| unit.live.as_deref_mut())
    }

    pub(super) fn any_process(&self) -> bool {
        self.lives().next().is_some()
    }

    pub(super) fn generation(&self, id: UnitId) -> Option<GenerationId> {
        Some(self.live(id)?.id)
    }

    pub(super) fn with_generation(&self, generation: GenerationId) -> Option<&ProcessUnit> {
        self.all.iter().find(|unit| unit.generation() == Some(generation))
    }

    pub(super) fn with_role(&self, role: UnitRole) -> impl Iterator<Item = &ProcessUnit> {
        self.all.iter().filter(move |unit| unit.role == role)
    }

    pub(super) fn staying(&self) -> impl DoubleEndedIterator<Item = &ProcessUnit> {
        self.all.iter().filter(|unit| unit.role != UnitRole::Retiring)
    }

    pub(super) fn current(&self, replica: u32) -> Option<&ProcessUnit> {
        self.with_role(UnitRole::Current).find(|unit| unit.replica == replica)
    }

    pub(super) fn set_role(&mut self, id: UnitId, role: UnitRole) {
        if let Some(unit) = self.get_mut(id) {
            unit.role = role;
        }
    }

    pub(super) fn all_serve(&self) -> bool {
        let is_ready = |unit: &ProcessUnit| unit.phase() == BackendPhase::Ready;
        self.with_role(UnitRole::Current).any(is_ready)
            && self.with_role(UnitRole::Current).all(|unit| is_ready(unit) || unit.waits_for_change())
    }

    pub(super) fn all_starts_failed(&self) -> bool {
        self.all.iter().all(ProcessUnit::waits_for_change)
    }

    pub(super) fn holds_starts(&self) -> bool {
        self.all.iter().any(|unit| unit.held_start.is_some())
    }

    pub(super) fn is_degraded(&self) -> bool {
        self.lives().any(|live| live.health.degraded.is_some())
    }

    /// True if another replica will start soon and this one serves its requests meanwhile.
    pub(super) fn is_another_starting(&self, replica: u32, failures_told: u32) -> bool {
        self.with_role(UnitRole::Current).any(|unit| {
            let comes = matches!(
                unit.phase(),
                BackendPhase::Starting
                    | BackendPhase::Draining
                    | BackendPhase::Stopping
                    | BackendPhase::Backoff
            );
            unit.replica != replica && comes && !unit.is_hopeless(failures_told)
        })
    }
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
    /// Boxed, because a process takes 1.6 KiB, and most models of a large configuration have none.
    pub(super) live: Option<Box<LiveGeneration>>,
    pub(super) start_failures: u32,
    /// Cause of the last unrequested end.
    pub(super) failure: Option<BackendFailure>,
    /// Result of the file check before the last start.
    pub(super) sight: Option<NeedsCheck>,
}

impl ProcessUnit {
    pub(super) fn new(id: UnitId, replica: u32, role: UnitRole) -> Self {
        Self {
            id,
            replica,
            role,
            machine: LifecycleMachine::new(),
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

    pub(super) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next_deadline());
        of_life.into_iter().chain(of_process).min()
    }

    /// True if requests should be refused instead of waiting for the next start. False during a trial start
    /// and after the end of a process that had served: both soon show a result.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        // This start waits only for room, which the loader frees for waiting requests.
        if self.held_start.is_some() {
            return false;
        }
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct PolicyWish {
    pub(super) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    pub(super) since: Option<Instant>,
    /// Begin of a drain that the policy demands at once.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, set when requests outlasted the last one.
    pub(super) not_before: Option<Instant>,
    pub(super) passed: PassedBudgets,
    /// Random number that spreads the replacements of several processes in time.
    pub(super) random: f64,
}

/// Command and options of a process. A process with an equal recipe need not be replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRecipe {
    pub(super) request: SpawnRequest,
    pub(super) memory_report: bool,
    pub(super) reclaim: bool,
    socket: SocketMode,
}

impl ProcessRecipe {
    pub(super) fn command(&self) -> &ServerCommand {
        &self.request.command
    }
}

pub(super) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    ProcessRecipe {
        request: SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj },
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}

/// Signal to send as soon as the process has been created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSignal {
    Terminate,
    Kill,
}

#[derive(Debug)]
pub(super) struct ChildHandle {
    pub(super) socket: PathBuf,
    pub(super) process: Option<Arc<dyn BackendProcess>>,
    pub(super) pending: Option<PendingSignal>,
    /// Start command, including added arguments.
    pub(super) started_with: Option<ServerCommand>,
    pub(super) short_grace: bool,
}

impl ChildHandle {
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }
}

#[derive(Debug)]
pub(super) struct StartProgress {
    pub(super) spawned: Instant,
    /// Load time of a process that the previous instance created.
    pub(super) adopted: Option<Duration>,
    /// Stops the helper that watches for a stalled start, when dropped.
    pub(super) watch: Option<DropGuard>,
    pub(super) timed_out: Option<StartLateness>,
    pub(super) ready: Option<Instant>,
    /// Number of slots that the ready process reported.
    pub(super) slots: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct ProbeState {
    pub(super) answered: bool,
    pub(super) probes_lost: u32,
    pub(super) lost_since: Option<Instant>,
    /// True if a short drain deadline was set, because the process is silent.
    pub(super) short_drain: bool,
    /// Send time of the last probe. Results of earlier probes are ignored.
    pub(super) last_probe: Option<Instant>,
    /// Lines that the model's processes had logged at the last probe.
    pub(super) lines_at_probe: u64,
    /// Lines that the model's processes had logged at the last answered probe.
    pub(super) lines_at_answer: u64,
    /// Tokens and complete answers at the last probe.
    pub(super) progress_at_probe: u64,
    /// Time of a crash line, if the process has answered no probe since.
    pub(super) crash_logged_at: Option<Instant>,
    /// Time of a crash line, if the process is known to be unresponsive.
    pub(super) crashed_at: Option<Instant>,
    /// Time of a refused connection. Probes sent before it do not count.
    pub(super) doubted_at: Option<Instant>,
}

impl ProbeState {
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Records progress of requests. A logged crash is not forgotten: the progress may be older than the
    /// crash line.
    pub(super) fn note_progress(&mut self, now: Instant) {
        self.probes_lost = 0;
        self.crash_logged_at = self.crash_logged_at.map(|_| now);
    }

    pub(super) fn note_answer(&mut self) {
        self.probes_lost = 0;
        self.crash_logged_at = None;
        self.lines_at_answer = self.lines_at_probe;
    }

    /// Time without answers and progress; `None` until enough probes are lost.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let is_silent = self.probes_lost > 0 && self.probes_lost >= probes_lost;
        if is_silent { self.lost_since.map(|since| since.elapsed()) } else { None }
    }
}

#[derive(Debug, Default)]
pub(super) struct GenerationTimers {
    pub(super) probe: Option<Instant>,
    pub(super) sample: Option<Instant>,
    /// Time of the next idle sample, and the moment from which the process must have been idle.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    pub(super) judgement: Option<Instant>,
    pub(super) idle_seen: Option<Instant>,
}

impl GenerationTimers {
    fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// Stops the timers for a phase. During a drain, memory is still sampled, because a shortage cuts the
    /// drain short, and a process with a crash line is still probed.
    fn stop(&mut self, phase: BackendPhase, is_alarmed: bool) {
        let drains = phase == BackendPhase::Draining;
        *self = Self {
            probe: if drains && is_alarmed { self.probe } else { None },
            sample: if drains { self.sample } else { None },
            idle_seen: self.idle_seen,
            ..Self::default()
        };
    }

    /// Takes an idle sample that is due. Returns since when the process must have been idle.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Clears a timer that is due. Returns true if it was due.
pub(super) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

#[derive(Debug)]
pub(super) struct LiveGeneration {
    pub(super) id: GenerationId,
    pub(super) cell: Arc<GenerationCell>,
    pub(super) recipe: ProcessRecipe,
    pub(super) child: ChildHandle,
    pub(super) start: StartProgress,
    pub(super) probing: ProbeState,
    pub(super) timers: GenerationTimers,
    pub(super) memory: Box<MemoryTracker>,
    pub(super) health: Box<HealthTracker>,
    pub(super) wish: PolicyWish,
    pub(super) reclaim: ReclaimState,
    pub(super) warm: WarmProgress,
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
        let start = StartProgress {
            spawned: Instant::now(),
            adopted: None,
            watch: None,
            timed_out: None,
            ready: None,
            slots: None,
        };
        Self {
            id,
            cell,
            recipe,
            child: ChildHandle {
                socket,
                process: None,
                pending: None,
                started_with: None,
                short_grace: false,
            },
            start,
            probing: ProbeState::default(),
            timers: GenerationTimers::default(),
            memory: Box::new(memory),
            health: Box::new(health),
            wish: PolicyWish { random: rand::random(), ..PolicyWish::default() },
            reclaim: ReclaimState::default(),
            warm: WarmProgress::default(),
        }
    }

    pub(super) fn enter_phase(&mut self, phase: BackendPhase, policy: &LifecyclePolicy) {
        let is_alarmed = self.probing.crash_logged_at.is_some();
        if matches!(phase, BackendPhase::Draining | BackendPhase::Stopping | BackendPhase::Starting) {
            self.timers.stop(phase, is_alarmed);
            self.wish.last_decision = None;
        }
        if phase == BackendPhase::Draining && !is_alarmed {
            // Probe during a drain: a process that stops answering must not use the whole deadline.
            let is_silent = self.probing.silent_for(policy.probes_lost).is_some();
            let pause = if is_silent { policy.start_probe_interval } else { policy.probe_interval };
            self.timers.probe = Some(clock::after(Instant::now(), pause));
        }
    }

    /// Sends SIGTERM, now or as soon as the process has been created.
    pub(super) fn terminate(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.terminate(),
            None => self.child.pending = self.child.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, now or as soon as the process has been created.
    pub(super) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.kill(),
            None => self.child.pending = Some(PendingSignal::Kill),
        }
    }
}
