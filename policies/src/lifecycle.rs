//! Life cycle of one backend, as a step function without side effects.
//!
//! ```text
//!             Up                    ProbeReady
//!   Idle ---------------> Starting ------------> Ready <-----------+
//!                          |    |                |  | ProbesLost   | ProbesBack
//!                          |    | start          |  v              |
//!                     exit |    | deadline       | Suspect --------+   no new leases, old ones run
//!                          v    v                |  | lost too long
//!   Failed <-- exit     Backoff <---- exit ------+  |
//!     |   that needs       | timer                  |  Down/Recycle
//!     |   a change         v                        v  v
//!     +--------------> Starting           Draining -- drained or deadline --> Stopping
//!       Changed or slow trial                                                    |
//!                                                     TERM, grace, KILL; exit:   |
//!                                   Restart -> Starting, Idle -> Idle <----------+
//! ```
//!
//! No phase is final: after a failure the next start is a trial, and trials continue. A process that had been
//! ready is restarted after short pauses ([`LifecyclePolicy::crash_cap`]), another one after pauses that grow
//! up to [`BackoffPolicy::cap`]. If a start needs a change first (of a flag, a file), the backend waits in
//! [`BackendPhase::Failed`], with occasional trials, because the diagnosis may be wrong.
//!
//! A [`LifecycleMachine`] is the life cycle of one process at a time. An overlapping replacement uses two
//! machines: the new one starts from `Idle`, and when it is `Ready` the old one gets `Down`. The machine
//! never acts: it returns [`LifecycleEffect`]s that its owner carries out.
//!
//! Invariants (property-tested): the gate is open only in `Ready`; a child is spawned only when no other
//! child lives; `Kill` follows `Term` and the grace time, except after `KillNow` and for a child that never
//! became ready; every phase but `Idle` and `Ready` has a timer, so no phase needs an operator to end it;
//! an unexpected exit leads to `Backoff` or `Failed`, never straight to `Starting`; `Failed` is reached
//! only by a failed start that needs a change, and left at once by that change; from any history, timers
//! and probes suffice to bring a wanted backend back to `Ready` once its process can start again.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::BackoffPolicy;
use crate::named::named_enum;

named_enum! {
    /// Phase in a backend's life cycle.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum BackendPhase {
        /// No process runs, and none is wanted.
        #[default]
        Idle = "idle",
        /// A process runs but does not answer yet.
        Starting = "starting",
        /// The process answers; leases may be taken.
        Ready = "ready",
        /// Probes are lost: no new leases, running ones continue.
        Suspect = "suspect",
        /// No new leases are granted; running leases are allowed to finish.
        Draining = "draining",
        /// The process got a signal to exit.
        Stopping = "stopping",
        /// The process died; the next start waits for a timer.
        Backoff = "backoff",
        /// The backend cannot start until a flag or a file changes; such a change, or an occasional trial, starts
        /// it.
        Failed = "failed",
    }
}

impl std::fmt::Display for BackendPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Next step after a stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterStop {
    /// Stay down.
    #[default]
    Idle,
    /// Start the next generation at once.
    Restart,
}

/// Consequence of an unexpected exit for the next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndCause {
    /// The next start may succeed.
    MayPass,
    /// The next start fails as well, unless a flag or a file changes.
    NeedsChange,
    /// Memory was short while other processes were freeing some; not counted as a failure of this backend.
    MemoryReturning,
}

/// Input of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleEvent {
    /// The backend is wanted: a request waits for it, or it is preloaded.
    Up,
    /// The backend is no longer wanted: drain, stop, stay stopped.
    Down,
    /// Replace the process: drain, stop, start again.
    Recycle,
    /// End the process without draining.
    KillNow(AfterStop),
    /// A probe was answered: the process is ready for requests.
    ProbeReady,
    /// Several probes in a row were lost.
    ProbesLost,
    /// A probe was answered after lost ones.
    ProbesBack,
    /// Cancel the drain: the process continues to serve. Sent only for a healthy process.
    Resume,
    /// The last lease has ended. Has an effect only while draining.
    Drained,
    /// The process has exited and was reaped. The cause matters only for an unexpected exit.
    Exited(EndCause),
    /// Like `Exited`, but caused by one request, which is refused from now on.
    KilledByRequest,
    /// The process could not be created.
    SpawnFailed(EndCause),
    /// A timer requested by [`LifecycleEffect::Arm`] has expired.
    Timer(LifecycleTimer),
    /// A condition for the start has changed, so the start may succeed now.
    Changed,
    /// The next start is known to fail until a condition changes.
    Stuck,
    /// Leave `Failed` or `Backoff`, by request of an operator or because of a new configuration.
    Reset,
}

