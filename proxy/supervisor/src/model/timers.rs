//! Deadlines of a model's task. Everything else that wakes the task is a message.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

use crate::clock;

/// Timers of one generation.
#[derive(Debug, Default)]
pub(super) struct GenerationTimers {
    /// Next probe; `None` while one is under way or none is needed.
    pub(super) probe: Option<Instant>,
    pub(super) sample: Option<Instant>,
    /// Reading due at the first instant, if the process has been idle since the second one.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    /// Next judgement without a new reading.
    pub(super) judgement: Option<Instant>,
}

impl GenerationTimers {
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// Stops probing. Sampling continues in a drain only, because memory that runs out cuts a drain short.
    pub(super) fn stop(&mut self, phase: BackendPhase) {
        *self = Self { sample: self.sample.filter(|_| phase == BackendPhase::Draining), ..Self::default() };
    }

    /// Takes a due idle sample and returns since when the process has to be idle for it.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Takes a timer that is due. Returns true if it was due.
pub(super) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

/// Timers of the whole model.
#[derive(Debug, Default)]
pub(super) struct ModelTimers {
    /// No replacement for the configuration before this time, because the last one failed or another one
    /// goes first.
    pub(super) configuration: Option<Instant>,
    /// Next check of the files that a process needs.
    pub(super) look: Option<Instant>,
    /// Time to check for unloading an idle model.
    pub(super) idle: Option<Instant>,
    /// Next look at a process that lost its GPU.
    pub(super) recovery: Option<OffloadRecovery>,
    /// Until this time the first process waits for removed models to free their room.
    pub(super) room: Option<Instant>,
}

impl ModelTimers {
    /// Next deadline. While waiting for room, checks at intervals of `look`.
    pub(super) fn next_deadline(&self, now: Instant, look: Duration) -> Option<Instant> {
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room.map(|until| until.min(clock::after_pause(now, look)));
        [self.configuration, self.look, self.idle, recovery, room].into_iter().flatten().min()
    }
}

/// Next look at a degraded process.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadRecovery {
    pub(super) at: Instant,
    /// Consecutive starts that did not help.
    pub(super) tried: u32,
}
