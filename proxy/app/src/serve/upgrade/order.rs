//! Orders to upgrade and their answers, one at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// An order to upgrade to another program.
#[derive(Debug)]
pub(crate) struct Order {
    /// Path of the program; `None`: our own path.
    pub(crate) to: Option<PathBuf>,
    /// Time limit; `None`: the configured one.
    pub(crate) wait: Option<Duration>,
    /// Name of the operator who gave it.
    pub(crate) by: Arc<str>,
    pub(crate) reply: oneshot::Sender<Result<Upgraded, String>>,
}

/// Report of a finished upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Upgraded {
    /// The old version.
    pub(crate) from: String,
    /// The new version.
    pub(crate) to: String,
    /// Processes that were handed over.
    pub(crate) processes: usize,
    /// Duration of the freeze of decisions, in milliseconds; requests continued.
    pub(crate) frozen_ms: u64,
    /// Path of the new program.
    #[serde(default)]
    pub(crate) program: String,
    /// True if it is the same file as before.
    #[serde(default)]
    pub(crate) same: bool,
    /// The program that a restart of the instance would start, if it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) restart_starts: Option<String>,
}

/// Sends orders.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    sender: Option<mpsc::Sender<Order>>,
    under_way: Arc<AtomicBool>,
}

/// Why an order was not carried out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another upgrade is in progress.
    UnderWay,
    Failed(String),
}

impl Orders {
    /// Also returns the receiver.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Order>) {
        let (sender, receiver) = mpsc::channel(1);
        (Self { sender: Some(sender), under_way: Arc::default() }, receiver)
    }

    /// Sends an order and waits for its outcome. The upgrade continues if the caller stops waiting.
    ///
    /// # Errors
    ///
    /// Another upgrade is in progress, or this one failed.
    pub(crate) async fn give(
        &self,
        to: Option<PathBuf>,
        wait: Option<Duration>,
        by: Arc<str>,
    ) -> Result<Upgraded, Refused> {
        let gone = || Refused::Failed("the instance is not ready for that, or is ending".to_owned());
        let Some(sender) = &self.sender else { return Err(gone()) };
        if self.under_way.swap(true, Ordering::SeqCst) {
            return Err(Refused::UnderWay);
        }
        let over = Over(Arc::clone(&self.under_way));
        let (reply, answer) = oneshot::channel();
        sender.send(Order { to, wait, by, reply }).await.map_err(|_| gone())?;
        // Released when the upgrade is over, not when the caller stops waiting.
        let answer = answer.await;
        drop(over);
        answer.map_err(|_| gone())?.map_err(Refused::Failed)
    }
}

struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
