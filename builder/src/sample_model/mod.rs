//! The sample model: a tiny GGUF with random weights that llama-server loads like any other model.
//!
//! Users and tests get a model with no download, and a build is verified with it. What it says is nonsense, but
//! always whole words of valid UTF-8, and every word depends on the whole context, so a wrong or stale KV cache
//! shows. The same [`Options`] give the same bytes on every platform.
//!
//! Two ideas make that work. The vocabulary round-trips (see `vocab.rs`), and channel 0 of the embedding is a
//! constant that no layer writes to, so that after the last norm it is an input of known sign: column 0 of the
//! output matrix is then a bias per token, which forbids byte and control tokens and makes the end as likely as
//! wanted.
//!
//! With a [`WeightKind`] other than f32 the matrices are stored in that form, in a model that is 256 wide: a row has to
//! be whole blocks. Nothing but the form is different from a trained model's weights, so the kernels that compute with
//! it can be tried.
//!
//! [`sized`] has models of other architectures and sizes by the same ideas.

mod half;
mod mmproj;
mod noise;
mod quant;
pub mod sized;
mod vocab;

use std::io::{self, Write as _};
use std::path::Path;

pub use crate::gguf::WeightKind;
use crate::gguf::{Gguf, Value, write_numbers};
use noise::Noise;
use sized::{Arch, SizedModel, Sizes, VisionModel, VisionSizes};
pub(crate) use vocab::{FIRST_WORD, WORDS};

/// In the name of every sample model.
const OURS: &[u8] = b"llama-warden sample (";
/// Where the name is: before the vocabulary, which is what makes a head long.
const HEAD: u64 = 1 << 20;
/// The value of the constant channel in each embedding; about a fifth of the vector's energy.
const CONSTANT: f32 = 3.0;
/// A bias that no other term of a logit comes near.
const NEVER: f32 = -1e3;
/// Variance of the logits: high enough that sampling is not uniform, low enough that answers differ by prompt.
const OUTPUT_GAIN: f64 = 4.0;
/// Variance of what attention and FFN add: enough that the next token depends on far tokens.
const GAIN: f64 = 1.6;

/// What the model is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// Three layers, 64 wide, with a chat template; 0.8 MB. Never ends by itself, so an answer has exactly
    /// `max_tokens` tokens.
    #[default]
    Chat,
    /// As `Chat`, but answers end by themselves, mostly within 80 tokens (`finish_reason` is `stop`).
    Ends,
    /// As `Chat`, without a chat template: what a base model looks like.
    Plain,
    /// As `Chat` with 96 layers, 14 MB: decodes some 150 tokens a second, so that there is time to kill it.
    Slow,
    /// One layer of 16 KiB of KV cache per token (f16), 4.6 MB: memory grows fast for little arithmetic.
    FatKv,
    /// As `Chat`, and sometimes calls a tool that the request offers: `<tool_call>`, whose shape llama-server's grammar
    /// sees to.
    Tools,
    /// No model of its own: a vision encoder and projector for `--mmproj` beside any of the others, 80 KB. An image is
    /// 16 tokens.
    Mmproj,
    /// Two layers, 64 wide, f16; 0.4 MB.
    Llama,
    /// 16 layers, 2048 wide, f16; 1.4 GiB, so that a GPU has something to do.
    LlamaGpu,
    /// Two layers, 2048 wide, with a large KV cache: 16 heads of keys and values in each layer; 126 MB.
    LlamaWide,
    /// Six layers, 64 wide, f16, five of them with a window of 512 tokens; 0.7 MB.
    Gemma4,
    /// 18 layers, 2048 wide, f16, five of six with a window of 1,024 tokens; 1.8 GiB.
    Gemma4Gpu,
    /// No model of its own: gemma4's vision encoder and projector, for `--mmproj` next to `gemma4` or `llama`. An image
    /// is 70 tokens or more.
    Gemma4Vision,
    /// The same for `gemma4-gpu` or `llama-gpu`.
    Gemma4VisionGpu,
}

