//! Child processes of a test: each in its own process group, with its output in a file, killed with its group
//! at the end; and facts from `/proc` about other processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::wait::wait_for;
use crate::{Context as _, Http, Trouble, wait_until};

/// Process with its start time, so that a reused PID is not mistaken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// PID of the process.
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub started: u64,
}

impl ProcessId {
    /// Returns the process that has `pid` now.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = Process::new(pid).ok()?.stat().ok()?;
        (stat.state != 'Z').then_some(Self { pid, started: stat.starttime })
    }

    /// Returns true if the process still runs; a zombie does not.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Returns true if the parent has collected the process. Only then are its sockets certainly closed:
    /// threads may outlive the main thread, whose end makes the process look like a zombie.
    pub fn is_collected(self) -> bool {
        let stat = Process::new(self.pid).and_then(|process| process.stat());
        stat.map_or(true, |stat| stat.starttime != self.started)
    }

    /// Sends a signal if the process still runs.
    pub fn signal(self, signal: Signal) {
        if self.is_alive()
            && let Some(pid) = Pid::from_raw(self.pid)
        {
            let _gone = kill_process(pid, signal);
        }
    }

    /// Command line of the process.
    pub fn command_line(self) -> Vec<String> {
        Process::new(self.pid).and_then(|process| process.cmdline()).unwrap_or_default()
    }

    /// Unix socket of the process, from its arguments (`--host X.sock`).
    pub fn socket(self) -> Option<PathBuf> {
        let line = self.command_line();
        let at = line.iter().position(|word| word == "--host")?;
        line.get(at + 1).map(PathBuf::from)
    }

    /// Client of the process, for the address in its arguments.
    pub fn http(self) -> Option<Http> {
        let line = self.command_line();
        let after = |flag: &str| line.get(line.iter().position(|word| word == flag)? + 1);
        let host = after("--host")?;
        if Path::new(host).extension().is_some_and(|end| end == "sock") {
            return Some(Http::unix(Path::new(host)));
        }
        Some(Http::Tcp(SocketAddr::new(host.parse().ok()?, after("--port")?.parse().ok()?)))
    }

    /// `RssAnon + VmSwap` in bytes.
    pub fn host_bytes(self) -> Option<u64> {
        let status = Process::new(self.pid).ok()?.status().ok()?;
        Some((status.rssanon? + status.vmswap?) * 1024)
    }

    /// Returns a variable of the process's environment.
    pub fn variable(self, name: &str) -> Option<OsString> {
        Process::new(self.pid).ok()?.environ().ok()?.remove(std::ffi::OsStr::new(name))
    }
}

/// Running direct children of `pid`.
pub fn children_of(pid: i32) -> Vec<ProcessId> {
    let Ok(all) = procfs::process::all_processes() else { return Vec::new() };
    let is_child = |process: Process| {
        let stat = process.stat().ok()?;
        let found = ProcessId { pid: stat.pid, started: stat.starttime };
        (stat.ppid == pid && stat.state != 'Z').then_some(found)
    };
    all.flatten().filter_map(is_child).collect()
}

/// Child process of the test.
#[derive(Debug)]
pub struct Kid {
    child: Child,
    /// Standard output and error, in order of arrival.
    log: PathBuf,
    status: Option<ExitStatus>,
}

impl Kid {
    /// Starts `program` with exactly the environment `env` and its output in the file `log`.
    ///
    /// # Errors
    /// The log cannot be created, or the program cannot be started.
    pub fn start(
        program: &Path,
        args: &[OsString],
        env: &BTreeMap<OsString, OsString>,
        directory: &Path,
        log: PathBuf,
    ) -> Result<Self, Trouble> {
        let out = File::create(&log).context(log.display())?;
        let err = out.try_clone()?;
        let child = Command::new(program)
            .args(args)
            .env_clear()
            .envs(env)
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn()
            .context(program.display())?;
        Ok(Self { child, log, status: None })
    }

    /// PID of the child.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Output so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Running direct children of the child.
    pub fn children(&self) -> Vec<ProcessId> {
        children_of(self.pid())
    }

    /// Sends a signal to the child, not to its group, unless it has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none()
            && let Some(pid) = Pid::from_raw(self.pid())
        {
            let _gone = kill_process(pid, signal);
        }
    }

    /// Exit status, if the child has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status
    }

    /// Waits for the end: returns the exit code, or minus the signal.
    ///
    /// # Errors
    /// The child still runs after `deadline`.
    pub async fn exit(&mut self, deadline: Duration) -> Result<i32, Trouble> {
        let what = format!("process {} ends; its output:\n{}", self.pid(), self.output());
        let status = wait_for(&what, deadline, async || self.ended()).await?;
        Ok(status.code().unwrap_or_else(|| -status.signal().unwrap_or_default()))
    }

    /// Waits until the output contains `text`; returns all of it.
    ///
    /// # Errors
    /// The text does not appear within `deadline`, or the child ends before.
    pub async fn says(&mut self, text: &str, deadline: Duration) -> Result<String, Trouble> {
        let mut output = String::new();
        let waited = wait_until(&format!("output contains {text:?}"), deadline, async || {
            let ended = self.ended().is_some();
            output = self.output();
            output.contains(text) || ended
        })
        .await;
        if output.contains(text) {
            return Ok(output);
        }
        let pid = self.pid();
        let why = waited.err().map_or_else(|| "it ended".to_owned(), |late| late.to_string());
        Err(Trouble::new(format!("process {pid} never said {text:?} ({why}); its output:\n{output}")))
    }
}

impl Drop for Kid {
    fn drop(&mut self) {
        let grandchildren = if self.ended().is_none() { self.children() } else { Vec::new() };
        if self.ended().is_none()
            && let Some(group) = Pid::from_raw(self.pid())
        {
            let _gone = kill_process_group(group, Signal::KILL);
            let _reaped = self.child.wait();
        }
        // Grandchildren have groups of their own. They should die with their parent, unless that is broken.
        for orphan in grandchildren {
            orphan.signal(Signal::KILL);
        }
        show(&format!("--- output of process {} ---\n{}", self.child.id(), self.output()));
    }
}

/// Prints text that the test harness shows only with a failure.
#[expect(clippy::print_stderr, reason = "captured by the test harness, which shows it with a failure only")]
fn show(text: &str) {
    eprintln!("{text}");
}
