//! Requests to one process to give memory back, and their results.

use warden_policies::reclaim::{NoReclaim, ReclaimHistory};

use crate::process::reclaim_file::ReclaimResult;
use crate::view::ReclaimTotals;
use crate::view::entry::ReclaimEntry;

#[derive(Debug, Default)]
pub(crate) struct ReclaimState {
    pub(crate) history: ReclaimHistory,
    pub(crate) pending: Option<PendingReclaim>,
    pub(crate) count: u64,
    pub(crate) last: Option<ReclaimEntry>,
    pub(crate) refusal: Option<NoReclaim>,
}

#[derive(Debug)]
pub(crate) struct PendingReclaim {
    pub(crate) entry: ReclaimEntry,
    /// Number of readings begun before the answer. Only a later reading shows the effect.
    pub(crate) answered_at_reading: Option<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct ReclaimCounts {
    pub(crate) totals: ReclaimTotals,
    /// True if the pending requests are made to free memory for another model.
    pub(crate) for_another: bool,
}

impl PendingReclaim {
    pub(crate) fn set_answer(&mut self, answer: &ReclaimResult) {
        self.entry.outcome = answer.outcome;
        self.entry.heap = answer.heap;
        self.entry.cuda = answer.cuda;
        self.entry.given = answer.given;
        self.entry.ms = answer.ms;
    }
}

impl ReclaimCounts {
    pub(crate) fn add(&mut self, entry: &ReclaimEntry) {
        match self.totals.counts.iter_mut().find(|(known, _)| *known == entry.outcome) {
            Some((_, count)) => *count += 1,
            None => self.totals.counts.push((entry.outcome, 1)),
        }
        self.totals.given = self.totals.given.plus(entry.given);
    }
}