impl Preset {
    /// All presets, in the order of this page.
    pub const ALL: [Self; 14] = [
        Self::Chat,
        Self::Ends,
        Self::Plain,
        Self::Slow,
        Self::FatKv,
        Self::Tools,
        Self::Mmproj,
        Self::Llama,
        Self::LlamaGpu,
        Self::LlamaWide,
        Self::Gemma4,
        Self::Gemma4Gpu,
        Self::Gemma4Vision,
        Self::Gemma4VisionGpu,
    ];

    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Ends => "ends",
            Self::Plain => "plain",
            Self::Slow => "slow",
            Self::FatKv => "fat-kv",
            Self::Tools => "tools",
            Self::Mmproj => "mmproj",
            Self::Llama => "llama",
            Self::LlamaGpu => "llama-gpu",
            Self::LlamaWide => "llama-wide",
            Self::Gemma4 => "gemma4",
            Self::Gemma4Gpu => "gemma4-gpu",
            Self::Gemma4Vision => "gemma4-vision",
            Self::Gemma4VisionGpu => "gemma4-vision-gpu",
        }
    }

    /// The preset of a name, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// Whether its matrices can be stored in another form than its own.
    pub const fn takes_weights(self) -> bool {
        matches!(self, Self::Chat | Self::Ends | Self::Plain | Self::Slow | Self::FatKv | Self::Tools)
    }

    const fn shape(self, wide: bool) -> Shape {
        let small =
            Shape { layers: 3, heads: 4, kv_heads: 2, head: 16, context: 32_768, width: 64, inner: 128 };
        let shape = match self {
            Self::Slow => Shape { layers: 96, context: 8192, ..small },
            Self::FatKv => Shape { layers: 1, heads: 16, kv_heads: 16, head: 256, context: 8192, ..small },
            _ => small,
        };
        match (wide, self) {
            (false, _) => shape,
            (true, Self::Slow | Self::FatKv) => Shape { width: 256, inner: 256, ..shape },
            (true, _) => Shape { layers: 2, head: 64, width: 256, inner: 256, ..shape },
        }
    }
}

/// Which model to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Different seeds give models that answer differently.
    pub seed: u64,
    /// What the model is for.
    pub preset: Preset,
    /// How the matrices are stored, if [`Preset::takes_weights`].
    pub weights: WeightKind,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 1, preset: Preset::Chat, weights: WeightKind::F32 }
    }
}

/// Sizes of a llama-architecture model.
#[derive(Clone, Copy)]
struct Shape {
    layers: u32,
    heads: u32,
    kv_heads: u32,
    /// Width of one attention head.
    head: u32,
    /// Tokens of context that the model says it was trained with.
    context: u32,
    /// Width of the embedding.
    width: u32,
    /// Width inside the FFN.
    inner: u32,
}

/// Width of the embedding of models with f32 weights.
const WIDTH: u32 = 64;

/// How matrices are written down.
#[derive(Clone, Copy)]
enum Stored {
    /// In their form.
    As(WeightKind),
    /// In f32, each number as it is read from its form: what is computed with both differs by kernels alone.
    AsReadFrom(WeightKind),
}

impl Stored {
    /// Adds a matrix whose numbers are drawn when the file is written, so memory holds one matrix at a time.
    fn add(
        self,
        file: &mut Gguf,
        name: &str,
        [columns, rows]: [u32; 2],
        draw: impl Fn() -> Vec<f32> + 'static,
    ) {
        let kind = match self {
            Self::As(kind) => kind,
            Self::AsReadFrom(_) => WeightKind::F32,
        };
        let write_matrix = move |out: &mut dyn io::Write| match self {
            Self::As(WeightKind::F32) => write_numbers(out, &draw()),
            Self::As(kind) => out.write_all(&quant::encode(kind, &draw())),
            Self::AsReadFrom(kind) => write_numbers(out, &quant::decode(kind, &quant::encode(kind, &draw()))),
        };
        file.made(name, kind, &[columns.into(), rows.into()], Box::new(write_matrix));
    }
}

fn file(options: &Options) -> Gguf {
    let seed = options.seed;
    let language = |arch, sizes| SizedModel { arch, sizes, seed }.file();
    let vision = |sizes, model: Sizes| VisionModel { sizes, width: model.width, seed }.file();
    match options.preset {
        Preset::Mmproj => mmproj::file(seed),
        Preset::Llama => language(Arch::Llama, Sizes::LLAMA),
        Preset::LlamaGpu => language(Arch::Llama, Sizes::LLAMA_GPU),
        Preset::LlamaWide => language(Arch::Llama, Sizes::LLAMA_WIDE),
        Preset::Gemma4 => language(Arch::Gemma4, Sizes::GEMMA4),
        Preset::Gemma4Gpu => language(Arch::Gemma4, Sizes::GEMMA4_GPU),
        Preset::Gemma4Vision => vision(VisionSizes::SMALL, Sizes::GEMMA4),
        Preset::Gemma4VisionGpu => vision(VisionSizes::GPU, Sizes::GEMMA4_GPU),
        Preset::Chat | Preset::Ends | Preset::Plain | Preset::Slow | Preset::FatKv | Preset::Tools => {
            model(options, Stored::As(options.weights))
        }
    }
}

