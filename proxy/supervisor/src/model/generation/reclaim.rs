//! Requests to one process to give memory back, and their results.

use warden_policies::reclaim::{NoReclaim, ReclaimHistory};

use crate::process::reclaim_file::ReclaimResult;
use crate::view::ReclaimTotals;
use crate::view::entry::ReclaimEntry;

#[derive(Debug, Default)]
pub(in crate::model) struct ReclaimState {
    pub(in crate::model) history: ReclaimHistory,
    pub(in crate::model) pending: Option<PendingReclaim>,
    pub(in crate::model) count: u64,
    pub(in crate::model) last: Option<ReclaimEntry>,
    pub(in crate::model) refusal: Option<NoReclaim>,
}

#[derive(Debug)]
pub(in crate::model) struct PendingReclaim {
    pub(in crate::model) entry: ReclaimEntry,
    /// Number of readings begun before the answer. Only a later reading shows the effect.
    pub(in crate::model) answered_at_reading: Option<u64>,
}

#[derive(Debug, Default)]
pub(in crate::model) struct ReclaimCounts {
    pub(in crate::model) totals: ReclaimTotals,
    /// True if the pending requests are made to free memory for another model.
    pub(in crate::model) for_another: bool,
}

impl PendingReclaim {
    pub(in crate::model) fn set_answer(&mut self, answer: &ReclaimResult) {
        self.entry.outcome = answer.outcome;
        self.entry.heap = answer.heap;
        self.entry.cuda = answer.cuda;
        self.entry.given = answer.given;
        self.entry.ms = answer.ms;
    }
}

impl ReclaimCounts {
    pub(in crate::model) fn add(&mut self, entry: &ReclaimEntry) {
        match self.totals.counts.iter_mut().find(|(known, _)| *known == entry.outcome) {
            Some((_, count)) => *count += 1,
            None => self.totals.counts.push((entry.outcome, 1)),
        }
        self.totals.given = self.totals.given.plus(entry.given);
    }
}
