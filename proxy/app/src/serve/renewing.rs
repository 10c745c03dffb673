//! `llama-warden update` now and then, if `update.every` says so: as a process of its own, because a build takes an hour, and what goes wrong
//! with it must not go wrong with us. It finds us as it finds every instance.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::{Instant, sleep_until, timeout};

use super::Plan;
use crate::cli::update::{last_run, words};

/// Runs updates.
pub(super) struct Renewing {
    /// Zero: never.
    every: Duration,
    state: PathBuf,
    words: Vec<String>,
    due: Option<Instant>,
    running: Option<Running>,
}

/// One under way.
struct Running {
    child: Child,
    /// As long as it is open, somebody wants what the process does.
    wanted: Option<ChildStdin>,
    out: Option<Lines<BufReader<ChildStdout>>>,
    told: Option<Lines<BufReader<ChildStderr>>>,
}

impl Renewing {
    /// As it is configured: how often, where the last run is noted, and the configuration.
    pub(super) fn new(every: Duration, state: &Path, plan: &Plan) -> Self {
        let mut renewing = Self {
            every: Duration::ZERO,
            state: state.to_owned(),
            words: words(&plan.config),
            due: None,
            running: None,
        };
        renewing.set(every);
        renewing
    }

    /// From now on so often. One that is under way goes on.
    pub(super) fn set(&mut self, every: Duration) {
        if self.every != every {
            self.every = every;
            // A restart of ours is no reason to begin anew.
            let waited = last_run(&self.state).unwrap_or(every);
            self.due = self.in_time(every.saturating_sub(waited).max(SOONEST.min(every)));
        }
    }

    /// The moment after this time, if anything is wanted at all.
    fn in_time(&self, time: Duration) -> Option<Instant> {
        (!self.every.is_zero()).then(|| Instant::now() + time)
    }

    /// Does what is due. It never resolves, and may be dropped at any point.
    pub(super) async fn go_on(&mut self) {
        loop {
            if let Some(running) = &mut self.running {
                running.end().await;
                self.running = None;
                self.due = self.in_time(self.every);
            }
            match self.due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
            self.running = self.start();
            self.due = self.in_time(self.every);
        }
    }

    /// Tells a running update to end. It is not killed: its compilers would go on without it, and instances that have a half brought-in build would
    /// not go back.
    pub(super) fn leave(&mut self) {
        if let Some(running) = &mut self.running {
            running.wanted = None;
        }
    }

    /// Waits until the update that was told to end has ended, for ten seconds at most.
    pub(super) async fn ended(mut self) {
        if let Some(running) = &mut self.running
            && timeout(PATIENCE, running.end()).await.is_err()
        {
            tracing::info!("llama-warden update ends without us");
        }
    }

    fn start(&self) -> Option<Running> {
        let started = std::env::current_exe().and_then(|program| {
            let mut command = Command::new(program);
            command.args(&self.words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            // Not in our group: what a terminal sends to us is ours to pass on.
            command.process_group(0).spawn()
        });
        match started {
            Ok(mut child) => {
                let out = child.stdout.take().map(|pipe| BufReader::new(pipe).lines());
                let told = child.stderr.take().map(|pipe| BufReader::new(pipe).lines());
                tracing::info!("llama-warden update begins (`update.every`)");
                Some(Running { wanted: child.stdin.take(), child, out, told })
            }
            Err(error) => {
                tracing::warn!(%error, "llama-warden update cannot be started");
                None
            }
        }
    }
}

/// How long one that is wanted no more is waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first seconds belong to the models.
const SOONEST: Duration = Duration::from_secs(60);

impl Running {
    /// Logs what it says until it has ended.
    async fn end(&mut self) {
        loop {
            tokio::select! {
                line = next(&mut self.out) => match line {
                    Some(line) => tracing::info!(target: "update", "{line}"),
                    None => self.out = None,
                },
                line = next(&mut self.told) => match line {
                    Some(line) => tracing::info!(target: "update", "{line}"),
                    None => self.told = None,
                },
                status = self.child.wait(), if self.out.is_none() && self.told.is_none() => {
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

/// The next line; `None` at the end. Waits for ever where there is nothing to read any more.
async fn next<R: AsyncRead + Unpin>(lines: &mut Option<Lines<BufReader<R>>>) -> Option<String> {
    match lines {
        Some(lines) => lines.next_line().await.ok().flatten(),
        None => std::future::pending().await,
    }
}
