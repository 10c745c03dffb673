//! Proves a new build against the one in use: with a configured model, or with the sample model.

use std::path::{Path, PathBuf};

use warden_builder::sample_model::{self, SampleModelOptions};
use warden_builder::{ComputeBackend, Provenance};
use warden_diagnose::report::ProofReport;
use warden_experiment::proof::BuildSide;
use warden_policies::defaults::Proof;
use warden_supervisor::nursery::NurseryHandle;

use super::UpdateArgs;
use crate::cli::diagnose::{DiagnoseArgs, against};
use crate::config::source::layers::LoadedConfig;
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

/// Both builds.
pub(super) struct UpdateBuilds<'a> {
    pub(super) old: PathBuf,
    pub(super) new: PathBuf,
    pub(super) provenance: &'a Provenance,
    /// Folder for a sample model.
    pub(super) cache: &'a Path,
}

/// Runs the proof.
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
        let args = against_command(both, &[], &super::config_words(&args.config), &more)?;
        return against::compare(&args, nursery.clone(), signals, proof.clone()).await;
    }
    let numbers = &loaded.settings.update;
    let sample = both.cache.join("proof.gguf");
    sample_model::write(&sample, &SampleModelOptions::default()).map_err(|error| {
        CommandError::failed(format!("cannot write the sample model {}: {error}", sample.display()))
    })?;
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
        // Try again: served models may have held the GPU's memory at that moment.
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

/// The command line of `diagnose --against`.
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
    // Ignore `LLAMA_WARDEN_CONFIG` for the sample model: the models of that file would be resolved, too.
    if config.is_empty() {
        args.ignore_config();
    }
    Ok(args)
}
