//! Orders to upgrade and their answers, one at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

#[derive(Debug)]
pub(crate) struct UpgradeOrder {
    /// Path of the new program; `None`: the path of the running program.
    pub(crate) to: Option<PathBuf>,
    /// Time limit; `None`: the configured one.
    pub(crate) wait: Option<Duration>,
    /// Name of the operator who gave the order.
    pub(crate) caller: Arc<str>,
    pub(crate) reply: oneshot::Sender<Result<UpgradeReport, String>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpgradeReport {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) processes: usize,
    /// Duration of the freeze of decisions, in milliseconds; requests continued.
    pub(crate) frozen_ms: u64,
    #[serde(default)]
    pub(crate) program: String,
    /// The new program is the same file as the old one.
    #[serde(default)]
    pub(crate) same: bool,
    /// The program that a restart of the instance would start, if that is another program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) restart_starts: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct UpgradeOrders {
    sender: Option<mpsc::Sender<UpgradeOrder>>,
    under_way: Arc<AtomicBool>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OrderError {
    UnderWay,
    Failed(String),
}

impl UpgradeOrders {
    /// Creates the sender, and the receiver of the orders.
    pub(crate) fn new() -> (Self, mpsc::Receiver<UpgradeOrder>) {
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
        let over = UnderWayGuard(Arc::clone(&self.under_way));
        let (reply, answer) = oneshot::channel();
        sender.send(UpgradeOrder { to, wait, caller: by, reply }).await.map_err(|_| gone())?;
        // Released when the upgrade is over, not when the caller stops waiting.
        let answer = answer.await;
        drop(over);
        answer.map_err(|_| gone())?.map_err(OrderError::Failed)
    }
}

struct UnderWayGuard(Arc<AtomicBool>);

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
