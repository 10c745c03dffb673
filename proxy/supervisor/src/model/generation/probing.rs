//! Answered and lost probes of one process.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::lifecycle::LifecyclePolicy;

#[derive(Debug, Default)]
pub(crate) struct ProbeState {
    pub(crate) answered: bool,
    pub(crate) probes_lost: u32,
    pub(crate) lost_since: Option<Instant>,
    /// True if a short drain deadline was set, because the process is silent.
    pub(crate) short_drain: bool,
    /// Send time of the last probe. Results of earlier probes are ignored.
    pub(crate) last_probe: Option<Instant>,
    /// Lines that the model's processes had logged at the last probe.
    pub(crate) lines_at_probe: u64,
    /// Lines that the model's processes had logged at the last answered probe.
    pub(crate) lines_at_answer: u64,
    /// Tokens and complete answers at the last probe.
    pub(crate) progress_at_probe: u64,
    /// Time of a crash line, if the process has answered no probe since.
    pub(crate) crash_logged_at: Option<Instant>,
    /// Time of a crash line, if the process is known to be unresponsive.
    pub(crate) crashed_at: Option<Instant>,
    /// Time of a refused connection. Probes sent before it do not count.
    pub(crate) doubted_at: Option<Instant>,
}

impl ProbeState {
    pub(crate) fn note_lost(&mut self, sent: Instant) {
        if self.probes_lost == 0 {
            self.lost_since = Some(sent);
        }
        self.probes_lost += 1;
    }

    /// Records progress of requests. A logged crash is not forgotten: the progress may be older than the
    /// crash line.
    pub(crate) fn note_progress(&mut self, now: Instant) {
        self.probes_lost = 0;
        self.crash_logged_at = self.crash_logged_at.map(|_| now);
    }

    pub(crate) fn note_answer(&mut self) {
        self.probes_lost = 0;
        self.crash_logged_at = None;
        self.lines_at_answer = self.lines_at_probe;
    }

    pub(crate) fn longest_drain(&mut self, timing: &LifecyclePolicy) -> Duration {
        match self.crashed_at {
            // After a crash, the process answers no more requests.
            Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.drain_deadline),
            // A process that was stopped by SIGSTOP may continue later.
            None if self.silent_for(timing.probes_lost).is_some() => {
                self.short_drain = true;
                timing.crash_ends.min(timing.drain_deadline)
            }
            None => timing.drain_deadline,
        }
    }

    /// Time without answers and progress; `None` until enough probes are lost.
    pub(crate) fn silent_for(&self, probes_lost: u32) -> Option<Duration> {
        let is_silent = self.probes_lost > 0 && self.probes_lost >= probes_lost;
        if is_silent { self.lost_since.map(|since| since.elapsed()) } else { None }
    }
}
