//! Tests computation with quantised weights against the same numbers in f32.
//!
//! Each model file is loaded with each setting that selects other kernels. The test requests the
//! probabilities of all next words: after a prompt, which is one batch, and after single tokens. The
//! reference is the same numbers in f32 on the CPU, so any difference comes from kernels.
//!
//! A server that exits with every setting of a format does not support the format. A server without
//! probabilities is not tested.

mod judge;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::checks::{self, ServerAddress, post};
use super::server::{TestBench, TestServer, TrialSettings};
use crate::error::{BuilderError, Result, io_error};
use crate::sample_model::{self, FIRST_WORD_ID, SampleModelOptions, WORD_COUNT, WeightKind};
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
    /// Root mean square difference of log-probabilities from f32, for the prompt where it is largest.
    pub distance: f64,
    /// The largest distance that counts as equal.
    pub limit: f64,
}

impl ComputeResults {
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

/// Tokens of the prompt: processed as one batch, and fewer than the 32 from which ggml offloads to a GPU.
const PROMPT_TOKENS: usize = 24;
/// Single tokens after the prompt, each computed alone: a GPU captures a graph and launches it again.
const SINGLE_TOKENS: usize = 6;

type WordProbabilities = Vec<BTreeMap<String, f64>>;

/// Requests all words' probabilities after the prompt, and after each of the single tokens that follow.
async fn request_probabilities(door: &ServerAddress) -> TrialOutcome {
    let mut answers = WordProbabilities::new();
    for length in PROMPT_TOKENS..=PROMPT_TOKENS + SINGLE_TOKENS {
        let prompt: Vec<usize> = (0..length).map(prompt_token).collect();
        let body = json!({
            "prompt": prompt, "n_predict": 1, "n_probs": WORD_COUNT, "cache_prompt": true, "seed": 1,
            // Older servers report only tokens that pass the samplers: let all likely tokens pass.
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        });
        let answer = match post(door, "/completion", &body).await {
            Ok(text) => serde_json::from_str::<Value>(&text).unwrap_or_default(),
            Err(fault) => return TrialOutcome::Wrong(fault.to_string()),
        };
        match parse_words(&answer) {
            Some(words) => answers.push(words),
            None if answers.is_empty() => return TrialOutcome::NoProbabilities,
            None => return TrialOutcome::Wrong("an answer without probabilities".to_owned()),
        }
    }
    TrialOutcome::Answered(answers)
}

const fn prompt_token(at: usize) -> usize {
    FIRST_WORD_ID + (at * 131 + 17) % WORD_COUNT
}

/// Parses the words with their log-probabilities; `None` if the answer has no probabilities.
fn parse_words(answer: &Value) -> Option<BTreeMap<String, f64>> {
    let first = answer["completion_probabilities"].get(0)?;
    let list = ["top_logprobs", "top_probs", "probs"].into_iter().find_map(|name| first[name].as_array())?;
    let words = list.iter().filter_map(|entry| {
        // Servers before 2025 name the word `tok_str`; probabilities after sampling are in `prob`.
        let word = entry["token"].as_str().or_else(|| entry["tok_str"].as_str())?;
        let log = entry["logprob"].as_f64().or_else(|| entry["prob"].as_f64().map(f64::ln))?;
        log.is_finite().then(|| (word.to_owned(), log))
    });
    let words: BTreeMap<String, f64> = words.collect();
    (!words.is_empty()).then_some(words)
}

/// Tests all formats. `None`: the server reports no probabilities.
pub(super) async fn test_all_formats(
    bench: TestBench<'_>,
    has_gpu: bool,
    cancel: &CancellationToken,
) -> Result<Option<ComputeResults>> {
    let flags = KnownFlags::from_server(&bench, cancel).await?;
    let bench = ComputeBench { bench, flags, cancel };
    let settings = KernelSetting::all(flags, has_gpu);
    let mut computed = ComputeResults::default();
    for kind in WeightKind::ALL.into_iter().filter(|kind| *kind != WeightKind::F32) {
        let Some(reference) = bench.reference(kind).await? else { return Ok(None) };
        let outcomes = bench.outcomes(kind, &settings).await?;
        match judge_format(kind, &reference, outcomes)? {
            Some(trials) => computed.trials.extend(trials),
            None => computed.unknown.push(kind.name().to_owned()),
        }
    }
    Ok(Some(computed))
}

struct ComputeBench<'a> {
    bench: TestBench<'a>,
    flags: KnownFlags,
    cancel: &'a CancellationToken,
}

