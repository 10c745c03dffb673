//! Liveness checks of the models' tasks and of the loader's task. A task that is stuck or has died does not
//! answer.

use tokio::sync::oneshot;
use warden_policies::ModelName;

use super::Fleet;
use crate::model::TaskMessage;

impl Fleet {
    /// Checks the loader's task. `None` if it no longer has to run.
    pub fn check_loader(&self) -> Option<oneshot::Receiver<()>> {
        (!self.inner.loader_ends.is_cancelled()).then(|| self.inner.context.loading.check_loader())
    }

    /// Checks the tasks of all models and canaries. Each receiver resolves when its task is responsive, and
    /// fails if the task has ended, as that of a model just removed may have.
    pub fn check_tasks(&self) -> Vec<(ModelName, oneshot::Receiver<()>)> {
        let roster = self.inner.roster.load();
        let handles = roster.handles().chain(roster.canaries());
        let asked = handles.map(|handle| {
            let (question, answer) = oneshot::channel();
            // A task that has ended drops the question, which is the answer.
            handle.sender.send(TaskMessage::Beat(question));
            (handle.leases.name().clone(), answer)
        });
        asked.collect()
    }
}
