//! The llama-server flags that determine a model's memory.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::LayerShape;
use crate::server_flags::normal_flag;

/// Memory-related flags; `None` means llama-server's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerRun {
    /// Tokens of context of all slots together.
    pub context: Option<u64>,
    /// `--parallel`: number of slots.
    pub slots: Option<u64>,
    /// All slots share one cache.
    pub unified: Option<bool>,
    /// `--ubatch-size`: tokens per micro-batch.
    pub ubatch: Option<u64>,
    /// Distribution of the model over GPUs and the host.
    pub gpus: GpuPlacement,
    /// The key-value cache.
    pub cache: CacheSettings,
    /// Flash attention on or off; `None`: on if available.
    pub flash: Option<bool>,
    /// Prompt tokens for which outputs are computed.
    pub outputs: OutputDemand,
    /// Weights are read instead of mapped.
    pub no_mmap: bool,
    /// File of the projector.
    pub projector: Option<String>,
    /// Flags that take memory and that the book does not support, as written.
    pub unknown: Vec<String>,
}

/// Distribution of a model over GPUs and the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuPlacement {
    /// Number of layers on GPUs.
    pub layers: Option<GpuLayers>,
    /// Number of layers, counted from the first, whose experts stay on the host.
    pub host_experts: u64,
    /// `--split-mode`: distribution of weights over GPUs.
    pub split: Option<String>,
    /// `--tensor-split`: each GPU's share, as given.
    pub shares: Vec<f64>,
    /// `--main-gpu`: the GPU used if all weights are on one.
    pub main_gpu: Option<usize>,
}

/// Settings of the key-value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSettings {
    /// Type of keys.
    pub key_type: CacheType,
    /// Type of values.
    pub value_type: CacheType,
    /// Windowed layers cache the whole context (`--swa-full`).
    pub whole_windows: bool,
    /// The cache stays on the host.
    pub on_host: bool,
}

impl CacheSettings {
    pub(super) const fn layer_bytes(&self, layer: &LayerShape, tokens: u64) -> u64 {
        self.key_type.bytes(layer.keys * tokens) + self.value_type.bytes(layer.values * tokens)
    }
}

/// Prompt tokens for which outputs are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputDemand {
    /// Only the last token, for generation.
    #[default]
    LastToken,
    /// All tokens, for embeddings and reranking.
    EachToken,
}

/// Number of layers on GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLayers {
    /// All layers.
    All,
    /// This many of the last layers; the output counts as one layer.
    Last(u64),
}

/// Number format of the key-value cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    /// 32 bits per number.
    F32,
    /// 16 bits per number, the default.
    #[default]
    F16,
    /// 16 bits per number, with a larger exponent.
    Bf16,
    /// 32 numbers in 34 bytes.
    Q8,
    /// 32 numbers in 22 or 24 bytes.
    Q5(u64),
    /// 32 numbers in 18 or 20 bytes.
    Q4(u64),
}

impl CacheType {
    /// Returns the bytes of this many numbers.
    pub const fn bytes(self, numbers: u64) -> u64 {
        match self {
            Self::F32 => numbers * 4,
            Self::F16 | Self::Bf16 => numbers * 2,
            Self::Q8 => numbers * 34 / 32,
            Self::Q5(block) | Self::Q4(block) => numbers * block / 32,
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "f32" => Self::F32,
            "f16" => Self::F16,
            "bf16" => Self::Bf16,
            "q8_0" => Self::Q8,
            "q5_0" => Self::Q5(22),
            "q5_1" => Self::Q5(24),
            "q4_0" | "iq4_nl" => Self::Q4(18),
            "q4_1" => Self::Q4(20),
            _ => return None,
        })
    }
}

const UNSUPPORTED_FLAGS: [&str; 9] = [
    "--model-draft",
    "-md",
    "--spec-draft-model",
    "-hfd",
    "--hf-repo-draft",
    "--lora",
    "--lora-scaled",
    "--override-tensor",
    "-ot",
];

pub(crate) struct CommandWords<'a> {
    args: &'a [String],
    /// Arguments with `-` in place of `_` in long flags: llama-server accepts both.
    words: Vec<String>,
    env: &'a BTreeMap<String, String>,
}

impl<'a> CommandWords<'a> {
    pub(crate) fn new(args: &'a [String], env: &'a BTreeMap<String, String>) -> Self {
        Self { args, words: args.iter().map(|word| normal_flag(word)).collect(), env }
    }

    /// Returns a flag as written, and the word after it. The last of repeated flags counts.
    pub(crate) fn flag(&self, flags: &[&str]) -> Option<(&'a str, &'a str)> {
        let at = self.words.iter().rposition(|word| flags.contains(&word.as_str()))?;
        Some((&self.args[at], self.args.get(at + 1)?))
    }

    pub(crate) fn variable(&self, name: &str) -> Option<&'a str> {
        self.env.get(name).map(String::as_str)
    }

    fn value(&self, flags: &[&str], variable: &str) -> Option<&'a str> {
        self.flag(flags).map(|(_, value)| value).or_else(|| self.variable(variable)).map(str::trim)
    }

    fn number<T: FromStr>(&self, flags: &[&str], variable: &str) -> Option<T> {
        self.value(flags, variable)?.parse().ok()
    }

    fn positive(&self, flags: &[&str], variable: &str) -> Option<u64> {
        let number: i64 = self.number(flags, variable)?;
        u64::try_from(number).ok().filter(|number| *number > 0)
    }

    fn switch(&self, on: &[&str], off: &[&str], variable: &str) -> Option<bool> {
        let last = self.words.iter().rev().find_map(|word| match word.as_str() {
            word if on.contains(&word) => Some(true),
            word if off.contains(&word) => Some(false),
            _ => None,
        });
        last.or_else(|| self.variable(variable).map(|value| ["1", "on", "true", "enabled"].contains(&value)))
    }

    fn is_on(&self, on: &[&str], off: &[&str], variable: &str) -> bool {
        self.switch(on, off, variable) == Some(true)
    }
}

