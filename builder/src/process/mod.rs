//! Runs a child program in its own process group, reads its output by line, and ends it on cancellation.
//!
//! On cancellation, the group gets TERM; after a grace period, the group and every descendant get KILL.
//! Dropping the future kills the group and the descendants at once.

mod tree;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpriority_process, kill_process_group, setpriority_process};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::{BuilderError, Result};

/// Time between TERM and KILL: ninja removes half-written files meanwhile.
const TERM_GRACE: Duration = Duration::from_secs(5);
/// Time to read output after the program's exit: a helper that outlives the program may keep the pipe open.
const OUTPUT_LINGER: Duration = Duration::from_millis(200);
/// Time limit for retries after `ETXTBSY`: a forked child's exec may take hundreds of ms on a busy machine.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between retries after `ETXTBSY`, and between checks for the end of killed descendants.
const BUSY_POLL: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) enum ChildExit {
    /// The program exited, or a signal from another process ended it.
    Exited(ExitStatus),
    /// The caller cancelled; all processes have ended.
    Cancelled,
}

/// Runs a program to its end, and passes on each line of standard output and standard error in order.
pub(crate) fn run(
    command: Command,
    cancel: &CancellationToken,
    line: impl FnMut(&str),
) -> impl Future<Output = io::Result<ChildExit>> {
    run_at_priority(command, RunPriority::Inherited, cancel, line)
}

/// Priority of a program and of the programs that it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPriority {
    /// The priority of this process.
    Inherited,
    /// A server that needs the processor gets nine tenths of it.
    Background,
}

/// Niceness of background programs; 0 is usual, 19 the most. At 19, other busy programs would delay a build
/// for hours.
const BACKGROUND_NICENESS: i32 = 10;

/// Like [`run`], at the given priority.
pub(crate) async fn run_at_priority(
    mut command: Command,
    priority: RunPriority,
    cancel: &CancellationToken,
    mut line: impl FnMut(&str),
) -> io::Result<ChildExit> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(OwnedFd::from(writer.try_clone()?)).stderr(OwnedFd::from(writer));
    let mut family = ProcessTree::spawn(command).await?;
    if priority == RunPriority::Background {
        family.lower_priority();
    }
    let mut output = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?;
    let mut lines = LineSplitter::default();
    let mut chunk = vec![0; 64 * 1024];
    let mut open = true;
    let status = loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => {
                family.stop(TERM_GRACE).await?;
                return Ok(ChildExit::Cancelled);
            }
            read = output.read(&mut chunk), if open => match read? {
                0 => open = false,
                count => lines.push(&chunk[..count], &mut line),
            },
            status = family.wait() => break status?,
        }
    };
    let rest = async {
        while let Ok(count @ 1..) = output.read(&mut chunk).await {
            lines.push(&chunk[..count], &mut line);
        }
    };
    if open {
        tokio::time::timeout(OUTPUT_LINGER, rest).await.ok();
    }
    lines.finish(&mut line);
    Ok(ChildExit::Exited(status))
}

/// Runs a short program and returns standard output and standard error together.
pub(crate) async fn output(command: Command, cancel: &CancellationToken) -> io::Result<(ChildExit, String)> {
    let mut text = String::new();
    let ended = run(command, cancel, |line| {
        text.push_str(line);
        text.push('\n');
    })
    .await?;
    Ok((ended, text))
}

/// Longest line in bytes; longer ones are passed on in pieces, so that a program cannot fill our memory.
const MAX_LINE_BYTES: usize = 256 * 1024;

/// Splits bytes into lines. A carriage return ends a line, too, because progress output overwrites itself.
#[derive(Debug, Default)]
struct LineSplitter {
    pending: Vec<u8>,
}

impl LineSplitter {
    fn push(&mut self, bytes: &[u8], line: &mut impl FnMut(&str)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            self.pending.extend_from_slice(&rest[..end]);
            self.finish(line);
            rest = &rest[end + 1..];
        }
        self.pending.extend_from_slice(rest);
        if self.pending.len() > MAX_LINE_BYTES {
            self.finish(line);
        }
    }

    fn finish(&mut self, line: &mut impl FnMut(&str)) {
        if !self.pending.is_empty() {
            line(&String::from_utf8_lossy(&self.pending));
            self.pending.clear();
        }
    }
}

