//! Kills all processes that a tool of `diagnose --wrap` leaves behind. The keeper is a process of its own,
//! because the experiment may be killed.
//!
//! Tools fork: a shell script runs the server as its child, a profiler leaves an agent in another session.
//! The kernel kills the tool's first process when llama-warden dies, and llama-warden kills the process
//! group. Other processes would stay.
//!
//! ```text
//!   llama-warden ── spawns ──> script of the wrap ─ starts the keeper, waits for it ─ exec ─> the tool ─> …
//!        │ ends                                       │                                         │ ends
//!        └──────────────────────> keeper: waits <─────┴─────────────────────────────────────────┘
//!                                   └─> kills every process that has the mark in its environment
//! ```
//!
//! Every process that the tool starts inherits the mark. A process that clears its environment is missed.

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;
use warden_policies::defaults;

use crate::exit::CommandError;
use crate::out;

/// Variable in the environment of every process of a tool. Its value identifies one run of the tool.
pub(super) const WRAP_MARK_VARIABLE: &str = "LLAMA_WARDEN_WRAPPED";

/// Arguments of the keeper. The script of a wrap runs this command, users do not.
#[derive(Debug, Args)]
pub(crate) struct KeeperArgs {
    /// PID that becomes the tool.
    tool: i32,
    /// PID of the experiment.
    owner: i32,
    /// Runs as the keeper; without it, starts a keeper and waits until it is ready.
    #[arg(long)]
    stay: bool,
}

/// Starts the keeper; with `--stay`, runs as the keeper.
pub(crate) fn run(args: &KeeperArgs) -> Result<(), CommandError> {
    let mark = std::env::var(WRAP_MARK_VARIABLE)
        .map_err(|_| CommandError::usage(format!("{WRAP_MARK_VARIABLE} is not set"), "use --wrap"))?;
    if args.stay { keep_until_end(args, &mark) } else { start_keeper(args) }
}

/// Starts the keeper in a process group of its own, so that signals to other groups do not end it.
fn start_keeper(args: &KeeperArgs) -> Result<(), CommandError> {
    let failed =
        |what: &str, error: &std::io::Error| CommandError::failed(format!("--wrap: {what}: {error}"));
    let mut keeper = Command::new("/proc/self/exe")
        .args(["keep-wrapped", "--stay", &args.tool.to_string(), &args.owner.to_string()])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed("cannot start the keeper", &error))?;
    let mut word = [0];
    let output = keeper.stdout.as_mut().map(|output| output.read_exact(&mut word));
    match output {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(failed("the keeper does not watch", &error)),
        None => Err(CommandError::failed("--wrap: the keeper has no output")),
    }
}

/// Waits until the tool or the experiment ends, then kills the remaining processes with the mark.
fn keep_until_end(args: &KeeperArgs, mark: &str) -> Result<(), CommandError> {
    let open = |pid: i32| Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let (tool, owner) = (open(args.tool), open(args.owner));
    out::print_line("watching")?;
    let both: Vec<&OwnedFd> = tool.iter().chain(&owner).collect();
    // A process that could not be opened has ended already.
    while both.len() == 2 && !wait_for_any_end(&both, TOOL_WAIT_LIMIT) {}
    let mark = format!("{WRAP_MARK_VARIABLE}={mark}");
    let deadline = Instant::now() + defaults().diagnose.wrap.rest;
    loop {
        let left = marked_processes(Path::new("/proc"), mark.as_bytes());
        if left.is_empty() {
            return Ok(());
        }
        let orphaned = owner.as_ref().is_none_or(|owner| wait_for_any_end(&[owner], Duration::ZERO));
        if orphaned || Instant::now() >= deadline {
            for pid in left {
                kill_marked(pid, mark.as_bytes());
            }
        }
        // Poll no process: this is only a pause.
        wait_for_any_end(&[], SCAN_INTERVAL);
    }
}

/// Longest single wait for the end of the tool; repeated until it ends.
const TOOL_WAIT_LIMIT: Duration = Duration::from_secs(3600);
/// Pause between two scans for remaining processes.
const SCAN_INTERVAL: Duration = Duration::from_millis(50);

/// Waits up to `limit` until one of the processes ends. Returns whether one has ended.
fn wait_for_any_end(processes: &[&OwnedFd], limit: Duration) -> bool {
    let mut asked: Vec<PollFd<'_>> = processes.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let limit = Timespec::try_from(limit).ok();
    matches!(poll(&mut asked, limit.as_ref()), Ok(ended) if ended > 0)
}

/// Processes other than this one whose environment contains `mark`.
fn marked_processes(proc: &Path, mark: &[u8]) -> Vec<Pid> {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    pids.filter(|pid| *pid != getpid() && has_mark(proc, *pid, mark)).collect()
}

fn has_mark(proc: &Path, pid: Pid, mark: &[u8]) -> bool {
    let process = proc.join(pid.as_raw_nonzero().to_string());
    let has = |folder: &Path| {
        let all = std::fs::read(folder.join("environ")).ok().filter(|all| !all.is_empty())?;
        Some(all.split(|byte| *byte == 0).any(|line| line == mark))
    };
    // The environment of a zombie is empty, and so is that of a process whose first thread has ended. Other
    // threads still show the environment.
    has(&process).unwrap_or_else(|| {
        let threads = std::fs::read_dir(process.join("task")).into_iter().flatten().flatten();
        threads.filter_map(|thread| has(&thread.path())).any(|has| has)
    })
}

/// Kills a process if it still has the mark: the PID may have been reused.
fn kill_marked(pid: Pid, mark: &[u8]) {
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
        && has_mark(Path::new("/proc"), pid, mark)
    {
        // Ignore the error: the process may have ended.
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_with_the_whole_mark_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let environment = |pid: &str, text: &str| {
            std::fs::create_dir(directory.path().join(pid)).unwrap();
            std::fs::write(directory.path().join(pid).join("environ"), text).unwrap();
        };
        environment("11", "A=1\0LLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        environment("12", "LLAMA_WARDEN_WRAPPED=/tmp/x:12\0");
        environment("13", "XLLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        environment("14", "");
        environment("15", "");
        std::fs::create_dir_all(directory.path().join("15/task/16")).unwrap();
        std::fs::write(directory.path().join("15/task/16/environ"), "LLAMA_WARDEN_WRAPPED=/tmp/x:1\0")
            .unwrap();
        environment("self", "LLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        let found = marked_processes(directory.path(), b"LLAMA_WARDEN_WRAPPED=/tmp/x:1");
        assert_eq!(found.iter().map(|pid| pid.as_raw_nonzero().get()).collect::<Vec<_>>(), [11, 15]);
    }
}
