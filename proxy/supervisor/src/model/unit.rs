//! One life-cycle machine, its timer, and the process that it has at the moment.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::health::Lost;
use warden_policies::lifecycle::{Machine, Phase, Timer};
use warden_policies::restraint::Held;
use warden_policies::sample::HostMemory;
use warden_policies::{Decision, GenerationId};
use warden_sensors::Report;

use super::act::Recipe;
use super::watched::Watched;
use crate::lease::Cell;
use crate::needs::Sight;
use crate::process::Process;
use crate::view::Failure;

/// Names a unit within its model; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitId(pub(super) u64);

/// What a unit is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Serves the replica.
    Current,
    /// Will serve it as soon as it is ready: the new half of an overlap.
    Successor,
    /// Drains and goes: the old half of an overlap, or a replica that is no longer configured.
    Retiring,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) id: UnitId,
    pub(super) replica: u32,
    pub(super) role: Role,
    pub(super) machine: Machine,
    pub(super) timer: Option<(Timer, Instant)>,
    pub(super) live: Option<Live>,
    /// Starts in a row that did not get ready.
    pub(super) start_failures: u32,
    /// Why the last process ended by itself.
    pub(super) failure: Option<Failure>,
    /// What the files that it needs were like before its last start.
    pub(super) sight: Option<Sight>,
}

impl Unit {
    pub(super) fn new(id: UnitId, replica: u32, role: Role) -> Self {
        let machine = Machine::new();
        Self {
            id,
            replica,
            role,
            machine,
            timer: None,
            live: None,
            start_failures: 0,
            failure: None,
            sight: None,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.machine.phase()
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.live.as_ref().map(|live| live.id)
    }

    /// Whether waiting for the next start is pointless enough to tell the callers. Not while a process is a trial: then they
    /// wait for how it ends. Never after the end of a process that had served: the next start is not far.
    pub(super) fn is_hopeless(&self, failures_told: u32) -> bool {
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0 && self.start_failures >= failures_told,
            _ => false,
        }
    }

    /// Whether its next start may go otherwise once a file that it needs has changed.
    pub(super) fn waits_for_change(&self) -> bool {
        match self.phase() {
            Phase::Failed => true,
            Phase::Backoff => self.start_failures > 0,
            _ => false,
        }
    }
}

/// A signal for a process that is still being created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Terminate,
    Kill,
}

/// One generation: from the order to create it until it is reaped.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) id: GenerationId,
    pub(super) socket: PathBuf,
    pub(super) cell: Arc<Cell>,
    /// What it was made of, to tell whether the configuration has changed since.
    pub(super) made_of: Recipe,
    pub(super) process: Option<Arc<dyn Process>>,
    pub(super) pending: Option<Pending>,
    pub(super) timed_out: bool,
    pub(super) spawned: Instant,
    pub(super) ready: Option<Instant>,
    pub(super) slots: Option<u32>,
    /// When to probe next; `None` while a probe is out or none is wanted.
    pub(super) probe_at: Option<Instant>,
    pub(super) probes_lost: u32,
    /// Probes sent before this time prove nothing: it refused a connection since.
    pub(super) doubted: Option<Instant>,
    /// When to read memory next.
    pub(super) sample_at: Option<Instant>,
    /// When to read memory because of the idle edge at the second moment, if it is idle since then.
    pub(super) idle_sample_at: Option<(Instant, Instant)>,
    pub(super) idle_seen: Option<Instant>,
    pub(super) host: Option<HostMemory>,
    pub(super) host_at_ready: Option<HostMemory>,
    pub(super) report: Option<Report>,
    pub(super) sampled: bool,
    /// Readings that were begun, and the number of the last one that was taken in.
    pub(super) readings: (u64, u64),
    /// It came up with much less on GPUs than one like it had.
    pub(super) degraded: Option<Lost>,
    /// When to judge again without a new sample.
    pub(super) judge_at: Option<Instant>,
    pub(super) wanted_since: Option<Instant>,
    /// A policy drains it again at this time at the earliest: requests had outlasted its last drain.
    pub(super) drain_at: Option<Instant>,
    /// It is ended without draining: its grace is short.
    pub(super) hurried: bool,
    /// Its memory and health.
    pub(super) watched: Box<Watched>,
    /// What the policy said last, and what holds it back.
    pub(super) policy: Option<(Decision, Option<Held>)>,
    /// This generation's random number for jitter.
    pub(super) random: f64,
}

impl Live {
    pub(super) fn new(
        id: GenerationId,
        socket: PathBuf,
        cell: Arc<Cell>,
        made_of: Recipe,
        watched: Watched,
    ) -> Self {
        Self {
            id,
            socket,
            cell,
            made_of,
            process: None,
            pending: None,
            timed_out: false,
            spawned: Instant::now(),
            ready: None,
            slots: None,
            probe_at: None,
            probes_lost: 0,
            doubted: None,
            sample_at: None,
            idle_sample_at: None,
            idle_seen: None,
            host: None,
            host_at_ready: None,
            report: None,
            sampled: false,
            readings: (0, 0),
            degraded: None,
            judge_at: None,
            wanted_since: None,
            drain_at: None,
            hurried: false,
            watched: Box::new(watched),
            policy: None,
            random: rand::random(),
        }
    }

    /// SIGTERM, now or as soon as there is a process.
    pub(super) fn terminate(&mut self) {
        self.cell.revoke();
        match &self.process {
            Some(process) => process.terminate(),
            None => self.pending = self.pending.or(Some(Pending::Terminate)),
        }
    }

    /// SIGKILL, now or as soon as there is a process.
    pub(super) fn kill(&mut self) {
        self.cell.revoke();
        match &self.process {
            Some(process) => process.kill(),
            None => self.pending = Some(Pending::Kill),
        }
    }
}
