//! Creates one process: the only file of the program with `unsafe` code (the library that it carries is another matter).
//!
//! The child leads a process group of its own, dies by SIGKILL when the forking thread dies, starts with an empty signal
//! mask and SIGHUP ignored, and inherits no file but its three standard ones. Must be called on a thread that lives as long as we do.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal};

use crate::error::SpawnError;
use crate::process::group::Group;
use crate::spec::SpawnRequest;

/// What a service manager tells us and nobody else: a child that took it for its own (tools for containers do) would speak in our name.
const TOLD_US: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"];

/// A process and the reading ends of its output. Dropping it kills the process's group.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) group: Group,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
}

/// Forks and executes; returns when the new program runs or could not be run.
pub(crate) fn spawn(request: &SpawnRequest) -> Result<Spawned, SpawnError> {
    let what = &request.command;
    let mut command = Command::new(&what.binary);
    command.args(&what.args);
    for name in TOLD_US {
        command.env_remove(name);
    }
    command.envs(what.env.iter().map(|(key, value)| (key, value)));
    for name in &what.env_remove {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    if let Some(directory) = &what.directory {
        command.current_dir(directory);
    }
    prepare(&mut command, rustix::process::getpid());

    let mut child = command.spawn().map_err(|source| match &what.directory {
        Some(directory) if !directory.is_dir() => {
            SpawnError::Directory { binary: what.binary.clone(), directory: directory.clone(), source }
        }
        _ => SpawnError::Exec { binary: what.binary.clone(), source },
    })?;
    let pid = Pid::from_child(&child);
    adjust_oom_score(pid, request.oom_score_adj);
    Ok(Spawned {
        group: Group::new(pid),
        stdout: child.stdout.take().map(OwnedFd::from),
        stderr: child.stderr.take().map(OwnedFd::from),
    })
}

#[expect(unsafe_code, reason = "what has to happen between fork and exec can only be told through pre_exec")]
fn prepare(command: &mut Command, parent: Pid) {
    // SAFETY: the closure runs in the forked child, where only async-signal-safe calls are allowed. It makes system
    // calls alone, allocates nothing and takes no lock: the error values are plain numbers.
    unsafe {
        command.pre_exec(move || before_exec(parent));
    }
}

/// Runs in the child between fork and exec: system calls only.
#[expect(unsafe_code, reason = "libc's signal sets and close_range have no safe wrapper")]
fn before_exec(parent: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before the line above; then nobody would ever kill us.
    if rustix::process::getppid() != Some(parent) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: the set is initialised by sigemptyset before it is read; both calls are async-signal-safe.
    unsafe {
        let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
    // What rotates our log may send SIGHUP to every process of a service, and llama-server would die of it. It handles
    // INT and TERM alone, so an ignored HUP, which is inherited through exec, stays ignored.
    // SAFETY: signal(2) with SIG_IGN is async-signal-safe; no handler of ours is involved.
    if unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it only marks descriptors from 3 up as close-on-exec; no pointer is passed. A kernel before 5.11 refuses,
    // and then only what others opened without the flag is inherited.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
    Ok(())
}

/// Best effort: without it only the kernel's choice of a victim is worse.
fn adjust_oom_score(pid: Pid, add: i32) {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok();
    let own: i32 = own.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let score = own.saturating_add(add).clamp(-1000, 1000);
    let path = format!("/proc/{}/oom_score_adj", pid.as_raw_nonzero());
    if let Err(error) = std::fs::write(Path::new(&path), score.to_string()) {
        tracing::debug!(pid = pid.as_raw_nonzero().get(), score, %error, "cannot set oom_score_adj");
    }
}
