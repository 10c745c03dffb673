//! Worker threads for blocking calls to disks, drivers, resolvers and the kernel, so that no task blocks.
//!
//! ```text
//!     task ── run(kind, job) ──> bounded queue of that kind ──> most recently idle thread ── result ──> task
//!              └── queue full, or no thread at all: an error, at once
//! ```
//!
//! Each kind of job has its own threads, because a hanging resource blocks all threads that use it. The
//! threads are started once and stay: tokio panics if the system cannot start one of its blocking threads.
//!
//! The most recently idle thread gets the next job: heap memory that a thread has used stays with it.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, mpsc};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;

use crate::sync::lock;

/// Resource that a job may wait for. Jobs of one kind share threads; different kinds never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// `/proc` and control groups, which may block while a process hangs in the kernel.
    Kernel,
    /// Libraries of GPU drivers.
    Driver,
    /// Files of models, programs and libraries, and the removal of saved slots.
    ModelFiles,
    /// Configuration file and the files that it names.
    Configuration,
    /// Reads of the state directory. A separate thread does the writes.
    StateFiles,
    /// Lookups of host names.
    Names,
    /// Messages between two instances during a handover.
    HandOver,
    /// Long pages, which would keep a serving thread busy for too long.
    Pages,
    /// Saved slots and conversations on disk: large files, read and written while a model waits.
    Conversations,
}

impl WorkKind {
    fn pool(self) -> &'static WorkPool {
        &POOLS[self as usize]
    }
}

/// Thread pools, in the order of [`WorkKind`]. With a second thread, a kind continues while one job hangs.
static POOLS: [WorkPool; 9] = [
    // Reading a process takes some milliseconds every few seconds.
    WorkPool::new("work-kernel", 2, 4096),
    // Two threads: at most one full reading and one reading of free memory run at the same time.
    WorkPool::new("work-driver", 2, 4),
    // Three threads: for checking folders, for reading files ahead, and for checks before starts.
    WorkPool::new("work-models", 3, 256),
    // Two threads: for reading the whole configuration, and for everything else.
    WorkPool::new("work-config", 2, 16),
    // All files are on one disk, so a second thread would hang too.
    WorkPool::new("work-state", 1, 16),
    WorkPool::new("work-names", 2, 64),
    // A handover has as few jobs as a change of the configuration.
    WorkPool::new("work-handover", 2, 16),
    WorkPool::new("work-pages", 1, 64),
    WorkPool::new("work-slots", 2, 256),
];

/// Reason why a job was not done. A retry may succeed.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// All threads are busy and the queue is full.
    #[error("all threads of `{0}` are busy, and {1} jobs wait: does a disk or a driver hang?")]
    Busy(&'static str, usize),
    /// The system cannot start a thread.
    #[error("no thread of `{0}` can be started: {1}; raise the limit of tasks (`pids.max`, `TasksMax`)")]
    NoThread(&'static str, io::Error),
    /// The job panicked; the panic is in the log.
    #[error("a job of `{0}` ended early because of the internal error above")]
    Lost(&'static str),
}

impl From<WorkError> for io::Error {
    fn from(error: WorkError) -> Self {
        Self::other(error)
    }
}

type WorkJob = Box<dyn FnOnce() + Send>;

struct WorkPool {
    name: &'static str,
    threads: usize,
    capacity: usize,
    queue: Mutex<WorkQueue>,
    /// Notified when a thread becomes idle.
    rested: Condvar,
}

struct WorkQueue {
    jobs: VecDeque<WorkJob>,
    /// Idle threads. The last one became idle most recently.
    resting: Vec<mpsc::Sender<WorkJob>>,
    started: usize,
}

impl WorkPool {
    const fn new(name: &'static str, threads: usize, capacity: usize) -> Self {
        let queue = WorkQueue { jobs: VecDeque::new(), resting: Vec::new(), started: 0 };
        Self { name, threads, capacity, queue: Mutex::new(queue), rested: Condvar::new() }
    }

    fn start_threads(&'static self, queue: &mut WorkQueue) -> io::Result<()> {
        while queue.started < self.threads {
            let (seat, given) = mpsc::channel();
            let own = seat.clone();
            std::thread::Builder::new()
                .name(self.name.to_owned())
                .spawn(move || self.work_loop(&own, &given))?;
            queue.started += 1;
            queue.resting.push(seat);
        }
        Ok(())
    }

    /// Runs jobs from the queue, and waits for more.
    fn work_loop(&self, seat: &mpsc::Sender<WorkJob>, given: &mpsc::Receiver<WorkJob>) {
        while let Ok(job) = given.recv() {
            run_guarded(job);
            loop {
                let mut queue = lock(&self.queue);
                let Some(job) = queue.jobs.pop_front() else {
                    queue.resting.push(seat.clone());
                    self.rested.notify_all();
                    break;
                };
                drop(queue);
                run_guarded(job);
            }
        }
    }

    /// Waits until no job is queued or running, at most for this time.
    fn wait_idle(&self, limit: Duration) {
        let busy = |queue: &mut WorkQueue| !queue.jobs.is_empty() || queue.resting.len() < queue.started;
        drop(self.rested.wait_timeout_while(lock(&self.queue), limit, busy));
    }

    fn submit(&'static self, mut job: WorkJob) -> Result<(), WorkError> {
        let mut queue = lock(&self.queue);
        if let Err(error) = self.start_threads(&mut queue)
            && queue.started == 0
        {
            return Err(WorkError::NoThread(self.name, error));
        }
        while let Some(seat) = queue.resting.pop() {
            match seat.send(job) {
                Ok(()) => return Ok(()),
                // Unreachable: a thread never ends.
                Err(mpsc::SendError(back)) => job = back,
            }
        }
        if queue.jobs.len() >= self.capacity {
            return Err(WorkError::Busy(self.name, queue.jobs.len()));
        }
        queue.jobs.push_back(job);
        Ok(())
    }
}

/// Runs a job. If the job panics, its caller gets no result, but the thread survives.
fn run_guarded(job: WorkJob) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(job)) {
        tracing::error!(panic = panic_words(&*panic), "a job of a worker thread ended in an internal error");
    }
}