impl GpuPlacement {
    fn from_command(command: &CommandWords<'_>) -> Self {
        let layers = command.value(&["--gpu-layers", "--n-gpu-layers", "-ngl"], "LLAMA_ARG_N_GPU_LAYERS");
        let layers = layers.and_then(|layers| match layers {
            "all" => Some(GpuLayers::All),
            "auto" => None,
            layers => match layers.parse::<i64>() {
                Ok(layers) if layers >= 0 => Some(GpuLayers::Last(layers.cast_unsigned())),
                Ok(-2) => Some(GpuLayers::All),
                _ => None,
            },
        });
        let host_experts = if command.is_on(&["--cpu-moe", "-cmoe"], &[], "LLAMA_ARG_CPU_MOE") {
            u64::MAX
        } else {
            command.positive(&["--n-cpu-moe", "-ncmoe"], "LLAMA_ARG_N_CPU_MOE").unwrap_or(0)
        };
        let shares = command.value(&["--tensor-split", "-ts"], "LLAMA_ARG_TENSOR_SPLIT").unwrap_or_default();
        Self {
            layers,
            host_experts,
            split: command.value(&["--split-mode", "-sm"], "LLAMA_ARG_SPLIT_MODE").map(str::to_owned),
            shares: shares.split([',', '/']).filter_map(|share| share.trim().parse().ok()).collect(),
            main_gpu: command
                .number::<i64>(&["--main-gpu", "-mg"], "LLAMA_ARG_MAIN_GPU")
                .and_then(|gpu| usize::try_from(gpu).ok()),
        }
    }
}

impl CacheSettings {
    /// Adds cache types that the book does not support to `unknown`.
    fn from_command(command: &CommandWords<'_>, unknown: &mut Vec<String>) -> Self {
        let mut type_of = |flags: &[&str], variable: &str| {
            let name = command.value(flags, variable);
            let known = name.and_then(CacheType::from_name);
            if let (Some(name), None) = (name, known) {
                unknown.push(format!("{} {name}", flags[0]));
            }
            known.unwrap_or_default()
        };
        Self {
            key_type: type_of(&["--cache-type-k", "-ctk"], "LLAMA_ARG_CACHE_TYPE_K"),
            value_type: type_of(&["--cache-type-v", "-ctv"], "LLAMA_ARG_CACHE_TYPE_V"),
            whole_windows: command.is_on(&["--swa-full"], &[], "LLAMA_ARG_SWA_FULL"),
            on_host: command.is_on(
                &["--no-kv-offload", "-nkvo"],
                &["--kv-offload", "-kvo"],
                "LLAMA_ARG_NO_KV_OFFLOAD",
            ),
        }
    }
}

impl OutputDemand {
    fn from_command(command: &CommandWords<'_>) -> Self {
        let pools = command.value(&["--pooling"], "LLAMA_ARG_POOLING").is_some_and(|kind| kind != "none");
        let embeds = command.is_on(&["--embedding", "--embeddings"], &[], "LLAMA_ARG_EMBEDDINGS");
        let ranks = command.is_on(&["--rerank", "--reranking"], &[], "LLAMA_ARG_RERANKING");
        if pools || embeds || ranks { Self::EachToken } else { Self::LastToken }
    }
}

impl ServerRun {
    /// Returns true if all slots share one cache: llama-server's default without `--parallel`.
    pub fn is_one_pool(&self) -> bool {
        self.unified.unwrap_or(self.slots.is_none())
    }

    /// Parses a command's arguments and environment.
    pub fn from_command(args: &[String], env: &BTreeMap<String, String>) -> Self {
        let command = CommandWords::new(args, env);
        let unsupported = command.words.iter().filter(|word| UNSUPPORTED_FLAGS.contains(&word.as_str()));
        let mut unknown: Vec<String> = unsupported.cloned().collect();
        let cache = CacheSettings::from_command(&command, &mut unknown);
        let flash = match command.value(&["--flash-attn", "-fa"], "LLAMA_ARG_FLASH_ATTN") {
            Some("on" | "1" | "true" | "enabled") => Some(true),
            Some("off" | "0" | "false" | "disabled") => Some(false),
            _ => None,
        };
        let no_mmap = match command.value(&["--load-mode", "-lm"], "LLAMA_ARG_LOAD_MODE") {
            Some("none" | "mlock" | "dio") => true,
            _ => command.is_on(&["--no-mmap"], &["--mmap"], "LLAMA_ARG_NO_MMAP"),
        };
        let unified = ["--kv-unified", "-kvu"];
        Self {
            context: command.positive(&["--ctx-size", "-c"], "LLAMA_ARG_CTX_SIZE"),
            slots: command.positive(&["--parallel", "-np"], "LLAMA_ARG_N_PARALLEL"),
            unified: command.switch(&unified, &["--no-kv-unified", "-no-kvu"], "LLAMA_ARG_KV_UNIFIED"),
            ubatch: command.positive(&["--ubatch-size", "-ub"], "LLAMA_ARG_UBATCH"),
            gpus: GpuPlacement::from_command(&command),
            cache,
            flash,
            outputs: OutputDemand::from_command(&command),
            no_mmap,
            projector: command.value(&["--mmproj", "-mm"], "LLAMA_ARG_MMPROJ").map(str::to_owned),
            unknown,
        }
    }
}
