//! Deadlines of a model's task. Only deadlines and messages wake the task.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

use crate::clock;

/// Timers of one generation.
#[derive(Debug, Default)]
pub(super) struct GenerationTimers {
    /// Time of the next probe; `None` while one is under way or none is needed.
    pub(super) probe: Option<Instant>,
    pub(super) sample: Option<Instant>,
    /// Time of a reading that is made only if the process stays idle, and the moment when it became idle.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    /// Time at which the policy is applied again without a new reading.
    pub(super) judgement: Option<Instant>,
}

impl GenerationTimers {
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// Stops probing. Memory is still sampled during a drain, because a shortage of memory cuts the drain
    /// short.
    pub(super) fn stop(&mut self, phase: BackendPhase) {
        *self = Self { sample: self.sample.filter(|_| phase == BackendPhase::Draining), ..Self::default() };
    }

    /// If an idle sample is due, removes it and returns the moment since which the process must have been
    /// idle.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Clears a timer if it is due. Returns true if it was due.
pub(super) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

/// Timers of the whole model.
#[derive(Debug, Default)]
pub(super) struct ModelTimers {
    /// Time before which no replacement begins for a new configuration, because the last one failed or
    /// another one goes first.
    pub(super) configuration: Option<Instant>,
    /// Next check of the files that a process needs.
    pub(super) look: Option<Instant>,
    /// Time of the next check whether the model is idle and may be unloaded.
    pub(super) idle: Option<Instant>,
    /// Next check of a process that lost its GPU.
    pub(super) recovery: Option<OffloadRecovery>,
    /// Time until which the first process waits for removed models to free memory.
    pub(super) room: Option<Instant>,
}

impl ModelTimers {
    /// Next deadline. While the model waits for removed models to free memory, it is at most `look` away.
    pub(super) fn next_deadline(&self, now: Instant, look: Duration) -> Option<Instant> {
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room.map(|until| until.min(clock::after_pause(now, look)));
        [self.configuration, self.look, self.idle, recovery, room].into_iter().flatten().min()
    }
}

/// Next attempt to restart a process that lost its GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadRecovery {
    pub(super) at: Instant,
    /// Number of consecutive starts that did not help.
    pub(super) tried: u32,
}
