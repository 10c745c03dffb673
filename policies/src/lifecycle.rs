//! The life of one backend, as a pure step function.
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
//! Nothing is down for ever: after a failure the next start is a trial, and trials go on. A process that had served is
//! followed by the next one after short pauses ([`LifecyclePolicy::crash_cap`]), because it could start a moment ago; one that
//! never became ready after pauses that grow up to [`BackoffPolicy::cap`]. A start that cannot succeed before something
//! else changes (a flag, a file) waits in [`Phase::Failed`] for that change, and is tried now and then all the same:
//! whoever judged that may have been wrong.
//!
//! A [`Machine`] is one such life. Replacing by overlap uses two machines: the new one starts from `Idle`, and when it
//! is `Ready` the old one is told `Down`. The machine never acts: it returns [`Effect`]s for its owner to carry out.
//!
//! Invariants (property-tested): the gate is open only in `Ready`; a child is spawned only when none lives; `Kill`
//! follows `Term` and the grace, except after `KillNow` and for a child that never became ready; every phase but `Idle` and
//! `Ready` always has a timer, so no way leads to a phase that only a person could end; an unexpected exit leads to `Backoff`
//! or `Failed`, never straight to `Starting`; `Failed` is reached only by a failed start that needs a change, and left by
//! that change at once; whatever happened before, timers and probes alone bring a backend that is wanted back to `Ready`
//! once its process starts again.

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
    /// It cannot start before something changes: a flag, a file. That change starts it, or a trial now and then.
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

/// What an end that nobody asked for says about the next start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The next start may go well.
    MayPass,
    /// The next start fails as well, unless something outside changes: a flag, a file.
    NeedsChange,
    /// Memory was short while somebody else was giving some back: that is no failure of this backend and is not counted.
    Crowded,
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
    /// The drain is given up: the process serves on. Only for one that is well.
    Resume,
    /// The last lease ended (sent while draining; harmless otherwise).
    Drained,
    /// The process is gone and reaped. The cause counts only if nobody asked for the end.
    Exited(Cause),
    /// The same, and one request is to blame, which is kept out from now on: that says nothing about the backend.
    Felled,
    /// The process could not even be created.
    SpawnFailed(Cause),
    /// A timer that an [`Effect::Arm`] asked for has run out.
    Timer(Timer),
    /// What a start needs is not what it was: the next start may go well.
    Changed,
    /// The next start is known to fail before something outside changes.
    Stuck,
    /// An operator or a new configuration clears `Failed` or `Backoff`.
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
        /// Consecutive failures of the same kind, 1 or more: the input of [`crate::backoff::delay`].
        failures: u32,
        /// The pause is at most [`LifecyclePolicy::crash_cap`]: the process that ended had been ready, or only found no room.
        short: bool,
    },
    /// The next start of a backend that waits for a change.
    Trial,
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
    /// It has failed as often as [`LifecyclePolicy::breaker_failures`] says: a person should know. Starts go on.
    Alarm,
}

/// How many failures are too many, and all deadlines. Reasons: `defaults.toml`, section `[lifecycle]`.
pub type LifecyclePolicy = crate::defaults::Lifecycle;

/// The state of one backend's life. See the module for the drawing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    then: Then,
    was_ready: bool,
    ready_since: Option<Duration>,
    failures: u32,
    /// Starts in a row that did not get ready.
    failed_starts: u32,
    /// Starts in a row that found no room while others were going.
    crowded: u32,
    recent: VecDeque<Duration>,
    alarmed: bool,
}

impl LifecyclePolicy {
    /// How long a probe may take after what looks like a crash: as many are lost as make it suspect before its time to end
    /// is over.
    pub fn crash_probe(&self) -> Duration {
        self.crash_ends / self.probes_lost.saturating_add(1)
    }

    /// The pause before the next start; `unit` is a random number in `[0, 1)`.
    pub fn pause(&self, failures: u32, short: bool, unit: f64) -> Duration {
        let cap = if short { self.crash_cap.min(self.backoff_cap) } else { self.backoff_cap };
        crate::backoff::delay(&BackoffPolicy { first: self.backoff_first, cap }, failures, unit)
    }
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
            failed_starts: 0,
            crowded: 0,
            recent: VecDeque::new(),
            alarmed: false,
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