fn panic_words(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown")
}

/// Starts all threads now, while the system has some.
///
/// # Errors
///
/// The system cannot start a thread. Later jobs try again.
pub fn start_worker_threads() -> Result<(), WorkError> {
    for pool in &POOLS {
        pool.start_threads(&mut lock(&pool.queue)).map_err(|error| WorkError::NoThread(pool.name, error))?;
    }
    Ok(())
}

/// Waits until the jobs of this kind are done, at most for this time. Call it before the exit, which would
/// end them midway.
pub fn finish_jobs(kind: WorkKind, limit: Duration) {
    kind.pool().wait_idle(limit);
}

/// Result of a job. Dropping it cancels a job that has not begun.
pub type PendingWork<T> = BoxFuture<'static, Result<T, WorkError>>;

/// Runs a job on a thread of this kind.
pub fn run_job<T: Send + 'static>(
    kind: WorkKind,
    job: impl FnOnce() -> T + Send + 'static,
) -> PendingWork<T> {
    run_in_pool(kind.pool(), job)
}

fn run_in_pool<T: Send + 'static>(
    pool: &'static WorkPool,
    job: impl FnOnce() -> T + Send + 'static,
) -> PendingWork<T> {
    let (reply, result) = oneshot::channel();
    #[cfg(test)]
    let held = hold_clock();
    let job = move || {
        if reply.is_closed() {
            return;
        }
        // Sending fails if the caller no longer waits.
        let _left = reply.send(job());
        #[cfg(test)]
        drop(held);
    };
    let submitted = pool.submit(Box::new(job));
    Box::pin(async move {
        submitted?;
        result.await.map_err(|_| WorkError::Lost(pool.name))
    })
}

/// Runs a job without a result on a thread of this kind.
///
/// # Errors
///
/// The job cannot be queued.
pub fn run_detached(kind: WorkKind, job: impl FnOnce() + Send + 'static) -> Result<(), WorkError> {
    kind.pool().submit(Box::new(job))
}

/// Runs a job on a thread of this kind, and blocks for its result, at most for `limit`. Meant for jobs that
/// take microseconds unless a disk hangs.
pub(crate) fn run_briefly<T: Send + 'static>(
    kind: WorkKind,
    limit: Duration,
    job: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (reply, result) = mpsc::sync_channel(1);
    run_detached(kind, move || drop(reply.send(job()))).ok()?;
    result.recv_timeout(limit).ok()
}

/// Addresses of a host. An IP address needs no lookup.
///
/// # Errors
///
/// The name is unknown, or lookups are impossible at present.
pub async fn resolve_host(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = bare.parse() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let host = host.to_owned();
    let asked = run_job(WorkKind::Names, move || (host.as_str(), port).to_socket_addrs().map(Vec::from_iter));
    asked.await?
}

