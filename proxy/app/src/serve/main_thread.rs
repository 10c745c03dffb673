//! The main thread of a command that starts processes: it forks, and other threads do the work.

use std::time::Duration;

use warden_supervisor::nursery::{self, NurseryHandle, ProcessNursery};
use warden_supervisor::{WorkKind, finish_jobs, start_worker_threads};

use crate::exit::CommandError;

/// For all work except serving clients. With two threads, a busy one does not delay all other work.
const CONTROL_THREADS: usize = 2;
/// Time limit for the removal of saved slots at the exit, which takes milliseconds unless the disk hangs.
const CLEANUP_LIMIT: Duration = Duration::from_millis(500);

/// Gives the main thread to the nursery and the work to other threads, until the work is done.
pub(crate) fn with_nursery<F, W>(work: F) -> Result<(), CommandError>
where
    F: FnOnce(NurseryHandle) -> W + Send + 'static,
    W: Future<Output = Result<(), CommandError>> + Send + 'static,
{
    with_this_nursery(nursery::nursery_channel(), work)
}

pub(super) fn with_this_nursery<F, W>(
    (nursery, handle): (ProcessNursery, NurseryHandle),
    work: F,
) -> Result<(), CommandError>
where
    F: FnOnce(NurseryHandle) -> W + Send + 'static,
    W: Future<Output = Result<(), CommandError>> + Send + 'static,
{
    // Create the threads first, so that a failure is reported here.
    let threads = start_worker_threads();
    threads.map_err(|error| CommandError::failed(format!("cannot start: {error}")))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(CONTROL_THREADS)
        .thread_name("control")
        .enable_all()
        .build();
    let runtime =
        runtime.map_err(|error| CommandError::failed(format!("cannot start the runtime: {error}")))?;
    let stop = StopOnDrop(handle.clone());
    let work = runtime.spawn(async move {
        let _stop = stop;
        work(handle).await
    });
    nursery.run();
    let done = runtime.block_on(work);
    // Tasks that still run may hold slot files. Do not wait longer: tasks that ignore their cancellation must
    // not delay the exit.
    runtime.shutdown_timeout(CLEANUP_LIMIT);
    finish_jobs(WorkKind::ModelFiles, CLEANUP_LIMIT);
    finish_jobs(WorkKind::Conversations, CLEANUP_LIMIT);
    done.unwrap_or_else(|_| {
        Err(CommandError::failed("llama-warden ended because of the internal error above"))
    })
}

/// Stops the nursery, so that the main thread exits however the work ends.
struct StopOnDrop(NurseryHandle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