/// Timers of a backend. At most one is armed at a time: every transition replaces the armed timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LifecycleTimer {
    /// Deadline for becoming ready.
    Start,
    /// Deadline for probes to be answered again.
    Suspect,
    /// Deadline for the leases to end.
    Drain,
    /// Deadline for the exit after TERM.
    Grace,
    /// Pause before the next start.
    Backoff {
        /// Number of consecutive failures of the same kind, 1 or more, for [`crate::backoff::delay`].
        failures: u32,
        /// The pause is at most [`LifecyclePolicy::crash_cap`]: the process had been ready, or only lacked
        /// memory.
        short: bool,
    },
    /// Pause before the next trial of a backend that waits for a change.
    Trial,
}

/// Action for the machine's owner; actions are carried out in the returned order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifecycleEffect {
    /// Create the process and probe it.
    Spawn,
    /// Allow new leases.
    OpenGate,
    /// Refuse new leases.
    CloseGate,
    /// Send SIGTERM once: llama-server exits at once on a second SIGTERM.
    Term,
    /// Send SIGKILL to the whole process group.
    Kill,
    /// Arm this timer, in place of any other. The owner's configuration gives the duration.
    Arm(LifecycleTimer),
    /// Disarm the timer.
    Disarm,
    /// Report a crash loop after [`LifecyclePolicy::breaker_failures`] failures. Starts continue.
    Alarm,
}

/// Failure counts and deadlines. `defaults.toml`, section `[lifecycle]`, gives the reasons.
pub type LifecyclePolicy = crate::defaults::Lifecycle;

/// State of one backend's life; the module documentation has a diagram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LifecycleMachine {
    phase: BackendPhase,
    then: AfterStop,
    was_ready: bool,
    ready_since: Option<Duration>,
    failures: u32,
    /// Consecutive starts that did not become ready.
    failed_starts: u32,
    /// Consecutive starts that lacked memory while other processes were exiting.
    crowded_starts: u32,
    recent: VecDeque<Duration>,
    alarmed: bool,
}

impl LifecyclePolicy {
    /// Returns the time limit of a probe after an apparent crash: all probes fit into `crash_ends`.
    pub fn crash_probe(&self) -> Duration {
        self.crash_ends / self.probes_lost.saturating_add(1)
    }

    /// Returns the pause before the next start; `unit` is a random number in `[0, 1)`.
    pub fn pause(&self, failures: u32, short: bool, unit: f64) -> Duration {
        let cap = if short { self.crash_cap.min(self.backoff_cap) } else { self.backoff_cap };
        crate::backoff::delay(&BackoffPolicy { first: self.backoff_first, cap }, failures, unit)
    }
}

impl LifecycleMachine {
    /// Creates a machine in [`BackendPhase::Idle`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the present phase.
    pub fn phase(&self) -> BackendPhase {
        self.phase
    }

    /// Returns the number of unexpected exits in a row, without a long time in service in between.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Returns the step after the present `Draining` or `Stopping`; `None` in other phases.
    pub fn after_stop(&self) -> Option<AfterStop> {
        matches!(self.phase, BackendPhase::Draining | BackendPhase::Stopping).then_some(self.then)
    }

    /// Returns true if a new process starts at once when this one has exited.
    pub fn restarts_when_ended(&self) -> bool {
        // If the process was never ready, the next one starts after a pause.
        self.phase == BackendPhase::Stopping && self.was_ready && self.then == AfterStop::Restart
    }

    /// Returns true if a process exists or is being created.
    pub fn has_process(&self) -> bool {
        !matches!(self.phase, BackendPhase::Idle | BackendPhase::Backoff | BackendPhase::Failed)
    }

    /// Applies an event at `now` (time since the caller's epoch, never decreasing) and returns the actions.
    /// Events without meaning in the present phase, such as late probes and timers, have no effect.
    pub fn step(
        &mut self,
        event: LifecycleEvent,
        now: Duration,
        policy: &LifecyclePolicy,
    ) -> Vec<LifecycleEffect> {
        match event {
            LifecycleEvent::Exited(_) | LifecycleEvent::SpawnFailed(_) | LifecycleEvent::KilledByRequest => {
                self.step_at_end(event, now, policy)
            }
            event if self.has_process() => self.step_with_process(event, now),
            event => self.step_without_process(event),
        }
    }

