//! A running child: its output, and its end as a future.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::error::SpawnError;
use crate::process::group::{Exit, Group};
use crate::process::spawn::Spawned;
use crate::sync::lock;

/// Pause between two looks at a child that has ended and cannot be reaped yet.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

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
