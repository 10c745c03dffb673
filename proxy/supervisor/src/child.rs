//! A running child: its signals, its end, its reaping.
//!
//! A process id is safe to signal only while its process is not reaped, and a group only while its leader is not. So the
//! signals and the reaping go through one lock, and the reaper kills what is left of the group while the leader is still
//! a zombie.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::error::SpawnError;
use crate::spawn::Spawned;
use crate::sync::lock;

/// Pause between two looks at a child that has ended and cannot be reaped yet.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// With an exit code.
    Code(i32),
    /// By a signal.
    Signal(i32),
    /// Somebody else reaped it.
    Unknown,
}

impl Exit {
    /// Whether it was ended by a signal that a process does not send itself: by an operator, a limit of time, or the kernel
    /// for lack of memory. What it dies of by itself (an abort, a bad address) is none of these.
    pub const fn is_from_outside(self) -> bool {
        matches!(
            self,
            Self::Signal(libc::SIGKILL | libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT)
        )
    }

    /// Whether what it did may have ended it: a failure's exit code, a failed assertion, a fault. A clean exit was asked for.
    pub(crate) const fn is_its_own(self) -> bool {
        !self.is_from_outside() && !matches!(self, Self::Code(0) | Self::Unknown)
    }
}

impl std::fmt::Display for Exit {
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

/// A process group and whether its leader is reaped. Dropping it before that kills the group.
#[derive(Debug)]
pub(crate) struct Group {
    leader: Pid,
    exit: Mutex<Option<Exit>>,
}

impl Group {
    pub(crate) fn new(leader: Pid) -> Self {
        Self { leader, exit: Mutex::new(None) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.leader.as_raw_nonzero().get().unsigned_abs()
    }

    fn signal(&self, signal: Signal) {
        let exit = lock(&self.exit);
        if exit.is_none()
            && let Err(error) = rustix::process::kill_process_group(self.leader, signal)
        {
            tracing::debug!(pid = self.id(), ?signal, %error, "cannot signal the process group");
        }
    }

    /// Kills what is left of the group and reaps the leader, if it has ended.
    fn reap(&self) -> Option<Exit> {
        let mut exit = lock(&self.exit);
        if exit.is_none() {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            match rustix::process::waitid(WaitId::Pid(self.leader), look | WaitIdOptions::NOWAIT) {
                Ok(None) => return None,
                Ok(Some(_)) => {
                    // Fails only if nobody is left.
                    let _ = rustix::process::kill_process_group(self.leader, Signal::KILL);
                    let status = rustix::process::waitid(WaitId::Pid(self.leader), look);
                    *exit = Some(status.ok().flatten().map_or(Exit::Unknown, |status| {
                        let signal = status.terminating_signal().map(Exit::Signal);
                        signal.or(status.exit_status().map(Exit::Code)).unwrap_or(Exit::Unknown)
                    }));
                }
                Err(error) => {
                    tracing::warn!(pid = self.id(), %error, "a child was reaped by somebody else");
                    *exit = Some(Exit::Unknown);
                }
            }
        }
        *exit
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.reap().is_none() {
            self.signal(Signal::KILL);
            // It may take a moment to die; then it stays a zombie until we end.
            self.reap();
        }
    }
}

/// A running child. Dropping it kills its process group.
#[derive(Debug)]
pub struct Child {
    group: Group,
    pidfd: AsyncFd<OwnedFd>,
    output: Mutex<Option<(pipe::Receiver, pipe::Receiver)>>,
}

impl Child {
    /// Registers with the current runtime.
    pub(crate) fn watch(spawned: Spawned) -> Result<Self, SpawnError> {
        let Spawned { group, stdout, stderr } = spawned;
        let pid = group.id();
        let failed = |source| SpawnError::Watch { pid, source };
        let pidfd = rustix::process::pidfd_open(group.leader, PidfdFlags::empty());
        let pidfd = pidfd.map_err(|errno| failed(errno.into()))?;
        #[expect(
            deprecated,
            reason = "unsound only for types that lie about their descriptor; `OwnedFd` does not"
        )]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(failed)?;
        let output = match (stdout, stderr) {
            (Some(stdout), Some(stderr)) => Some((
                pipe::Receiver::from_owned_fd(stdout).map_err(failed)?,
                pipe::Receiver::from_owned_fd(stderr).map_err(failed)?,
            )),
            _ => None,
        };
        Ok(Self { group, pidfd, output: Mutex::new(output) })
    }

    /// Its process id, which is also that of its process group.
    pub fn pid(&self) -> u32 {
        self.group.id()
    }

    /// The reading ends of its standard output and standard error; `None` after the first call. A child whose output is
    /// not read blocks when the pipes are full.
    pub fn take_output(&self) -> Option<(pipe::Receiver, pipe::Receiver)> {
        lock(&self.output).take()
    }

    /// Whether it still runs: its files were open until now. Its end can be waited for only later.
    pub fn is_running(&self) -> bool {
        // First, because the number is its own only as long as it is not reaped.
        if warden_sensors::is_ending(self.pid()) == Some(true) {
            return false;
        }
        let pidfd = self.pidfd.get_ref();
        let mut asked = [PollFd::new(pidfd, PollFlags::IN)];
        // Readable means ended. Where that cannot be asked, nothing says that it has.
        !matches!(rustix::event::poll(&mut asked, Some(&Timespec::default())), Ok(ended) if ended > 0)
    }

    /// Sends SIGTERM to its group. llama-server exits at once on a second one, so send it once.
    pub fn terminate(&self) {
        self.group.signal(Signal::TERM);
    }

    /// Sends SIGKILL to its group.
    pub fn kill(&self) {
        self.group.signal(Signal::KILL);
    }

    /// Waits for its end, kills what is left of its group, reaps it. May be called again; may be dropped at any time.
    pub async fn wait(&self) -> Exit {
        loop {
            if let Some(exit) = self.group.reap() {
                return exit;
            }
            match self.pidfd.readable().await {
                // Readable means ended, and is never taken back, so the readiness stays set.
                Ok(mut guard) => guard.retain_ready(),
                Err(error) => {
                    tracing::error!(pid = self.pid(), %error, "cannot wait for a child: the runtime is ending");
                    std::future::pending::<()>().await;
                }
            }
            if let Some(exit) = self.group.reap() {
                return exit;
            }
            // Only a debugger can make waitid later than the pidfd.
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}
