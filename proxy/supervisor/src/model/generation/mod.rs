//! A process of a model, and what its task knows of it.

mod health;
mod probing;
mod recipe;
mod reclaim;
mod timers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::DropGuard;
use warden_policies::cooldown::HoldReason;
use warden_policies::cooldown::working_set::PassedBudgets;
use warden_policies::health::HealthSymptom;
use warden_policies::lifecycle::{BackendPhase, LifecyclePolicy};
use warden_policies::{GenerationId, RecycleDecision};

pub(crate) use self::health::HealthTracker;
pub(crate) use self::probing::ProbeState;
pub(crate) use self::recipe::{ProcessRecipe, process_recipe};
pub(crate) use self::reclaim::{PendingReclaim, ReclaimCounts, ReclaimState};
pub(crate) use self::timers::{GenerationTimers, take_due};
use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::memory::tracker::MemoryTracker;
use crate::process::failure::StartLateness;
use crate::process::slot_files::SlotFiles;
use crate::process::{BackendProcess, failure};
use crate::spec::ServerCommand;
use crate::view::log::LogRing;

#[derive(Debug, Default)]
pub(crate) struct PolicyWish {
    pub(crate) last_decision: Option<(RecycleDecision, Option<HoldReason>)>,
    pub(crate) since: Option<Instant>,
    /// Begin of a drain that the policy demands at once.
    pub(crate) urgent_since: Option<Instant>,
    /// Earliest time of the next drain, set when requests outlasted the last one.
    pub(crate) not_before: Option<Instant>,
    pub(crate) passed: PassedBudgets,
    /// Random number that spreads the replacements of several processes in time.
    pub(crate) random: f64,
}

/// Signal to send as soon as the process has been created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PendingSignal {
    Terminate,
    Kill,
}

#[derive(Debug)]
pub(crate) struct ChildHandle {
    pub(crate) socket: PathBuf,
    pub(crate) process: Option<Arc<dyn BackendProcess>>,
    pub(crate) pending: Option<PendingSignal>,
    /// Start command, including added arguments.
    pub(crate) started_with: Option<ServerCommand>,
    pub(crate) short_grace: bool,
}

impl ChildHandle {
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid())
    }
}

#[derive(Debug)]
pub(crate) struct StartProgress {
    pub(crate) spawned: Instant,
    /// Load time of a process that the previous instance created.
    pub(crate) adopted: Option<Duration>,
    /// Stops the helper that watches for a stalled start, when dropped.
    pub(crate) watch: Option<DropGuard>,
    pub(crate) timed_out: Option<StartLateness>,
    pub(crate) ready: Option<Instant>,
    /// Number of slots that the ready process reported.
    pub(crate) slots: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PackProgress {
    #[default]
    NotYet,
    UnderWay,
    Done,
}

#[derive(Debug, Default)]
pub(crate) struct WarmProgress {
    /// Directory for saved slots, if the process can save any.
    pub(crate) files: Option<Arc<SlotFiles>>,
    pub(crate) packed: PackProgress,
    pub(crate) from: Option<GenerationId>,
    /// True while a helper evaluates the remaining prompts of the previous process.
    pub(crate) is_behind: bool,
    /// Slots with restored contents, which llama-server lists like slots that were never used.
    pub(crate) restored_slots: Vec<u32>,
}

#[derive(Debug)]
pub(crate) struct LiveGeneration {
    pub(crate) id: GenerationId,
    pub(crate) cell: Arc<GenerationCell>,
    pub(crate) recipe: ProcessRecipe,
    pub(crate) child: ChildHandle,
    pub(crate) start: StartProgress,
    pub(crate) probing: ProbeState,
    pub(crate) timers: GenerationTimers,
    pub(crate) memory: Box<MemoryTracker>,
    pub(crate) health: Box<HealthTracker>,
    pub(crate) wish: PolicyWish,
    pub(crate) reclaim: ReclaimState,
    pub(crate) warm: WarmProgress,
}

impl LiveGeneration {
    pub(crate) fn new(
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

    pub(crate) fn enter_phase(&mut self, phase: BackendPhase, policy: &LifecyclePolicy) {
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

    /// Crash line that the process has logged since it last answered a probe. An older line is ignored:
    /// it may be text that a client sent.
    pub(crate) fn crash_line(&self, logs: &LogRing) -> Option<String> {
        failure::crash_line(&logs.lines_since(self.id, self.probing.lines_at_answer))
    }

    /// Handles an unanswered probe. Returns the time of the crash if the process has logged one since its
    /// last answered probe.
    pub(crate) fn note_crash(&mut self, logs: &LogRing) -> Option<Instant> {
        let has_line = self.crash_line(logs).is_some();
        let probing = &mut self.probing;
        probing.crashed_at = has_line.then(|| probing.crash_logged_at.unwrap_or_else(Instant::now));
        probing.crashed_at
    }

    /// Duration of the hang for which a process is ended. Its requests may be the cause.
    pub(crate) fn hung_for(&self) -> Option<Duration> {
        let silent = |symptom: &HealthSymptom| match symptom {
            HealthSymptom::Wedged { seconds, .. } => Some(Duration::from_secs(*seconds)),
            _ => None,
        };
        let crashed = self.probing.crashed_at.map(|since| since.elapsed());
        crashed.or_else(|| self.health.symptoms().iter().find_map(silent))
    }

    /// False if the process is known to answer no more requests, or has to end at once.
    pub(crate) fn may_drain_on(&self, probes_lost: u32) -> bool {
        !self.child.short_grace
            && self.probing.crashed_at.is_none()
            && self.probing.silent_for(probes_lost).is_none()
    }

    /// Sends SIGTERM, now or as soon as the process has been created.
    pub(crate) fn terminate(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.terminate(),
            None => self.child.pending = self.child.pending.or(Some(PendingSignal::Terminate)),
        }
    }

    /// Sends SIGKILL, now or as soon as the process has been created.
    pub(crate) fn kill(&mut self) {
        self.cell.request_stop();
        match &self.child.process {
            Some(process) => process.kill(),
            None => self.child.pending = Some(PendingSignal::Kill),
        }
    }
}
