//! Units of a model: each a life-cycle machine, its timer, and its present process.

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

/// Identifies a unit within its model; ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(u64);

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

/// Units of a model.
#[derive(Debug, Default)]
pub(super) struct UnitList {
    pub(super) all: Vec<ProcessUnit>,
    next: u64,
}

impl UnitList {
    pub(super) fn add(&mut self, replica: u32, role: UnitRole) -> UnitId {
        let id = UnitId(self.next);
        self.next += 1;
        // Reserve exactly one: most models have one unit, and the vector would reserve four.
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

    /// Phase of a unit, and its generation.
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

    /// Units that serve or will serve.
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

    /// True if all replicas serve, except those whose starts fail.
    pub(super) fn all_serve(&self) -> bool {
        let is_ready = |unit: &ProcessUnit| unit.phase() == BackendPhase::Ready;
        self.with_role(UnitRole::Current).any(is_ready)
            && self.with_role(UnitRole::Current).all(|unit| is_ready(unit) || unit.waits_for_change())
    }

    /// True if all replicas wait after failed starts; other models may use the room meanwhile.
    pub(super) fn all_starts_failed(&self) -> bool {
        self.all.iter().all(ProcessUnit::waits_for_change)
    }

    pub(super) fn holds_starts(&self) -> bool {
        self.all.iter().any(|unit| unit.held_start.is_some())
    }

    pub(super) fn is_degraded(&self) -> bool {
        self.lives().any(|live| live.health.degraded.is_some())
    }

    /// True if another replica does not serve now but will start soon, so that this one serves the requests
    /// of both.
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
    /// Event that would start a process, kept until the loader grants room.
    pub(super) held_start: Option<LifecycleEvent>,
    /// Boxed, because most models of a large configuration have none: each would reserve 1.6 KiB.
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

/// State of the recycle policy for one generation.
#[derive(Debug, Default)]
pub(super) struct PolicyWish {
    /// Last decision, and the reason that holds it back.
    pub(super) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    /// Moment since which the policy wants the process replaced.
    pub(super) since: Option<Instant>,
    /// Begin of a drain during which the policy demands at least an immediate drain.
    pub(super) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, set because requests outlasted the last drain.
    pub(super) not_before: Option<Instant>,
    /// Budgets that the process has exceeded, and since when.
    pub(super) passed: PassedBudgets,
    /// Random number of this generation, which spreads replacements in time.
    pub(super) random: f64,
}

/// Command and options of a process. If two recipes are equal, no new process is needed.
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

/// Recipe for a new process of this model.
pub(super) fn process_recipe(spec: &ModelSpec) -> ProcessRecipe {
    ProcessRecipe {
        request: SpawnRequest { command: spec.command.clone(), oom_score_adj: spec.oom_score_adj },
        memory_report: spec.run.memory_report,
        reclaim: spec.recycle.common.reclaim,
        socket: spec.run.socket,
    }
}

/// Signal to send to a process as soon as it has been created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PendingSignal {
    Terminate,
    Kill,
}

/// Operating-system process of a generation.
#[derive(Debug)]
pub(super) struct ChildHandle {
    pub(super) socket: PathBuf,
    /// `None` until the process has been created.
    pub(super) process: Option<Arc<dyn BackendProcess>>,
    pub(super) pending: Option<PendingSignal>,
    /// Command with which the process was started, including added arguments.
    pub(super) started_with: Option<ServerCommand>,
    /// True if the process is ended without a drain and with a short grace period.
    pub(super) short_grace: bool,
}

impl ChildHandle {
    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }
}

/// Start of a generation.
#[derive(Debug)]
pub(super) struct StartProgress {
    pub(super) spawned: Instant,
    /// Load time of a process that the previous instance created; `None` for a process of our own.
    pub(super) adopted: Option<Duration>,
    /// Ends the helper that reports a stalled start when dropped.
    pub(super) watch: Option<DropGuard>,
    /// Time limit that the start exceeded, if any.
    pub(super) timed_out: Option<StartLateness>,
    pub(super) ready: Option<Instant>,
    /// Number of slots, as reported when the process was ready.
    pub(super) slots: Option<u32>,
}

