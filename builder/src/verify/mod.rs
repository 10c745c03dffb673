//! Verifies a llama-server: it must start, load the sample model and answer.
//!
//! ```text
//!  start -> health -> completion -> chat (streamed) -> stop
//!  start with --embeddings -> health -> embedding -> stop
//!  start with each weight format and each setting -> compare with the same numbers in f32 -> stop
//!  start with a slow model -> measure its behaviour -> stop
//! ```
//!
//! Completions and embeddings need two starts, because older servers refuse completions with embeddings on.
//! A server around b4881 exits before it is ready if it shall pool the mean of a generating model; then the
//! last token is pooled. The server listens on a Unix socket in a private folder, so it takes no port and
//! no other user can reach it. A server without Unix sockets is tested on a free loopback port. The server
//! has ended whenever this returns.
//!
//! Measured facts (time of a stream's head, threads per connection, handling of unread bodies) differ
//! between versions and forks. The proxy uses them; they never fail a build.

mod bodies;
mod checks;
mod computing;
mod devices;
mod measure;
mod measured;
mod remembered;
mod server;
mod trial;

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::environment::short_temporary_folder;
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Reporter};
use crate::sample_model::{self, Preset};
pub use checks::Door;
use checks::Fault;
pub use computing::{Computed, ComputedTrial};
pub use measured::{HttpThreads, Measured, StreamHead};
pub use remembered::{Recalled, Remembered};
pub(crate) use server::Server;
pub(crate) use trial::Trial;

/// Results of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// Passed checks in order.
    pub checks: Vec<Check>,
    /// GPUs as listed by the server; empty for builds without a GPU, and on machines without one.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Results with quantised weights. `None`: the server reports no probabilities, or the build is from
    /// before this test existed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed: Option<Computed>,
    /// Measured behaviour; unknown for builds from before the measurements existed.
    #[serde(default)]
    pub measured: Measured,
}

/// A passed check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Name, such as `completion`.
    pub name: String,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Verifies a server binary. `timeout` limits each start and each answer.
///
/// # Errors
///
/// Fails if a check fails: the error names the check, and quotes the answer or a crashed server's last
/// lines. Fails on cancellation.
pub async fn verify(
    binary: &Path,
    timeout: Duration,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Verified> {
    let trial = Trial { timeout, gpu: false, hide: false, libraries: None, variables: Vec::new() };
    try_out(binary, &trial, reporter, cancel).await
}

/// Like [`verify()`], with more settings.
pub(crate) async fn try_out(
    binary: &Path,
    trial: &Trial,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Verified> {
    let folder = folder()?;
    let model = folder.path().join("sample.gguf");
    sample_model::write(&model, &sample_model::Options::default()).map_err(io_error("writing", &model))?;
    let mut verified = Verified::default();
    if trial.gpu {
        verified.devices = devices::listed(binary, trial, cancel).await?;
    }
    let mut run =
        Run { binary, folder: folder.path(), trial, reporter, cancel, unix: true, verified: &mut verified };
    let asks = [("completion", Ask::Completion), ("chat", Ask::Chat)];
    let first = run.with_server("answers", &SMALL, &asks).await;
    match first {
        Ok(()) => {}
        // Servers before about b5000, and ik_llama.cpp, have no Unix sockets. Any other cause ends the
        // second attempt, too.
        Err(Stopped { error: Error::Verify { .. }, never_ready: true, .. }) if !cancel.is_cancelled() => {
            run.unix = false;
            run.verified.checks.clear();
            run.with_server("answers", &SMALL, &asks).await.map_err(|stopped| stopped.error)?;
            reporter.tell(Event::Note(
                "it does not listen on a Unix socket: verified on a loopback port".to_owned(),
            ));
        }
        Err(stopped) => return Err(stopped.error),
    }
    run.embeds().await?;
    let unix = run.unix;
    compute(binary, folder.path(), trial, unix, &mut verified, reporter, cancel).await?;
    verified.measured = measured_in(binary, folder.path(), trial, unix, cancel).await?;
    reporter.tell(Event::Note(format!("measured: {}", verified.measured)));
    Ok(verified)
}

/// Tests all weight formats, and reports the result.
async fn compute(
    binary: &Path,
    folder: &Path,
    trial: &Trial,
    unix: bool,
    verified: &mut Verified,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<()> {
    let begun = Instant::now();
    let has_gpu = trial.gpu && !trial.hide && !verified.devices.is_empty();
    verified.computed = computing::all(binary, folder, trial, unix, has_gpu, cancel).await?;
    let Some(computed) = &verified.computed else {
        let note = "not computed: the server gives no probabilities, so quantised weights were not tried";
        reporter.tell(Event::Note(note.to_owned()));
        return Ok(());
    };
    let name = "computing";
    verified.checks.push(Check { name: name.to_owned(), seconds: begun.elapsed().as_secs_f64() });
    reporter.tell(Event::Checked(name));
    reporter.tell(Event::Note(computed.in_words()));
    Ok(())
}

/// Flags of a server to be measured, except for its address. `model` was written by [`measuring_model`].
pub fn measuring_flags(model: &Path) -> Vec<OsString> {
    // CPU only: a GPU processes the prompt too fast to observe, and another process's model may keep it busy.
    let mut flags: Vec<OsString> = vec!["-m".into(), model.into()];
    flags.extend(["-t", "1", "-ngl", "0", "-c", measure::CONTEXT].map(OsString::from));
    flags.extend(measure::FLAGS.map(OsString::from));
    flags
}

/// Writes the model for measurements: 14 MB, slow for its size.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn measuring_model(path: &Path) -> Result<()> {
    let options = sample_model::Options { preset: Preset::Slow, ..sample_model::Options::default() };
    sample_model::write(path, &options).map_err(io_error("writing", path))
}

/// Measures a healthy server that was started with [`measuring_flags`]. After `limit`, the remaining facts
/// stay unknown.
pub async fn measure(door: &Door, limit: Duration) -> Measured {
    measure::all(door, limit).await
}

/// Waits until a server is healthy; returns false if that failed. The caller limits the time.
pub(crate) async fn healthy(door: &Door) -> bool {
    checks::health(door).await.is_ok()
}

/// Flags for the small model. One thread: more would only spin on a machine that just compiled.
const SMALL: [&str; 6] = ["-m", "sample.gguf", "-t", "1", "-c", "512"];

/// Pooling types for embeddings, each with the name of its check; the usual one first.
const POOLINGS: [(&str, &str); 2] = [("mean", "embedding"), ("last", "embedding-last")];

/// Creates a private folder with a short path.
fn folder() -> Result<TempDir> {
    let base = short_temporary_folder();
    tempfile::Builder::new()
        .prefix("llama-warden-verify-")
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(&base)
        .map_err(io_error("creating a folder in", base))
}

/// Starts a server for measurements, and measures it. If it does not start, all facts stay unknown.
async fn measured_in(
    binary: &Path,
    folder: &Path,
    trial: &Trial,
    unix: bool,
    cancel: &CancellationToken,
) -> Result<Measured> {
    let trial = Trial { gpu: false, hide: true, ..trial.clone() };
    let model = folder.join("long.gguf");
    measuring_model(&model)?;
    let flags = measuring_flags(&model);
    let flags: Vec<&str> = flags.iter().filter_map(|flag| flag.to_str()).collect();
    let Ok(mut server) = Server::start(binary, folder, "measure", &flags, &trial, unix).await else {
        return Ok(Measured::default());
    };
    let door = server.door();
    let asked = async {
        if matches!(timeout(trial.timeout, checks::health(&door)).await, Ok(Ok(()))) {
            measure::all(&door, trial.timeout).await
        } else {
            Measured::default()
        }
    };
    let measured = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        () = server.ended() => Some(Measured::default()),
        measured = asked => Some(measured),
    };
    server.stop().await;
    measured.ok_or(Error::Cancelled)
}

/// A request to a running server.
#[derive(Clone, Copy)]
enum Ask {
    Completion,
    Chat,
    Embedding,
}

/// Failure of a server.
struct Stopped {
    error: Error,
    /// The server exited before it was healthy.
    never_ready: bool,
    /// The server was never healthy, exited or not.
    unhealthy: bool,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self { error, never_ready: false, unhealthy: false }
    }
}

