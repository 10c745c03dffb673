//! The main thread's only job: it forks.
//!
//! The kernel ties a parent-death signal to the *thread* that forked. A pool thread may end at any time and would take the
//! child with it, so all children are forked by the one thread that lives as long as the process: main.
//!
//! ```text
//!   main thread:  Nursery::run <---- orders ---- NurseryHandle::spawn  (any task)
//!                      |  fork, exec                    ^
//!                      +--------- the child ------------+
//! ```

use std::sync::mpsc;

use tokio::sync::oneshot;

use crate::error::SpawnError;
use crate::process::child::Child;
use crate::process::spawn::{Spawned, spawn};
use crate::spec::SpawnRequest;

enum Order {
    Spawn(Box<SpawnRequest>, oneshot::Sender<Result<Spawned, SpawnError>>),
    Stop,
}

/// The forking side: give it the main thread.
#[derive(Debug)]
pub struct Nursery {
    orders: mpsc::Receiver<Order>,
}

/// The asking side.
#[derive(Clone, Debug)]
pub struct NurseryHandle {
    orders: mpsc::Sender<Order>,
}

/// A nursery and a handle to it.
pub fn channel() -> (Nursery, NurseryHandle) {
    let (sender, receiver) = mpsc::channel();
    (Nursery { orders: receiver }, NurseryHandle { orders: sender })
}

impl Nursery {
    /// Serves until all handles are gone or [`NurseryHandle::stop`] is called. The children die when the calling thread
    /// ends, not when this returns.
    pub fn run(self) {
        while let Ok(Order::Spawn(request, reply)) = self.orders.recv() {
            // A caller that left meanwhile drops the child, which kills it.
            drop(reply.send(spawn(&request)));
        }
    }
}

impl NurseryHandle {
    /// Has the main thread create a process. Must be called within a tokio runtime with I/O.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or the main thread no longer takes orders.
    pub async fn spawn(&self, request: SpawnRequest) -> Result<Child, SpawnError> {
        let binary = request.command.binary.clone();
        let (reply, answer) = oneshot::channel();
        if self.orders.send(Order::Spawn(Box::new(request), reply)).is_err() {
            return Err(SpawnError::NurseryGone { binary });
        }
        let spawned = answer.await.map_err(|_| SpawnError::NurseryGone { binary })??;
        Child::watch(spawned)
    }

    /// Ends [`Nursery::run`].
    pub fn stop(&self) {
        drop(self.orders.send(Order::Stop));
    }
}
