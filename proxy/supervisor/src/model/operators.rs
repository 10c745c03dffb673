//! Operators who wait for a restart, a drain or a reclaim.

use tokio::sync::oneshot;
use warden_policies::GenerationId;
use warden_policies::lifecycle::BackendPhase;

use super::message::RequestedBy;
use super::replacement::ReplacementTracker;
use super::unit::{ProcessUnit, UnitList, UnitRole};
use crate::error::ControlError;
use crate::view::entry::ReclaimEntry;
use crate::view::ledger::LedgerEntry;

/// Restart requested by an operator; done when each replica has a process newer than generation `after`.
#[derive(Debug)]
pub(super) struct RestartRequest {
    pub(super) after: GenerationId,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
}

#[derive(Debug)]
pub(super) struct ReclaimRequest {
    pub(super) generations: Vec<GenerationId>,
    pub(super) entries: Vec<ReclaimEntry>,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
}

/// Drain requested by an operator: these generations have to end.
#[derive(Debug)]
pub(super) struct DrainRequest {
    pub(super) generations: Vec<GenerationId>,
    pub(super) reply: oneshot::Sender<Result<(), ControlError>>,
}

#[derive(Default)]
pub(super) struct OperatorRequests {
    pub(super) restarts: Vec<RestartRequest>,
    pub(super) drains: Vec<DrainRequest>,
    pub(super) reclaims: Vec<ReclaimRequest>,
    pub(super) answers: Vec<Box<dyn FnOnce() + Send>>,
}

impl OperatorRequests {
    pub(super) fn is_empty(&self) -> bool {
        self.restarts.is_empty() && self.drains.is_empty() && self.reclaims.is_empty()
    }

    pub(super) fn who_reclaims(&self, generation: GenerationId) -> Option<String> {
        let asked = self.reclaims.iter().filter(|waiting| waiting.generations.contains(&generation));
        asked.filter_map(|waiting| waiting.by.as_deref()).map(str::to_owned).next()
    }

    pub(super) fn note_reclaimed(&mut self, entry: &ReclaimEntry) {
        for waiting in &mut self.reclaims {
            if let Some(index) = waiting.generations.iter().position(|known| *known == entry.generation) {
                waiting.generations.remove(index);
                waiting.entries.push(entry.clone());
            }
        }
        let done = self.reclaims.extract_if(.., |waiting| waiting.generations.is_empty());
        for request in done.collect::<Vec<_>>() {
            self.answer(request.reply, Ok(request.entries));
        }
    }

    /// Answers operators whose restart is done. Returns true if there was one.
    pub(super) fn answer_done_restarts(
        &mut self,
        units: &UnitList,
        replacements: &ReplacementTracker,
    ) -> bool {
        let serves =
            |unit: &ProcessUnit| unit.role != UnitRole::Current || unit.phase() == BackendPhase::Ready;
        if !replacements.is_empty() || !units.all.iter().all(serves) {
            return false;
        }
        let is_done = |after| !units.with_role(UnitRole::Current).any(|unit| unit.is_not_newer(after));
        let count = self.restarts.iter().take_while(|restart| is_done(restart.after)).count();
        for restart in self.restarts.drain(..count).collect::<Vec<_>>() {
            let is_present = |entry: &&LedgerEntry| {
                entry.to.is_some_and(|generation| units.with_generation(generation).is_some())
            };
            let entries = replacements.last.iter().filter(is_present).cloned().collect();
            self.answer(restart.reply, Ok(entries));
        }
        count > 0
    }

    /// Answers operators whose drain is done: the processes that ran at the request are gone.
    pub(super) fn answer_done_drains(&mut self, units: &UnitList) {
        let lives = |id: &GenerationId| units.with_generation(*id).is_some();
        let is_done = |drain: &mut DrainRequest| !drain.generations.iter().any(lives);
        for drain in self.drains.extract_if(.., is_done).collect::<Vec<_>>() {
            self.answer(drain.reply, Ok(()));
        }
    }

    /// Keeps an answer until the published view shows the result.
    pub(super) fn answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        self.answers.push(Box::new(move || drop(reply.send(answer))));
    }

    pub(super) fn send_answers(&mut self) {
        for answer in std::mem::take(&mut self.answers) {
            answer();
        }
    }
}
