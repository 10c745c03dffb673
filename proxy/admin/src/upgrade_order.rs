//! Orders to upgrade and their answers, one at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// An order to upgrade to another program.
#[derive(Debug)]
pub struct UpgradeOrder {
    /// Path of the new program; `None`: the path of the running program.
    pub to: Option<PathBuf>,
    /// Time limit; `None`: the configured one.
    pub wait: Option<Duration>,
    /// Name of the caller, for the log.
    pub caller: Arc<str>,
    /// Answers the caller.
    pub reply: OrderReply,
}

/// Answers the client that gave the order. Until then, no other order of a client is accepted, even if the
/// client has left.
#[derive(Debug)]
pub struct OrderReply {
    sender: oneshot::Sender<Result<UpgradeReport, String>>,
    under_way: Option<UnderWayGuard>,
}

impl OrderReply {
    /// Creates a reply that nobody reads, for an order given by a signal.
    pub fn discarded() -> Self {
        Self { sender: oneshot::channel().0, under_way: None }
    }

    /// Sends the outcome of the upgrade.
    pub fn send(self, outcome: Result<UpgradeReport, String>) {
        // First, because the client may give its next order as soon as it has the answer.
        drop(self.under_way);
        // Sending fails if the client has left.
        drop(self.sender.send(outcome));
    }
}

/// The answer to `POST /upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeReport {
    /// Version of the old program.
    pub from: String,
    /// Version of the new program.
    pub to: String,
    /// Number of processes that were taken over.
    pub processes: usize,
    /// Milliseconds for which the fleet's decisions were frozen; requests continued.
    pub frozen_ms: u64,
    /// Path of the new program.
    #[serde(default)]
    pub program: String,
    /// The new program is the same file as the old one.
    #[serde(default)]
    pub same: bool,
    /// The program that a restart of the instance would start, if that is another program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_starts: Option<String>,
}

/// Accepts orders to upgrade, one at a time. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct UpgradeOrders {
    sender: Option<mpsc::Sender<UpgradeOrder>>,
    under_way: Arc<AtomicBool>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OrderError {
    UnderWay,
    Failed(String),
}

impl UpgradeOrders {
    /// Creates the sender of orders, and their receiver.
    pub fn new() -> (Self, mpsc::Receiver<UpgradeOrder>) {
        let (sender, receiver) = mpsc::channel(1);
        (Self { sender: Some(sender), under_way: Arc::default() }, receiver)
    }

    /// Sends an order and waits for its outcome. The upgrade continues if the caller stops waiting.
    pub(crate) async fn send(
        &self,
        to: Option<PathBuf>,
        wait: Option<Duration>,
        by: Arc<str>,
    ) -> Result<UpgradeReport, OrderError> {
        let gone = || OrderError::Failed("the instance is not ready for that, or is ending".to_owned());
        let Some(sender) = &self.sender else { return Err(gone()) };
        if self.under_way.swap(true, Ordering::SeqCst) {
            return Err(OrderError::UnderWay);
        }
        let under_way = Some(UnderWayGuard(Arc::clone(&self.under_way)));
        let (answer_sender, answer) = oneshot::channel();
        let reply = OrderReply { sender: answer_sender, under_way };
        sender.send(UpgradeOrder { to, wait, caller: by, reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?.map_err(OrderError::Failed)
    }
}

#[derive(Debug)]
struct UnderWayGuard(Arc<AtomicBool>);

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_upgrade_whose_client_left_is_under_way_until_it_ends() {
        let (orders, mut inbox) = UpgradeOrders::new();
        let mut abandoned = Box::pin(orders.send(None, None, "first".into()));
        let order = tokio::select! {
            _ = &mut abandoned => panic!("answered before the upgrade ended"),
            order = inbox.recv() => order.expect("the sender lives"),
        };
        drop(abandoned);
        assert_eq!(orders.send(None, None, "second".into()).await, Err(OrderError::UnderWay));

        order.reply.send(Err("no such program".to_owned()));
        let third = orders.send(None, None, "third".into());
        let answer =
            async { inbox.recv().await.expect("the sender lives").reply.send(Err("too early".to_owned())) };
        let (outcome, ()) = tokio::join!(third, answer);
        assert_eq!(outcome, Err(OrderError::Failed("too early".to_owned())));
    }
}
