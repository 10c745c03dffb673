//! State of one generation that its leases share.

use std::any::{Any, TypeId};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_policies::{GenerationId, QuickMap, ServerFacts, WorkDone};

use crate::lease::outcomes::OutcomeStats;
use crate::lease::pulse::ProgressTracker;
use crate::origin::RemoteOrigin;
use crate::process::BackendProcess;
use crate::process::endpoint::ListenAddress;
use crate::process::needs::AnswerIdentity;
use crate::sync::lock;

/// Target of a generation's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAddress {
    /// A local process.
    Process(ListenAddress),
    /// A remote endpoint.
    Remote(Arc<RemoteOrigin>),
}

impl LeaseAddress {
    /// Returns `None` for a remote endpoint.
    pub(crate) fn endpoint(&self) -> Option<&ListenAddress> {
        match self {
            Self::Process(endpoint) => Some(endpoint),
            Self::Remote(_) => None,
        }
    }
}

impl From<ListenAddress> for LeaseAddress {
    fn from(endpoint: ListenAddress) -> Self {
        Self::Process(endpoint)
    }
}

/// How the supervisor ended the process.
#[derive(Debug, Default)]
struct StopRecord {
    requested: AtomicBool,
    /// Duration of the hang that was the reason.
    hung_for: OnceLock<Duration>,
}

/// Shared state of one generation.
#[derive(Debug)]
pub(crate) struct GenerationCell {
    pub(crate) id: GenerationId,
    pub(crate) address: LeaseAddress,
    /// Number of the replica, from 0.
    pub(crate) replica: AtomicU32,
    /// The process; empty until it has been created.
    pub(crate) process: OnceLock<Weak<dyn BackendProcess>>,
    facts: Mutex<ServerFacts>,
    /// Identity of the process's answers at its start; empty until known.
    pub(crate) kin: OnceLock<AnswerIdentity>,
    /// False if the command names the slot directory.
    pub(crate) saves_for_us: AtomicBool,
    pub(crate) pulses: ProgressTracker,
    pub(crate) outcomes: Mutex<OutcomeStats>,
    pub(super) attachments: Mutex<QuickMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    stop: StopRecord,
    pub(super) revoked: CancellationToken,
}

impl GenerationCell {
    pub(crate) fn new(id: GenerationId, address: impl Into<LeaseAddress>, facts: ServerFacts) -> Self {
        Self {
            id,
            address: address.into(),
            replica: AtomicU32::new(0),
            process: OnceLock::new(),
            facts: Mutex::new(facts),
            kin: OnceLock::new(),
            saves_for_us: AtomicBool::new(false),
            pulses: ProgressTracker::new(),
            outcomes: Mutex::default(),
            attachments: Mutex::default(),
            stop: StopRecord::default(),
            revoked: CancellationToken::new(),
        }
    }

    /// Sets facts of an adopted process: earlier work, and who may save its slots.
    pub(crate) fn inherit(&self, work: WorkDone, saves_for_us: bool) {
        lock(&self.outcomes).work = work;
        self.saves_for_us.store(saves_for_us, Ordering::Relaxed);
    }

    pub(crate) fn replica(&self) -> u32 {
        self.replica.load(Ordering::Relaxed)
    }

    pub(crate) fn add_work(&self, work: WorkDone) {
        lock(&self.outcomes).work += work;
    }

    pub(crate) fn work(&self) -> WorkDone {
        lock(&self.outcomes).work
    }

    pub(crate) fn facts(&self) -> ServerFacts {
        *lock(&self.facts)
    }

    pub(crate) fn set_facts(&self, facts: ServerFacts) {
        *lock(&self.facts) = facts;
    }

    /// Records a hang, before the stop is requested. `since`: duration of the hang.
    pub(crate) fn note_hung(&self, since: Duration) {
        let _known = self.stop.hung_for.set(since);
    }

    pub(crate) fn hung_for(&self) -> Option<Duration> {
        self.stop.hung_for.get().copied()
    }

    pub(crate) fn was_stopped(&self) -> bool {
        self.stop.requested.load(Ordering::Acquire)
    }

    /// Records a stop requested by the supervisor, and revokes the leases.
    pub(crate) fn request_stop(&self) {
        self.stop.requested.store(true, Ordering::Release);
        self.revoke();
    }

    /// Revokes the leases and drops attached values: open connections would delay llama-server's end.
    pub(crate) fn revoke(&self) {
        self.revoked.cancel();
        let attachments = std::mem::take(&mut *lock(&self.attachments));
        drop(attachments);
    }
}
