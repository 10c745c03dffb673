//! One llama-server for the time of its verification.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::process::Command;

use super::Trial;
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
pub(super) struct Server {
    family: Family,
    status: Option<ExitStatus>,
    socket: PathBuf,
    log: PathBuf,
}

impl Server {
    /// Starts it on a socket in `folder`. `name` keeps the files of two starts apart: a socket's file outlives its
    /// server.
    pub(super) async fn start(
        binary: &Path,
        folder: &Path,
        name: &str,
        arguments: &[&str],
        trial: &Trial,
    ) -> Result<Self> {
        let socket = folder.join(format!("{name}.sock"));
        let log = folder.join(format!("{name}.log"));
        let output = File::create(&log).map_err(io_error("creating", &log))?;
        let second = output.try_clone().map_err(io_error("creating", &log))?;
        let mut command = Command::new(binary);
        command
            .arg("-m")
            .arg(folder.join("sample.gguf"))
            .arg("--host")
            .arg(&socket)
            // One thread: the model is tiny, and more of them only spin on a machine that just compiled.
            .args(["-t", "1", "-c", "512"])
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
        Ok(Self { family, status: None, socket, log })
    }

    /// A client that speaks to this server alone, whatever proxy the environment names.
    pub(super) fn client(&self) -> Result<reqwest::Client> {
        reqwest::Client::builder()
            .unix_socket(self.socket.clone())
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            // The server closes connections after streams and errors without saying so.
            .pool_max_idle_per_host(0)
            .build()
            .map_err(|error| Error::Verify {
                check: "start",
                why: error.to_string(),
                illegal_instruction: false,
            })
    }

    /// Resolves when the server has ended. Cancel safe.
    pub(super) async fn ended(&mut self) {
        if self.status.is_none() {
            // An error here means that it cannot be waited for, so it is not there.
            self.status = self.family.wait().await.ok();
        }
    }

    /// If it died, how, and whether of an instruction that the CPU does not know.
    pub(super) async fn death(&mut self) -> (Option<String>, bool) {
        tokio::time::timeout(DYING, self.ended()).await.ok();
        let Some(status) = self.status else { return (None, false) };
        let illegal = status.signal() == Some(Signal::ILL.as_raw());
        (
            Some(format!("the server ended with {status}\n{}", self.last_lines()).trim_end().to_owned()),
            illegal,
        )
    }

    /// The end of its output.
    pub(super) fn last_lines(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }

    /// Ends it.
    pub(super) async fn stop(&mut self) {
        if self.status.is_none() {
            // What cannot be stopped is killed when this is dropped.
            self.family.stop(GRACE).await.ok();
        }
    }
}