/// Keeps a paused test clock from advancing to the next deadline while one of our threads works.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "the runtime's own blocking threads keep a stopped clock from leaping"
)]
pub(crate) fn hold_clock() -> Option<mpsc::Sender<()>> {
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    let (done, until) = mpsc::channel::<()>();
    drop(runtime.spawn_blocking(move || until.recv()));
    Some(done)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn small(threads: usize, capacity: usize) -> &'static WorkPool {
        Box::leak(Box::new(WorkPool::new("test", threads, capacity)))
    }

    #[tokio::test]
    async fn a_job_that_hangs_takes_one_thread_and_what_does_not_fit_is_refused_at_once() {
        let pool = small(2, 1);
        let (release, hangs) = mpsc::channel::<()>();
        let hung = run_in_pool(pool, move || hangs.recv_timeout(LONG).is_err());
        assert_eq!(run_in_pool(pool, || 7).await.unwrap(), 7, "the other thread");
        let (free, second) = mpsc::channel::<()>();
        let (began, begins) = oneshot::channel();
        let also = run_in_pool(pool, move || {
            began.send(()).unwrap();
            second.recv_timeout(LONG).is_err()
        });
        begins.await.unwrap();
        let waits = run_in_pool(pool, || 8);
        let refused = run_in_pool(pool, || 9).await.unwrap_err();
        assert!(matches!(refused, WorkError::Busy("test", 1)), "{refused}");
        drop(free);
        assert!(also.await.unwrap());
        assert_eq!(waits.await.unwrap(), 8);
        drop(release);
        assert!(hung.await.unwrap());
    }

    #[tokio::test]
    async fn a_job_that_panics_is_an_error_and_its_thread_does_the_next_one() {
        let pool = small(1, 8);
        let lost =
            run_in_pool(pool, || assert!(std::env::args().len() > 999, "as it must be")).await.unwrap_err();
        assert!(matches!(lost, WorkError::Lost("test")), "{lost}");
        assert_eq!(run_in_pool(pool, || 7).await.unwrap(), 7);
        assert_eq!(lock(&pool.queue).started, 1);
    }

    #[tokio::test]
    async fn the_thread_that_rested_last_works_and_the_others_are_not_touched() {
        let pool = small(3, 8);
        let first = run_in_pool(pool, || std::thread::current().id()).await.unwrap();
        for _ in 0..50 {
            // The thread becomes idle a moment after its answer arrives.
            let rests = || lock(&pool.queue).resting.len() == 3;
            while !rests() {
                tokio::task::yield_now().await;
            }
            assert_eq!(run_in_pool(pool, || std::thread::current().id()).await.unwrap(), first);
        }
    }

    #[tokio::test]
    async fn who_has_left_before_its_job_began_has_it_not_done() {
        let pool = small(1, 8);
        let (release, hangs) = mpsc::channel::<()>();
        let hung = run_in_pool(pool, move || hangs.recv_timeout(LONG).is_err());
        let done = Arc::new(Mutex::new(0));
        let counts = done.clone();
        drop(run_in_pool(pool, move || *lock(&counts) += 1));
        drop(release);
        hung.await.unwrap();
        run_in_pool(pool, || ()).await.unwrap();
        assert_eq!(*lock(&done), 0);
    }

    #[tokio::test]
    async fn finishing_waits_for_running_and_queued_jobs_but_not_for_one_that_hangs() {
        let pool = small(1, 8);
        let done = Arc::new(Mutex::new(0));
        let (release, hangs) = mpsc::channel::<()>();
        let jobs: Vec<_> = (0..3)
            .map(|_| {
                let counts = done.clone();
                run_in_pool(pool, move || *lock(&counts) += 1)
            })
            .collect();
        pool.wait_idle(LONG);
        assert_eq!(*lock(&done), 3);
        let hung = run_in_pool(pool, move || hangs.recv_timeout(LONG).is_err());
        pool.wait_idle(Duration::from_millis(20));
        assert_eq!(lock(&pool.queue).resting.len(), 0, "the job still runs");
        drop((release, hung, jobs));
    }

    #[tokio::test]
    async fn an_address_is_no_name() {
        for (host, address) in [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7")] {
            assert_eq!(resolve_host(host, 7).await.unwrap(), [address.parse().unwrap()]);
        }
        assert!(resolve_host("localhost", 7).await.unwrap().iter().all(|one| one.ip().is_loopback()));
    }
}
