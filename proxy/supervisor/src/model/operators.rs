//! Operators who wait for a restart, drain or reclaim. They are answered once the published view shows the
//! result.

use tokio::sync::oneshot;
use warden_policies::GenerationId;

use super::message::RequestedBy;
use crate::error::ControlError;
use crate::view::ledger::LedgerEntry;
use crate::view::reclaim_entry::ReclaimEntry;

/// Restart awaited by an operator: each replica needs a process newer than this generation.
#[derive(Debug)]
pub(super) struct RestartRequest {
    pub(super) after: GenerationId,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
}

/// Reclaim awaited by an operator.
#[derive(Debug)]
pub(super) struct ReclaimRequest {
    /// Generations that have not answered yet.
    pub(super) generations: Vec<GenerationId>,
    pub(super) entries: Vec<ReclaimEntry>,
    pub(super) by: RequestedBy,
    pub(super) reply: oneshot::Sender<Result<Vec<ReclaimEntry>, ControlError>>,
}

/// Drain awaited by an operator: these generations have to end.
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
    /// Answers to send to operators at the end of the task's turn.
    answers: Vec<Box<dyn FnOnce() + Send>>,
}

impl OperatorRequests {
    /// True if no operator waits.
    pub(super) fn is_empty(&self) -> bool {
        self.restarts.is_empty() && self.drains.is_empty() && self.reclaims.is_empty()
    }

    /// Name of the waiting operator who asked this generation for memory.
    pub(super) fn who_reclaims(&self, generation: GenerationId) -> Option<String> {
        let asked = self.reclaims.iter().filter(|waiting| waiting.generations.contains(&generation));
        asked.filter_map(|waiting| waiting.by.as_deref()).map(str::to_owned).next()
    }

    /// Records the answer of a generation to a reclaim request. Returns the operators' requests that are
    /// now complete.
    pub(super) fn note_reclaimed(
        &mut self,
        generation: GenerationId,
        entry: &ReclaimEntry,
    ) -> Vec<ReclaimRequest> {
        for waiting in &mut self.reclaims {
            if let Some(index) = waiting.generations.iter().position(|known| *known == generation) {
                waiting.generations.remove(index);
                waiting.entries.push(entry.clone());
            }
        }
        self.reclaims.extract_if(.., |waiting| waiting.generations.is_empty()).collect()
    }

    pub(super) fn queue_answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        // Sending fails if the operator no longer waits.
        self.answers.push(Box::new(move || drop(reply.send(answer))));
    }

    pub(super) fn send_answers(&mut self) {
        for answer in std::mem::take(&mut self.answers) {
            answer();
        }
    }
}

impl std::fmt::Debug for OperatorRequests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { restarts, drains, reclaims, answers } = self;
        write!(f, "{restarts:?}, {drains:?}, {reclaims:?}, {} answers", answers.len())
    }
}
