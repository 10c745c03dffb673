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
//! Servers around b4881 exit at the start with `--pooling mean` and a generating model, so a server that does
//! not start is tested with `--pooling last`. The server listens on a Unix socket in a private folder, which
//! no other user can reach; a server without Unix sockets uses a free loopback port.
//!
//! Measured facts (time of a stream's head, threads per connection, handling of unread bodies) differ between
//! versions and forks. The proxy uses them; they never fail a build.

mod bodies;
mod checks;
mod computing;
mod measure;
mod measured;
mod remembered;
mod server;

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::environment::{private_folder, short_temporary_folder};
use crate::error::{BuilderError, Result, io_error};
use crate::event::{BuildEvent, EventReporter};
use crate::sample_model::{self, SamplePreset};
use checks::CheckError;
pub use checks::ServerAddress;
pub(crate) use checks::wait_until_healthy;
pub use computing::{ComputeResults, ComputedTrial};
pub use measured::{HttpThreads, ServerBehaviour, StreamHead};
pub use remembered::{CachedMeasurement, MeasurementCache};
pub(crate) use server::{TestBench, TestServer, TrialSettings};

/// Results of a verification.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerifyResults {
    /// Passed checks in order.
    pub checks: Vec<PassedCheck>,
    /// GPUs as listed by the server; empty for builds without a GPU, and on machines without one.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Results with quantised weights; `None` for servers without probabilities, and in old builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed: Option<ComputeResults>,
    /// Measured behaviour; unknown for builds from before the measurements existed.
    #[serde(default)]
    pub measured: ServerBehaviour,
}

/// A passed check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassedCheck {
    /// Name, such as `completion`.
    pub name: String,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Verifies a server binary. `timeout` limits each start and each answer.
///
/// # Errors
/// Fails on cancellation, or if a check fails. The error names the check, and quotes the answer or a crashed
/// server's last lines.
pub async fn verify(
    binary: &Path,
    timeout: Duration,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<VerifyResults> {
    let trial =
        TrialSettings { timeout, gpu: false, hide_gpus: false, libraries: None, variables: Vec::new() };
    verify_with(binary, &trial, reporter, cancel).await
}

pub(crate) async fn verify_with(
    binary: &Path,
    trial: &TrialSettings,
    reporter: &EventReporter,
    cancel: &CancellationToken,
) -> Result<VerifyResults> {
    let folder = private_folder("llama-warden-verify-", short_temporary_folder())?;
    let model = folder.path().join("sample.gguf");
    sample_model::write(&model, &sample_model::SampleModelOptions::default())
        .map_err(io_error("writing", &model))?;
    let mut verified = VerifyResults::default();
    if trial.gpu {
        verified.devices = server::list_devices(binary, trial, cancel).await?;
    }
    let bench = TestBench { binary, folder: folder.path(), trial, unix: true };
    let mut run = VerifyRun { bench, reporter, cancel, verified };
    let asks = [("completion", CheckRequest::Completion), ("chat", CheckRequest::Chat)];
    match run.with_server("answers", &SMALL_MODEL_FLAGS, &asks).await {
        Ok(()) => {}
        // Servers before about b5000, and ik_llama.cpp, have no Unix sockets. A server that exited for
        // another reason exits again.
        Err(ServerFailure { error: BuilderError::Verify { .. }, stage: FailureStage::Exited })
            if !cancel.is_cancelled() =>
        {
            run.bench.unix = false;
            run.verified.checks.clear();
            run.with_server("answers", &SMALL_MODEL_FLAGS, &asks).await.map_err(|stopped| stopped.error)?;
            reporter.note("it does not listen on a Unix socket: verified on a loopback port");
        }
        Err(stopped) => return Err(stopped.error),
    }
    run.check_embedding().await?;
    run.compute().await?;
    let VerifyRun { bench, mut verified, .. } = run;
    verified.measured = start_and_measure(bench, cancel).await?;
    reporter.note(format!("measured: {}", verified.measured));
    Ok(verified)
}

/// Flags of a server to be measured, except for its address. `model` was written by [`measuring_model`].
pub fn measuring_flags(model: &Path) -> Vec<OsString> {
    // CPU only: a GPU processes the prompt too fast to observe, and another process's model may keep it busy.
    let mut flags: Vec<OsString> = vec!["-m".into(), model.into()];
    flags.extend(["-t", "1", "-ngl", "0", "-c", measure::CONTEXT_SIZE].map(OsString::from));
    flags.extend(measure::MEASURING_FLAGS.map(OsString::from));
    flags
}

/// Writes the model for measurements: 14 MB, slow for its size.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn measuring_model(path: &Path) -> Result<()> {
    let options = sample_model::SampleModelOptions {
        preset: SamplePreset::Slow,
        ..sample_model::SampleModelOptions::default()
    };
    sample_model::write(path, &options).map_err(io_error("writing", path))
}

