//! Creates one process. Only this file and the tracer library contain `unsafe` code.
//!
//! The child leads its own process group, and gets SIGKILL when the forking thread ends. It starts with an
//! empty signal mask and ignored SIGHUP, and inherits only its standard files. It enters its control group
//! before its program runs.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal};
use warden_policies::own_variables::is_own_variable;

use crate::error::SpawnError;
use crate::process::control_group::ControlGroup;
use crate::process::group::ProcessGroup;
use crate::process::root::SuccessorProgram;
use crate::spec::SpawnRequest;

/// Dropping this value kills the process's group.
#[derive(Debug)]
pub(crate) struct SpawnedChild {
    pub(crate) group: ProcessGroup,
    pub(crate) control: Option<Arc<ControlGroup>>,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
}

/// Variable that gives a successor the root's PID and the numbers of two inherited file descriptors.
pub const SUCCESSION_VARIABLE: &str = "WARDEN_SUCCEEDS";

/// Creates the process of the next instance. Unlike other children, it keeps our standard files and SIGHUP
/// handling, and inherits the two given files.
pub(crate) fn spawn_successor(
    program: &SuccessorProgram,
    files: &[OwnedFd; 2],
) -> Result<SpawnedChild, SpawnError> {
    let [root, handover] = files.each_ref().map(AsRawFd::as_raw_fd);
    let own = rustix::process::getpid();
    let mut command = Command::new(&program.binary);
    command.arg0(&program.called).args(&program.args).process_group(0);
    command.env(SUCCESSION_VARIABLE, format!("{} {root} {handover}", own.as_raw_nonzero()));
    inherit_files(&mut command, own, [root, handover]);
    let failed = |source| SpawnError::Exec { binary: program.binary.clone(), source };
    let child = command.stdin(Stdio::null()).spawn().map_err(failed)?;
    Ok(SpawnedChild {
        group: ProcessGroup::new(Pid::from_child(&child)),
        control: None,
        stdout: None,
        stderr: None,
    })
}

