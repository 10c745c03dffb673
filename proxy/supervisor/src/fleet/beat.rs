//! Questions of the watchdog to the models' tasks and the loader's task. A task that hangs or has died does
//! not answer.

use tokio::sync::oneshot;
use warden_policies::ModelName;

use super::Fleet;
use crate::model::TaskMessage;

impl Fleet {
    /// Asks the loader's task whether it is alive. `None` if that task no longer has to run.
    pub fn check_loader(&self) -> Option<oneshot::Receiver<()>> {
        (!self.inner.loader_ends.is_cancelled()).then(|| self.inner.context.loading.check_loader())
    }

    /// Asks the tasks of all models and canaries whether they are alive. Each receiver resolves when its
    /// task answers, and fails if the task has ended, as it may right after the model was removed.
    pub fn check_tasks(&self) -> Vec<(ModelName, oneshot::Receiver<()>)> {
        let roster = self.inner.roster.load();
        let handles = roster.handles().chain(roster.canaries());
        let asked = handles.map(|handle| {
            let (question, answer) = oneshot::channel();
            // If the task has ended, the question is dropped, and so the receiver fails.
            handle.sender.send(TaskMessage::Beat(question));
            (handle.leases.name().clone(), answer)
        });
        asked.collect()
    }
}