/// Measures a healthy server started with [`measuring_flags`], for at most `limit`.
pub async fn measure(door: &ServerAddress, limit: Duration) -> ServerBehaviour {
    measure::measure_all(door, limit).await
}

/// Flags for the small model. A single thread, since more would only spin on a machine that just compiled.
const SMALL_MODEL_FLAGS: [&str; 6] = ["-m", "sample.gguf", "-t", "1", "-c", "512"];

/// Pooling types for embeddings, each with the name of its check; the usual one first.
const POOLING_CHECKS: [(&str, &str); 2] = [("mean", "embedding"), ("last", "embedding-last")];

/// Starts a server for measurements, and measures it. If it does not start, all facts stay unknown.
async fn start_and_measure(bench: TestBench<'_>, cancel: &CancellationToken) -> Result<ServerBehaviour> {
    let trial = TrialSettings { gpu: false, hide_gpus: true, ..bench.trial.clone() };
    let bench = TestBench { trial: &trial, ..bench };
    let model = bench.folder.join("long.gguf");
    measuring_model(&model)?;
    let flags = measuring_flags(&model);
    let flags: Vec<&str> = flags.iter().filter_map(|flag| flag.to_str()).collect();
    let Ok(mut server) = TestServer::start(&bench, "measure", &flags).await else {
        return Ok(ServerBehaviour::default());
    };
    let door = server.address();
    let asked = async {
        if matches!(timeout(trial.timeout, wait_until_healthy(&door)).await, Ok(Ok(()))) {
            measure::measure_all(&door, trial.timeout).await
        } else {
            ServerBehaviour::default()
        }
    };
    let measured = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        () = server.wait_for_exit() => Some(ServerBehaviour::default()),
        measured = asked => Some(measured),
    };
    server.stop().await;
    measured.ok_or(BuilderError::Cancelled)
}

#[derive(Clone, Copy)]
enum CheckRequest {
    Completion,
    Chat,
    Embedding,
}

struct ServerFailure {
    error: BuilderError,
    stage: FailureStage,
}

#[derive(PartialEq, Eq)]
enum FailureStage {
    /// The server exited before it was healthy.
    Exited,
    /// The server ran and was never healthy.
    Unhealthy,
    /// The server became healthy, or something else failed.
    Healthy,
}

impl From<BuilderError> for ServerFailure {
    fn from(error: BuilderError) -> Self {
        Self { error, stage: FailureStage::Healthy }
    }
}

struct VerifyRun<'a> {
    bench: TestBench<'a>,
    reporter: &'a EventReporter,
    cancel: &'a CancellationToken,
    verified: VerifyResults,
}