/// A child with its descendants. Dropping this value kills all of them.
#[derive(Debug)]
pub(crate) struct ProcessTree {
    child: Child,
    /// PID of the child and its process group; `None` after the child was reaped.
    leader: Option<i32>,
}

impl ProcessTree {
    /// Starts a program as the leader of a new process group. Takes the command by value, because the command
    /// holds our copies of the pipe's write end.
    ///
    /// A program that was just written may be busy (`ETXTBSY`): a child that another thread forks meanwhile
    /// keeps the file open for writing until its exec. Spawning is retried for at most [`BUSY_TIMEOUT`].
    pub(crate) async fn spawn(mut command: Command) -> io::Result<Self> {
        command.process_group(0).kill_on_drop(true);
        remove_own_variables(&mut command);
        let given_up = Instant::now() + BUSY_TIMEOUT;
        let child = loop {
            match command.spawn() {
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                    if Instant::now() >= given_up {
                        return Err(error);
                    }
                    tokio::time::sleep(BUSY_POLL).await;
                }
                other => break other?,
            }
        };
        let leader = child.id().and_then(|id| i32::try_from(id).ok());
        Ok(Self { child, leader })
    }

    /// Lowers the priority of the program and of all that it starts from now on.
    fn lower_priority(&self) {
        let Some(leader) = self.leader.and_then(Pid::from_raw) else { return };
        // A failure is no reason to stop: the program then only competes with servers.
        if getpriority_process(Some(leader)).is_ok_and(|niceness| niceness < BACKGROUND_NICENESS) {
            setpriority_process(Some(leader), BACKGROUND_NICENESS).ok();
        }
    }

    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        self.leader = None;
        Ok(status)
    }

    /// Sends TERM only to those descendants that run this program.
    pub(crate) fn terminate_program(&self, program: &Path) {
        if let Some(leader) = self.leader {
            tree::terminate(&tree::descendants(leader), program);
        }
    }

    /// Sends TERM, waits for the grace period, and sends KILL. Returns when all processes have ended.
    pub(crate) async fn stop(&mut self, grace: Duration) -> io::Result<()> {
        let Some(leader) = self.leader else { return Ok(()) };
        let descendants = tree::descendants(leader);
        signal_group(leader, Signal::TERM);
        if tokio::time::timeout(grace, self.child.wait()).await.is_err() {
            signal_group(leader, Signal::KILL);
            self.child.wait().await?;
        }
        // Kill group members that outlived the leader. The kernel assigns PIDs in sequence, so the leader's
        // PID is not reused yet.
        signal_group(leader, Signal::KILL);
        tree::kill(&descendants);
        self.leader = None;
        // A killed process ends only when the kernel schedules it. Give up if a process hangs in the kernel.
        let given_up = Instant::now() + KILL_TIMEOUT;
        while descendants.iter().any(tree::is_running) && Instant::now() < given_up {
            tokio::time::sleep(BUSY_POLL).await;
        }
        Ok(())
    }
}

/// Removes variables meant for this process only: sockets of the service manager, and paths of our secrets.
/// Must match `warden_policies::own_variables`, which this crate cannot use.
fn remove_own_variables(command: &mut Command) {
    const OURS: [&str; 7] = [
        "NOTIFY_SOCKET",
        "WATCHDOG_",
        "LISTEN_",
        "CREDENTIALS_DIRECTORY",
        "WARDEN_SUCCEEDS",
        "OTEL_EXPORTER_OTLP",
        "LLAMA_WARDEN_",
    ];
    let is_given = |name: &std::ffi::OsStr| command.as_std().get_envs().any(|(given, _)| given == name);
    let is_ours = |name: &std::ffi::OsStr| {
        name.to_str().is_some_and(|name| OURS.iter().any(|ours| name.starts_with(ours)))
    };
    let names = std::env::vars_os().map(|(name, _)| name);
    let kept: Vec<_> = names.filter(|name| is_ours(name) && !is_given(name)).collect();
    for name in kept {
        command.env_remove(name);
    }
}

impl Drop for ProcessTree {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            let descendants = tree::descendants(leader);
            signal_group(leader, Signal::KILL);
            tree::kill(&descendants);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // Joining fails only when the runtime shuts down.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(BuilderError::Cancelled))
}

fn signal_group(leader: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(leader) {
        // The group may have ended already.
        kill_process_group(pid, signal).ok();
    }
}

#[cfg(test)]
mod tests;
