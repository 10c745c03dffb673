//! Life of a model's task: its end, its timers, and the number of its actions.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::backoff::{self, BackoffPolicy};
use warden_policies::health::HealthPolicy;

use crate::clock;

#[derive(Debug)]
pub(super) struct TaskLife {
    pub(super) end: Option<TaskEnd>,
    /// True while no instance decides, until the handover has succeeded or failed.
    pub(super) is_frozen: bool,
    /// False after the removal of the model: then another model may use its name in the view.
    pub(super) is_published: bool,
    pub(super) is_dirty: bool,
    pub(super) steps: u64,
    pub(super) timers: ModelTimers,
    pub(super) crashes: u64,
    pub(super) dying: Vec<GenerationId>,
}

impl TaskLife {
    pub(super) fn new() -> Self {
        Self {
            end: None,
            is_frozen: false,
            is_published: true,
            is_dirty: true,
            steps: 0,
            timers: ModelTimers::default(),
            crashes: 0,
            dying: Vec::new(),
        }
    }

    /// Records an action, so that the task settles again and publishes the view.
    pub(super) fn note_action(&mut self) {
        self.steps += 1;
        self.is_dirty = true;
    }

    pub(super) fn end_deadline(&self, stop_grace: Duration) -> Option<Instant> {
        match self.end? {
            TaskEnd::Removed => None,
            TaskEnd::Shutdown(deadline) if deadline > Instant::now() => Some(deadline),
            TaskEnd::Shutdown(deadline) => Some(clock::after(deadline, stop_grace.saturating_mul(2))),
        }
    }

    /// True if killed processes should have ended long ago.
    pub(super) fn is_overdue(&self, stop_grace: Duration) -> bool {
        matches!(self.end, Some(TaskEnd::Shutdown(deadline))
            if clock::after(deadline, stop_grace.saturating_mul(2)) <= Instant::now())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskEnd {
    Removed,
    /// Requests may run until this time.
    Shutdown(Instant),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct OffloadRecovery {
    pub(super) at: Instant,
    /// Number of consecutive starts that did not help.
    pub(super) tried: u32,
}

#[derive(Debug, Default)]
pub(super) struct ModelTimers {
    /// Time for retrying a failed or delayed replacement for a new configuration.
    pub(super) configuration: Option<Instant>,
    pub(super) look: Option<Instant>,
    pub(super) idle: Option<Instant>,
    pub(super) recovery: Option<OffloadRecovery>,
    /// End of the first process's wait for the memory of removed models.
    pub(super) room: Option<Instant>,
}

impl ModelTimers {
    pub(super) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room.map(|until| until.min(clock::after_pause(now, ROOM_CHECK_INTERVAL)));
        [self.configuration, self.look, self.idle, recovery, room].into_iter().flatten().min()
    }

    /// Sets the time of the next restart of a process that lost its GPU.
    pub(super) fn schedule_recovery(&mut self, health: &HealthPolicy, tried: u32) {
        let policy = BackoffPolicy { first: health.offload_retry, cap: health.offload_retry_most };
        let pause = backoff::delay(&policy, tried.saturating_add(1), rand::random());
        self.recovery = Some(OffloadRecovery { at: clock::after_pause(Instant::now(), pause), tried });
    }
}

pub(super) const ROOM_CHECK_INTERVAL: Duration = Duration::from_millis(50);
