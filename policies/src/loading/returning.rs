//! Memory of ended processes, until it shows as free.
//!
//! A driver may return memory a moment after its process has ended. Without this module, the loader would
//! unload another model although the memory is about to return.

use std::time::Duration;

use super::amounts::MemoryAmounts;

#[derive(Debug, Default)]
pub(super) struct ReturningMemory {
    /// Memory of each ended process, and the end of the wait for it; `None` until the first reading.
    gone: Vec<(MemoryAmounts, Option<Duration>)>,
    /// Free memory before the first of these processes ended; anything above has returned.
    before: MemoryAmounts,
    /// Time of the last reading, and the free memory at that time.
    seen: Option<(Duration, MemoryAmounts)>,
}

/// Missing memory below this fraction of a process's memory is ignored: other programs take memory, too.
const IGNORED_REST_DIVISOR: u64 = 16;

impl ReturningMemory {
    /// Returns the free memory at the last reading.
    pub(super) fn free(&self) -> Option<&MemoryAmounts> {
        self.seen.as_ref().map(|(_, free)| free)
    }

    pub(super) fn is_awaited(&self) -> bool {
        !self.gone.is_empty()
    }

    pub(super) fn add(&mut self, held: MemoryAmounts) {
        let Some((_, free)) = &self.seen else { return };
        if self.gone.is_empty() {
            self.before = free.clone();
        }
        self.gone.push((held, None));
    }

    /// Updates the free memory; returns the memory that has not returned and is still awaited.
    pub(super) fn update(
        &mut self,
        now: Duration,
        free: Option<&MemoryAmounts>,
        within: Duration,
    ) -> Option<MemoryAmounts> {
        // An old reading cannot be compared: the ended process may have taken or returned memory since.
        let is_old = |seen: &(Duration, MemoryAmounts)| now.saturating_sub(seen.0) > within;
        let is_stale = self.seen.as_ref().is_none_or(is_old);
        self.seen = free.map(|free| (now, free.clone()));
        for (_, until) in &mut self.gone {
            until.get_or_insert_with(|| if is_stale { now } else { now.saturating_add(within) });
        }
        self.gone.retain(|(_, until)| until.is_some_and(|until| now < until));
        let all = self.gone.iter().fold(MemoryAmounts::none(), |sum, (held, _)| sum.plus(held));
        let left = all.minus(&free?.minus(&self.before));
        if left.is_within(&all.divided_by(IGNORED_REST_DIVISOR)) {
            self.gone.clear();
        }
        (!self.gone.is_empty()).then_some(left)
    }
}
