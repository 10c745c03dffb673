//! The configuration, read again beside everything else: a disk that hangs keeps nobody from hearing what we are told.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::Plan;
use crate::config::machine::Machine;
use crate::config::resolve::Resolved;
use crate::exit::Failure;

/// Files of configuration and the heads of models take milliseconds, a llama-server that is asked for its version some seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads, one at a time.
pub(super) struct Reading {
    plan: Plan,
    machine: Machine,
    under_way: Option<UnderWay>,
    /// What is under way may have begun before the last change: it is read once more.
    again: bool,
}

struct UnderWay {
    task: JoinHandle<Result<Resolved, Failure>>,
    since: Instant,
    told: bool,
}

/// What came of it.
pub(super) enum Read {
    Done(Box<Result<Resolved, Failure>>),
    /// Nothing yet, for so long.
    Late(Duration),
}

impl Reading {
    pub(super) fn new(plan: &Plan, machine: &Machine) -> Self {
        Self { plan: plan.clone(), machine: machine.clone(), under_way: None, again: false }
    }

    /// Reads all anew; once more behind what is under way, if something is.
    pub(super) fn begin(&mut self) {
        if self.under_way.is_some() {
            self.again = true;
            return;
        }
        let (plan, machine, here) = (self.plan.clone(), self.machine.clone(), Handle::current());
        // On a thread of its own: a read from a disk cannot be given up.
        let task = tokio::task::spawn_blocking(move || here.block_on(plan.resolve(&machine)));
        self.under_way = Some(UnderWay { task, since: Instant::now(), told: false });
    }

    /// Whether something is being read.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Resolves with what was read, and once if that takes long. May be dropped at any point.
    pub(super) async fn read(&mut self) -> Read {
        let Some(under_way) = &mut self.under_way else { return std::future::pending().await };
        let done = tokio::select! {
            done = &mut under_way.task => done,
            () = sleep_until(under_way.since + PATIENCE), if !under_way.told => {
                under_way.told = true;
                return Read::Late(PATIENCE);
            }
        };
        self.under_way = None;
        if std::mem::take(&mut self.again) {
            self.begin();
        }
        let panicked = |_| Err(Failure::failed("reading it ended because of the internal error above"));
        Read::Done(Box::new(done.unwrap_or_else(panicked)))
    }
}
