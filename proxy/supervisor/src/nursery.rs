//! The main thread's only job: it forks.
//!
//! The kernel ties a parent-death signal to the *thread* that forked. A pool thread may end at any time and would take the
//! child with it, so all children are forked by the one thread that lives as long as the process: main.

use std::sync::mpsc;

use tokio::sync::oneshot;

use crate::error::SpawnError;
use crate::spec::Command;

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpawnRequest {
    /// Binary, all arguments, environment, directory.
    pub command: Command,
    /// Added to our own `oom_score_adj`.
    pub oom_score_adj: i32,
}

enum Order {
    Spawn(Box<SpawnRequest>, oneshot::Sender<Result<Child, SpawnError>>),
    Stop,
}

/// A running child.
#[derive(Debug)]
pub struct Child {
    pid: u32,
}

impl Child {
    /// Its process id, which is also that of its process group.
    pub fn pid(&self) -> u32 {
        self.pid
    }
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
    /// Serves until all handles are gone or [`NurseryHandle::stop`] is called. The children die with the calling thread.
    pub fn run(self) {
        while let Ok(Order::Spawn(request, reply)) = self.orders.recv() {
            drop(reply.send(Err(SpawnError::NurseryGone { binary: request.command.binary })));
        }
    }
}

impl NurseryHandle {
    /// Has the main thread create a process.
    pub async fn spawn(&self, request: SpawnRequest) -> Result<Child, SpawnError> {
        let gone = SpawnError::NurseryGone { binary: request.command.binary.clone() };
        let (reply, answer) = oneshot::channel();
        if self.orders.send(Order::Spawn(Box::new(request), reply)).is_err() {
            return Err(gone);
        }
        answer.await.unwrap_or(Err(gone))
    }

    /// Ends [`Nursery::run`].
    pub fn stop(&self) {
        drop(self.orders.send(Order::Stop));
    }
}