/// Probes of a generation, and other signs that it is unresponsive.
#[derive(Debug, Default)]
pub(super) struct ProbeState {
    /// True if the process has answered on its socket.
    pub(super) answered: bool,
    pub(super) probes_lost: u32,
    /// Send time of the first of the consecutive lost probes.
    pub(super) lost_since: Option<Instant>,
    /// True if the drain has a short deadline, because the process answers no probe and generates no token.
    pub(super) short_drain: bool,
    /// Send time of the last probe. Results of earlier probes are ignored.
    pub(super) last_probe: Option<Instant>,
    /// Number of lines that the model's processes had logged at the last probe.
    pub(super) lines_at_probe: u64,
    /// Number of lines that the model's processes had logged at the last answered probe.
    pub(super) lines_at_answer: u64,
    /// Count of tokens and complete answers at the last probe.
    pub(super) progress_at_probe: u64,
    /// Time of a logged crash, if the process has answered no probe since.
    pub(super) crash_logged_at: Option<Instant>,
    /// Time of a logged crash, if the process is known to be unresponsive.
    pub(super) crashed_at: Option<Instant>,
    /// Time at which the process refused a connection. Probes sent before it do not count.
    pub(super) doubted_at: Option<Instant>,
}

impl ProbeState {
    /// Records that the probe sent at `sent` was not answered and no progress was seen since.
    pub(super) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Records progress of requests. Restarts the waiting time after a logged crash instead of forgetting
    /// the crash: the progress may be older than the crash line.
    pub(super) fn note_progress(&mut self, now: Instant) {
        self.probes_lost = 0;
        self.crash_logged_at = self.crash_logged_at.map(|_| now);
    }

    pub(super) fn note_answer(&mut self) {
        self.probes_lost = 0;
        self.crash_logged_at = None;
        self.lines_at_answer = self.lines_at_probe;
    }

    /// Time without answer and progress; `None` until enough probes are lost.
    pub(super) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let is_silent = self.probes_lost > 0 && self.probes_lost >= probes_lost;
        if is_silent { self.lost_since.map(|since| since.elapsed()) } else { None }
    }
}

#[derive(Debug, Default)]
pub(super) struct GenerationTimers {
    /// Time of the next probe; `None` while one is under way or none is needed.
    pub(super) probe: Option<Instant>,
    pub(super) sample: Option<Instant>,
    /// Time of a reading that is made only if the process stays idle, and the moment when it became idle.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    /// Time at which the policy is applied again without a new reading.
    pub(super) judgement: Option<Instant>,
    /// Moment since which the process has been idle, as last seen.
    pub(super) idle_seen: Option<Instant>,
}

impl GenerationTimers {
    fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// Stops the timers at the begin of a phase. Memory is still sampled during a drain, because a shortage
    /// of memory cuts the drain short. A process that has logged a crash is still probed then.
    fn stop(&mut self, phase: BackendPhase, is_alarmed: bool) {
        let drains = phase == BackendPhase::Draining;
        *self = Self {
            probe: if drains && is_alarmed { self.probe } else { None },
            sample: if drains { self.sample } else { None },
            idle_seen: self.idle_seen,
            ..Self::default()
        };
    }

    /// Takes an idle sample that is due: the moment since which the process must have been idle.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Clears a timer if it is due. Returns true if it was due.
pub(super) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

/// A generation (one process of a model), from the request to create it until it is reaped.
#[derive(Debug)]
pub(super) struct LiveGeneration {
    pub(super) id: GenerationId,
    pub(super) cell: Arc<GenerationCell>,
    /// Command and options of the process, compared with the present configuration.
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

    /// Sets the timers for a new phase of the process.
    pub(super) fn enter_phase(&mut self, phase: BackendPhase, policy: &LifecyclePolicy) {
        let is_alarmed = self.probing.crash_logged_at.is_some();
        if matches!(phase, BackendPhase::Draining | BackendPhase::Stopping | BackendPhase::Starting) {
            self.timers.stop(phase, is_alarmed);
            self.wish.last_decision = None;
        }
        if phase == BackendPhase::Draining && !is_alarmed {
            // Keep probing during a drain: otherwise a process that stops answering would use the whole
            // drain deadline.
            let is_silent = self.probing.silent_for(policy.probes_lost).is_some();
            let pause = if is_silent { policy.start_probe_interval } else { policy.probe_interval };
            self.timers.probe = Some(clock::after(Instant::now(), pause));
        }
    }

    /// Sends SIGTERM, or notes to send it as soon as the process has been created.
    pub(super) fn terminate(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.terminate(),
            None => self.child.pending = self.child.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, or notes to send it as soon as the process has been created.
    pub(super) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.kill(),
            None => self.child.pending = Some(PendingSignal::Kill),
        }
    }
}
