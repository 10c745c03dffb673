//! A process group: sending signals to it, detecting its end, reaping its leader.
//!
//! Signals may be sent to a PID only until its process is reaped, and to a group only until its leader is
//! reaped: later the number may be reused. So signals and reaping share a lock, and the rest of the group
//! is killed while the leader is still a zombie.

use std::sync::Mutex;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

use crate::process::watched_process::exit_of;
use crate::sync::lock;

/// Exit of a process: by a code or by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessExit {
    /// The process exited with this code.
    Code(i32),
    /// This signal ended the process.
    Signal(i32),
    /// Unknown, because another process reaped it.
    Unknown,
}

impl ProcessExit {
    /// True if a signal ended the process that it would not send to itself: sent by an operator, after a
    /// time limit, or by the kernel for lack of memory. False for an abort or a segmentation fault.
    pub const fn is_from_outside(self) -> bool {
        matches!(
            self,
            Self::Signal(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT)
        )
    }

    /// True if the process may have caused its own end: an exit code other than 0, a failed assertion, a
    /// fault. A clean exit counts as requested.
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

/// A process group, and the exit of its leader once reaped. Dropping it before that kills the group.
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

    /// Exit of the leader, if this group has reaped it.
    pub(super) fn reaped_exit(&self) -> Option<ProcessExit> {
        *lock(&self.exit)
    }

    /// Exit of the leader, if it has ended. Does not reap the leader, so its PID and group stay valid.
    pub(super) fn leader_exit(&self) -> Option<ProcessExit> {
        let exit = lock(&self.exit);
        if exit.is_some() {
            return *exit;
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match rustix::process::waitid(WaitId::Pid(self.leader), look) {
            Ok(status) => status.as_ref().map(exit_of),
            // Another process has reaped the leader; `reap` will record that.
            Err(_) => Some(ProcessExit::Unknown),
        }
    }

    /// If the leader has ended, kills the rest of the group and reaps the leader. `said`: exit to report
    /// instead of the leader's, because the server ended in another way.
    pub(super) fn reap(&self, said: Option<ProcessExit>) -> Option<ProcessExit> {
        let mut exit = lock(&self.exit);
        if exit.is_none() {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::Pid(self.leader), look | WaitIdOptions::NOWAIT) {
                Ok(None) => return None,
                Ok(Some(_)) => {
                    // The call fails only if the group is empty.
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
            // If the leader takes a moment to die, it is not reaped here and stays a zombie until this
            // process ends.
            self.reap(None);
        }
    }
}
