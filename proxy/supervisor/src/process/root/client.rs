//! The successor's connection to the root.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Pid;
use tokio::sync::oneshot;

use super::{ChildId, RootAnswer, RootRequest, SuccessorProgram, wire};
use crate::error::SpawnError;
use crate::process::child::{ChildProcess, RootChild};
use crate::process::group::ProcessExit;
use crate::process::kinship;
use crate::spec::SpawnRequest;
use crate::sync::lock;

type PendingAnswers = HashMap<u64, oneshot::Sender<(RootAnswer, Vec<OwnedFd>)>>;

#[derive(Debug)]
pub(crate) struct RootClient {
    stream: UnixStream,
    writing: Mutex<()>,
    next: AtomicU64,
    waiting: Mutex<PendingAnswers>,
}

impl RootClient {
    /// Starts the connection and its reader thread. `stream`: socket from the root.
    pub(crate) fn connect(stream: UnixStream) -> io::Result<Arc<Self>> {
        let client = Arc::new(Self {
            stream,
            writing: Mutex::default(),
            next: AtomicU64::new(0),
            waiting: Mutex::default(),
        });
        let listening = Arc::clone(&client);
        thread::Builder::new().name("root".to_owned()).spawn(move || listening.listen())?;
        Ok(client)
    }

    fn listen(&self) {
        while let Ok((answer, files)) = wire::receive_message::<RootAnswer>(&self.stream) {
            let waiting = lock(&self.waiting).remove(&answer.number());
            // If the requester has left, `Forget` makes the root kill the created child.
            let lost = match waiting {
                Some(waiting) => waiting.send((answer, files)).err(),
                None => Some((answer, files)),
            };
            if let Some((RootAnswer::Created { child, .. }, _)) = lost {
                self.send_order(&RootRequest::Forget { child });
            }
        }
        // Without the root, the kernel ends this process too.
        lock(&self.waiting).clear();
    }

    fn send_message(&self, ask: &RootRequest, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let _one = lock(&self.writing);
        wire::send_message(&self.stream, ask, files)
    }

    fn send_order(&self, ask: &RootRequest) {
        if let Err(error) = self.send_message(ask, &[]) {
            tracing::error!(%error, "the first instance does not listen");
        }
    }

    async fn send_request(
        &self,
        ask: impl FnOnce(u64) -> RootRequest,
        files: &[BorrowedFd<'_>],
    ) -> Option<(RootAnswer, Vec<OwnedFd>)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let (reply, answer) = oneshot::channel();
        lock(&self.waiting).insert(number, reply);
        if self.send_message(&ask(number), files).is_err() {
            lock(&self.waiting).remove(&number);
            return None;
        }
        answer.await.ok()
    }

    pub(crate) async fn spawn(self: &Arc<Self>, request: SpawnRequest) -> Result<ChildProcess, SpawnError> {
        let (binary, mark) = (request.command.binary.clone(), kinship::command_mark(&request.command));
        // An older root does not know the wrapper field.
        let request = SpawnRequest { command: request.command.without_wrapper(), ..request };
        let answer =
            self.send_request(|number| RootRequest::Spawn { number, request: Box::new(request) }, &[]).await;
        self.created(binary, answer, mark)
    }

    pub(crate) async fn spawn_successor(
        self: &Arc<Self>,
        program: SuccessorProgram,
        handover: OwnedFd,
    ) -> Result<ChildProcess, SpawnError> {
        let binary = program.binary.clone();
        let files = [handover.as_fd()];
        let answer = self.send_request(|number| RootRequest::Succeed { number, program }, &files).await;
        self.created(binary, answer, None)
    }

    fn created(
        self: &Arc<Self>,
        binary: PathBuf,
        answer: Option<(RootAnswer, Vec<OwnedFd>)>,
        mark: Option<String>,
    ) -> Result<ChildProcess, SpawnError> {
        match answer {
            Some((RootAnswer::Created { child, pid, .. }, files)) => {
                self.watch_child(child, pid, files, mark, binary)
            }
            Some((RootAnswer::Failed { errno, message, .. }, _)) => {
                let source = errno.map_or_else(|| io::Error::other(message), io::Error::from_raw_os_error);
                Err(SpawnError::Exec { binary, source })
            }
            _ => Err(SpawnError::NurseryGone { binary }),
        }
    }

    /// Must be called in a tokio runtime. `files`: pidfd and the read ends of the output, if any.
    pub(crate) fn watch_child(
        self: &Arc<Self>,
        id: ChildId,
        pid: i32,
        files: Vec<OwnedFd>,
        mark: Option<String>,
        binary: PathBuf,
    ) -> Result<ChildProcess, SpawnError> {
        let mut files = files.into_iter();
        let Some((leader, pidfd)) = Pid::from_raw(pid).zip(files.next()) else {
            return Err(SpawnError::NurseryGone { binary });
        };
        let output = files.next().zip(files.next());
        ChildProcess::of_root(RootChild::new(id, leader, Arc::clone(self)), pidfd, output, mark)
    }

    pub(crate) async fn reap(&self, child: ChildId) -> ProcessExit {
        match self.send_request(|number| RootRequest::Reap { number, child }, &[]).await {
            Some((RootAnswer::Reaped { exit, .. }, _)) => exit,
            _ => ProcessExit::Unknown,
        }
    }

    pub(crate) fn signal(&self, child: ChildId, kill: bool) {
        self.send_order(&RootRequest::Signal { child, kill });
    }

    pub(crate) fn forget(&self, child: ChildId) {
        self.send_order(&RootRequest::Forget { child });
    }

    /// Reports to the root that the next instance now serves.
    pub(crate) fn note_serving(&self, child: ChildId) {
        self.send_order(&RootRequest::Serves { child });
    }
}
