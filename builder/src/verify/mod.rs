//! Makes a llama-server prove itself before it counts: it must start, load the sample model and answer.
//!
//! ```text
//!  start -> health -> completion -> chat (streamed) -> stop
//!  start with --embeddings -> health -> embedding -> stop
//! ```
//!
//! Two starts, because older servers refuse completions when embeddings are on. The server listens on a Unix socket
//! in a private folder, so no port is taken and nobody else can reach it; it is gone when this returns, however it
//! returns.

mod checks;
mod devices;
mod server;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::environment::short_temporary_folder;
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Reporter};
use crate::sample_model;
use checks::Fault;
use server::Server;

/// What a server did to prove itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// The checks that passed, in their order.
    pub checks: Vec<Check>,
    /// The GPUs that the server listed, as it wrote them; empty for builds without a GPU, and on machines without one.
    #[serde(default)]
    pub devices: Vec<String>,
}

/// How a server is tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trial {
    /// Bounds each start and each answer.
    pub(crate) timeout: Duration,
    /// Whether the model goes to a GPU, if the server sees one.
    pub(crate) gpu: bool,
    /// Whether this machine's GPUs are hidden from it.
    pub(crate) hide: bool,
    /// A folder with libraries that its loader takes before others.
    pub(crate) libraries: Option<PathBuf>,
}

/// One check that passed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Such as `completion`.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// Checks one server binary. `timeout` bounds each start and each answer. On failure the error names the check and
/// tells the answer, or the last lines of a server that died.
pub async fn verify(
    binary: &Path,
    timeout: Duration,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Verified> {
    let trial = Trial { timeout, gpu: false, hide: false, libraries: None };
    try_out(binary, &trial, reporter, cancel).await
}

/// As [`verify()`], with more to say about how.
pub(crate) async fn try_out(
    binary: &Path,
    trial: &Trial,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Verified> {
    let base = short_temporary_folder();
    let folder = tempfile::Builder::new()
        .prefix("llama-warden-verify-")
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(&base)
        .map_err(io_error("creating a folder in", base))?;
    let model = folder.path().join("sample.gguf");
    sample_model::write(&model, &sample_model::Options::default()).map_err(io_error("writing", &model))?;
    let mut verified = Verified::default();
    if trial.gpu {
        verified.devices = devices::listed(binary, trial, cancel).await?;
    }
    let mut run = Run { binary, folder: folder.path(), trial, reporter, cancel, verified: &mut verified };
    run.with_server("answers", &[], &[("completion", Ask::Completion), ("chat", Ask::Chat)]).await?;
    run.with_server("embeds", &["--embeddings", "--pooling", "mean"], &[("embedding", Ask::Embedding)])
        .await?;
    Ok(verified)
}

/// What is asked of a running server.
#[derive(Clone, Copy)]
enum Ask {
    Completion,
    Chat,
    Embedding,
}

struct Run<'a> {
    binary: &'a Path,
    folder: &'a Path,
    trial: &'a Trial,
    reporter: &'a Reporter,
    cancel: &'a CancellationToken,
    verified: &'a mut Verified,
}

impl Run<'_> {
    /// Starts a server, waits until it is healthy, asks, and stops it.
    async fn with_server(
        &mut self,
        name: &str,
        arguments: &[&str],
        asks: &[(&'static str, Ask)],
    ) -> Result<()> {
        let mut server = Server::start(self.binary, self.folder, name, arguments, self.trial).await?;
        let cancel = self.cancel.clone();
        let done = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::Cancelled),
            done = self.ask_all(&mut server, asks) => done,
        };
        // Stopped in every case; what the checks said is more interesting than how it ended.
        server.stop().await;
        done
    }

    async fn ask_all(&mut self, server: &mut Server, asks: &[(&'static str, Ask)]) -> Result<()> {
        let client = server.client()?;
        self.timed("health", server, checks::health(&client)).await?;
        for (name, ask) in asks {
            match ask {
                Ask::Completion => self.timed(name, server, checks::completion(&client)).await?,
                Ask::Chat => self.timed(name, server, checks::chat(&client)).await?,
                Ask::Embedding => self.timed(name, server, checks::embedding(&client)).await?,
            }
        }
        Ok(())
    }

    async fn timed(
        &mut self,
        name: &'static str,
        server: &mut Server,
        check: impl Future<Output = std::result::Result<(), Fault>>,
    ) -> Result<()> {
        let begun = Instant::now();
        let outcome = tokio::select! {
            biased;
            outcome = tokio::time::timeout(self.trial.timeout, check) => {
                outcome.unwrap_or_else(|_| Err(Fault::new(format!("no answer within {:?}", self.trial.timeout))))
            }
            () = server.ended() => Err(Fault::new("the server ended".to_owned())),
        };
        if let Err(fault) = outcome {
            // A server that died takes the answer with it: its own words tell more.
            let (death, illegal_instruction) = server.death().await;
            let why =
                death.unwrap_or_else(|| format!("{fault}\n{}", server.last_lines()).trim_end().to_owned());
            return Err(Error::Verify { check: name, why, illegal_instruction });
        }
        let seconds = begun.elapsed().as_secs_f64();
        self.verified.checks.push(Check { name: name.to_owned(), seconds });
        self.reporter.tell(Event::Checked(name));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
