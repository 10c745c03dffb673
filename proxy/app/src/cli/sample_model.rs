//! `llama-warden sample-model`: models with random weights, from a preset or by architecture and size.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use warden_builder::sample_model::sized::{
    Arch, Attention, Size, Sized, Sizes, Unusable, Vision, VisionSizes, projector_path,
};
use warden_builder::sample_model::{self, Options, Preset, WeightKind};
use warden_policies::ByteSize;

use crate::exit::Failure;
use crate::out;

/// What `sample-model` takes.
#[derive(Debug, Args)]
pub(crate) struct SampleModelArgs {
    /// The file to write.
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Different seeds give models that answer differently.
    #[arg(long, default_value_t = Options::default().seed)]
    seed: u64,
    /// What it is for.
    #[arg(long, default_value = Options::default().preset.name(), conflicts_with = "arch", value_parser = PossibleValuesParser::new(Preset::ALL.map(Preset::name)))]
    preset: String,
    /// How a preset's matrices are stored; other than f32, it is 256 wide.
    #[arg(long, value_name = "FORM", default_value = WeightKind::F32.name(), conflicts_with = "arch", value_parser = PossibleValuesParser::new(WeightKind::ALL.map(WeightKind::name)))]
    weights: String,
    /// Instead of a preset: a model of this architecture, of a size to choose.
    #[arg(long, value_parser = PossibleValuesParser::new(Arch::ALL.map(Arch::name)))]
    arch: Option<String>,
    /// Its size: tiny loads at once on a CPU, gpu has some gigabytes; the numbers below change it.
    #[arg(long, requires = "arch", default_value = Size::default().name(), value_parser = PossibleValuesParser::new(Size::ALL.map(Size::name)))]
    size: String,
    #[command(flatten)]
    numbers: Numbers,
    /// Writes a vision encoder and projector for `--mmproj` beside it, too.
    #[arg(long, requires = "arch")]
    vision: bool,
    /// Where that goes instead of to mmproj-NAME in the same folder.
    #[arg(long, value_name = "FILE", requires = "vision")]
    mmproj: Option<PathBuf>,
    /// Layers of the encoder.
    #[arg(long, value_name = "N", requires = "vision")]
    vision_layers: Option<u32>,
    /// Width of the encoder.
    #[arg(long, value_name = "N", requires = "vision")]
    vision_width: Option<u32>,
}

/// Single numbers of a size.
#[derive(Debug, Args)]
#[group(requires = "arch")]
struct Numbers {
    /// Layers.
    #[arg(long, value_name = "N")]
    layers: Option<u32>,
    /// Width of the embedding, a multiple of 32.
    #[arg(long, value_name = "N")]
    width: Option<u32>,
    /// Width inside the feed-forward part, a multiple of 32.
    #[arg(long, value_name = "N")]
    feed: Option<u32>,
    /// Attention heads.
    #[arg(long, value_name = "N")]
    heads: Option<u32>,
    /// Heads of keys and values; in gemma4 of the layers with a window, and half as many in the others.
    #[arg(long, value_name = "N")]
    kv_heads: Option<u32>,
    /// Width of one head; in gemma4 of the layers with a window, and twice that in the others.
    #[arg(long, value_name = "N")]
    head_size: Option<u32>,
    /// Tokens of context that it says it was trained with.
    #[arg(long, value_name = "TOKENS")]
    context: Option<u32>,
    /// Tokens in the vocabulary.
    #[arg(long, value_name = "TOKENS")]
    vocab: Option<u32>,
    /// Tokens in the window of gemma4's layers that have one.
    #[arg(long, value_name = "TOKENS")]
    window: Option<u32>,
}

