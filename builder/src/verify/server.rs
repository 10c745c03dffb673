//! One llama-server for the time of its verification.

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;

use super::checks::Door;
use super::trial::Trial;
use crate::environment::without;
use crate::error::{Error, Result, io_error};
use crate::process::Family;

/// An idle server exits within a quarter of a second of TERM.
const GRACE: Duration = Duration::from_secs(3);
/// How long a server that closed its connection may take to be seen dead.
const DYING: Duration = Duration::from_millis(500);
/// Lines of output that tell why.
const LINES: usize = 12;

/// The environment that a server is tried in.
pub(super) fn surroundings(command: &mut Command, trial: &Trial) {
    // The server takes flags from its environment, a key and another model among them: what is checked is the binary.
    without(command, |name| name.starts_with("LLAMA_") || name.starts_with("GGML_"));
    // A server that ends by an assertion would start a debugger first, which may wait for ever.
    command.env("GGML_NO_BACKTRACE", "1");
    command.envs(trial.variables.iter().map(|(name, value)| (name, value)));
    if trial.hide {
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

/// A running server and its files. Dropped, it is killed.
pub(crate) struct Server {
    family: Family,
    status: Option<ExitStatus>,
    door: Door,
    log: PathBuf,
}

impl Server {
    /// Starts it, on a socket in `folder` or on a free port. `name` keeps the files of two starts apart: a socket's file outlives its
    /// server.
    pub(crate) async fn start(
        binary: &Path,
        folder: &Path,
        name: &str,
        arguments: &[&str],
        trial: &Trial,
        unix: bool,
    ) -> Result<Self> {
        let door =
            if unix { Door::Unix(folder.join(format!("{name}.sock"))) } else { Door::Port(free_port()?) };
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log).map_err(io_error("creating", &log))?;
        let second = output.try_clone().map_err(io_error("creating", &log))?;
        let mut command = Command::new(binary);
        command
            .args(match &door {
                Door::Unix(socket) => vec!["--host".into(), socket.clone().into_os_string()],
                Door::Port(port) => {
                    ["--host", "127.0.0.1", "--port", &port.to_string()].map(OsString::from).into()
                }
            })
            .args(arguments)
            // As many layers as there are: a GPU that is not used would prove nothing.
            .args(if trial.gpu { &["-ngl", "99"][..] } else { &[] })
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(second);
        surroundings(&mut command, trial);
        let family = Family::spawn(command).await.map_err(|error| Error::Verify {
            check: "start",
            why: format!("{} cannot be run: {error}", binary.display()),
            illegal_instruction: false,
        })?;
        Ok(Self { family, status: None, door, log })
    }

    pub(crate) fn door(&self) -> Door {
        self.door.clone()
    }

    /// Whether it was seen to have ended.
    pub(super) fn is_dead(&self) -> bool {
        self.status.is_some()
    }

    /// Resolves when the server has ended. Cancel safe.
    pub(crate) async fn ended(&mut self) {
        if self.status.is_none() {
            // An error here means that it cannot be waited for, so it is not there.
            self.status = self.family.wait().await.ok();
        }
    }

    /// If it ended, how, and whether by a signal.
    pub(super) async fn end(&mut self) -> Option<(String, bool)> {
        let (why, _) = self.death().await;
        Some((why?, self.status?.signal().is_some()))
    }

    /// If it died, how, and whether of an instruction that the CPU does not know.
    pub(crate) async fn death(&mut self) -> (Option<String>, bool) {
        tokio::time::timeout(DYING, self.ended()).await.ok();
        let Some(status) = self.status else { return (None, false) };
        let illegal = status.signal() == Some(Signal::ILL.as_raw());
        (
            Some(format!("the server ended with {status}\n{}", self.last_lines()).trim_end().to_owned()),
            illegal,
        )
    }

    /// All that it said.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The end of its output.
    pub(crate) fn last_lines(&self) -> String {
        let text = self.output();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// Tells a server that runs under a tool to end, and waits for so long until the tool has ended, too.
    pub(crate) async fn end_inside(&mut self, program: &Path, limit: Duration) {
        if self.status.is_none() {
            self.family.tell_inside(program);
            tokio::time::timeout(limit, self.ended()).await.ok();
        }
    }

    pub(crate) async fn stop(&mut self) {
        if self.status.is_none() {
            // What cannot be stopped is killed when this is dropped.
            self.family.stop(GRACE).await.ok();
        }
    }
}

/// A port that is free now. If somebody else takes it before the server does, the server says so and ends.
fn free_port() -> Result<u16> {
    let free = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr();
    Ok(free().map_err(io_error("looking for a free port of", "127.0.0.1"))?.port())
}
