//! Makes a llama-server prove itself before it counts: it must start, load the sample model and answer.
//!
//! ```text
//!  start -> health -> completion -> chat (streamed) -> stop
//!  start with --embeddings -> health -> embedding -> stop
//!  start with each form of weights and each setting -> compare with the same numbers in f32 -> stop
//!  start with a slow model -> measure how it behaves -> stop
//! ```
//!
//! Two starts, because older servers refuse completions when embeddings are on. Around b4881 one ends before it is ready when it is to
//! take the mean of the embeddings of a model that writes: then the last one has to do. The server listens on a Unix socket
//! in a private folder, so no port is taken and nobody else can reach it; one that cannot is tried on a free port of the
//! loopback interface. It is gone when this returns, however it returns.
//!
//! What is measured (when the head of a stream is sent, how connections get threads, what becomes of unread bodies)
//! differs between versions and forks, and is a fact that the proxy decides by. It is never a reason to refuse a
//! build.

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

/// What a server did to prove itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Verified {
    /// The checks that passed, in their order.
    pub checks: Vec<Check>,
    /// The GPUs that the server listed, as it wrote them; empty for builds without a GPU, and on machines without one.
    #[serde(default)]
    pub devices: Vec<String>,
    /// What it computed with quantised weights. `None`: it gives no probabilities, or it was verified before this was
    /// tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed: Option<Computed>,
    /// How it behaves. Builds from before this was measured know nothing of it.
    #[serde(default)]
    pub measured: Measured,
}

/// One check that passed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Such as `completion`.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// Checks one server binary. `timeout` bounds each start and each answer.
///
/// # Errors
///
/// A check failed: the error names it and tells the answer, or the last lines of a server that died. Or it was cancelled.
pub async fn verify(
    binary: &Path,
    timeout: Duration,
    reporter: &Reporter,
    cancel: &CancellationToken,
) -> Result<Verified> {
    let trial = Trial { timeout, gpu: false, hide: false, libraries: None, variables: Vec::new() };
    try_out(binary, &trial, reporter, cancel).await
}

/// As [`verify()`], with more to say about how.
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
        // Before about b5000, and in ik_llama.cpp, there are no Unix sockets. Whatever else ended it ends it again.
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

/// Tries all forms of weights, and says what came of it.
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

/// What a server is started with to be measured, apart from where it listens. `model` is one of [`measuring_model`].
pub fn measuring_flags(model: &Path) -> Vec<OsString> {
    // On the CPU: a GPU computes the prompt before anybody can look, and may be busy with somebody else's model.
    let mut flags: Vec<OsString> = vec!["-m".into(), model.into()];
    flags.extend(["-t", "1", "-ngl", "0", "-c", measure::CONTEXT].map(OsString::from));
    flags.extend(measure::FLAGS.map(OsString::from));
    flags
}

/// Writes the model that a server is measured with: 14 MB, slow for its size.
///
/// # Errors
/// It cannot be written.
pub fn measuring_model(path: &Path) -> Result<()> {
    let options = sample_model::Options { preset: Preset::Slow, ..sample_model::Options::default() };
    sample_model::write(path, &options).map_err(io_error("writing", path))
}

/// Measures a server that was started with [`measuring_flags`] and is healthy. `limit` bounds it all, in the end by leaving
/// things unknown.
pub async fn measure(door: &Door, limit: Duration) -> Measured {
    measure::all(door, limit).await
}

/// Waits until a server is healthy; whether it came to that. The caller bounds the time.
pub(crate) async fn healthy(door: &Door) -> bool {
    checks::health(door).await.is_ok()
}

/// Flags for the small model. One thread: more of them only spin on a machine that just compiled.
const SMALL: [&str; 6] = ["-m", "sample.gguf", "-t", "1", "-c", "512"];

/// What is made of the embeddings of a text, and what the check is called then: the usual way first.
const POOLINGS: [(&str, &str); 2] = [("mean", "embedding"), ("last", "embedding-last")];

/// A private folder with a short path.
fn folder() -> Result<TempDir> {
    let base = short_temporary_folder();
    tempfile::Builder::new()
        .prefix("llama-warden-verify-")
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(&base)
        .map_err(io_error("creating a folder in", base))
}

/// Starts a server to be measured, and measures it. Nothing is known of one that does not start so.
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

/// What is asked of a running server.
#[derive(Clone, Copy)]
enum Ask {
    Completion,
    Chat,
    Embedding,
}

/// Why a server did not pass.
struct Stopped {
    error: Error,
    /// It ended before it was healthy.
    never_ready: bool,
    /// It was never healthy, whether it ended or not.
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
    /// Whether it listens on a Unix socket, else on a port.
    unix: bool,
    verified: &'a mut Verified,
}

impl Run<'_> {
    /// Starts a server, waits until it is healthy, asks, and stops it.
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
        // Stopped in every case; what the checks said is more interesting than how it ended.
        server.stop().await;
        let unhealthy = self.verified.checks.len() == passed;
        done.map_err(|error| Stopped { error, never_ready: dead && unhealthy, unhealthy })
    }

    /// Asks for an embedding. The first pooling with which the server gets ready counts.
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