    /// Whether a start follows at once when the process has ended.
    pub fn restarts_when_ended(&self) -> bool {
        // One that never was ready is started after a pause.
        self.phase == Phase::Stopping && self.was_ready && self.then == Then::Restart
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
            (Idle, Event::Up | Event::Recycle)
            | (Backoff, Event::Timer(Timer::Backoff { .. }))
            | (Failed, Event::Timer(Timer::Trial)) => self.start(),
            (Backoff | Failed, Event::Changed) => {
                self.failed_starts = 0;
                self.start()
            }
            (Backoff, Event::Stuck) => {
                self.phase = Failed;
                vec![Effect::Arm(Timer::Trial)]
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
            (Backoff | Failed, Event::Down | Event::KillNow(Then::Idle)) => {
                self.phase = Idle;
                vec![Effect::Disarm]
            }

            (Starting | Suspect, Event::ProbeReady) | (Suspect, Event::ProbesBack) => {
                if self.phase == Starting {
                    self.ready_since = Some(now);
                    self.failed_starts = 0;
                    self.crowded = 0;
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

            (Draining, Event::Resume) => {
                self.phase = Ready;
                vec![Effect::Disarm, Effect::OpenGate]
            }
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
                vec![Effect::CloseGate, Effect::Arm(Timer::Backoff { failures: 1, short: true })]
            }
            (_, Event::Felled) => self.step(Event::Exited(Cause::MayPass), now, policy),

            // An end that was asked for, of a process that had been of use.
            (Stopping, Event::Exited(_)) if self.was_ready || self.then == Then::Idle => {
                self.stopped(now, policy)
            }
            // Died while it drained: its successor was wanted, or nothing was.
            (Draining, Event::Exited(_)) if self.then == Then::Idle => self.stopped(now, policy),
            (
                Starting | Ready | Suspect | Draining | Stopping,
                Event::Exited(cause) | Event::SpawnFailed(cause),
            ) => self.failed(now, cause, policy),
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

    fn failed(&mut self, now: Duration, cause: Cause, policy: &LifecyclePolicy) -> Vec<Effect> {
        // A process that served could start, whatever its end looked like.
        let cause = if self.was_ready { Cause::MayPass } else { cause };
        self.settle(now, policy);
        let mut effects = vec![Effect::CloseGate];
        if cause == Cause::Crowded {
            self.crowded = self.crowded.saturating_add(1);
        } else {
            self.failures = self.failures.saturating_add(1);
            self.crowded = 0;
            if !self.was_ready {
                self.failed_starts = self.failed_starts.saturating_add(1);
            }
            effects.extend(self.alarm(now, policy));
        }
        self.phase = if cause == Cause::NeedsChange { Phase::Failed } else { Phase::Backoff };
        effects.push(Effect::Arm(match cause {
            Cause::NeedsChange => Timer::Trial,
            Cause::Crowded => Timer::Backoff { failures: self.crowded, short: true },
            Cause::MayPass if self.was_ready => Timer::Backoff { failures: self.failures, short: true },
            Cause::MayPass => Timer::Backoff { failures: self.failed_starts, short: false },
        }));
        effects
    }

    /// One more unexpected end. Told once for as long as they are that many.
    fn alarm(&mut self, now: Duration, policy: &LifecyclePolicy) -> Option<Effect> {
        self.recent.push_back(now);
        let most = policy.breaker_failures.max(1) as usize;
        let late = |at: &Duration| now.saturating_sub(*at) > policy.breaker_window;
        // No more than are looked at: a backend that fails for months needs no more memory for it.
        while self.recent.len() > most || self.recent.front().is_some_and(late) {
            self.recent.pop_front();
        }
        let many = self.recent.len() >= most;
        let news = many && !self.alarmed;
        self.alarmed = many;
        news.then_some(Effect::Alarm)
    }

    /// A long time in service pays off old failures.
    fn settle(&mut self, now: Duration, policy: &LifecyclePolicy) {
        if self.ready_since.take().is_some_and(|since| now.saturating_sub(since) >= policy.stable_after) {
            self.forgive();
        }
    }

    fn forgive(&mut self) {
        self.failures = 0;
        self.failed_starts = 0;
        self.crowded = 0;
        self.recent.clear();
        self.alarmed = false;
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
