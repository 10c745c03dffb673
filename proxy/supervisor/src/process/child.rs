//! A running child: its output, and its end as a future. Ours, or the root's that we go on for.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::error::SpawnError;
use crate::process::group::{Exit, Group};
use crate::process::root::ask::ChildId;
use crate::process::root::client::Client;
use crate::process::spawn::Spawned;
use crate::sync::lock;

/// Pause between two looks at a child that has ended and cannot be reaped yet.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A running child. Dropping it kills its process group, unless it was handed over.
#[derive(Debug)]
pub struct Child {
    leader: Leader,
    pidfd: AsyncFd<OwnedFd>,
    output: Mutex<Option<(pipe::Receiver, pipe::Receiver)>>,
}

/// Who signals and reaps it.
#[derive(Debug)]
enum Leader {
    Ours(Group),
    Roots { child: Created, exit: Mutex<Option<Exit>>, handed_over: AtomicBool },
}

/// A child of the root, made for us or handed over to us.
#[derive(Debug)]
pub(crate) struct Created {
    pub(crate) id: ChildId,
    pub(crate) leader: Pid,
    pub(crate) client: Arc<Client>,
}

impl Child {
    /// Registers with the current runtime.
    pub(crate) fn watch(spawned: Spawned) -> Result<Self, SpawnError> {
        let Spawned { group, stdout, stderr } = spawned;
        let pidfd = rustix::process::pidfd_open(group.leader, PidfdFlags::empty());
        let pid = group.id();
        let pidfd = pidfd.map_err(|errno| SpawnError::Watch { pid, source: errno.into() })?;
        Self::new(Leader::Ours(group), pidfd, stdout.zip(stderr))
    }

    /// One of the root's. Registers with the current runtime.
    pub(crate) fn of_root(
        child: Created,
        pidfd: OwnedFd,
        output: Option<(OwnedFd, OwnedFd)>,
    ) -> Result<Self, SpawnError> {
        let handed_over = AtomicBool::new(false);
        Self::new(Leader::Roots { child, exit: Mutex::default(), handed_over }, pidfd, output)
    }

    fn new(leader: Leader, pidfd: OwnedFd, output: Option<(OwnedFd, OwnedFd)>) -> Result<Self, SpawnError> {
        let pid = leader.pid();
        let failed = |source| SpawnError::Watch { pid, source };
        #[expect(
            deprecated,
            reason = "unsound only for types that lie about their descriptor; `OwnedFd` does not"
        )]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(failed)?;
        let output = match output {
            Some((stdout, stderr)) => Some((
                pipe::Receiver::from_owned_fd(stdout).map_err(failed)?,
                pipe::Receiver::from_owned_fd(stderr).map_err(failed)?,
            )),
            None => None,
        };
        Ok(Self { leader, pidfd, output: Mutex::new(output) })
    }

    /// Its process id, which is also that of its process group.
    pub fn pid(&self) -> u32 {
        self.leader.pid()
    }

    /// What tells of its end.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.get_ref().as_fd()
    }

    /// By which number the root knows it; `None` for a child of ours.
    pub(crate) fn of_root_id(&self) -> Option<ChildId> {
        match &self.leader {
            Leader::Ours(_) => None,
            Leader::Roots { child, .. } => Some(child.id),
        }
    }

    /// Somebody else has it from now on: our end is not its end. One of ours has to be kept by the family.
    pub(crate) fn hand_over(&self) {
        if let Leader::Roots { handed_over, .. } = &self.leader {
            handed_over.store(true, Ordering::SeqCst);
        }
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

    /// It was handed over to us: our end is its end from now on.
    pub(crate) fn claim(&self) {
        if let Leader::Roots { handed_over, .. } = &self.leader {
            handed_over.store(false, Ordering::SeqCst);
        }
    }

    /// Sends SIGTERM to its group. llama-server exits at once on a second one, so send it once.
    pub fn terminate(&self) {
        match &self.leader {
            Leader::Ours(group) => group.signal(Signal::TERM),
            Leader::Roots { child, .. } => child.client.signal(child.id, false),
        }
    }

    /// Sends SIGKILL to its group.
    pub fn kill(&self) {
        match &self.leader {
            Leader::Ours(group) => group.signal(Signal::KILL),
            Leader::Roots { child, .. } => child.client.signal(child.id, true),
        }
    }

    /// Sends any signal to one of ours.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Leader::Ours(group) = &self.leader {
            group.signal(signal);
        }
    }

    /// Waits for its end, kills what is left of its group, reaps it. May be called again; may be dropped at any time.
    pub async fn wait(&self) -> Exit {
        loop {
            if let Some(exit) = self.leader.known() {
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
            match &self.leader {
                Leader::Ours(group) => {
                    if let Some(exit) = group.reap() {
                        return exit;
                    }
                }
                Leader::Roots { child, exit, .. } => {
                    let ended = child.client.reap(child.id).await;
                    return *lock(exit).get_or_insert(ended);
                }
            }
            // Only a debugger can make waitid later than the pidfd.
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

impl Leader {
    fn pid(&self) -> u32 {
        match self {
            Self::Ours(group) => group.id(),
            Self::Roots { child, .. } => child.leader.as_raw_nonzero().get().unsigned_abs(),
        }
    }

    /// How it has ended, if that can be told now.
    fn known(&self) -> Option<Exit> {
        match self {
            Self::Ours(group) => group.reap(),
            Self::Roots { exit, .. } => *lock(exit),
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if let Self::Roots { child, handed_over, .. } = self
            && !handed_over.load(Ordering::SeqCst)
        {
            child.client.forget(child.id);
        }
    }
}