impl Numbers {
    fn apply(&self, arch: Arch, sizes: &mut Sizes) {
        for (given, place) in [
            (self.layers, &mut sizes.layers),
            (self.width, &mut sizes.width),
            (self.feed, &mut sizes.feed),
            (self.heads, &mut sizes.heads),
            (self.context, &mut sizes.context),
            (self.vocab, &mut sizes.vocab),
            (self.window, &mut sizes.window),
        ] {
            *place = given.unwrap_or(*place);
        }
        let kv_heads = self.kv_heads.unwrap_or(sizes.windowed.kv_heads);
        let head_size = self.head_size.unwrap_or(sizes.windowed.head_size);
        if self.kv_heads.is_some() || self.head_size.is_some() {
            sizes.windowed = Attention { kv_heads, head_size };
            sizes.full = match arch {
                Arch::Llama => sizes.windowed,
                Arch::Gemma4 => {
                    Attention { kv_heads: kv_heads.div_ceil(2), head_size: head_size.saturating_mul(2) }
                }
            };
        }
    }
}

pub(crate) fn run(args: &SampleModelArgs) -> Result<(), Failure> {
    match args.arch.as_deref().and_then(Arch::from_name) {
        Some(arch) => of_size(args, arch),
        None => of_preset(args),
    }
}

fn of_preset(args: &SampleModelArgs) -> Result<(), Failure> {
    let preset = Preset::from_name(&args.preset).unwrap_or_default();
    let weights = WeightKind::from_name(&args.weights).unwrap_or_default();
    if preset == Preset::Mmproj && weights != WeightKind::F32 {
        return Err(Failure::usage("--weights: a projector is stored in f32 alone", "leave --weights away"));
    }
    sample_model::write(&args.output, &Options { seed: args.seed, preset, weights })
        .map_err(|problem| failed(&args.output, &problem))?;
    let bytes = std::fs::metadata(&args.output).map_or(0, |facts| facts.len());
    let form =
        if weights == WeightKind::F32 { String::new() } else { format!(", {} weights", weights.name()) };
    let (path, size) = (args.output.display(), ByteSize(bytes));
    out::line(&format!("wrote {path} ({size}, preset {}{form})", args.preset))
}

fn of_size(args: &SampleModelArgs, arch: Arch) -> Result<(), Failure> {
    let size = Size::from_name(&args.size).unwrap_or_default();
    let mut sizes = Sizes::of(arch, size);
    args.numbers.apply(arch, &mut sizes);
    sizes.check(arch).map_err(|wrong| unusable(&wrong))?;
    let encoder = VisionSizes::of(size);
    let encoder = VisionSizes {
        layers: args.vision_layers.unwrap_or(encoder.layers),
        width: args.vision_width.unwrap_or(encoder.width),
        ..encoder
    };
    encoder.check().map_err(|wrong| unusable(&wrong))?;

    let model = Sized { arch, sizes, seed: args.seed };
    let bytes = model.write(&args.output).map_err(|problem| failed(&args.output, &problem))?;
    out::line(&format!(
        "wrote {} ({}, {}, {} layers, {} wide, {} tokens of context)",
        args.output.display(),
        ByteSize(bytes),
        arch.name(),
        sizes.layers,
        sizes.width,
        sizes.context
    ))?;
    if !args.vision {
        return Ok(());
    }
    let path = args.mmproj.clone().unwrap_or_else(|| projector_path(&args.output));
    let vision = Vision { sizes: encoder, width: sizes.width, seed: args.seed };
    let bytes = vision.write(&path).map_err(|problem| failed(&path, &problem))?;
    out::line(&format!("wrote {} ({}, its vision projector, for --mmproj)", path.display(), ByteSize(bytes)))
}

fn unusable(wrong: &Unusable) -> Failure {
    Failure::usage(wrong.to_string(), "leave the option away to get the number of the size")
}

fn failed(path: &std::path::Path, problem: &std::io::Error) -> Failure {
    Failure::hinted(
        format!("cannot write {}: {problem}", path.display()),
        "choose another place; a model of the size gpu needs some gigabytes",
    )
}