/// Writes the model of these options with its numbers in f32, each as it is read from the form of the options.
pub(crate) fn write_twin(path: &Path, options: &Options) -> io::Result<()> {
    persist(path, &model(options, Stored::AsReadFrom(options.weights)))
}

/// The file's bytes.
pub fn bytes(options: &Options) -> Vec<u8> {
    let mut out = Vec::new();
    // A Vec takes everything, so there is no error to pass on.
    file(options).write(&mut out).ok();
    out
}

/// Writes the file, whole or not at all: readers never see a part of it, and an older file stays if this fails.
///
/// # Errors
///
/// The folder cannot be made, or the file cannot be written or put into its place.
pub fn write(path: &Path, options: &Options) -> io::Result<()> {
    persist(path, &file(options))
}

/// The same for any model.
fn persist(path: &Path, model: &Gguf) -> io::Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !may_replace(path) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "it is there, and no sample model of llama-warden: remove it first, or choose another name",
        ));
    }
    let mut temporary = tempfile::Builder::new().prefix(".sample-model-").tempfile_in(folder)?;
    let mut out = io::BufWriter::new(temporary.as_file_mut());
    model.write(&mut out)?;
    out.flush()?;
    drop(out);
    // A private mode is for secrets; a model is to be read by whoever serves it.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    temporary.as_file().set_permissions(readable)?;
    temporary.persist(path).map_err(|failed| failed.error)?;
    Ok(())
}

/// Whether nothing is lost with a file: it is not there, empty, or a sample model of ours, whose name says so near its
/// beginning.
fn may_replace(path: &Path) -> bool {
    use std::io::Read as _;
    let Ok(facts) = std::fs::metadata(path) else { return std::fs::symlink_metadata(path).is_err() };
    let mut head = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    facts.is_file() && (facts.len() == 0 || (read.is_ok() && memchr::memmem::find(&head, OURS).is_some()))
}

fn model(options: &Options, stored: Stored) -> Gguf {
    let wide = options.weights != WeightKind::F32;
    let shape = options.preset.shape(wide);
    let tools = options.preset == Preset::Tools;
    let tokens = if tools { vocab::TOKENS_WITH_TOOLS } else { vocab::TOKENS };
    let mut file = Gguf::new("llama");
    let form = match stored {
        Stored::As(WeightKind::F32) => String::new(),
        Stored::As(kind) => format!(", {}", kind.name()),
        Stored::AsReadFrom(kind) => format!(", as {}", kind.name()),
    };
    let file_type = match stored {
        Stored::As(kind) => kind.file_type(),
        Stored::AsReadFrom(_) => WeightKind::F32.file_type(),
    };
    file.set("general.name", Value::String(format!("llama-warden sample ({}{form})", options.preset.name())))
        .set("general.file_type", Value::U32(file_type));
    for (key, number) in [
        ("context_length", shape.context),
        ("embedding_length", shape.width),
        ("block_count", shape.layers),
        ("feed_forward_length", shape.inner),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head),
        ("attention.value_length", shape.head),
        ("rope.dimension_count", shape.head),
        ("vocab_size", u32::try_from(tokens).unwrap_or(u32::MAX)),
    ] {
        file.set(&format!("llama.{key}"), Value::U32(number));
    }
    file.set("llama.rope.freq_base", Value::F32(10_000.0))
        .set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    let speaks = match options.preset {
        Preset::Plain => vocab::Speaks::Text,
        Preset::Tools => vocab::Speaks::Tools,
        _ => vocab::Speaks::Turns,
    };
    vocab::add(&mut file, speaks);

    let weights = Weights { seed: options.seed, tokens, width: shape.width };
    let preset = options.preset;
    let by_token = [shape.width, u32::try_from(tokens).unwrap_or(u32::MAX)];
    stored.add(&mut file, "token_embd.weight", by_token, move || weights.embedding());
    file.vector("output_norm.weight", vec![1.0; shape.width as usize]);
    stored.add(&mut file, "output.weight", by_token, move || weights.output(preset));
    // Layers share one contribution to the residual stream, whatever their number.
    let residual = GAIN * (3.0 / f64::from(shape.layers)).sqrt();
    // Heads four times as wide: attention would choose one token, and what is rounded away in a key would choose
    // another.
    let attention = if wide { GAIN * 0.75 } else { GAIN * 1.5 };
    let (queries, keys) = (shape.heads * shape.head, shape.kv_heads * shape.head);
    for layer in 0..shape.layers {
        for (name, rows, columns, gain) in [
            ("attn_q", queries, shape.width, attention),
            ("attn_k", keys, shape.width, attention),
            ("attn_v", keys, shape.width, GAIN),
            ("attn_output", shape.width, queries, residual),
            ("ffn_gate", shape.inner, shape.width, GAIN),
            ("ffn_up", shape.inner, shape.width, GAIN),
            ("ffn_down", shape.width, shape.inner, residual),
        ] {
            let name = format!("blk.{layer}.{name}.weight");
            let own = name.clone();
            stored.add(&mut file, &name, [columns, rows], move || {
                let mut data = weights.matrix(&own, rows, columns, gain);
                if own.contains("output") || own.contains("down") {
                    // Row 0 writes to the constant channel: it must not.
                    data[..columns as usize].fill(0.0);
                    if tools {
                        // Nor row 1 to the one that a newline after `<tool_call>` hangs on.
                        data[columns as usize..2 * columns as usize].fill(0.0);
                    }
                }
                data
            });
        }
        for name in ["attn_norm", "ffn_norm"] {
            file.vector(&format!("blk.{layer}.{name}.weight"), vec![1.0; shape.width as usize]);
        }
    }
    file
}

