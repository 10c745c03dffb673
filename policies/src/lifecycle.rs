//! The life of one backend, as a pure step function.
//!
//! ```text
//!             Up                    ProbeReady
//!   Idle ---------------> Starting ------------> Ready <-----------+
//!    ^                     |    |                |  | ProbesLost   | ProbesBack
//!    |                     |    | start          |  v              |
//!    |                exit |    | deadline       | Suspect --------+   no new leases, old ones run
//!    |                     v    v                |  | lost too long
//!    |  breaker open    Backoff <---- exit ------+  |
//!    |  +----------------+  | timer  ^              |  Down/Recycle
//!    |  v                   +> Starting             v  v
//!  Failed -- Reset --> Idle      |    |  Draining -- drained or deadline --> Stopping
//!                                +--------------------------------------------^  |
//!                                                     TERM, grace, KILL; exit:   |
//!                                   Restart -> Starting, Idle -> Idle <----------+
//! ```
//!
//! A [`Machine`] is one such life. Replacing by overlap uses two machines: the new one starts from `Idle`, and when it
//! is `Ready` the old one is told `Down`. The machine never acts: it returns [`Effect`]s for its owner to carry out.
//!
//! Invariants (property-tested): the gate is open only in `Ready`; a child is spawned only when none lives; `Kill`
//! follows `Term` and the grace, except after `KillNow` and for a child that never became ready; `Draining` and
//! `Stopping` always have a timer; an unexpected exit leads to `Backoff` or `Failed`, never straight to `Starting`.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::BackoffPolicy;

/// Where a backend is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// No process, none wanted.
    Idle,
    /// A process runs and does not answer requests yet.
    Starting,
    /// The process answers; leases may be taken.
    Ready,
    /// Probes are lost: no new leases, running ones go on.
    Suspect,
    /// No new leases; waits for the running ones to end.
    Draining,
    /// The process was told to end.
    Stopping,
    /// The process died; the next start waits.
    Backoff,
    /// It died too often: only an operator (or a new configuration) starts it again.
    Failed,
}

impl Phase {
    /// The name used in status, events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
            Self::Backoff => "backoff",
            Self::Failed => "failed",
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What follows a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Then {
    /// Stay down.
    Idle,
    /// Start the next generation at once.
    Restart,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The backend is wanted: a request waits for it, or it is preloaded.
    Up,
    /// It is not wanted any more: drain, stop, stay down.
    Down,
    /// Replace it: drain, stop, start again.
    Recycle,
    /// End the process without draining.
    KillNow(Then),
    /// A probe was answered: ready for requests.
    ProbeReady,
    /// Several probes in a row were lost.
    ProbesLost,
    /// A probe was answered after some were lost.
    ProbesBack,
    /// The last lease ended (sent while draining; harmless otherwise).
    Drained,
    /// The process is gone and reaped.
    Exited,
    /// The same, and one request is to blame, which is kept out from now on: that says nothing about the backend.
    Felled,
    /// The process could not even be created.
    SpawnFailed,
    /// A timer that an [`Effect::Arm`] asked for has run out.
    Timer(Timer),
    /// An operator clears `Failed` or `Backoff`.
    Reset,
}

/// The timers of a backend. At most one is armed at a time: every transition replaces the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    /// The process has to be ready by then.
    Start,
    /// Lost probes have to come back by then.
    Suspect,
    /// Leases have to end by then.
    Drain,
    /// The process has to be gone by then, after TERM.
    Grace,
    /// The next start, after this many consecutive failures.
    Backoff {
        /// Consecutive failures, 1 or more: the input of [`crate::backoff::delay`].
        failures: u32,
    },
}

/// What the owner of the machine must do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Create the process and probe it.
    Spawn,
    /// Let leases be taken.
    OpenGate,
    /// Take no more leases.
    CloseGate,
    /// Send SIGTERM, once: llama-server exits at once on a second one.
    Term,
    /// Send SIGKILL to the whole process group.
    Kill,
    /// Arm this timer, in place of any other. How long it runs is the owner's configuration.
    Arm(Timer),
    /// Disarm the timer.
    Disarm,
    /// Too many failures: stay down until an operator resets.
    GiveUp,
}

/// How many failures are too many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LifecyclePolicy {
    /// Delays between failures.
    pub backoff: BackoffPolicy,
    /// The breaker opens at this many unexpected exits ...
    pub breaker_failures: u32,
    /// ... within this time.
    pub breaker_window: Duration,
    /// A backend that was ready for this long has its consecutive failures forgotten.
    pub stable_after: Duration,
}

