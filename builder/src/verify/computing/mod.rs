//! Tests computation with quantised weights against the same numbers in f32.
//!
//! A model file of each format is loaded with each setting that selects other kernels. The test asks the
//! server for the probabilities of all next words: after a prompt, which is one batch, and after single tokens.
//! The same numbers in f32 on the CPU are the reference. Any difference comes from kernels, and the
//! distance measures their rounding.
//!
//! ```text
//!  each format:  f32 twin (CPU) ──────────────────────────┐
//!                repacked | --no-repack | q8_0 KV cache ──┴─ distance ─ within the limit? ─ all: computed
//!                GPU | GPU without graphs | GPU, q8_0 KV ─┘                └ no, or a crash: kernel fault
//! ```
//!
//! A server that exits with every setting of a format does not support the format. A server without
//! probabilities is not tested.

mod answers;
mod judge;
mod settings;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::checks::{self, ServerAddress};
use super::server::TestServer;
use super::trial::TrialSettings;
use crate::error::{BuilderError, Result, io_error};
use crate::sample_model::{self, SampleModelOptions, WeightKind};
use answers::WordProbabilities;
use judge::{TrialOutcome, judge_format};
use settings::{KernelSetting, KnownFlags};

/// Results of a server for each weight format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ComputeResults {
    /// Results of every format with every setting.
    pub trials: Vec<ComputedTrial>,
    /// Formats that the server does not support.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
}

/// Result of one format with one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComputedTrial {
    /// Weight format, such as `q4_0`.
    pub weights: String,
    /// Setting of the server, such as `--no-repack`.
    pub setting: String,
    /// Distance from the reference in f32: root mean square of the differences of log-probabilities, for the
    /// prompt with the largest value.
    pub distance: f64,
    /// The largest distance that counts as equal.
    pub limit: f64,
}

impl ComputeResults {
    /// Formats with their largest distances, as a line of text.
    pub(super) fn in_words(&self) -> String {
        let mut forms: Vec<(&str, f64)> = Vec::new();
        for trial in &self.trials {
            match forms.iter_mut().find(|(name, _)| *name == trial.weights) {
                Some((_, most)) => *most = most.max(trial.distance),
                None => forms.push((&trial.weights, trial.distance)),
            }
        }
        let forms: Vec<String> = forms.iter().map(|(name, most)| format!("{name} {most:.4}")).collect();
        let unknown = match self.unknown.as_slice() {
            [] => String::new(),
            unknown => format!("; does not know {}", unknown.join(", ")),
        };
        format!("computed, distance from f32: {}{unknown}", forms.join(", "))
    }
}

/// Common parameters of all trials of a server.
struct ComputeBench<'a> {
    binary: &'a Path,
    folder: &'a Path,
    trial: &'a TrialSettings,
    unix: bool,
    cancel: &'a CancellationToken,
}

/// Tests all formats. `None`: the server reports no probabilities.
pub(super) async fn test_all_formats(
    binary: &Path,
    folder: &Path,
    trial: &TrialSettings,
    unix: bool,
    has_gpu: bool,
    cancel: &CancellationToken,
) -> Result<Option<ComputeResults>> {
    let bench = ComputeBench { binary, folder, trial, unix, cancel };
    let flags = KnownFlags::from_server(binary, trial, cancel).await?;
    let settings = KernelSetting::all(flags, has_gpu);
    let mut computed = ComputeResults::default();
    for kind in WeightKind::ALL.into_iter().filter(|kind| *kind != WeightKind::F32) {
        let Some(reference) = bench.reference(kind).await? else { return Ok(None) };
        let outcomes = bench.outcomes(kind, &settings, flags).await?;
        match judge_format(kind, &reference, outcomes)? {
            Some(trials) => computed.trials.extend(trials),
            None => computed.unknown.push(kind.name().to_owned()),
        }
    }
    Ok(Some(computed))
}