/// Random numbers by tensor name.
#[derive(Clone, Copy)]
struct Weights {
    seed: u64,
    tokens: usize,
    /// Of the embedding.
    width: u32,
}

impl Weights {
    /// Rows of `columns` numbers whose products with a unit-variance vector have the standard deviation `gain`.
    fn matrix(&self, name: &str, rows: u32, columns: u32, gain: f64) -> Vec<f32> {
        Noise::new(self.seed, name).take((rows * columns) as usize, gain / f64::from(columns).sqrt())
    }

    fn embedding(&self) -> Vec<f32> {
        let width = self.width as usize;
        let count = self.tokens * width;
        let mut data = Noise::new(self.seed, "token_embd").take(count, 1.0);
        data.iter_mut().step_by(width).for_each(|first| *first = CONSTANT);
        if self.tokens > vocab::TOKENS {
            data.iter_mut().skip(1).step_by(width).for_each(|second| *second = 0.0);
            data[vocab::CALL * width + 1] = CALLING;
        }
        data
    }

    fn output(&self, preset: Preset) -> Vec<f32> {
        let width = self.width as usize;
        let count = self.tokens * width;
        let mut data =
            Noise::new(self.seed, "output").take(count, OUTPUT_GAIN / f64::from(self.width).sqrt());
        for (token, row) in data.chunks_exact_mut(width).enumerate() {
            let word = (FIRST_WORD..FIRST_WORD + WORDS).contains(&token);
            row[0] = if word { 0.0 } else { NEVER };
            match preset {
                Preset::Ends if token == vocab::TURN_END => row[0] = ENDS_BIAS,
                Preset::Tools => {
                    row[1] = if token == vocab::NEWLINE { AFTER_CALL } else { 0.0 };
                    if token == vocab::TURN_END {
                        row[0] = TOOLS_END_BIAS;
                    } else if token == vocab::CALL {
                        row[0] = CALL_BIAS;
                    }
                }
                _ => {}
            }
        }
        data
    }
}

/// Found by trying on llama-server: of 20 answers the shortest had 2 tokens, the median 28, the longest 293.
const ENDS_BIAS: f32 = 11.0;

/// Found by trying on llama-server: most answers to a request with a tool call it, after some words.
const CALL_BIAS: f32 = 13.0;
/// Likewise: answers end, though not at once.
const TOOLS_END_BIAS: f32 = 10.0;
/// What only `<tool_call>` has in channel 1, and what makes of it the newline that the format wants there.
const CALLING: f32 = 30.0;
const AFTER_CALL: f32 = 1e4;

#[cfg(test)]
mod tests;
