//! Proves a new build against the one in use: with a configured model, or with the sample model.

use std::path::{Path, PathBuf};

use warden_builder::sample_model::{self, Options};
use warden_builder::{Backend, Provenance};
use warden_diagnose::report::ProofReport;
use warden_experiment::proof::Side;
use warden_policies::defaults::Proof;
use warden_supervisor::nursery::NurseryHandle;

use super::UpdateArgs;
use crate::cli::diagnose::{DiagnoseArgs, against};
use crate::config::source::layers::Loaded;
use crate::exit::Failure;
use crate::out;
use crate::serve::Signals;

/// Both builds.
pub(super) struct Both<'a> {
    pub(super) old: PathBuf,
    pub(super) new: PathBuf,
    pub(super) provenance: &'a Provenance,
    /// Folder for a sample model.
    pub(super) cache: &'a Path,
}

/// Runs the proof.
pub(super) async fn run(
    args: &UpdateArgs,
    loaded: &Loaded,
    both: &Both<'_>,
    nursery: &NurseryHandle,
    signals: &mut Signals,
) -> Result<ProofReport, Failure> {
    let proof = &loaded.settings.proof;
    if let Some(model) = &args.model {
        let mut more = vec!["--model", model];
        more.extend(args.workload.iter().flat_map(|workload| ["--workload", workload.as_str()]));
        let args = command(both, &[], &super::config_words(&args.config), &more)?;
        return against::compare(&args, nursery.clone(), signals, proof.clone()).await;
    }
    let numbers = &loaded.settings.update;
    let sample = both.cache.join("proof.gguf");
    sample_model::write(&sample, &Options::default()).map_err(|error| {
        Failure::failed(format!("cannot write the sample model {}: {error}", sample.display()))
    })?;
    let sample = sample.display().to_string();
    let requests = numbers.sample_requests.to_string();
    let lenient = Proof { slower: proof.slower.max(numbers.sample_slower), ..proof.clone() };
    let more = ["--requests", &requests, "--workload", "short-text,long-text,conversation"];
    let flags =
        |layers: &'static str| ["-m", &sample, "-c", "8192", "-np", "2", "-ngl", layers].map(str::to_owned);
    let is_on_gpu = both.provenance.backend() != Backend::Cpu;
    let layers = if is_on_gpu { "99" } else { "0" };
    let first = command(both, &flags(layers), &[], &more)?;
    let mut report = against::compare(&first, nursery.clone(), signals, lenient.clone()).await?;
    let fault = |report: &ProofReport| report.proof.fault.as_ref().map(|fault| fault.side);
    if is_on_gpu && fault(&report) == Some(Side::New) {
        // Try again: served models may have held the GPU's memory at that moment.
        report = against::compare(&first, nursery.clone(), signals, lenient.clone()).await?;
    }
    if !(is_on_gpu && fault(&report) == Some(Side::Old)) {
        return Ok(report);
    }
    // Served models probably fill the GPU.
    out::error_line(
        "update: the build in use does not start beside what runs on the GPU; proving both on the CPU",
    );
    let second = command(both, &flags("0"), &[], &more)?;
    against::compare(&second, nursery.clone(), signals, lenient).await
}

/// The command line of `diagnose --against`.
fn command(
    both: &Both<'_>,
    flags: &[String],
    config: &[String],
    more: &[&str],
) -> Result<DiagnoseArgs, Failure> {
    let mut words = vec!["diagnose".to_owned()];
    words.extend_from_slice(config);
    words.extend(["--against".to_owned(), both.old.display().to_string()]);
    words.extend(["--binary".to_owned(), both.new.display().to_string()]);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    if !flags.is_empty() {
        words.push("--".to_owned());
        words.extend_from_slice(flags);
    }
    let mut args = DiagnoseArgs::parsed(&words)?;
    // Ignore `LLAMA_WARDEN_CONFIG` for the sample model: the models of that file would be resolved, too.
    if config.is_empty() {
        args.without_config();
    }
    Ok(args)
}
