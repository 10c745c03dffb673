//! Proves a new build against the build in use, with a configured model or with the sample model. Then tries
//! the new build on a share of the conversations of running instances.

use std::path::{Path, PathBuf};

use reqwest::Method;
use tokio::time::{Instant, sleep};
use warden_builder::sample_model::{self, SampleModelOptions};
use warden_builder::{BuildId, ComputeBackend, Provenance};
use warden_config::source::layers::LoadedConfig;
use warden_diagnose::report::ProofReport;
use warden_experiment::proof::BuildSide;
use warden_policies::canary::CanaryVerdict;
use warden_policies::defaults::{Proof, Update};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{CanaryState, CanaryView};

use super::UpdateArgs;
use super::live::LiveInstance;
use crate::cli::diagnose::{DiagnoseArgs, against};
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

pub(super) struct UpdateBuilds<'a> {
    pub(super) old: PathBuf,
    pub(super) new: PathBuf,
    pub(super) provenance: &'a Provenance,
    pub(super) cache: &'a Path,
}

pub(super) async fn prove_build(
    args: &UpdateArgs,
    loaded: &LoadedConfig,
    both: &UpdateBuilds<'_>,
    nursery: &NurseryHandle,
    signals: &mut SignalHandlers,
) -> Result<ProofReport, CommandError> {
    let proof = &loaded.settings.proof;
    if let Some(model) = &args.model {
        let mut more = vec!["--model", model];
        more.extend(args.workload.iter().flat_map(|workload| ["--workload", workload.as_str()]));
        let args = against_command(both, &[], &super::schedule::config_words(&args.config), &more)?;
        return against::compare(&args, nursery.clone(), signals, proof.clone()).await;
    }
    let numbers = &loaded.settings.update;
    let sample = both.cache.join("proof.gguf");
    sample_model::write(&sample, &SampleModelOptions::default())
        .map_err(CommandError::cannot("write the sample model", &sample))?;
    let sample = sample.display().to_string();
    let requests = numbers.sample_requests.to_string();
    let lenient = Proof { slower: proof.slower.max(numbers.sample_slower), ..proof.clone() };
    let more = ["--requests", &requests, "--workload", "short-text,long-text,conversation"];
    let flags =
        |layers: &'static str| ["-m", &sample, "-c", "8192", "-np", "2", "-ngl", layers].map(str::to_owned);
    let is_on_gpu = both.provenance.backend() != ComputeBackend::Cpu;
    let layers = if is_on_gpu { "99" } else { "0" };
    let first = against_command(both, &flags(layers), &[], &more)?;
    let mut report = against::compare(&first, nursery.clone(), signals, lenient.clone()).await?;
    let fault = |report: &ProofReport| report.proof.fault.as_ref().map(|fault| fault.side);
    if is_on_gpu && fault(&report) == Some(BuildSide::New) {
        // Try again, because served models may have held the GPU's memory at that moment.
        report = against::compare(&first, nursery.clone(), signals, lenient.clone()).await?;
    }
    if !(is_on_gpu && fault(&report) == Some(BuildSide::Old)) {
        return Ok(report);
    }
    // Served models probably fill the GPU, so prove both builds on the CPU.
    out::error_line(
        "update: the build in use does not start next to what runs on the GPU; proving both on the CPU",
    );
    let second = against_command(both, &flags("0"), &[], &more)?;
    against::compare(&second, nursery.clone(), signals, lenient).await
}

fn against_command(
    both: &UpdateBuilds<'_>,
    flags: &[String],
    config: &[String],
    more: &[&str],
) -> Result<DiagnoseArgs, CommandError> {
    let mut words = vec!["diagnose".to_owned()];
    words.extend_from_slice(config);
    words.extend(["--against".to_owned(), both.old.display().to_string()]);
    words.extend(["--binary".to_owned(), both.new.display().to_string()]);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    if !flags.is_empty() {
        words.push("--".to_owned());
        words.extend_from_slice(flags);
    }
    let mut args = DiagnoseArgs::parse_words(&words)?;
    // With the sample model, ignore `LLAMA_WARDEN_CONFIG`: the models of that file are not needed.
    if config.is_empty() {
        args.ignore_config();
    }
    Ok(args)
}

/// Tries the build with each model in turn. Returns the reason if the build is worse with a model, and adds
/// notes about the other models. Skips models that cannot have a canary now (no memory, not loaded, another
/// canary).
pub(super) async fn try_canaries(
    live: &LiveInstance,
    build: &BuildId,
    numbers: &Update,
    notes: &mut Vec<String>,
    signals: &mut SignalHandlers,
) -> Result<Option<String>, CommandError> {
    for model in &live.models {
        let path = ["models", model, "canary"];
        let begun =
            live.client.json_with::<CanaryView>(Method::POST, &path, &[("build", build.to_string())]).await;
        let begun = match begun {
            Ok(begun) => begun,
            Err(failure) => match live.client.json::<CanaryView>(Method::GET, &path).await {
                // The canary may have ended already, or an interrupted update may have left a canary of this
                // build.
                Ok(view) if view.build.as_deref() == Some(build.as_str()) => view,
                _ => {
                    notes.push(format!("`{model}` had no canary: {}", failure.lines().join("; ")));
                    continue;
                }
            },
        };
        out::error_line(&format!("update: {}", crate::cli::canary::summary_line(&begun)));
        let view = tokio::select! {
            view = wait_for_end(live, &path, numbers) => view?,
            () = signals.wait_leave() => {
                drop(live.client.json::<CanaryView>(Method::DELETE, &path).await);
                return Err(CommandError::INTERRUPTED);
            }
        };
        let requests = view.report.canary.requests;
        match view.verdict {
            CanaryVerdict::Worse { reasons } => {
                return Ok(Some(format!(
                    "canary of `{model}` after {requests} requests: {}",
                    reasons.join("; ")
                )));
            }
            CanaryVerdict::BetterOrEqual => {
                notes.push(format!("`{model}`: as good on {requests} requests of clients"));
            }
            CanaryVerdict::Undecided { missing } => {
                notes.push(format!(
                    "`{model}`: not worse on {requests} requests of clients ({})",
                    missing.join("; ")
                ));
            }
        }
    }
    Ok(None)
}

async fn wait_for_end(
    live: &LiveInstance,
    path: &[&str],
    numbers: &Update,
) -> Result<CanaryView, CommandError> {
    let until = Instant::now() + numbers.canary;
    loop {
        // A lost answer does not end the canary.
        if let Ok(view) = live.client.json::<CanaryView>(Method::GET, path).await
            && view.state == CanaryState::Ended
        {
            return Ok(view);
        }
        if Instant::now() >= until {
            return Ok(live.client.json(Method::DELETE, path).await?);
        }
        sleep(numbers.look).await;
    }
}
