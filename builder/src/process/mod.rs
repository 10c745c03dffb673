//! Runs one child program: in a process group of its own, its output line by line, and gone when we want it gone.
//!
//! ```text
//!  spawn -> reads lines -> exits -> status
//!              | cancelled
//!              v
//!           TERM to the group -> grace -> KILL to the group and to every descendant -> Cancelled
//! ```
//!
//! A future that is dropped kills the group and the descendants at once. It never reads settings and never prints.

mod lines;
mod tree;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use lines::Lines;

/// What a program gets between TERM and KILL: ninja removes half-written files in this time.
const GRACE: Duration = Duration::from_secs(5);
/// How long output may follow after the end of a program: a helper that outlives it may hold the pipe for ever.
const LINGER: Duration = Duration::from_millis(200);
/// How long a program may be open for writing before it is told: between a fork and its exec lie milliseconds, on a
/// loaded machine some hundreds of them.
const BUSY: Duration = Duration::from_secs(2);
/// How long a killed descendant may take to be gone.
const REAPED: Duration = Duration::from_secs(5);
/// How often it is tried again until then.
const BUSY_POLL: Duration = Duration::from_millis(5);

/// How a program ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// By itself, or by a signal that was not ours.
    Exited(ExitStatus),
    /// Because we were cancelled. Nothing of it is left.
    Cancelled,
}

/// Runs a program to its end and hands over each line of its standard output and standard error, in their order.
pub(crate) async fn run(
    mut command: Command,
    cancel: &CancellationToken,
    mut line: impl FnMut(&str),
) -> io::Result<Ended> {
    let (reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(OwnedFd::from(writer.try_clone()?)).stderr(OwnedFd::from(writer));
    let mut family = Family::spawn(command).await?;
    let mut output = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?;
    let mut lines = Lines::default();
    let mut chunk = vec![0; 64 * 1024];
    let mut open = true;
    let status = loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => {
                family.stop(GRACE).await?;
                return Ok(Ended::Cancelled);
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
        tokio::time::timeout(LINGER, rest).await.ok();
    }
    lines.finish(&mut line);
    Ok(Ended::Exited(status))
}

/// Runs a program that is over soon, and returns its output, both kinds together.
pub(crate) async fn output(command: Command, cancel: &CancellationToken) -> io::Result<(Ended, String)> {
    let mut text = String::new();
    let ended = run(command, cancel, |line| {
        text.push_str(line);
        text.push('\n');
    })
    .await?;
    Ok((ended, text))
}

/// A child with all that it starts. Dropped while alive, it takes them all along.
#[derive(Debug)]
pub(crate) struct Family {
    child: Child,
    /// The child's id, which is also its group's; `None` once the child is reaped.
    leader: Option<i32>,
}

impl Family {
    /// Starts a program as the leader of a new process group.
    ///
    /// Takes the command by value: it holds our copies of the pipe's writing end, which must close.
    ///
    /// A program that was just written may be "busy" for a moment: a child that another thread forks at that time
    /// holds a copy of the open file until it runs its own program. So that error is waited out, for at most
    /// [`BUSY`]; whoever really holds the file open for writing longer than that gets to see it.
    pub(crate) async fn spawn(mut command: Command) -> io::Result<Self> {
        command.process_group(0).kill_on_drop(true);
        keep_what_is_ours(&mut command);
        let given_up = Instant::now() + BUSY;
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

    /// Waits for the child's own end. Cancel safe.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        self.leader = None;
        Ok(status)
    }

    /// TERM to those of its descendants that run this program, and to nobody else.
    pub(crate) fn tell_inside(&self, program: &Path) {
        if let Some(leader) = self.leader {
            tree::tell(&tree::descendants(leader), program);
        }
    }

    /// TERM, a grace, then KILL for whatever is left. Returns when the child is reaped and its descendants are gone.
    pub(crate) async fn stop(&mut self, grace: Duration) -> io::Result<()> {
        let Some(leader) = self.leader else { return Ok(()) };
        let descendants = tree::descendants(leader);
        signal_group(leader, Signal::TERM);
        if tokio::time::timeout(grace, self.child.wait()).await.is_err() {
            signal_group(leader, Signal::KILL);
            self.child.wait().await?;
        }
        // Members that outlived the leader. The kernel hands ids out in turn, so this number is not another's yet.
        signal_group(leader, Signal::KILL);
        tree::kill(&descendants);
        self.leader = None;
        // A killed process lives until the kernel gets to it. One that hangs in the kernel is not waited for.
        let given_up = Instant::now() + REAPED;
        while descendants.iter().any(tree::lives) && Instant::now() < given_up {
            tokio::time::sleep(BUSY_POLL).await;
        }
        Ok(())
    }
}

/// Keeps from a program what our environment has for us alone: sockets of the service manager, and where our own secrets are. As
/// `warden_policies::own_variables`, which this crate does not know.
fn keep_what_is_ours(command: &mut Command) {
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

impl Drop for Family {
    fn drop(&mut self) {
        if let Some(leader) = self.leader {
            let descendants = tree::descendants(leader);
            signal_group(leader, Signal::KILL);
            tree::kill(&descendants);
        }
    }
}

fn signal_group(leader: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(leader) {
        // No such group any more: it ended by itself.
        kill_process_group(pid, signal).ok();
    }
}

#[cfg(test)]
mod tests;