struct Run<'a> {
    binary: &'a Path,
    folder: &'a Path,
    trial: &'a Trial,
    reporter: &'a Reporter,
    cancel: &'a CancellationToken,
    /// The server listens on a Unix socket, else on a port.
    unix: bool,
    verified: &'a mut Verified,
}

impl Run<'_> {
    /// Starts a server, waits until it is healthy, sends the requests, and stops it.
    async fn with_server(
        &mut self,
        name: &str,
        arguments: &[&str],
        asks: &[(&'static str, Ask)],
    ) -> std::result::Result<(), Stopped> {
        let passed = self.verified.checks.len();
        let mut server =
            Server::start(self.binary, self.folder, name, arguments, self.trial, self.unix).await?;
        let cancel = self.cancel.clone();
        let done = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(Error::Cancelled),
            done = self.ask_all(&mut server, asks) => done,
        };
        let dead = server.is_dead();
        // Always stopped; the result of the checks matters more than the server's exit.
        server.stop().await;
        let unhealthy = self.verified.checks.len() == passed;
        done.map_err(|error| Stopped { error, never_ready: dead && unhealthy, unhealthy })
    }

    /// Requests an embedding, with the first pooling type with which the server becomes ready.
    async fn embeds(&mut self) -> Result<()> {
        let mut first = None;
        for (pooling, name) in POOLINGS {
            let flags = [&SMALL[..], &["--embeddings", "--pooling", pooling]].concat();
            match self.with_server(name, &flags, &[(name, Ask::Embedding)]).await {
                Ok(()) => {
                    if first.is_some() {
                        let note = format!(
                            "it does not start with `--embeddings --pooling {}`: verified with `--pooling {pooling}`",
                            POOLINGS[0].0
                        );
                        self.reporter.tell(Event::Note(note));
                    }
                    return Ok(());
                }
                Err(Stopped { error: error @ Error::Verify { .. }, unhealthy: true, .. })
                    if !self.cancel.is_cancelled() =>
                {
                    first.get_or_insert(error);
                }
                Err(stopped) => return Err(stopped.error),
            }
        }
        first.map_or(Ok(()), Err)
    }

    async fn ask_all(&mut self, server: &mut Server, asks: &[(&'static str, Ask)]) -> Result<()> {
        let door = server.door();
        self.timed("health", server, checks::health(&door)).await?;
        for (name, ask) in asks {
            match ask {
                Ask::Completion => self.timed(name, server, checks::completion(&door)).await?,
                Ask::Chat => self.timed(name, server, checks::chat(&door)).await?,
                Ask::Embedding => self.timed(name, server, checks::embedding(&door)).await?,
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
            outcome = timeout(self.trial.timeout, check) => {
                outcome.unwrap_or_else(|_| Err(Fault::new(format!("no answer within {:?}", self.trial.timeout))))
            }
            () = server.ended() => Err(Fault::new("the server ended".to_owned())),
        };
        if let Err(fault) = outcome {
            // Report the last output of a crashed server, not its incomplete answer.
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