    fn step_without_process(&mut self, event: LifecycleEvent) -> Vec<LifecycleEffect> {
        use BackendPhase::{Backoff, Failed, Idle};
        match (self.phase, event) {
            (Idle, LifecycleEvent::Up | LifecycleEvent::Recycle)
            | (Backoff, LifecycleEvent::Timer(LifecycleTimer::Backoff { .. }))
            | (Failed, LifecycleEvent::Timer(LifecycleTimer::Trial)) => self.start(),
            (Backoff | Failed, LifecycleEvent::Changed) => {
                self.failed_starts = 0;
                self.start()
            }
            (Backoff, LifecycleEvent::Stuck) => {
                self.phase = Failed;
                vec![LifecycleEffect::Arm(LifecycleTimer::Trial)]
            }
            (Backoff | Failed, LifecycleEvent::Recycle) => {
                self.clear_failures();
                self.start()
            }
            (Backoff | Failed, LifecycleEvent::Reset) => {
                self.clear_failures();
                self.phase = Idle;
                vec![LifecycleEffect::Disarm]
            }
            (Backoff | Failed, LifecycleEvent::Down | LifecycleEvent::KillNow(AfterStop::Idle)) => {
                self.phase = Idle;
                vec![LifecycleEffect::Disarm]
            }
            _ => Vec::new(),
        }
    }

    fn step_with_process(&mut self, event: LifecycleEvent, now: Duration) -> Vec<LifecycleEffect> {
        use BackendPhase::{Draining, Ready, Starting, Stopping, Suspect};
        match (self.phase, event) {
            (Starting | Suspect, LifecycleEvent::ProbeReady) | (Suspect, LifecycleEvent::ProbesBack) => {
                if self.phase == Starting {
                    self.ready_since = Some(now);
                    self.failed_starts = 0;
                    self.crowded_starts = 0;
                }
                self.was_ready = true;
                self.phase = Ready;
                vec![LifecycleEffect::Disarm, LifecycleEffect::OpenGate]
            }
            (Starting, LifecycleEvent::Timer(LifecycleTimer::Start)) => {
                // The process never served a request, so there is nothing to drain.
                self.then = AfterStop::Restart;
                self.was_ready = false;
                self.phase = Stopping;
                vec![LifecycleEffect::Kill, LifecycleEffect::Arm(LifecycleTimer::Grace)]
            }
            (Starting, LifecycleEvent::Down) => self.stop(AfterStop::Idle),
            (Starting, LifecycleEvent::Recycle) => self.stop(AfterStop::Restart),

            (Ready, LifecycleEvent::ProbesLost) => {
                self.phase = Suspect;
                vec![LifecycleEffect::CloseGate, LifecycleEffect::Arm(LifecycleTimer::Suspect)]
            }
            (Suspect, LifecycleEvent::Timer(LifecycleTimer::Suspect))
            | (Ready | Suspect, LifecycleEvent::Recycle) => self.drain(AfterStop::Restart),
            (Ready | Suspect, LifecycleEvent::Down) => self.drain(AfterStop::Idle),

            (Draining, LifecycleEvent::Resume) => {
                self.phase = Ready;
                vec![LifecycleEffect::Disarm, LifecycleEffect::OpenGate]
            }
            (Draining, LifecycleEvent::Drained | LifecycleEvent::Timer(LifecycleTimer::Drain)) => {
                self.stop(self.then)
            }
            (Draining | Stopping, LifecycleEvent::Down) => {
                self.then = AfterStop::Idle;
                Vec::new()
            }
            (Draining | Stopping, LifecycleEvent::Up | LifecycleEvent::Recycle) => {
                self.then = AfterStop::Restart;
                Vec::new()
            }
            (Stopping, LifecycleEvent::Timer(LifecycleTimer::Grace)) => {
                vec![LifecycleEffect::Kill, LifecycleEffect::Arm(LifecycleTimer::Grace)]
            }

            (Starting | Ready | Suspect | Draining | Stopping, LifecycleEvent::KillNow(then)) => {
                self.then = then;
                self.phase = Stopping;
                vec![
                    LifecycleEffect::CloseGate,
                    LifecycleEffect::Kill,
                    LifecycleEffect::Arm(LifecycleTimer::Grace),
                ]
            }
            _ => Vec::new(),
        }
    }

