//! The llama-server flags that determine a model's memory.

use std::collections::BTreeMap;

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
    /// Number of layers on GPUs.
    pub gpu_layers: Option<GpuLayers>,
    /// Number of layers, counted from the first, whose experts stay on the host.
    pub host_experts: u64,
    /// Cache type of keys.
    pub key_type: CacheType,
    /// Cache type of values.
    pub value_type: CacheType,
    /// Flash attention on or off; `None`: on if available.
    pub flash: Option<bool>,
    /// Prompt tokens for which outputs are computed.
    pub outputs: OutputDemand,
    /// Windowed layers cache the whole context (`--swa-full`).
    pub whole_windows: bool,
    /// The key-value cache stays on the host.
    pub cache_on_host: bool,
    /// Weights are read instead of mapped.
    pub no_mmap: bool,
    /// `--split-mode`: distribution of weights over GPUs.
    pub split: Option<String>,
    /// `--tensor-split`: each GPU's share, as given.
    pub shares: Vec<f64>,
    /// `--main-gpu`: the GPU used if all weights are on one.
    pub main_gpu: Option<usize>,
    /// File of the projector.
    pub projector: Option<String>,
    /// Flags that take memory and that the book does not support, as written.
    pub unknown: Vec<String>,
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

/// Flags that take memory and that the book does not support.
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

impl ServerRun {
    /// Returns true if all slots share one cache: by flag, or because llama-server chooses the number of
    /// slots.
    pub fn is_one_pool(&self) -> bool {
        self.unified.unwrap_or(self.slots.is_none())
    }

    /// Parses a command's arguments and environment.
    pub fn from_command(args: &[String], env: &BTreeMap<String, String>) -> Self {
        let normal =
            |word: &str| if word.starts_with("--") { word.replace('_', "-") } else { word.to_owned() };
        let words: Vec<String> = args.iter().map(|word| normal(word)).collect();
        let given = |flags: &[&str], variable: &str| {
            let at = words.iter().rposition(|word| flags.contains(&word.as_str()));
            let told = at.and_then(|at| args.get(at + 1)).or_else(|| env.get(variable));
            told.map(|told| told.trim().to_owned())
        };
        let is_on = |flags: &[&str], off: &[&str], variable: &str| {
            let last = words.iter().rev().find_map(|word| match word.as_str() {
                word if flags.contains(&word) => Some(true),
                word if off.contains(&word) => Some(false),
                _ => None,
            });
            last.or_else(|| {
                env.get(variable).map(|value| ["1", "on", "true", "enabled"].contains(&value.as_str()))
            })
        };
        let number =
            |flags: &[&str], variable: &str| given(flags, variable).and_then(|told| told.parse::<i64>().ok());
        let positive =
            |told: Option<i64>| told.and_then(|told| u64::try_from(told).ok()).filter(|told| *told > 0);
        let gpu_layers = given(&["--gpu-layers", "--n-gpu-layers", "-ngl"], "LLAMA_ARG_N_GPU_LAYERS");
        let gpu_layers = gpu_layers.and_then(|told| match told.as_str() {
            "all" => Some(GpuLayers::All),
            "auto" => None,
            told => match told.parse::<i64>() {
                Ok(layers) if layers >= 0 => Some(GpuLayers::Last(layers.cast_unsigned())),
                Ok(-2) => Some(GpuLayers::All),
                _ => None,
            },
        });
        let all_experts = is_on(&["--cpu-moe", "-cmoe"], &[], "LLAMA_ARG_CPU_MOE") == Some(true);
        let host_experts = if all_experts {
            u64::MAX
        } else {
            positive(number(&["--n-cpu-moe", "-ncmoe"], "LLAMA_ARG_N_CPU_MOE")).unwrap_or(0)
        };
        let mut unknown: Vec<String> =
            words.iter().filter(|word| UNSUPPORTED_FLAGS.contains(&word.as_str())).cloned().collect();
        let mut cache = |flags: &[&str], variable: &str| {
            let told = given(flags, variable);
            let known = told.as_deref().and_then(CacheType::from_name);
            if let (Some(told), None) = (&told, known) {
                unknown.push(format!("{} {told}", flags[0]));
            }
            known.unwrap_or_default()
        };
        let key_type = cache(&["--cache-type-k", "-ctk"], "LLAMA_ARG_CACHE_TYPE_K");
        let value_type = cache(&["--cache-type-v", "-ctv"], "LLAMA_ARG_CACHE_TYPE_V");
        let flash =
            given(&["--flash-attn", "-fa"], "LLAMA_ARG_FLASH_ATTN").and_then(|told| match told.as_str() {
                "on" | "1" | "true" | "enabled" => Some(true),
                "off" | "0" | "false" | "disabled" => Some(false),
                _ => None,
            });
        let pooling = given(&["--pooling"], "LLAMA_ARG_POOLING").is_some_and(|told| told != "none");
        let embeds = [
            is_on(&["--embedding", "--embeddings"], &[], "LLAMA_ARG_EMBEDDINGS"),
            is_on(&["--rerank", "--reranking"], &[], "LLAMA_ARG_RERANKING"),
        ];
        let shares = given(&["--tensor-split", "-ts"], "LLAMA_ARG_TENSOR_SPLIT").unwrap_or_default();
        let shares = shares.split([',', '/']).filter_map(|share| share.trim().parse().ok()).collect();
        Self {
            context: positive(number(&["--ctx-size", "-c"], "LLAMA_ARG_CTX_SIZE")),
            slots: positive(number(&["--parallel", "-np"], "LLAMA_ARG_N_PARALLEL")),
            unified: is_on(
                &["--kv-unified", "-kvu"],
                &["--no-kv-unified", "-no-kvu"],
                "LLAMA_ARG_KV_UNIFIED",
            ),
            ubatch: positive(number(&["--ubatch-size", "-ub"], "LLAMA_ARG_UBATCH")),
            gpu_layers,
            host_experts,
            key_type,
            value_type,
            flash,
            outputs: if pooling || embeds.contains(&Some(true)) {
                OutputDemand::EachToken
            } else {
                OutputDemand::LastToken
            },
            whole_windows: is_on(&["--swa-full"], &[], "LLAMA_ARG_SWA_FULL") == Some(true),
            cache_on_host: is_on(
                &["--no-kv-offload", "-nkvo"],
                &["--kv-offload", "-kvo"],
                "LLAMA_ARG_NO_KV_OFFLOAD",
            ) == Some(true),
            no_mmap: match given(&["--load-mode", "-lm"], "LLAMA_ARG_LOAD_MODE").as_deref() {
                Some("none" | "mlock" | "dio") => true,
                _ => is_on(&["--no-mmap"], &["--mmap"], "LLAMA_ARG_NO_MMAP") == Some(true),
            },
            split: given(&["--split-mode", "-sm"], "LLAMA_ARG_SPLIT_MODE"),
            shares,
            main_gpu: number(&["--main-gpu", "-mg"], "LLAMA_ARG_MAIN_GPU")
                .and_then(|gpu| usize::try_from(gpu).ok()),
            projector: given(&["--mmproj", "-mm"], "LLAMA_ARG_MMPROJ"),
            unknown,
        }
    }
}
