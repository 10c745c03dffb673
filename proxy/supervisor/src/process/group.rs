//! Signals, end and reaping of processes: of a group whose leader this process forked, and of others.
//!
//! A PID may be reused once its process is reaped, and a group's number once its leader is reaped. So signals
//! and reaping share a lock, and the group is killed while its leader is still a zombie. For other processes,
//! a pidfd is used instead of the PID.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use warden_sensors::StartedProcess;

use crate::sync::lock;

/// Exit of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessExit {
    /// Exit code.
    Code(i32),
    /// Signal that ended the process.
    Signal(i32),
    /// Another process reaped it.
    Unknown,
}

impl ProcessExit {
    /// True if an operator, the supervisor or the kernel's OOM killer sent the signal. False for an abort or
    /// a segmentation fault.
    pub const fn is_from_outside(self) -> bool {
        matches!(
            self,
            Self::Signal(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT)
        )
    }

    /// True if the process may have caused its own end. A clean exit counts as requested.
    pub(crate) const fn is_self_inflicted(self) -> bool {
        !self.is_from_outside() && !matches!(self, Self::Code(0) | Self::Unknown)
    }
}

impl std::fmt::Display for ProcessExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(number) => match signal_name(*number) {
                Some(name) => write!(f, "signal {number} ({name})"),
                None => write!(f, "signal {number}"),
            },
            Self::Unknown => f.write_str("an unknown end"),
        }
    }
}

fn signal_name(number: i32) -> Option<&'static str> {
    Some(match number {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGTERM => "SIGTERM",
        libc::SIGSYS => "SIGSYS",
        _ => return None,
    })
}

/// Dropping the group before the leader is reaped kills the group.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    pub(super) leader: Pid,
    exit: Mutex<Option<ProcessExit>>,
}

impl ProcessGroup {
    pub(crate) fn new(leader: Pid) -> Self {
        Self { leader, exit: Mutex::new(None) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.leader.as_raw_nonzero().get().unsigned_abs()
    }

    pub(super) fn signal(&self, signal: Signal) {
        let exit = lock(&self.exit);
        if exit.is_none()
            && let Err(error) = rustix::process::kill_process_group(self.leader, signal)
        {
            tracing::debug!(pid = self.id(), ?signal, %error, "cannot signal the process group");
        }
    }

    pub(super) fn reaped_exit(&self) -> Option<ProcessExit> {
        *lock(&self.exit)
    }

    /// Returns the leader's exit without reaping it, so that its PID and group stay valid.
    pub(super) fn leader_exit(&self) -> Option<ProcessExit> {
        let exit = lock(&self.exit);
        if exit.is_some() {
            return *exit;
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match rustix::process::waitid(WaitId::Pid(self.leader), look) {
            Ok(status) => status.as_ref().map(exit_of),
            // Another process has reaped the leader; `reap` records that.
            Err(_) => Some(ProcessExit::Unknown),
        }
    }

    /// Kills the rest of the group and reaps the leader, once it has ended. `said`: the server's exit, to be
    /// reported instead of the leader's.
    pub(super) fn reap(&self, said: Option<ProcessExit>) -> Option<ProcessExit> {
        let mut exit = lock(&self.exit);
        if exit.is_none() {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::Pid(self.leader), look | WaitIdOptions::NOWAIT) {
                Ok(None) => return None,
                Ok(Some(_)) => {
                    // The call fails only for an empty group.
                    let _ = rustix::process::kill_process_group(self.leader, Signal::KILL);
                    let status = rustix::process::waitid(WaitId::Pid(self.leader), look);
                    *exit =
                        said.or(Some(status.ok().flatten().as_ref().map_or(ProcessExit::Unknown, exit_of)));
                }
                Err(error) => {
                    tracing::warn!(pid = self.id(), %error, "a child was reaped outside of the supervisor");
                    *exit = said.or(Some(ProcessExit::Unknown));
                }
            }
        }
        *exit
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if self.reap(None).is_none() {
            self.signal(Signal::KILL);
            // A leader that dies slowly stays a zombie until this process ends.
            self.reap(None);
        }
    }
}

/// A process that another process forked.
#[derive(Debug)]
pub(crate) struct WatchedProcess {
    process: StartedProcess,
    pidfd: AsyncFd<OwnedFd>,
}

impl WatchedProcess {
    /// Must be called in a tokio runtime. `None` if the process has ended.
    pub(crate) fn open(process: StartedProcess) -> io::Result<Option<Self>> {
        let Some(pidfd) = open_pidfd(process)? else { return Ok(None) };
        Ok(Some(Self { process, pidfd: watch_pidfd(pidfd)? }))
    }

    pub(crate) fn process(&self) -> StartedProcess {
        self.process
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Err(error) = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), signal) {
            tracing::debug!(pid = self.process.pid, ?signal, %error, "cannot signal a process outside of its group");
        }
    }

    /// Waits for the end, no matter which process reaps it.
    pub(crate) async fn until_ended(&self) {
        until_pidfd_ends(&self.pidfd, self.process.pid).await;
    }

    pub(crate) fn is_running(&self) -> bool {
        if has_ended(self.pidfd.get_ref()) {
            return false;
        }
        // The process is not reaped, so the PID is its own.
        warden_sensors::is_ending(self.process.pid) != Some(true)
    }

    /// Reaps an ended process and returns its exit, if this process is its parent.
    pub(crate) fn reap(&self) -> Option<ProcessExit> {
        reap_ended(WaitId::PidFd(self.pidfd.get_ref().as_fd()))
    }
}

/// Sends SIGKILL without waiting for the end.
pub(crate) fn kill_process(process: StartedProcess) {
    let killed = open_pidfd(process).and_then(|pidfd| match pidfd {
        Some(pidfd) => rustix::process::pidfd_send_signal(pidfd, Signal::KILL).map_err(io::Error::from),
        None => Ok(()),
    });
    if let Err(error) = killed {
        tracing::warn!(pid = process.pid, %error, "cannot kill a process that a child of ours left behind");
    }
}

fn exit_of(status: &WaitIdStatus) -> ProcessExit {
    let signal = status.terminating_signal().map(ProcessExit::Signal);
    signal.or(status.exit_status().map(ProcessExit::Code)).unwrap_or(ProcessExit::Unknown)
}

fn open_pidfd(process: StartedProcess) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // If the PID still belongs to the process, so does the pidfd.
    Ok((StartedProcess::with_pid(process.pid) == Some(process)).then_some(pidfd))
}

#[expect(deprecated, reason = "unsound only for types that lie about their descriptor; `OwnedFd` does not")]
pub(crate) fn watch_pidfd(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(pidfd, Interest::READABLE)
}

/// True if the pidfd is readable. An error counts as running.
pub(crate) fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(rustix::event::poll(&mut asked, Some(&Timespec::default())), Ok(ended) if ended > 0)
}

pub(crate) async fn until_pidfd_ends(pidfd: &AsyncFd<OwnedFd>, pid: u32) {
    match pidfd.readable().await {
        // A pidfd stays readable after the end of its process.
        Ok(mut guard) => guard.retain_ready(),
        Err(error) => {
            tracing::error!(pid, %error, "cannot wait for a process: the runtime is ending");
            std::future::pending::<()>().await;
        }
    }
}

pub(crate) fn reap_ended(which: WaitId<'_>) -> Option<ProcessExit> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    rustix::process::waitid(which, options).ok().flatten().as_ref().map(exit_of)
}
