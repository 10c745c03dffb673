//! Who asks for an upgrade, and how it is answered: one at a time.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

/// An order to let another program take our place.
#[derive(Debug)]
pub(crate) struct Order {
    /// The file; where ours was found if there is none.
    pub(crate) to: Option<PathBuf>,
    /// How long it may take; as long as usual if there is nothing.
    pub(crate) wait: Option<Duration>,
    /// Who wants it.
    pub(crate) by: Arc<str>,
    pub(crate) reply: oneshot::Sender<Result<Upgraded, String>>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Upgraded {
    /// The version before.
    pub(crate) from: String,
    /// The version now.
    pub(crate) to: String,
    /// Processes that went along.
    pub(crate) processes: usize,
    /// How long nobody decided anything, in milliseconds; requests went on.
    pub(crate) frozen_ms: u64,
    /// The program.
    #[serde(default)]
    pub(crate) program: String,
    /// It is the file that ran before.
    #[serde(default)]
    pub(crate) same: bool,
    /// Who starts the instance anew as it was started gets this other one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) restart_starts: Option<String>,
}

/// Where orders are given.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    sender: Option<mpsc::Sender<Order>>,
    under_way: Arc<AtomicBool>,
}

/// Why an order was not carried out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another one is.
    UnderWay,
    /// In words.
    Failed(String),
}

impl Orders {
    /// And where they arrive.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Order>) {
        let (sender, receiver) = mpsc::channel(1);
        (Self { sender: Some(sender), under_way: Arc::default() }, receiver)
    }

    /// Gives one and waits for what comes of it. Who leaves meanwhile changes nothing about it.
    ///
    /// # Errors
    ///
    /// Another one is under way, or it did not come to it.
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
        // Not when who asked leaves: when it is over.
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