impl VerifyRun<'_> {
    async fn with_server(
        &mut self,
        name: &str,
        arguments: &[&str],
        asks: &[(&'static str, CheckRequest)],
    ) -> std::result::Result<(), ServerFailure> {
        let passed = self.verified.checks.len();
        let mut server = TestServer::start(&self.bench, name, arguments).await?;
        let cancel = self.cancel.clone();
        let done = tokio::select! {
            biased;
            () = cancel.cancelled() => Err(BuilderError::Cancelled),
            done = self.run_checks(&mut server, asks) => done,
        };
        let dead = server.is_dead();
        // The result of the checks matters more than the server's exit.
        server.stop().await;
        let stage = match (self.verified.checks.len() == passed, dead) {
            (true, true) => FailureStage::Exited,
            (true, false) => FailureStage::Unhealthy,
            (false, _) => FailureStage::Healthy,
        };
        done.map_err(|error| ServerFailure { error, stage })
    }

    /// Requests an embedding with the first pooling type that lets the server become ready.
    async fn check_embedding(&mut self) -> Result<()> {
        let mut first = None;
        for (pooling, name) in POOLING_CHECKS {
            let flags = [&SMALL_MODEL_FLAGS[..], &["--embeddings", "--pooling", pooling]].concat();
            match self.with_server(name, &flags, &[(name, CheckRequest::Embedding)]).await {
                Ok(()) => {
                    if first.is_some() {
                        let note = format!(
                            "it does not start with `--embeddings --pooling {}`: verified with `--pooling {pooling}`",
                            POOLING_CHECKS[0].0
                        );
                        self.reporter.note(note);
                    }
                    return Ok(());
                }
                Err(ServerFailure { error: error @ BuilderError::Verify { .. }, stage })
                    if stage != FailureStage::Healthy && !self.cancel.is_cancelled() =>
                {
                    first.get_or_insert(error);
                }
                Err(stopped) => return Err(stopped.error),
            }
        }
        first.map_or(Ok(()), Err)
    }

    async fn run_checks(
        &mut self,
        server: &mut TestServer,
        asks: &[(&'static str, CheckRequest)],
    ) -> Result<()> {
        let door = server.address();
        self.run_check("health", server, wait_until_healthy(&door)).await?;
        for (name, ask) in asks {
            match ask {
                CheckRequest::Completion => {
                    self.run_check(name, server, checks::check_completion(&door)).await?;
                }
                CheckRequest::Chat => self.run_check(name, server, checks::check_chat(&door)).await?,
                CheckRequest::Embedding => {
                    self.run_check(name, server, checks::check_embedding(&door)).await?;
                }
            }
        }
        Ok(())
    }

    async fn run_check(
        &mut self,
        name: &'static str,
        server: &mut TestServer,
        check: impl Future<Output = std::result::Result<(), CheckError>>,
    ) -> Result<()> {
        let begun = Instant::now();
        let limit = self.bench.trial.timeout;
        let outcome = tokio::select! {
            biased;
            outcome = timeout(limit, check) => {
                outcome.unwrap_or_else(|_| Err(CheckError::new(format!("no answer within {limit:?}"))))
            }
            () = server.wait_for_exit() => Err(CheckError::new("the server ended".to_owned())),
        };
        if let Err(fault) = outcome {
            // Report the last output of a crashed server, not its incomplete answer.
            let (death, illegal_instruction) = server.crash_reason().await;
            let why =
                death.unwrap_or_else(|| format!("{fault}\n{}", server.last_lines()).trim_end().to_owned());
            return Err(BuilderError::Verify { check: name, why, illegal_instruction });
        }
        self.pass_check(name, begun);
        Ok(())
    }

    async fn compute(&mut self) -> Result<()> {
        let begun = Instant::now();
        let trial = self.bench.trial;
        let has_gpu = trial.gpu && !trial.hide_gpus && !self.verified.devices.is_empty();
        self.verified.computed = computing::test_all_formats(self.bench, has_gpu, self.cancel).await?;
        let Some(words) = self.verified.computed.as_ref().map(ComputeResults::in_words) else {
            let note = "not computed: the server gives no probabilities, so quantised weights were not tried";
            self.reporter.note(note);
            return Ok(());
        };
        self.pass_check("computing", begun);
        self.reporter.note(words);
        Ok(())
    }

    fn pass_check(&mut self, name: &'static str, begun: Instant) {
        let seconds = begun.elapsed().as_secs_f64();
        self.verified.checks.push(PassedCheck { name: name.to_owned(), seconds });
        self.reporter.report(BuildEvent::Checked(name));
    }
}

#[cfg(test)]
mod tests;
