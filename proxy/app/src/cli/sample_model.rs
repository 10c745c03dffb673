//! `llama-warden sample-model`: writes models with random weights.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use warden_builder::sample_model::{self, SampleModelOptions, SamplePreset, WeightKind};
use warden_policies::ByteSize;

use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct SampleModelArgs {
    /// File to write.
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Seed of the weights. Models of different seeds answer differently.
    #[arg(long, default_value_t = SampleModelOptions::default().seed)]
    seed: u64,
    /// Purpose of the model; docs/diagnose.md describes each. `mmproj` is a projector for `--mmproj`.
    #[arg(
        long,
        default_value = SampleModelOptions::default().preset.name(),
        value_parser = PossibleValuesParser::new(SamplePreset::NAMES.map(|(_, name)| name))
    )]
    preset: String,
    /// Storage type of the matrices, for all presets but mmproj. With other types than f32, the model
    /// is 256 wide.
    #[arg(
        long,
        value_name = "FORM",
        default_value = WeightKind::F32.name(),
        value_parser = PossibleValuesParser::new(WeightKind::ALL.map(WeightKind::name))
    )]
    weights: String,
}

pub(crate) fn run(args: &SampleModelArgs) -> Result<(), CommandError> {
    let preset = SamplePreset::from_name(&args.preset).unwrap_or_default();
    let weights = WeightKind::from_name(&args.weights).unwrap_or_default();
    if !preset.takes_weights() && weights != WeightKind::F32 {
        let why = format!("--weights: the preset {} is stored in one form alone", args.preset);
        return Err(CommandError::usage(why, "leave --weights away"));
    }
    let path = args.output.display();
    sample_model::write(&args.output, &SampleModelOptions { seed: args.seed, preset, weights }).map_err(
        |problem| CommandError::hinted(format!("cannot write {path}: {problem}"), "choose another place"),
    )?;
    let bytes = std::fs::metadata(&args.output).map_or(0, |facts| facts.len());
    let form =
        if weights == WeightKind::F32 { String::new() } else { format!(", {} weights", weights.name()) };
    out::print_line(&format!("wrote {path} ({}, preset {}{form})", ByteSize(bytes), args.preset))
}