    fn step_at_end(
        &mut self,
        event: LifecycleEvent,
        now: Duration,
        policy: &LifecyclePolicy,
    ) -> Vec<LifecycleEffect> {
        use BackendPhase::{Backoff, Draining, Ready, Starting, Stopping, Suspect};
        match (self.phase, event) {
            (Ready | Suspect, LifecycleEvent::KilledByRequest) => {
                // The exit is not counted as a failure, but a pause follows: the wrong request may have been
                // blamed.
                self.clear_if_stable(now, policy);
                self.phase = Backoff;
                vec![
                    LifecycleEffect::CloseGate,
                    LifecycleEffect::Arm(LifecycleTimer::Backoff { failures: 1, short: true }),
                ]
            }
            (_, LifecycleEvent::KilledByRequest) => {
                self.step_at_end(LifecycleEvent::Exited(EndCause::MayPass), now, policy)
            }

            // Requested exit of a process that had been ready, or that is not to be restarted.
            (Stopping, LifecycleEvent::Exited(_)) if self.was_ready || self.then == AfterStop::Idle => {
                self.handle_stopped(now, policy)
            }
            // The process died while it drained, and no successor is wanted.
            (Draining, LifecycleEvent::Exited(_)) if self.then == AfterStop::Idle => {
                self.handle_stopped(now, policy)
            }
            (
                Starting | Ready | Suspect | Draining | Stopping,
                LifecycleEvent::Exited(cause) | LifecycleEvent::SpawnFailed(cause),
            ) => self.handle_failure(now, cause, policy),
            _ => Vec::new(),
        }
    }

    fn start(&mut self) -> Vec<LifecycleEffect> {
        self.phase = BackendPhase::Starting;
        self.was_ready = false;
        self.ready_since = None;
        vec![LifecycleEffect::Arm(LifecycleTimer::Start), LifecycleEffect::Spawn]
    }

    fn drain(&mut self, then: AfterStop) -> Vec<LifecycleEffect> {
        self.then = then;
        self.phase = BackendPhase::Draining;
        vec![LifecycleEffect::CloseGate, LifecycleEffect::Arm(LifecycleTimer::Drain)]
    }

    fn stop(&mut self, then: AfterStop) -> Vec<LifecycleEffect> {
        self.then = then;
        // A requested stop during a start is no failure of the backend.
        self.was_ready |= self.phase == BackendPhase::Starting;
        self.phase = BackendPhase::Stopping;
        vec![LifecycleEffect::Term, LifecycleEffect::Arm(LifecycleTimer::Grace)]
    }

    fn handle_stopped(&mut self, now: Duration, policy: &LifecyclePolicy) -> Vec<LifecycleEffect> {
        self.clear_if_stable(now, policy);
        match self.then {
            AfterStop::Restart => self.start(),
            AfterStop::Idle => {
                self.phase = BackendPhase::Idle;
                vec![LifecycleEffect::Disarm]
            }
        }
    }

    fn handle_failure(
        &mut self,
        now: Duration,
        cause: EndCause,
        policy: &LifecyclePolicy,
    ) -> Vec<LifecycleEffect> {
        // A process that was ready could start, so the next start may succeed.
        let cause = if self.was_ready { EndCause::MayPass } else { cause };
        self.clear_if_stable(now, policy);
        let mut effects = vec![LifecycleEffect::CloseGate];
        if cause == EndCause::MemoryReturning {
            self.crowded_starts = self.crowded_starts.saturating_add(1);
        } else {
            self.failures = self.failures.saturating_add(1);
            self.crowded_starts = 0;
            if !self.was_ready {
                self.failed_starts = self.failed_starts.saturating_add(1);
            }
            effects.extend(self.count_unexpected_end(now, policy));
        }
        self.phase =
            if cause == EndCause::NeedsChange { BackendPhase::Failed } else { BackendPhase::Backoff };
        effects.push(LifecycleEffect::Arm(match cause {
            EndCause::NeedsChange => LifecycleTimer::Trial,
            EndCause::MemoryReturning => {
                LifecycleTimer::Backoff { failures: self.crowded_starts, short: true }
            }
            EndCause::MayPass if self.was_ready => {
                LifecycleTimer::Backoff { failures: self.failures, short: true }
            }
            EndCause::MayPass => LifecycleTimer::Backoff { failures: self.failed_starts, short: false },
        }));
        effects
    }

    fn count_unexpected_end(&mut self, now: Duration, policy: &LifecyclePolicy) -> Option<LifecycleEffect> {
        self.recent.push_back(now);
        let most = policy.breaker_failures.max(1) as usize;
        let late = |at: &Duration| now.saturating_sub(*at) > policy.breaker_window;
        // Keep the list bounded over months of failures.
        while self.recent.len() > most || self.recent.front().is_some_and(late) {
            self.recent.pop_front();
        }
        let many = self.recent.len() >= most;
        let news = many && !self.alarmed;
        self.alarmed = many;
        news.then_some(LifecycleEffect::Alarm)
    }

    fn clear_if_stable(&mut self, now: Duration, policy: &LifecyclePolicy) {
        if self.ready_since.take().is_some_and(|since| now.saturating_sub(since) >= policy.stable_after) {
            self.clear_failures();
        }
    }

    fn clear_failures(&mut self) {
        self.failures = 0;
        self.failed_starts = 0;
        self.crowded_starts = 0;
        self.recent.clear();
        self.alarmed = false;
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