impl ComputeBench<'_> {
    /// Reference answers: the same numbers in f32, on the CPU.
    async fn reference(&self, kind: WeightKind) -> Result<Option<WordProbabilities>> {
        let path = self.folder.join("twin.gguf");
        let options = SampleModelOptions { weights: kind, ..SampleModelOptions::default() };
        sample_model::write_twin(&path, &options).map_err(io_error("writing", &path))?;
        let name = format!("twin-{}", kind.name());
        match self
            .run_attempts(vec![self.attempt(name, "twin.gguf", Vec::new(), Vec::new(), false)])
            .await?
            .pop()
        {
            Some(TrialOutcome::Answered(answers)) => Ok(Some(answers)),
            Some(TrialOutcome::NoProbabilities) => Ok(None),
            Some(
                TrialOutcome::Refused(why)
                | TrialOutcome::Died(why)
                | TrialOutcome::Wrong(why)
                | TrialOutcome::Late(why),
            ) => {
                let why = format!("the numbers of {} in f32: {why}", kind.name());
                Err(BuilderError::Verify { check: "computing", why, illegal_instruction: false })
            }
            None => Err(BuilderError::Cancelled),
        }
    }

    /// Outcomes of a format with each setting.
    async fn outcomes(
        &self,
        kind: WeightKind,
        settings: &[KernelSetting],
        flags: KnownFlags,
    ) -> Result<Vec<(KernelSetting, TrialOutcome)>> {
        let path = self.folder.join("form.gguf");
        let options = SampleModelOptions { weights: kind, ..SampleModelOptions::default() };
        sample_model::write(&path, &options).map_err(io_error("writing", &path))?;
        let attempts = settings.iter().enumerate().map(|(number, setting)| {
            let name = format!("{}-{number}", kind.name());
            self.attempt(name, "form.gguf", setting.flags(flags), setting.variables(), setting.on_gpu())
        });
        let outcomes = self.run_attempts(attempts.collect()).await?;
        Ok(settings.iter().copied().zip(outcomes).collect())
    }

    fn attempt(
        &self,
        name: String,
        model: &str,
        flags: Vec<&'static str>,
        variables: Vec<(String, String)>,
        gpu: bool,
    ) -> ServerAttempt {
        let mut arguments: Vec<String> = ["-m", model].map(str::to_owned).into();
        arguments.extend(settings::COMMON_FLAGS.map(str::to_owned));
        if !gpu {
            arguments.extend(["-ngl", "0"].map(str::to_owned));
        }
        arguments.extend(flags.into_iter().map(str::to_owned));
        let mut trial = TrialSettings { gpu, hide_gpus: self.trial.hide_gpus || !gpu, ..self.trial.clone() };
        trial.variables.extend(variables);
        let (binary, folder) = (self.binary.to_owned(), self.folder.to_owned());
        ServerAttempt { binary, folder, name, arguments, trial, unix: self.unix }
    }

    /// Runs attempts in parallel; returns their outcomes in the same order.
    async fn run_attempts(&self, attempts: Vec<ServerAttempt>) -> Result<Vec<TrialOutcome>> {
        let mut running = JoinSet::new();
        for (number, attempt) in attempts.into_iter().enumerate() {
            running.spawn(async move { (number, attempt.outcome().await) });
        }
        let mut outcomes = Vec::new();
        loop {
            let ended = tokio::select! {
                biased;
                // Dropping the set kills all servers.
                () = self.cancel.cancelled() => return Err(BuilderError::Cancelled),
                ended = running.join_next() => ended,
            };
            match ended {
                None => break,
                Some(Ok((number, outcome))) => outcomes.push((number, outcome?)),
                Some(Err(_)) => return Err(BuilderError::Cancelled),
            }
        }
        outcomes.sort_by_key(|(number, _)| *number);
        Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
    }
}

/// A single start of the server.
struct ServerAttempt {
    binary: PathBuf,
    folder: PathBuf,
    /// Name of its files, distinct from those of other attempts.
    name: String,
    arguments: Vec<String>,
    trial: TrialSettings,
    unix: bool,
}

impl ServerAttempt {
    async fn outcome(self) -> Result<TrialOutcome> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut server =
            TestServer::start(&self.binary, &self.folder, &self.name, &arguments, &self.trial, self.unix)
                .await?;
        let outcome = self.ask(&mut server).await;
        server.stop().await;
        Ok(outcome)
    }

    async fn ask(&self, server: &mut TestServer) -> TrialOutcome {
        let door: ServerAddress = server.address();
        let limit = self.trial.timeout;
        let asked = async {
            let healthy = timeout(limit, checks::wait_until_healthy(&door)).await;
            match healthy {
                Ok(Ok(())) => {}
                Ok(Err(fault)) => return TrialOutcome::Wrong(fault.to_string()),
                Err(_) => return TrialOutcome::Late(format!("it was not ready within {limit:?}")),
            }
            let answers = timeout(limit, answers::request_probabilities(&door)).await;
            answers.unwrap_or_else(|_| TrialOutcome::Late(format!("no answer within {limit:?}")))
        };
        let outcome = tokio::select! {
            biased;
            outcome = asked => outcome,
            () = server.wait_for_exit() => TrialOutcome::Wrong("the server ended".to_owned()),
        };
        if !matches!(outcome, TrialOutcome::Wrong(_)) {
            return outcome;
        }
        // Report the exit of a crashed server, not its incomplete answer.
        match server.exit_reason().await {
            Some((why, true)) => TrialOutcome::Died(why),
            Some((why, false)) => TrialOutcome::Refused(why),
            None => outcome,
        }
    }
}
