//! Starts and stops a llama-server for its verification.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::checks::ServerAddress;
use crate::environment::remove_variables;
use crate::error::{BuilderError, Result, io_error};
use crate::process::{ChildExit, ProcessTree, output};

/// Time between TERM and KILL. An idle server exits within a quarter of a second.
const TERM_GRACE: Duration = Duration::from_secs(3);
/// Time to wait for the exit of a server that closed its connection.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_SHOWN_LINES: usize = 12;

const DEVICE_LIST_HEADING: &str = "Available devices:";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrialSettings {
    /// Time limit of each start and each answer.
    pub(crate) timeout: Duration,
    /// The model is offloaded to a GPU, if the server sees one.
    pub(crate) gpu: bool,
    pub(crate) hide_gpus: bool,
    /// Folder with libraries that the dynamic loader prefers.
    pub(crate) libraries: Option<PathBuf>,
    pub(crate) variables: Vec<(String, String)>,
}

/// Runs a server with one flag that makes it print and exit. `None` if it fails to run, or takes too long.
pub(super) async fn run_with_flag(
    binary: &Path,
    flag: &str,
    trial: &TrialSettings,
    cancel: &CancellationToken,
) -> Result<Option<(ExitStatus, String)>> {
    let mut command = Command::new(binary);
    command.arg(flag).stdin(Stdio::null());
    set_environment(&mut command, trial);
    match tokio::time::timeout(trial.timeout, output(command, cancel)).await {
        Ok(Ok((ChildExit::Cancelled, _))) => Err(BuilderError::Cancelled),
        Ok(Ok((ChildExit::Exited(status), text))) => Ok(Some((status, text))),
        _ => Ok(None),
    }
}

/// GPUs that a server sees, such as `CUDA0: NVIDIA H200 (143167 MiB, 142540 MiB free)`. Empty for older
/// servers without this flag, and for a server that cannot start.
pub(super) async fn list_devices(
    binary: &Path,
    trial: &TrialSettings,
    cancel: &CancellationToken,
) -> Result<Vec<String>> {
    match run_with_flag(binary, "--list-devices", trial, cancel).await? {
        Some((status, text)) if status.success() => Ok(parse_devices(&text)),
        _ => Ok(Vec::new()),
    }
}

fn parse_devices(text: &str) -> Vec<String> {
    let after = text.lines().skip_while(|line| line.trim() != DEVICE_LIST_HEADING).skip(1);
    // List entries are indented, later lines are not.
    after.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()).collect()
}

fn set_environment(command: &mut Command, trial: &TrialSettings) {
    // The server would read flags from its environment, such as an API key or another model.
    remove_variables(command, |name| name.starts_with("LLAMA_") || name.starts_with("GGML_"));
    // After a failed assertion, the server would start a debugger, which may hang.
    command.env("GGML_NO_BACKTRACE", "1");
    command.envs(trial.variables.iter().map(|(name, value)| (name, value)));
    if trial.hide_gpus {
        for name in ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
            command.env(name, "-1");
        }
    }
    if let Some(folder) = &trial.libraries {
        let mut folders = folder.clone().into_os_string();
        if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
            folders.push(":");
            folders.push(others);
        }
        command.env("LD_LIBRARY_PATH", folders);
    }
}

#[derive(Clone, Copy)]
pub(crate) struct TestBench<'a> {
    pub(crate) binary: &'a Path,
    pub(crate) folder: &'a Path,
    pub(crate) trial: &'a TrialSettings,
    /// Servers listen on a Unix socket, else on a port.
    pub(crate) unix: bool,
}

/// A running server with its files. Dropping this value kills the server.
pub(crate) struct TestServer {
    family: ProcessTree,
    status: Option<ExitStatus>,
    door: ServerAddress,
    log: PathBuf,
}

