//! Generations of one model that were opened and whose process is not gone.

use std::sync::Arc;

use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;
use warden_policies::{GenerationId, QuickMap, WorkDone};

use crate::lease::cell::GenerationCell;

#[derive(Debug)]
pub(crate) struct GenerationTable {
    pub(super) entries: QuickMap<GenerationId, GenerationEntry>,
    /// Closed generations that the task has to probe, because they refused a connection.
    pub(super) doubted: Vec<GenerationId>,
    /// End of the last lease on a generation that was removed later; at first, the creation of the queue.
    last_idle: Instant,
    /// Moment since which no generation is open; `None` while one is open, or if none ever was.
    pub(super) gap: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct GenerationEntry {
    pub(super) cell: Arc<GenerationCell>,
    idle_since: Option<Instant>,
    /// True if the task will check an idle generation again without being woken.
    task_will_look: bool,
}

#[derive(Debug)]
pub(crate) struct GenerationCounts {
    pub(crate) generation: GenerationId,
    pub(crate) in_flight: u32,
    pub(crate) work: WorkDone,
    pub(crate) open: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpenedGate {
    pub(crate) waiting: usize,
    /// Moment since which no generation was open. Before the first one, the moment when the oldest request
    /// began to wait. `None` if one was open.
    pub(crate) gap: Option<Instant>,
}

impl GenerationTable {
    pub(super) fn new() -> Self {
        Self { entries: QuickMap::default(), doubted: Vec::new(), last_idle: Instant::now(), gap: None }
    }

    pub(super) fn add(&mut self, cell: &Arc<GenerationCell>) {
        self.entries.entry(cell.id).or_insert_with(|| GenerationEntry {
            cell: Arc::clone(cell),
            idle_since: Some(Instant::now()),
            task_will_look: false,
        });
    }

    pub(super) fn has_replicas(&self) -> bool {
        self.entries.values().any(|entry| entry.cell.replica() > 0)
    }

    pub(super) fn remove(&mut self, generation: GenerationId) -> Option<GenerationEntry> {
        let entry = self.entries.remove(&generation)?;
        self.last_idle = self.last_idle.max(entry.idle_since.unwrap_or_else(Instant::now));
        Some(entry)
    }

    pub(super) fn occupy(
        &mut self,
        generation: GenerationId,
        kind: LeaseKind,
    ) -> Option<Arc<GenerationCell>> {
        let entry = self.entries.get_mut(&generation)?;
        if !matches!(kind, LeaseKind::Read | LeaseKind::Watch) {
            entry.idle_since = None;
        }
        Some(Arc::clone(&entry.cell))
    }

    /// Handles the end of a generation's last lease. Returns true if the task has to be woken: it waits for
    /// an idle generation (`awaited`), or would not check again by itself.
    pub(super) fn note_idle(&mut self, generation: GenerationId, last: LeaseKind, awaited: bool) -> bool {
        let Some(entry) = self.entries.get_mut(&generation) else { return true };
        if last == LeaseKind::Read && entry.idle_since.is_some() {
            return awaited;
        }
        entry.idle_since = Some(Instant::now());
        awaited || !std::mem::replace(&mut entry.task_will_look, true)
    }

    /// Requests a wake-up of the task when a generation becomes idle. `returns`: the task checks again by
    /// itself. Returns false if the generation became idle or busy after `seen`: check again now.
    pub(crate) fn watch_idle(
        &mut self,
        generation: GenerationId,
        seen: Option<Instant>,
        returns: bool,
    ) -> bool {
        let Some(entry) = self.entries.get_mut(&generation) else { return seen.is_none() };
        entry.task_will_look = returns;
        entry.idle_since == seen
    }

    pub(crate) fn take_doubted(&mut self) -> Vec<GenerationId> {
        std::mem::take(&mut self.doubted)
    }

    pub(super) fn idle_since(&self, generation: GenerationId) -> Option<Instant> {
        self.entries.get(&generation)?.idle_since
    }

    pub(super) fn last_idle(&self) -> Instant {
        let present = self.entries.values().filter_map(|entry| entry.idle_since).max();
        present.map_or(self.last_idle, |since| since.max(self.last_idle))
    }

    pub(crate) fn cell(&self, generation: GenerationId) -> Option<Arc<GenerationCell>> {
        self.entries.get(&generation).map(|entry| Arc::clone(&entry.cell))
    }
}
