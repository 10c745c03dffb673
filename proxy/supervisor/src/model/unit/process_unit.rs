//! A unit of a model: a life-cycle machine with its timer and its process.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::lifecycle::{
    BackendPhase, LifecycleEvent, LifecycleMachine, LifecyclePolicy, LifecycleTimer,
};

use crate::clock;
use crate::error::BackendFailure;
use crate::lease::queue::LeaseQueue;
use crate::model::generation::LiveGeneration;
use crate::process::needs::NeedsCheck;
use crate::view::event::EventKind;
use crate::view::log::LogRing;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitId(pub(super) u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitRole {
    /// The process serves the replica.
    Current,
    /// The new process of an overlap serves once it is ready.
    Successor,
    /// The old process of an overlap, or of a replica that is no longer configured, drains.
    Retiring,
}

#[derive(Debug)]
pub(crate) struct ProcessUnit {
    pub(crate) id: UnitId,
    pub(crate) replica: u32,
    pub(crate) role: UnitRole,
    pub(crate) machine: LifecycleMachine,
    pub(crate) timer: Option<(LifecycleTimer, Instant)>,
    /// Start event that waits for room.
    pub(crate) held_start: Option<LifecycleEvent>,
    /// Boxed, because a process takes 1.6 KiB, and most models of a large configuration have none.
    pub(crate) live: Option<Box<LiveGeneration>>,
    pub(crate) start_failures: u32,
    /// Cause of the last unrequested end.
    pub(crate) failure: Option<BackendFailure>,
    /// Result of the file check before the last start.
    pub(crate) sight: Option<NeedsCheck>,
}

impl ProcessUnit {
    pub(crate) fn new(id: UnitId, replica: u32, role: UnitRole) -> Self {
        Self {
            id,
            replica,
            role,
            machine: LifecycleMachine::new(),
            timer: None,
            held_start: None,
            live: None,
            start_failures: 0,
            failure: None,
            sight: None,
        }
    }

    pub(crate) fn phase(&self) -> BackendPhase {
        self.machine.phase()
    }

    pub(crate) fn generation(&self) -> Option<GenerationId> {
        self.live.as_ref().map(|live| live.id)
    }

    pub(crate) fn due_next(&self) -> Option<Instant> {
        let of_life = self.timer.map(|(_, at)| at);
        let of_process = self.live.as_ref().and_then(|live| live.timers.next_deadline());
        of_life.into_iter().chain(of_process).min()
    }

    /// True if the unit serves its replica, but has no process.
    pub(crate) fn is_idle(&self) -> bool {
        self.role == UnitRole::Current && self.phase() == BackendPhase::Idle
    }

    /// True if the process drains and has no leases.
    pub(crate) fn is_drained(&self, leases: &LeaseQueue) -> bool {
        let is_unused = |generation| leases.with_state(|queue| queue.is_unused(generation));
        self.phase() == BackendPhase::Draining && self.generation().is_none_or(is_unused)
    }

    /// True if a retiring process is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.role == UnitRole::Retiring && !self.machine.has_process()
    }

    /// Detects that the process has become idle or busy. An idle process gets an idle sample, and a judgement
    /// if a replacement waits for a quiet moment.
    pub(crate) fn watch_idle(&mut self, leases: &LeaseQueue, settle: Duration, quiet_for: Duration) {
        if self.phase() != BackendPhase::Ready {
            return;
        }
        let Some(live) = &mut self.live else { return };
        // Repeat, because requests arrive and end meanwhile.
        loop {
            let idle = leases.idle_since(live.id);
            if live.timers.idle_seen != idle {
                live.timers.idle_seen = idle;
                live.timers.idle_sample = idle.map(|since| (clock::after(since, settle), since));
                if let Some(since) = idle
                    && live.wish.since.is_some()
                {
                    live.timers.judgement = Some(clock::after(since, quiet_for));
                }
            }
            let returns = live.timers.idle_sample.is_some();
            if leases.with_state(|queue| queue.table.watch_idle(live.id, idle, returns)) || returns {
                break;
            }
        }
    }

    /// Starts a timer of the machine, and returns its time.
    pub(crate) fn arm_timer(
        &mut self,
        timer: LifecycleTimer,
        timing: &LifecyclePolicy,
        logs: &LogRing,
    ) -> Duration {
        let live = self.live.as_mut();
        let after = match timer {
            LifecycleTimer::Start => timing.start_timeout,
            LifecycleTimer::Suspect => match live.and_then(|live| live.note_crash(logs)) {
                Some(since) => timing.crash_ends.saturating_sub(since.elapsed()).min(timing.suspect_timeout),
                None => timing.suspect_timeout,
            },
            // The drain deadline is shorter for a crashed or silent process.
            LifecycleTimer::Drain => {
                live.map_or(timing.drain_deadline, |live| live.probing.longest_drain(timing))
            }
            LifecycleTimer::Grace if live.is_some_and(|live| live.child.short_grace) => timing.kill_grace,
            LifecycleTimer::Grace => timing.stop_grace,
            LifecycleTimer::Backoff { failures, short } => timing.pause(failures, short, rand::random()),
            LifecycleTimer::Trial => timing.recheck,
        };
        self.timer = Some((timer, clock::after(Instant::now(), after)));
        after
    }

    /// Event to log when the unit has changed from one phase to another.
    pub(crate) fn phase_event(
        &self,
        before: BackendPhase,
        phase: BackendPhase,
        leases: &LeaseQueue,
        logs: &LogRing,
    ) -> Option<EventKind> {
        let live = self.live.as_ref();
        match (before, phase) {
            (_, BackendPhase::Suspect) => Some(EventKind::Suspect {
                refused: live.is_some_and(|live| live.probing.doubted_at.is_some()),
                crash: live.and_then(|live| live.crash_line(logs)),
            }),
            (BackendPhase::Suspect, BackendPhase::Ready) => Some(EventKind::Recovered),
            (_, BackendPhase::Draining) => {
                let in_flight = live.map_or(0, |live| leases.in_flight(live.id));
                Some(EventKind::Draining { in_flight })
            }
            (_, BackendPhase::Failed) => self.failure.clone().map(|failure| EventKind::Failed { failure }),
            _ => None,
        }
    }

    /// True if the unit has no process, or one with at most this number.
    pub(crate) fn is_not_newer(&self, after: GenerationId) -> bool {
        self.generation().is_none_or(|generation| generation <= after)
    }

    /// True if requests should be refused instead of waiting for the next start. False during a trial start
    /// and after the end of a process that had served: both soon show a result.
    pub(crate) fn is_hopeless(&self, failures_told: u32) -> bool {
        // This start waits only for room, which the loader frees for waiting requests.
        if self.held_start.is_some() {
            return false;
        }
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    pub(crate) fn waits_for_change(&self) -> bool {
        match self.phase() {
            BackendPhase::Failed => true,
            BackendPhase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}