impl ComputeBench<'_> {
    /// Reference answers: the same numbers in f32, on the CPU.
    async fn reference(&self, kind: WeightKind) -> Result<Option<WordProbabilities>> {
        let path = self.bench.folder.join("twin.gguf");
        let options = SampleModelOptions { weights: kind, ..SampleModelOptions::default() };
        sample_model::write_twin(&path, &options).map_err(io_error("writing", &path))?;
        let attempt = self.attempt(format!("twin-{}", kind.name()), "twin.gguf", None);
        match self.run_attempts(vec![attempt]).await?.pop() {
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

    async fn outcomes(
        &self,
        kind: WeightKind,
        settings: &[KernelSetting],
    ) -> Result<Vec<(KernelSetting, TrialOutcome)>> {
        let path = self.bench.folder.join("form.gguf");
        let options = SampleModelOptions { weights: kind, ..SampleModelOptions::default() };
        sample_model::write(&path, &options).map_err(io_error("writing", &path))?;
        let attempts = settings.iter().enumerate().map(|(number, setting)| {
            self.attempt(format!("{}-{number}", kind.name()), "form.gguf", Some(*setting))
        });
        let outcomes = self.run_attempts(attempts.collect()).await?;
        Ok(settings.iter().copied().zip(outcomes).collect())
    }

    /// Prepares a start of the server with a setting; without a setting, the server computes on the CPU.
    fn attempt(&self, name: String, model: &str, setting: Option<KernelSetting>) -> ServerAttempt {
        let gpu = setting.is_some_and(KernelSetting::on_gpu);
        let mut arguments = vec!["-m", model];
        arguments.extend(settings::COMMON_FLAGS);
        if !gpu {
            arguments.extend(["-ngl", "0"]);
        }
        let own = self.bench.trial;
        let mut trial = TrialSettings { gpu, hide_gpus: own.hide_gpus || !gpu, ..own.clone() };
        if let Some(setting) = setting {
            arguments.extend(setting.flags(self.flags));
            trial.variables.extend(setting.variables());
        }
        ServerAttempt {
            binary: self.bench.binary.to_owned(),
            folder: self.bench.folder.to_owned(),
            name,
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            trial,
            unix: self.bench.unix,
        }
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

struct ServerAttempt {
    binary: PathBuf,
    folder: PathBuf,
    /// Name of this attempt's files, distinct from those of other attempts.
    name: String,
    arguments: Vec<String>,
    trial: TrialSettings,
    unix: bool,
}

impl ServerAttempt {
    async fn outcome(self) -> Result<TrialOutcome> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let bench =
            TestBench { binary: &self.binary, folder: &self.folder, trial: &self.trial, unix: self.unix };
        let mut server = TestServer::start(&bench, &self.name, &arguments).await?;
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
            let answers = timeout(limit, request_probabilities(&door)).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_read_in_all_forms() {
        let new = json!({"completion_probabilities": [{"id": 1, "top_logprobs": [
            {"id": 1, "token": " ba", "logprob": -0.5}, {"id": 2, "token": " do", "logprob": null}]}]});
        assert_eq!(parse_words(&new), Some([(" ba".to_owned(), -0.5)].into()));
        let old = json!({"completion_probabilities": [{"content": "x", "probs": [{"tok_str": " ba", "prob": 1.0}]}]});
        assert_eq!(parse_words(&old), Some([(" ba".to_owned(), 0.0)].into()));
        let sampled = json!({"completion_probabilities": [{"top_probs": [{"token": " ba", "prob": 1.0}]}]});
        assert_eq!(parse_words(&sampled), Some([(" ba".to_owned(), 0.0)].into()));
        assert_eq!(parse_words(&json!({"content": " ba"})), None);
    }
}
