//! Answers a successor's requests on separate threads, so that a slow one does not delay others.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::{RootAnswer, RootRequest, wire};
use crate::error::SpawnError;
use crate::process::child::ChildProcess;
use crate::process::group::ProcessExit;
use crate::process::nursery::NurseryHandle;
use crate::sync::lock;

/// Answers requests until the successor closes the connection.
pub(crate) fn serve_successor(stream: UnixStream, nursery: NurseryHandle, runtime: Handle) -> io::Result<()> {
    let desk = Arc::new(RootServer {
        stream,
        writing: Mutex::default(),
        nursery,
        runtime,
        tasks: TaskTracker::new(),
    });
    thread::Builder::new().name("desk".to_owned()).spawn(move || desk.run()).map(drop)
}

struct RootServer {
    stream: UnixStream,
    writing: Mutex<()>,
    nursery: NurseryHandle,
    runtime: Handle,
    tasks: TaskTracker,
}

impl RootServer {
    fn run(self: Arc<Self>) {
        loop {
            match wire::receive_message::<RootRequest>(&self.stream) {
                Ok((ask, files)) => self.take_request(ask, files),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return,
                Err(error) => {
                    tracing::error!(%error, "cannot read a message of the serving instance");
                    return;
                }
            }
        }
    }

    fn take_request(self: &Arc<Self>, ask: RootRequest, files: Vec<OwnedFd>) {
        let Some(family) = self.nursery.family() else { return };
        match ask {
            RootRequest::Signal { child, kill } => {
                if let Some(child) = family.child(child) {
                    if kill { child.kill() } else { child.terminate() }
                }
            }
            RootRequest::Forget { child } => family.forget(child),
            RootRequest::Serves { child } => {
                // The previous instance still serves its last requests.
                if let Some(before) = family.note_serving(child) {
                    let family = Arc::clone(family);
                    self.spawn_task(async move { family.await_retired(before).await });
                }
            }
            RootRequest::Spawn { number, request } => {
                let desk = Arc::clone(self);
                self.create_process(number, async move { desk.nursery.spawn(*request).await });
            }
            RootRequest::Succeed { number, program } => {
                family.note_next_instance();
                let (desk, handover) = (Arc::clone(self), files.into_iter().next());
                self.create_process(
                    number,
                    async move { desk.nursery.spawn_successor(program, handover).await },
                );
            }
            RootRequest::Reap { number, child } => {
                let (desk, child) = (Arc::clone(self), family.child(child));
                self.spawn_task(async move {
                    let exit = match child {
                        Some(child) => child.wait().await,
                        None => ProcessExit::Unknown,
                    };
                    desk.answer(&RootAnswer::Reaped { number, exit }, &[]);
                });
            }
        }
    }

    fn spawn_task(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.tasks.spawn_on(task, &self.runtime));
    }

    fn create_process(
        self: &Arc<Self>,
        number: u64,
        creating: impl Future<Output = Result<ChildProcess, SpawnError>> + Send + 'static,
    ) {
        let desk = Arc::clone(self);
        self.spawn_task(async move {
            match creating.await {
                Ok(child) => desk.report_created(number, child),
                Err(error) => {
                    let errno = std::error::Error::source(&error)
                        .and_then(|source| source.downcast_ref::<io::Error>())
                        .and_then(io::Error::raw_os_error);
                    desk.answer(&RootAnswer::Failed { number, errno, message: error.to_string() }, &[]);
                }
            }
        });
    }

    fn report_created(&self, number: u64, child: ChildProcess) {
        let Some(family) = self.nursery.family() else { return };
        let output = child.take_output();
        let child = Arc::new(child);
        let pid = i32::try_from(child.pid()).unwrap_or_default();
        let id = family.keep(Arc::clone(&child));
        let mut files = vec![child.pidfd()];
        if let Some((stdout, stderr)) = &output {
            files.extend([stdout.as_fd(), stderr.as_fd()]);
        }
        self.answer(&RootAnswer::Created { number, child: id, pid }, &files);
    }

    fn answer(&self, answer: &RootAnswer, files: &[BorrowedFd<'_>]) {
        let _one = lock(&self.writing);
        if let Err(error) = wire::send_message(&self.stream, answer, files) {
            tracing::debug!(%error, "cannot send an answer to the serving instance");
        }
    }
}