#[expect(unsafe_code, reason = "what has to happen between fork and exec can only be told through pre_exec")]
fn inherit_files(command: &mut Command, parent: Pid, files: [RawFd; 2]) {
    // SAFETY: as in `prepare`: system calls alone. The files are open in the parent until the program runs.
    unsafe {
        command.pre_exec(move || {
            die_with_parent(parent)?;
            mark_all_files();
            for file in files {
                if libc::fcntl(file, libc::F_SETFD, 0) == -1 {
                    return Err(io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
}

/// Values that the root gives to a successor in [`SUCCESSION_VARIABLE`].
#[derive(Debug)]
pub struct Succession {
    /// PID of the root.
    pub root: u32,
    /// Connection to the root.
    pub to_root: UnixStream,
    /// Connection to the previous instance.
    pub handover: UnixStream,
}

impl Succession {
    /// Reads the succession from the environment. `None` if this process is no successor, at a second call,
    /// or after other threads were started or other files opened.
    #[expect(unsafe_code, reason = "a file that was inherited has nothing but its number")]
    pub fn from_environment() -> Option<Self> {
        static TAKEN: AtomicBool = AtomicBool::new(false);
        let told = std::env::var(SUCCESSION_VARIABLE).ok()?;
        let mut numbers = told.split(' ').map(str::parse::<i32>);
        let (root, to_root, handover) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        // Other children of the root inherit the variable, but not the files.
        let is_child = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get()) == Some(root);
        let distinct = to_root > 2 && handover > 2 && to_root != handover;
        if !is_child || !distinct || !is_alone() || TAKEN.swap(true, Ordering::SeqCst) {
            return None;
        }
        // SAFETY: this runs once, for two different files, and no other thread exists that could take or
        // close them.
        let (to_root, handover) = unsafe { (take_socket(to_root)?, take_socket(handover)?) };
        Some(Self { root: u32::try_from(root).ok()?, to_root, handover })
    }
}

fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Takes ownership of an inherited socket. Descriptors that this program opened have the close-on-exec flag
/// and are refused.
///
/// # Safety
/// No other code takes or closes the file descriptor.
#[expect(unsafe_code, reason = "a file that was inherited has nothing but its number")]
unsafe fn take_socket(file: RawFd) -> Option<UnixStream> {
    // SAFETY: fcntl only reads the flags of a descriptor, and fails for a number that is no open file.
    if unsafe { libc::fcntl(file, libc::F_GETFD) } != 0 {
        return None;
    }
    // SAFETY: fcntl only sets a flag of an open descriptor.
    if unsafe { libc::fcntl(file, libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return None;
    }
    // SAFETY: the descriptor is open, and was inherited from our parent, which opened it for us. So no
    // other code in this process owns it, and the caller guarantees that none will.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let is_socket = rustix::net::sockopt::socket_type(&file).is_ok();
    is_socket.then(|| UnixStream::from(file))
}

/// Forks and executes. Returns when the new program runs or has failed to start.
pub(crate) fn spawn(
    request: &SpawnRequest,
    control: Option<Arc<ControlGroup>>,
) -> Result<SpawnedChild, SpawnError> {
    let what = &request.command;
    let mut words = what.program_words().into_iter();
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(words).args(&what.args);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_own_variable) {
            command.env_remove(name);
        }
    }
    command.envs(what.env.iter().map(|(key, value)| (key, value)));
    for name in &what.env_remove {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    if let Some(directory) = &what.directory {
        command.current_dir(directory);
    }
    prepare(
        &mut command,
        rustix::process::getpid(),
        control.as_ref().and_then(|group| group.open_entrance().ok()),
    );

    let mut child = command.spawn().map_err(|source| match &what.directory {
        Some(directory) if !directory.is_dir() => {
            SpawnError::Directory { binary: what.binary.clone(), directory: directory.clone(), source }
        }
        _ => SpawnError::Exec { binary: program.into(), source },
    })?;
    let pid = Pid::from_child(&child);
    adjust_oom_score(pid, request.oom_score_adj);
    Ok(SpawnedChild {
        group: ProcessGroup::new(pid),
        control,
        stdout: child.stdout.take().map(OwnedFd::from),
        stderr: child.stderr.take().map(OwnedFd::from),
    })
}

#[expect(unsafe_code, reason = "what has to happen between fork and exec can only be told through pre_exec")]
fn prepare(command: &mut Command, parent: Pid, control: Option<OwnedFd>) {
    // SAFETY: the closure runs in the forked child, where only async-signal-safe calls are allowed. The
    // closure makes system calls alone, allocates nothing and takes no lock: the error values are plain
    // numbers.
    unsafe {
        command.pre_exec(move || before_exec(parent, control.as_ref()));
    }
}

#[expect(unsafe_code, reason = "libc's signal() has no safe wrapper")]
fn before_exec(parent: Pid, control: Option<&OwnedFd>) -> io::Result<()> {
    die_with_parent(parent)?;
    if let Some(control) = control {
        // If the kernel refuses, the child starts outside of its control group.
        let _outside = rustix::io::write(control, b"0");
    }
    // Log rotation may send SIGHUP to a whole service, which would end llama-server. An ignored SIGHUP stays
    // ignored after exec, and llama-server handles only SIGINT and SIGTERM.
    // SAFETY: signal(2) with SIG_IGN is async-signal-safe; no handler of ours is involved.
    if unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    mark_all_files();
    Ok(())
}

/// Ties the child's life to the forking thread and unblocks all signals. Makes only system calls.
#[expect(unsafe_code, reason = "libc's signal sets have no safe wrapper")]
fn die_with_parent(parent: Pid) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // If the parent died before the call above, nothing would ever kill the child.
    if rustix::process::getppid() != Some(parent) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: the set is initialised by sigemptyset before it is read; both calls are async-signal-safe.
    unsafe {
        let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
    Ok(())
}

/// Marks all files except the standard ones as close-on-exec.
#[expect(unsafe_code, reason = "close_range has no safe wrapper")]
fn mark_all_files() {
    // SAFETY: the call only marks descriptors from 3 up as close-on-exec; no pointer is passed. A kernel
    // before 5.11 refuses; then the child inherits files that other code opened without that flag.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    }
}

/// Adds to the OOM score. Ignores failures: they only affect the kernel's choice of a victim.
fn adjust_oom_score(pid: Pid, add: i32) {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok();
    let own: i32 = own.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let score = own.saturating_add(add).clamp(-1000, 1000);
    let path = format!("/proc/{}/oom_score_adj", pid.as_raw_nonzero());
    if let Err(error) = std::fs::write(Path::new(&path), score.to_string()) {
        tracing::debug!(pid = pid.as_raw_nonzero().get(), score, %error, "cannot set oom_score_adj");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "as above")]
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    fn a_file_that_this_program_opened_is_not_taken_and_one_that_was_inherited_is() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        // SAFETY: the descriptor is refused, so `one` stays its owner.
        assert!(unsafe { take_socket(one.as_raw_fd()) }.is_none());
        one.write_all(b"1").unwrap();
        other.read_exact(&mut [0]).unwrap();
        // SAFETY: no open file has this number.
        assert!(unsafe { take_socket(RawFd::MAX) }.is_none());

        let inherited = one.try_clone().unwrap();
        rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
        // SAFETY: `into_raw_fd` has given up the descriptor, so only `take_socket` owns it.
        let mut taken = unsafe { take_socket(std::os::fd::IntoRawFd::into_raw_fd(inherited)) }.unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&taken).unwrap(), rustix::io::FdFlags::CLOEXEC);
        taken.write_all(b"2").unwrap();
        other.read_exact(&mut [0]).unwrap();
        assert!(!std::thread::spawn(is_alone).join().unwrap());
    }
}
