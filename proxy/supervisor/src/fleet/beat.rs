//! Whether the tasks of the models turn, and the one that decides which of them are loaded: each is asked for a word,
//! and one that is stuck or has died gives none.

use tokio::sync::oneshot;
use warden_policies::ModelName;

use super::Fleet;
use crate::model::Message;

impl Fleet {
    /// Asks the task that decides which models are loaded. `None` if it is not to run any more.
    pub fn ask_loader(&self) -> Option<oneshot::Receiver<()>> {
        (!self.inner.loader_ends.is_cancelled()).then(|| self.inner.context.loading.ask())
    }

    /// Asks all models, canaries too: whom, and what resolves when its task turns. It fails if that task has ended,
    /// which those of models that were just removed may have.
    pub fn ask_tasks(&self) -> Vec<(ModelName, oneshot::Receiver<()>)> {
        let roster = self.inner.roster.load();
        let handles = roster.handles().chain(roster.canaries());
        let asked = handles.map(|handle| {
            let (question, answer) = oneshot::channel();
            // A task that has ended drops it, and that is the answer.
            handle.sender.send(Message::Beat(question));
            (handle.leases.name().clone(), answer)
        });
        asked.collect()
    }
}
