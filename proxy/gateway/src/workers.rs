//! The threads that serve clients, each with its own runtime. A connection stays on its thread with all its
//! requests and their connections to backends, so a request wakes no other thread. This module knows no HTTP.
//!
//! ```text
//!   acceptor --job--> [ the worker with the fewest connections ] --> the job runs there until it ends
//!                              | all handles dropped
//!                              v
//!                       the thread ends, and its tasks with it
//! ```
//!
//! One acceptor has the one listening socket. With a socket per thread (`SO_REUSEPORT`), a second program
//! could listen on the same port unnoticed.

use std::cell::Cell;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// Maximum number of threads if `server.threads` is 0.
const MAX_DEFAULT_THREADS: usize = 4;

thread_local! {
    static WORKER_NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of the current worker thread, from 0; also 0 on any other thread.
pub(crate) fn worker_number() -> usize {
    WORKER_NUMBER.get()
}

type WorkerJob = Box<dyn FnOnce(ConnectionLoad) + Send>;

/// The worker threads, which end when this value is dropped.
#[derive(Debug)]
pub(crate) struct WorkerThreads(Vec<WorkerThread>);

#[derive(Debug)]
struct WorkerThread {
    jobs: UnboundedSender<(WorkerJob, ConnectionLoad)>,
    load: Arc<AtomicUsize>,
}

/// Counts one connection of a worker until it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionLoad(Arc<AtomicUsize>);

impl ConnectionLoad {
    fn new(load: &Arc<AtomicUsize>) -> Self {
        load.fetch_add(1, Ordering::Relaxed);
        Self(load.clone())
    }
}

impl Drop for ConnectionLoad {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the number of threads for the setting `asked`: 0 means one per available core, up to four.
pub(crate) fn thread_count(asked: usize) -> usize {
    match asked {
        0 => std::thread::available_parallelism().map_or(1, NonZero::get).min(MAX_DEFAULT_THREADS),
        asked => asked,
    }
}

impl WorkerThreads {
    pub(crate) fn start(threads: usize) -> io::Result<Self> {
        (0..threads.max(1)).map(WorkerThread::start).collect::<io::Result<_>>().map(Self)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns handles that check whether each thread responds, without keeping the threads alive.
    pub(crate) fn probes(&self) -> Vec<WorkerProbe> {
        self.0.iter().map(|worker| WorkerProbe(worker.jobs.downgrade())).collect()
    }

    /// Calls `job` on the thread with the fewest connections. The connection counts for that thread until the
    /// job drops the [`ConnectionLoad`].
    pub(crate) fn run_job(&self, job: impl FnOnce(ConnectionLoad) + Send + 'static) {
        let idlest = self.0.iter().min_by_key(|worker| worker.load.load(Ordering::Relaxed));
        if let Some(worker) = idlest {
            let load = ConnectionLoad::new(&worker.load);
            // Sending cannot fail, because the worker runs at least as long as `self`.
            drop(worker.jobs.send((Box::new(job), load)));
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct WorkerProbe(WeakUnboundedSender<(WorkerJob, ConnectionLoad)>);

impl WorkerProbe {
    /// Makes the thread answer the question; drops the question if the thread has ended.
    pub(crate) fn ask(&self, question: oneshot::Sender<()>) {
        let Some(jobs) = self.0.upgrade() else { return };
        // A question is no connection.
        let load = ConnectionLoad::new(&Arc::default());
        drop(jobs.send((
            Box::new(move |_load| {
                let _left = question.send(());
            }),
            load,
        )));
    }
}

impl WorkerThread {
    fn start(number: usize) -> io::Result<Self> {
        let (jobs, mut inbox) = unbounded_channel::<(WorkerJob, ConnectionLoad)>();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name(format!("gateway-{number}")).spawn(move || {
            WORKER_NUMBER.set(number);
            runtime.block_on(async move {
                while let Some((job, load)) = inbox.recv().await {
                    job(load);
                }
            });
            // Do not wait for the remaining tasks.
            runtime.shutdown_background();
        })?;
        Ok(Self { jobs, load: Arc::default() })
    }
}

/// Question to an event loop, which answers by this sender.
pub(crate) type PulseQuestion = oneshot::Sender<()>;

/// Checks whether the loops of the data plane respond.
#[derive(Clone, Debug)]
pub struct GatewayPulse {
    acceptor: UnboundedSender<PulseQuestion>,
    workers: Vec<WorkerProbe>,
}

impl GatewayPulse {
    /// The acceptor must answer the questions from the returned receiver.
    pub(crate) fn new(workers: Vec<WorkerProbe>) -> (Self, UnboundedReceiver<PulseQuestion>) {
        let (acceptor, asked) = unbounded_channel();
        (Self { acceptor, workers }, asked)
    }

    /// Asks all loops. Returns each name with a receiver, which fails if the loop has ended.
    pub fn ask(&self) -> Vec<(String, oneshot::Receiver<()>)> {
        let (question, answer) = oneshot::channel();
        // If the acceptor has ended, dropping the question makes its receiver fail.
        drop(self.acceptor.send(question));
        let threads = self.workers.iter().enumerate().map(|(number, worker)| {
            let (question, answer) = oneshot::channel();
            worker.ask(question);
            (format!("the gateway's thread {number}"), answer)
        });
        std::iter::once(("the acceptor of connections".to_owned(), answer)).chain(threads).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn connections_go_to_the_thread_that_has_the_fewest() {
        let workers = WorkerThreads::start(3).unwrap();
        let (tell, told) = channel();
        let begin = || {
            let tell = tell.clone();
            workers.run_job(move |load| drop(tell.send((worker_number(), load))));
            told.recv_timeout(LONG).unwrap()
        };
        let first = [begin(), begin(), begin()];
        assert_eq!(first.each_ref().map(|(number, _)| *number), [0, 1, 2]);
        let [_zero, one, _two] = first;
        drop(one);
        assert_eq!(begin().0, 1);
    }

    #[test]
    fn what_runs_on_the_threads_ends_with_them() {
        let workers = WorkerThreads::start(2).unwrap();
        let (tell, told) = channel::<()>();
        for _ in 0..4 {
            let tell = tell.clone();
            workers.run_job(move |_load| {
                let forever = async move {
                    let _tell = tell;
                    std::future::pending::<()>().await;
                };
                drop(tokio_util::task::TaskTracker::new().spawn(forever));
            });
        }
        drop(tell);
        drop(workers);
        assert!(told.recv_timeout(LONG).is_err(), "nothing is left to tell");
    }

    #[test]
    fn nought_means_the_cores_that_there_are_up_to_four() {
        assert!((1..=MAX_DEFAULT_THREADS).contains(&thread_count(0)));
        assert_eq!((thread_count(1), thread_count(7)), (1, 7));
    }
}

#[cfg(test)]
mod pulse_tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::workers::WorkerThreads;

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_thread_that_is_stuck_gives_no_word_until_it_turns_again_and_none_of_it_keeps_the_threads() {
        let workers = WorkerThreads::start(2).unwrap();
        let (pulse, mut asked) = GatewayPulse::new(workers.probes());
        let (release, held) = channel::<()>();
        // The first of two idle threads gets the job: number 0.
        workers.run_job(move |_load| assert!(held.recv_timeout(LONG).is_ok()));
        let mut answers = pulse.ask();
        assert_eq!(answers.len(), 3, "{answers:?}");
        asked.recv().await.unwrap().send(()).unwrap();
        for number in [0, 2] {
            let (who, answer) = &mut answers[number];
            tokio::time::timeout(LONG, answer).await.expect(who).expect(who);
        }
        let (who, stuck) = &mut answers[1];
        assert_eq!(who, "the gateway's thread 0");
        assert!(stuck.try_recv().is_err(), "it cannot have answered");
        release.send(()).unwrap();
        tokio::time::timeout(LONG, stuck).await.unwrap().unwrap();
        drop((workers, asked));
        for (who, answer) in pulse.ask() {
            assert!(tokio::time::timeout(LONG, answer).await.expect(&who).is_err(), "{who}");
        }
    }
}
