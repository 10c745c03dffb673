//! Deadlines: when something is due by itself. Every other wake-up of a model's task is a message.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::Phase;

use crate::clock;

/// Those of one generation.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// The next probe; `None` while one is out or none is wanted.
    pub(super) probe: Option<Instant>,
    /// The next reading of memory.
    pub(super) sample: Option<Instant>,
    /// A reading because of the idle edge at the second moment, if it is idle since then.
    pub(super) idle_sample: Option<(Instant, Instant)>,
    /// The policy is asked again without a new reading.
    pub(super) judgement: Option<Instant>,
}

impl Timers {
    pub(super) fn next(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement].into_iter().flatten().min()
    }

    /// No more probes, and no more samples unless it drains: memory that runs out cuts a drain short.
    pub(super) fn stop(&mut self, phase: Phase) {
        *self = Self { sample: self.sample.filter(|_| phase == Phase::Draining), ..Self::default() };
    }

    /// Since when it has to be idle for a reading that is due because of that.
    pub(super) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Whether this is due. If so it is taken out.
pub(super) fn take(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}

/// Those of the whole model.
#[derive(Debug, Default)]
pub(super) struct ModelTimers {
    /// No replacement because of the configuration before this time: the last one failed, or another one goes first.
    pub(super) configuration: Option<Instant>,
    /// What a process needs is looked at without being asked.
    pub(super) look: Option<Instant>,
    /// It may be unloaded because nobody asks for it.
    pub(super) idle: Option<Instant>,
    /// A process that has lost its GPU is looked at again.
    pub(super) recovery: Option<Recovery>,
    /// Until then what leaves may make room before the first process is made.
    pub(super) room: Option<Instant>,
}

impl ModelTimers {
    /// While what leaves makes room it is looked for at every step of `look`.
    pub(super) fn next(&self, now: Instant, look: Duration) -> Option<Instant> {
        let recovery = self.recovery.map(|recovery| recovery.at);
        let room = self.room.map(|until| until.min(clock::again(now, look)));
        [self.configuration, self.look, self.idle, recovery, room].into_iter().flatten().min()
    }
}

/// When a degraded process is looked at again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recovery {
    pub(super) at: Instant,
    /// Starts in a row that brought nothing.
    pub(super) tried: u32,
}