/// The state of one backend's life. See the module for the drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    then: Then,
    was_ready: bool,
    ready_since: Option<Duration>,
    failures: u32,
    recent: VecDeque<Duration>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// A machine in [`Phase::Idle`].
    pub fn new() -> Self {
        Self {
            phase: Phase::Idle,
            then: Then::Idle,
            was_ready: false,
            ready_since: None,
            failures: 0,
            recent: VecDeque::new(),
        }
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Unexpected ends in a row, without a stable time between.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// What follows the present `Draining` or `Stopping`; `None` in other phases.
    pub fn then(&self) -> Option<Then> {
        matches!(self.phase, Phase::Draining | Phase::Stopping).then_some(self.then)
    }

    /// Whether a process exists (or is being created).
    pub fn has_process(&self) -> bool {
        !matches!(self.phase, Phase::Idle | Phase::Backoff | Phase::Failed)
    }

    /// Takes an event at `now` (time since an epoch of the caller's choice, never going back) and returns what to do.
    ///
    /// Events that mean nothing in the present phase change nothing: late probes and timers are harmless.
    pub fn step(&mut self, event: Event, now: Duration, policy: &LifecyclePolicy) -> Vec<Effect> {
        use Phase::{Backoff, Draining, Failed, Idle, Ready, Starting, Stopping, Suspect};
        match (self.phase, event) {
            (Idle, Event::Up | Event::Recycle) | (Backoff, Event::Timer(Timer::Backoff { .. })) => {
                self.start()
            }
            (Backoff | Failed, Event::Recycle) => {
                self.forgive();
                self.start()
            }
            (Backoff | Failed, Event::Reset) => {
                self.forgive();
                self.phase = Idle;
                vec![Effect::Disarm]
            }
            // A failed backend stays failed when it is not wanted: only a reset forgives it.
            (Backoff, Event::Down | Event::KillNow(Then::Idle)) => {
                self.phase = Idle;
                vec![Effect::Disarm]
            }

            (Starting | Suspect, Event::ProbeReady) | (Suspect, Event::ProbesBack) => {
                if self.phase == Starting {
                    self.ready_since = Some(now);
                }
                self.was_ready = true;
                self.phase = Ready;
                vec![Effect::Disarm, Effect::OpenGate]
            }
            (Starting, Event::Timer(Timer::Start)) => {
                // It never served anybody, so there is nothing to wait for.
                self.then = Then::Restart;
                self.was_ready = false;
                self.phase = Stopping;
                vec![Effect::Kill, Effect::Arm(Timer::Grace)]
            }
            (Starting, Event::Down) => self.stop(Then::Idle),
            (Starting, Event::Recycle) => self.stop(Then::Restart),

            (Ready, Event::ProbesLost) => {
                self.phase = Suspect;
                vec![Effect::CloseGate, Effect::Arm(Timer::Suspect)]
            }
            (Suspect, Event::Timer(Timer::Suspect)) | (Ready | Suspect, Event::Recycle) => {
                self.drain(Then::Restart)
            }
            (Ready | Suspect, Event::Down) => self.drain(Then::Idle),

            (Draining, Event::Drained | Event::Timer(Timer::Drain)) => self.stop(self.then),
            (Draining | Stopping, Event::Down) => {
                self.then = Then::Idle;
                Vec::new()
            }
            (Draining | Stopping, Event::Up | Event::Recycle) => {
                self.then = Then::Restart;
                Vec::new()
            }
            (Stopping, Event::Timer(Timer::Grace)) => vec![Effect::Kill, Effect::Arm(Timer::Grace)],

            (Starting | Ready | Suspect | Draining | Stopping, Event::KillNow(then)) => {
                self.then = then;
                self.phase = Stopping;
                vec![Effect::CloseGate, Effect::Kill, Effect::Arm(Timer::Grace)]
            }

            (Ready | Suspect, Event::Felled) => {
                // Not counted, and still not started at once: whoever is wrong about the blame must not make a storm.
                self.settle(now, policy);
                self.phase = Backoff;
                vec![Effect::CloseGate, Effect::Arm(Timer::Backoff { failures: 1 })]
            }
            (_, Event::Felled) => self.step(Event::Exited, now, policy),

            // An end that was asked for, of a process that had been of use.
            (Stopping, Event::Exited) if self.was_ready || self.then == Then::Idle => {
                self.stopped(now, policy)
            }
            // Died while it drained: its successor was wanted, or nothing was.
            (Draining, Event::Exited) if self.then == Then::Idle => self.stopped(now, policy),
            (Starting | Ready | Suspect | Draining | Stopping, Event::Exited | Event::SpawnFailed) => {
                self.failed(now, policy)
            }
            _ => Vec::new(),
        }
    }

    fn start(&mut self) -> Vec<Effect> {
        self.phase = Phase::Starting;
        self.was_ready = false;
        self.ready_since = None;
        vec![Effect::Arm(Timer::Start), Effect::Spawn]
    }

    fn drain(&mut self, then: Then) -> Vec<Effect> {
        self.then = then;
        self.phase = Phase::Draining;
        vec![Effect::CloseGate, Effect::Arm(Timer::Drain)]
    }

    fn stop(&mut self, then: Then) -> Vec<Effect> {
        self.then = then;
        // Stopping on request while starting is no failure of the backend.
        self.was_ready |= self.phase == Phase::Starting;
        self.phase = Phase::Stopping;
        vec![Effect::Term, Effect::Arm(Timer::Grace)]
    }

    fn stopped(&mut self, now: Duration, policy: &LifecyclePolicy) -> Vec<Effect> {
        self.settle(now, policy);
        match self.then {
            Then::Restart => self.start(),
            Then::Idle => {
                self.phase = Phase::Idle;
                vec![Effect::Disarm]
            }
        }
    }

    fn failed(&mut self, now: Duration, policy: &LifecyclePolicy) -> Vec<Effect> {
        self.settle(now, policy);
        self.failures = self.failures.saturating_add(1);
        self.recent.push_back(now);
        while self.recent.front().is_some_and(|at| now.saturating_sub(*at) > policy.breaker_window) {
            self.recent.pop_front();
        }
        if self.recent.len() >= policy.breaker_failures.max(1) as usize {
            self.phase = Phase::Failed;
            return vec![Effect::CloseGate, Effect::Disarm, Effect::GiveUp];
        }
        self.phase = Phase::Backoff;
        vec![Effect::CloseGate, Effect::Arm(Timer::Backoff { failures: self.failures })]
    }

    /// A long time in service pays off old failures.
    fn settle(&mut self, now: Duration, policy: &LifecyclePolicy) {
        if self.ready_since.take().is_some_and(|since| now.saturating_sub(since) >= policy.stable_after) {
            self.forgive();
        }
    }

    fn forgive(&mut self) {
        self.failures = 0;
        self.recent.clear();
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
