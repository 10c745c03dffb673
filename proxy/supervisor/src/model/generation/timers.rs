//! Timers of one process.

use tokio::time::Instant;
use warden_policies::lifecycle::BackendPhase;

#[derive(Debug, Default)]
pub(crate) struct GenerationTimers {
    pub(crate) probe: Option<Instant>,
    pub(crate) sample: Option<Instant>,
    /// Time of the next idle sample, and the moment from which the process must have been idle.
    pub(crate) idle_sample: Option<(Instant, Instant)>,
    pub(crate) judgement: Option<Instant>,
    /// Time of the next fixed prompts.
    pub(crate) answers: Option<Instant>,
    pub(crate) idle_seen: Option<Instant>,
}

impl GenerationTimers {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let idle_sample = self.idle_sample.map(|(at, _)| at);
        [self.probe, self.sample, idle_sample, self.judgement, self.answers].into_iter().flatten().min()
    }

    /// Stops the timers for a phase. During a drain, memory is still sampled, because a shortage cuts the
    /// drain short, and a process with a crash line is still probed.
    pub(super) fn stop(&mut self, phase: BackendPhase, is_alarmed: bool) {
        let drains = phase == BackendPhase::Draining;
        *self = Self {
            probe: if drains && is_alarmed { self.probe } else { None },
            sample: if drains { self.sample } else { None },
            idle_seen: self.idle_seen,
            ..Self::default()
        };
    }

    /// Takes an idle sample that is due. Returns since when the process must have been idle.
    pub(crate) fn take_idle_sample(&mut self, now: Instant) -> Option<Instant> {
        self.idle_sample.take_if(|(at, _)| *at <= now).map(|(_, since)| since)
    }
}

/// Clears a timer that is due. Returns true if it was due.
pub(crate) fn take_due(timer: &mut Option<Instant>, now: Instant) -> bool {
    timer.take_if(|at| *at <= now).is_some()
}