impl TestServer {
    /// Starts a server on a socket in the folder, or on a free port. Each start needs another `name`: a
    /// socket's file outlives its server.
    pub(crate) async fn start(bench: &TestBench<'_>, name: &str, arguments: &[&str]) -> Result<Self> {
        let TestBench { binary, folder, trial, unix } = *bench;
        let door = if unix {
            ServerAddress::Unix(folder.join(format!("{name}.sock")))
        } else {
            ServerAddress::Port(free_port()?)
        };
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log).map_err(io_error("creating", &log))?;
        let second = output.try_clone().map_err(io_error("creating", &log))?;
        let mut command = Command::new(binary);
        command
            .args(match &door {
                ServerAddress::Unix(socket) => vec!["--host".into(), socket.clone().into_os_string()],
                ServerAddress::Port(port) => {
                    ["--host", "127.0.0.1", "--port", &port.to_string()].map(OsString::from).into()
                }
            })
            .args(arguments)
            // Offload all layers: an unused GPU would not be tested.
            .args(if trial.gpu { &["-ngl", "99"][..] } else { &[] })
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(second);
        set_environment(&mut command, trial);
        let family = ProcessTree::spawn(command).await.map_err(|error| BuilderError::Verify {
            check: "start",
            why: format!("{} cannot be run: {error}", binary.display()),
            illegal_instruction: false,
        })?;
        Ok(Self { family, status: None, door, log })
    }

    pub(crate) fn address(&self) -> ServerAddress {
        self.door.clone()
    }

    pub(super) fn is_dead(&self) -> bool {
        self.status.is_some()
    }

    /// Waits for the server's exit. Cancel safe.
    pub(crate) async fn wait_for_exit(&mut self) {
        if self.status.is_none() {
            // An error means that there is no such child any more.
            self.status = self.family.wait().await.ok();
        }
    }

    /// Exit reason of the server, if it has ended, and true if a signal ended it.
    pub(super) async fn exit_reason(&mut self) -> Option<(String, bool)> {
        let (why, _) = self.crash_reason().await;
        Some((why?, self.status?.signal().is_some()))
    }

    /// Crash reason of the server, if it has died, and true if the CPU lacked an instruction.
    pub(crate) async fn crash_reason(&mut self) -> (Option<String>, bool) {
        tokio::time::timeout(EXIT_TIMEOUT, self.wait_for_exit()).await.ok();
        let Some(status) = self.status else { return (None, false) };
        let illegal = status.signal() == Some(Signal::ILL.as_raw());
        (
            Some(format!("the server ended with {status}\n{}", self.last_lines()).trim_end().to_owned()),
            illegal,
        )
    }

    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub(crate) fn last_lines(&self) -> String {
        let text = self.output();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(MAX_SHOWN_LINES)..].join("\n")
    }

    /// Sends TERM to a server that runs under a tool, and waits up to `limit` for the tool's exit.
    pub(crate) async fn terminate_inside(&mut self, program: &Path, limit: Duration) {
        if self.status.is_none() {
            self.family.terminate_program(program);
            tokio::time::timeout(limit, self.wait_for_exit()).await.ok();
        }
    }

    pub(crate) async fn stop(&mut self) {
        if self.status.is_none() {
            // If stopping fails, the server is killed when this value is dropped.
            self.family.stop(TERM_GRACE).await.ok();
        }
    }
}

/// A port that is free now. If another program takes it first, the server reports that and exits.
fn free_port() -> Result<u16> {
    let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr();
    Ok(free().map_err(io_error("looking for a free port of", "127.0.0.1"))?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_what_is_indented_below_its_heading() {
        let text = "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: X, compute capability 9.0\n\
                    Available devices:\n  CUDA0: X (2 MiB, 1 MiB free)\n  CUDA1: Y (3 MiB, 2 MiB free)\nbye\n  no";
        assert_eq!(parse_devices(text), ["CUDA0: X (2 MiB, 1 MiB free)", "CUDA1: Y (3 MiB, 2 MiB free)"]);
        assert_eq!(parse_devices("Available devices:\n"), Vec::<String>::new());
        assert_eq!(parse_devices("unknown flag\n  see --help"), Vec::<String>::new());
    }
}
