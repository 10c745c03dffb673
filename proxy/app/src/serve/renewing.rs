//! Runs `llama-warden update` at intervals if `update.every` is set, as a separate process: a build takes
//! an hour, and its failures must not affect this program. The process finds this instance like any other.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::ConfigSource;
use crate::cli::update::schedule::{last_run, scheduled_command};

pub(super) struct UpdateSchedule {
    /// Interval of updates; zero: never.
    every: Duration,
    state: PathBuf,
    words: Vec<String>,
    due: Option<Instant>,
    running: Option<RunningUpdate>,
}

struct RunningUpdate {
    child: Child,
    /// The update process continues while this is open; closing it asks the process to end.
    keep_alive: Option<ChildStdin>,
    stdout: Option<Lines<BufReader<ChildStdout>>>,
    stderr: Option<Lines<BufReader<ChildStderr>>>,
}

impl UpdateSchedule {
    /// `state`: folder with the time of the last run; `plan`: sources of the configuration.
    pub(super) fn new(every: Duration, state: &Path, plan: &ConfigSource) -> Self {
        let mut renewing = Self {
            every: Duration::ZERO,
            state: state.to_owned(),
            words: scheduled_command(&plan.config),
            due: None,
            running: None,
        };
        renewing.set(every);
        renewing
    }

    /// Sets the interval. A running update continues.
    pub(super) fn set(&mut self, every: Duration) {
        if self.every != every {
            self.every = every;
            // A restart of llama-warden must not restart the interval.
            let waited = last_run(&self.state).unwrap_or(every);
            self.due = self.due_after(every.saturating_sub(waited).max(MIN_FIRST_DELAY.min(every)));
        }
    }

    fn due_after(&self, time: Duration) -> Option<Instant> {
        (!self.every.is_zero()).then(|| Instant::now() + time)
    }

    /// Runs due updates. Never resolves; cancel-safe.
    pub(super) async fn run_due(&mut self) {
        loop {
            if let Some(running) = &mut self.running {
                running.wait_logging().await;
                self.running = None;
                self.due = self.due_after(self.every);
            }
            match self.due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
            self.running = self.start();
            self.due = self.due_after(self.every);
        }
    }

    /// Asks a running update to end. Killing it would leave its compilers running, and instances with a
    /// half-installed build would not roll back.
    pub(super) fn ask_to_end(&mut self) {
        if let Some(running) = &mut self.running {
            running.keep_alive = None;
        }
    }

    /// Waits, at most ten seconds, until an update that was asked to end has ended.
    pub(super) async fn wait_ended(mut self) {
        if let Some(running) = &mut self.running
            && timeout(UPDATE_END_LIMIT, running.wait_logging()).await.is_err()
        {
            tracing::info!("not waiting any longer for llama-warden update to end");
        }
    }

    fn start(&self) -> Option<RunningUpdate> {
        let started = std::env::current_exe().and_then(|program| {
            let mut command = Command::new(program);
            command.args(&self.words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            // Use a separate process group: a terminal's Ctrl-C then reaches only llama-warden, which asks
            // the update to end.
            command.process_group(0).spawn()
        });
        match started {
            Ok(mut child) => {
                let out = child.stdout.take().map(|pipe| BufReader::new(pipe).lines());
                let told = child.stderr.take().map(|pipe| BufReader::new(pipe).lines());
                tracing::info!("llama-warden update begins (`update.every`)");
                Some(RunningUpdate { keep_alive: child.stdin.take(), child, stdout: out, stderr: told })
            }
            Err(error) => {
                tracing::warn!(%error, "llama-warden update cannot be started");
                None
            }
        }
    }
}

const UPDATE_END_LIMIT: Duration = Duration::from_secs(10);
/// Least delay of the first update: the first seconds belong to the models.
const MIN_FIRST_DELAY: Duration = Duration::from_secs(60);

impl RunningUpdate {
    async fn wait_logging(&mut self) {
        loop {
            tokio::select! {
                line = next_line(&mut self.stdout) => match line {
                    Some(line) => tracing::info!(target: "update", "{line}"),
                    None => self.stdout = None,
                },
                line = next_line(&mut self.stderr) => match line {
                    Some(line) => tracing::info!(target: "update", "{line}"),
                    None => self.stderr = None,
                },
                status = self.child.wait(), if self.stdout.is_none() && self.stderr.is_none() => {
                    match status {
                        Ok(status) => tracing::info!(%status, "llama-warden update has ended"),
                        Err(error) => tracing::warn!(%error, "llama-warden update cannot be waited for"),
                    }
                    return;
                }
            }
        }
    }
}

/// The next line; `None` at the end. Never resolves without a stream to read.
async fn next_line<R: AsyncRead + Unpin>(lines: &mut Option<Lines<BufReader<R>>>) -> Option<String> {
    match lines {
        Some(lines) => lines.next_line().await.ok().flatten(),
        None => std::future::pending().await,
    }
}
