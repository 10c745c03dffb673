//! The channel to a model's task. tokio reserves room for 32 messages per channel, and the largest message
//! has 224 bytes. The channel carries boxes, so it costs an idle model 0.5 KiB instead of 7 KiB.

use tokio::sync::mpsc;

use super::message::TaskMessage;

/// Receives the messages to a model's task, in the order in which they were sent.
#[derive(Debug)]
pub(crate) struct TaskInbox(mpsc::UnboundedReceiver<Box<TaskMessage>>);

/// Sends messages to a model's task.
#[derive(Clone, Debug)]
pub(crate) struct TaskOutbox(mpsc::UnboundedSender<Box<TaskMessage>>);

/// Opens the channel to a new task.
pub(crate) fn mailbox() -> (TaskOutbox, TaskInbox) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (TaskOutbox(sender), TaskInbox(receiver))
}

impl TaskInbox {
    /// Next message; `None` if all senders are dropped. Cancel safe: dropping the future loses no message.
    pub(crate) async fn recv(&mut self) -> Option<TaskMessage> {
        self.0.recv().await.map(|message| *message)
    }

    /// Next message, if one is waiting.
    #[cfg(test)]
    pub(crate) fn try_recv(&mut self) -> Option<TaskMessage> {
        self.0.try_recv().ok().map(|message| *message)
    }

    /// Number of waiting messages.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl TaskOutbox {
    /// Sends a message. If the task has ended, the message is dropped with its reply channel.
    pub(crate) fn send(&self, message: TaskMessage) {
        drop(self.0.send(Box::new(message)));
    }

    /// True if the task has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}
