//! Operators who wait: for a restart, for a drain. They are answered when the picture shows what they are told.

use tokio::sync::oneshot;
use warden_policies::GenerationId;

use crate::error::ControlError;
use crate::view::ledger::LedgerEntry;

/// A restart that an operator waits for: every replica is to have a process made after this generation.
#[derive(Debug)]
pub(super) struct Restart {
    pub(super) after: GenerationId,
    pub(super) reply: oneshot::Sender<Result<Vec<LedgerEntry>, ControlError>>,
}

/// A drain that an operator waits for: these generations are to be gone.
#[derive(Debug)]
pub(super) struct Drain {
    pub(super) generations: Vec<GenerationId>,
    pub(super) reply: oneshot::Sender<Result<(), ControlError>>,
}

#[derive(Default)]
pub(super) struct Operators {
    pub(super) restarts: Vec<Restart>,
    pub(super) drains: Vec<Drain>,
    /// Given at the end of the turn.
    answers: Vec<Box<dyn FnOnce() + Send>>,
}

impl Operators {
    pub(super) fn answer<T: Send + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        // Fails if the operator has left.
        self.answers.push(Box::new(move || drop(reply.send(answer))));
    }

    pub(super) fn give_answers(&mut self) {
        for answer in std::mem::take(&mut self.answers) {
            answer();
        }
    }
}

impl std::fmt::Debug for Operators {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { restarts, drains, answers } = self;
        write!(f, "{restarts:?}, {drains:?}, {} answers", answers.len())
    }
}
