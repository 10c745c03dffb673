//! A process that we did not fork directly. Signals, waits and reaping use its pidfd, so another process
//! that gets the same PID is never affected.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use warden_sensors::StartedProcess;

use crate::process::group::ProcessExit;

/// A process and its pidfd.
#[derive(Debug)]
pub(crate) struct WatchedProcess {
    process: StartedProcess,
    pidfd: AsyncFd<OwnedFd>,
}

impl WatchedProcess {
    /// Watches a process; must be called in a tokio runtime. `None` if the process has ended.
    pub(crate) fn open(process: StartedProcess) -> io::Result<Option<Self>> {
        let Some(pidfd) = open(process)? else { return Ok(None) };
        #[expect(
            deprecated,
            reason = "unsound only for types that lie about their descriptor; `OwnedFd` does not"
        )]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE)?;
        Ok(Some(Self { process, pidfd }))
    }

    pub(crate) fn process(&self) -> StartedProcess {
        self.process
    }

    /// Sends a signal, if the process is not reaped yet.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Err(error) = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), signal) {
            tracing::debug!(pid = self.process.pid, ?signal, %error, "cannot signal a process outside of its group");
        }
    }

    /// Waits for the end of the process, no matter which process reaps it.
    pub(crate) async fn until_ended(&self) {
        until_pidfd_ends(&self.pidfd, self.process.pid).await;
    }

    /// True if the process runs, and so still holds its files.
    pub(crate) fn is_running(&self) -> bool {
        if has_ended(self.pidfd.get_ref()) {
            return false;
        }
        // The pidfd showed that the process is not reaped, so this PID is its own.
        warden_sensors::is_ending(self.process.pid) != Some(true)
    }

    /// Reaps the process and returns its exit, if it has ended and is our child: only the parent can do
    /// that.
    pub(crate) fn reap(&self) -> Option<ProcessExit> {
        reap(WaitId::PidFd(self.pidfd.get_ref().as_fd()))
    }
}

/// Kills a process without waiting for its end.
pub(crate) fn kill(process: StartedProcess) {
    let killed = open(process).and_then(|pidfd| match pidfd {
        Some(pidfd) => rustix::process::pidfd_send_signal(pidfd, Signal::KILL).map_err(io::Error::from),
        None => Ok(()),
    });
    if let Err(error) = killed {
        tracing::warn!(pid = process.pid, %error, "cannot kill a process that a child of ours left behind");
    }
}

/// Converts the status that `waitid` reports.
pub(crate) fn exit_of(status: &WaitIdStatus) -> ProcessExit {
    let signal = status.terminating_signal().map(ProcessExit::Signal);
    signal.or(status.exit_status().map(ProcessExit::Code)).unwrap_or(ProcessExit::Unknown)
}

/// Opens a pidfd; `None` if the process is reaped.
fn open(process: StartedProcess) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // Check after opening: if the PID still belongs to the process, the pidfd does, too.
    Ok((StartedProcess::with_pid(process.pid) == Some(process)).then_some(pidfd))
}

/// True if the process of a pidfd has ended (the pidfd is readable). An error counts as running.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(rustix::event::poll(&mut asked, Some(&Timespec::default())), Ok(ended) if ended > 0)
}

/// Waits until the process of a pidfd has ended.
pub(crate) async fn until_pidfd_ends(pidfd: &AsyncFd<OwnedFd>, pid: u32) {
    match pidfd.readable().await {
        // Keep the readiness set: a pidfd becomes readable at the end of its process and stays so.
        Ok(mut guard) => guard.retain_ready(),
        Err(error) => {
            tracing::error!(pid, %error, "cannot wait for a process: the runtime is ending");
            std::future::pending::<()>().await;
        }
    }
}

/// Reaps a child of ours that has ended, and returns its exit.
pub(crate) fn reap(which: WaitId<'_>) -> Option<ProcessExit> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    rustix::process::waitid(which, options).ok().flatten().as_ref().map(exit_of)
}
