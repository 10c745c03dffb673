//! The sample model: a tiny GGUF with random weights that llama-server loads like any other model.
//!
//! The model's answers are nonsense, but always whole words of valid UTF-8. Every word depends on the whole
//! context, so a wrong or stale KV cache changes the answer. The same [`SampleModelOptions`] give the same
//! bytes on every platform.
//!
//! The vocabulary round-trips (see `vocab.rs`). Channel 0 of the embedding is a constant that no layer writes
//! to, so after the last norm it is an input of known sign. Column 0 of the output matrix is thus a bias per
//! token: it excludes byte and control tokens, and sets the probability of the end token.
//!
//! With a [`WeightKind`] other than f32, the matrices are stored in that format, to test its kernels. The
//! model then has width 256, since a row has to consist of whole blocks.

mod half;
mod mmproj;
mod noise;
mod quant;
mod vocab;

use std::io::{self, Write as _};
use std::path::Path;

pub use crate::gguf::WeightKind;
use crate::gguf::{GgufWriter, MetadataValue, write_numbers};
use noise::NoiseStream;
pub(crate) use vocab::{FIRST_WORD_ID, WORD_COUNT};

const NAME_PREFIX: &[u8] = b"llama-warden sample (";
/// Bytes searched for the name, which precedes the vocabulary; the vocabulary takes most of the metadata.
const NAME_SEARCH_BYTES: u64 = 1 << 20;
/// Value of the constant channel in each embedding; about a fifth of the vector's energy.
const CONSTANT: f32 = 3.0;
/// Bias that excludes a token; no other term of a logit is near it.
const EXCLUDING_BIAS: f32 = -1e3;
/// Variance of the logits: sampling is not uniform, and answers still depend on the prompt.
const OUTPUT_GAIN: f64 = 4.0;
/// Variance that attention and FFN add: enough that the next token depends on distant tokens.
const LAYER_GAIN: f64 = 1.6;

/// A sample model by its purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SamplePreset {
    /// Three layers, width 64, chat template; 0.8 MB. Without an end token: answers have `max_tokens` tokens.
    #[default]
    Chat,
    /// Like `Chat`, but the model ends its answers, mostly within 80 tokens (`finish_reason` is `stop`).
    Ends,
    /// Like `Chat`, but without a chat template, like a base model.
    Plain,
    /// Like `Chat`, but with 96 layers, 14 MB: at 150 tokens per second, tests can interrupt an answer.
    Slow,
    /// One layer with 16 KiB of KV cache per token (f16), 4.6 MB: memory grows fast with little computation.
    FatKv,
    /// Like `Chat`, but sometimes calls a tool of the request; llama-server's grammar enforces the format.
    Tools,
    /// A vision encoder and projector for `--mmproj`, for any other preset; 80 KB. An image takes 16 tokens.
    Mmproj,
}

impl SamplePreset {
    /// All presets with their names in options, in the order of the enum.
    pub const NAMES: [(Self, &'static str); 7] = [
        (Self::Chat, "chat"),
        (Self::Ends, "ends"),
        (Self::Plain, "plain"),
        (Self::Slow, "slow"),
        (Self::FatKv, "fat-kv"),
        (Self::Tools, "tools"),
        (Self::Mmproj, "mmproj"),
    ];

    /// The name in options.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// Parses a preset's name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find(|(_, known)| *known == name).map(|(preset, _)| preset)
    }

    /// Returns true if the matrices can be stored in another format.
    pub const fn takes_weights(self) -> bool {
        !matches!(self, Self::Mmproj)
    }

    const fn shape(self, wide: bool) -> LlamaShape {
        let small =
            LlamaShape { layers: 3, heads: 4, kv_heads: 2, head: 16, context: 32_768, width: 64, inner: 128 };
        let shape = match self {
            Self::Slow => LlamaShape { layers: 96, context: 8192, ..small },
            Self::FatKv => {
                LlamaShape { layers: 1, heads: 16, kv_heads: 16, head: 256, context: 8192, ..small }
            }
            _ => small,
        };
        match (wide, self) {
            (false, _) => shape,
            (true, Self::Slow | Self::FatKv) => LlamaShape { width: 256, inner: 256, ..shape },
            (true, _) => LlamaShape { layers: 2, head: 64, width: 256, inner: 256, ..shape },
        }
    }
}

/// Options of a sample model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleModelOptions {
    /// Seed of the weights; models with different seeds answer differently.
    pub seed: u64,
    /// Preset of the model.
    pub preset: SamplePreset,
    /// Format of the matrices, if [`SamplePreset::takes_weights`].
    pub weights: WeightKind,
}

impl Default for SampleModelOptions {
    fn default() -> Self {
        Self { seed: 1, preset: SamplePreset::Chat, weights: WeightKind::F32 }
    }
}

#[derive(Clone, Copy)]
struct LlamaShape {
    layers: u32,
    heads: u32,
    kv_heads: u32,
    head: u32,
    /// Training context in tokens, as stated in the metadata.
    context: u32,
    width: u32,
    inner: u32,
}

const F32_WIDTH: u32 = 64;

#[derive(Clone, Copy)]
enum MatrixStorage {
    Native(WeightKind),
    /// Stored in f32 after rounding to this format: only the kernels differ from [`Self::Native`].
    Roundtripped(WeightKind),
}

impl MatrixStorage {
    /// Adds a matrix; its numbers are drawn during the write, so memory holds one matrix at a time.
    fn add_matrix(
        self,
        file: &mut GgufWriter,
        name: &str,
        [columns, rows]: [u32; 2],
        draw: impl Fn() -> Vec<f32> + 'static,
    ) {
        let kind = match self {
            Self::Native(kind) => kind,
            Self::Roundtripped(_) => WeightKind::F32,
        };
        let write_matrix = move |out: &mut dyn io::Write| match self {
            Self::Native(WeightKind::F32) => write_numbers(out, &draw()),
            Self::Native(kind) => out.write_all(&quant::encode(kind, &draw())),
            Self::Roundtripped(kind) => {
                write_numbers(out, &quant::decode(kind, &quant::encode(kind, &draw())))
            }
        };
        file.computed_tensor(name, kind, &[columns.into(), rows.into()], Box::new(write_matrix));
    }
}

fn model_file(options: &SampleModelOptions) -> GgufWriter {
    if options.preset == SamplePreset::Mmproj {
        return mmproj::mmproj_file(options.seed);
    }
    llama_model(options, MatrixStorage::Native(options.weights))
}

/// Writes a model in f32 whose numbers are rounded to the format of the options.
pub(crate) fn write_twin(path: &Path, options: &SampleModelOptions) -> io::Result<()> {
    write_atomically(path, &llama_model(options, MatrixStorage::Roundtripped(options.weights)))
}

/// Returns the bytes of the model's file.
pub fn bytes(options: &SampleModelOptions) -> Vec<u8> {
    let mut out = Vec::new();
    // Writing to a Vec cannot fail.
    model_file(options).write(&mut out).ok();
    out
}

/// Writes the file atomically: readers never see a part of it, and an older file stays if this fails.
///
/// # Errors
/// Fails if the folder cannot be created, or if the file cannot be written or renamed.
pub fn write(path: &Path, options: &SampleModelOptions) -> io::Result<()> {
    write_atomically(path, &model_file(options))
}

fn write_atomically(path: &Path, model: &GgufWriter) -> io::Result<()> {
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
    // Temporary files have a private mode; other users must be able to read a model.
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    temporary.as_file().set_permissions(readable)?;
    temporary.persist(path).map_err(|failed| failed.error)?;
    Ok(())
}

/// Returns true if the file is missing, empty, or a sample model of ours by the name near its beginning.
fn may_replace(path: &Path) -> bool {
    use std::io::Read as _;
    let Ok(facts) = std::fs::metadata(path) else { return std::fs::symlink_metadata(path).is_err() };
    let mut head = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(NAME_SEARCH_BYTES).read_to_end(&mut head));
    facts.is_file()
        && (facts.len() == 0 || (read.is_ok() && memchr::memmem::find(&head, NAME_PREFIX).is_some()))
}

fn llama_model(options: &SampleModelOptions, stored: MatrixStorage) -> GgufWriter {
    let wide = options.weights != WeightKind::F32;
    let shape = options.preset.shape(wide);
    let tools = options.preset == SamplePreset::Tools;
    let tokens = if tools { vocab::TOOLS_TOKEN_COUNT } else { vocab::TOKEN_COUNT };
    let mut file = GgufWriter::new("llama");
    add_llama_metadata(&mut file, options.preset, stored, shape, tokens);
    let weights = WeightSource { seed: options.seed, tokens, width: shape.width };
    let preset = options.preset;
    let by_token = [shape.width, u32::try_from(tokens).unwrap_or(u32::MAX)];
    stored.add_matrix(&mut file, "token_embd.weight", by_token, move || weights.embedding());
    file.vector("output_norm.weight", vec![1.0; shape.width as usize]);
    stored.add_matrix(&mut file, "output.weight", by_token, move || weights.output(preset));
    // All layers together add the same amount to the residual stream, for any number of layers.
    let residual = LAYER_GAIN * (3.0 / f64::from(shape.layers)).sqrt();
    // Heads of the wide model are four times as wide. With the full gain, attention would pick a single
    // token, and rounding a key would change the pick.
    let attention = if wide { LAYER_GAIN * 0.75 } else { LAYER_GAIN * 1.5 };
    let (queries, keys) = (shape.heads * shape.head, shape.kv_heads * shape.head);
    for layer in 0..shape.layers {
        for (name, rows, columns, gain) in [
            ("attn_q", queries, shape.width, attention),
            ("attn_k", keys, shape.width, attention),
            ("attn_v", keys, shape.width, LAYER_GAIN),
            ("attn_output", shape.width, queries, residual),
            ("ffn_gate", shape.inner, shape.width, LAYER_GAIN),
            ("ffn_up", shape.inner, shape.width, LAYER_GAIN),
            ("ffn_down", shape.width, shape.inner, residual),
        ] {
            let name = format!("blk.{layer}.{name}.weight");
            let own = name.clone();
            stored.add_matrix(&mut file, &name, [columns, rows], move || {
                let mut data = weights.matrix(&own, rows, columns, gain);
                if own.contains("output") || own.contains("down") {
                    // Row 0 writes to the constant channel, so it must be zero.
                    data[..columns as usize].fill(0.0);
                    if tools {
                        // Row 1 writes to the channel that triggers the newline after `<tool_call>`.
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

fn add_llama_metadata(
    file: &mut GgufWriter,
    preset: SamplePreset,
    stored: MatrixStorage,
    shape: LlamaShape,
    tokens: usize,
) {
    let (form, kind) = match stored {
        MatrixStorage::Native(WeightKind::F32) => (String::new(), WeightKind::F32),
        MatrixStorage::Native(kind) => (format!(", {}", kind.name()), kind),
        MatrixStorage::Roundtripped(kind) => (format!(", as {}", kind.name()), WeightKind::F32),
    };
    let name = format!("llama-warden sample ({}{form})", preset.name());
    file.set("general.name", MetadataValue::String(name))
        .set("general.file_type", MetadataValue::U32(kind.file_type()));
    file.numbers(
        "llama",
        [
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
        ],
    );
    file.set("llama.rope.freq_base", MetadataValue::F32(10_000.0))
        .set("llama.attention.layer_norm_rms_epsilon", MetadataValue::F32(1e-5));
    let speaks = match preset {
        SamplePreset::Plain => vocab::VocabKind::Text,
        SamplePreset::Tools => vocab::VocabKind::Tools,
        _ => vocab::VocabKind::Turns,
    };
    vocab::add_vocab(file, speaks);
}

#[derive(Clone, Copy)]
struct WeightSource {
    seed: u64,
    tokens: usize,
    width: u32,
}

impl WeightSource {
    /// A matrix whose product with a unit-variance vector has the standard deviation `gain`.
    fn matrix(&self, name: &str, rows: u32, columns: u32, gain: f64) -> Vec<f32> {
        NoiseStream::new(self.seed, name).take((rows * columns) as usize, gain / f64::from(columns).sqrt())
    }

    fn embedding(&self) -> Vec<f32> {
        let width = self.width as usize;
        let count = self.tokens * width;
        let mut data = NoiseStream::new(self.seed, "token_embd").take(count, 1.0);
        data.iter_mut().step_by(width).for_each(|first| *first = CONSTANT);
        if self.tokens > vocab::TOKEN_COUNT {
            data.iter_mut().skip(1).step_by(width).for_each(|second| *second = 0.0);
            data[vocab::TOOL_CALL_ID * width + 1] = CALL_CHANNEL;
        }
        data
    }

    fn output(&self, preset: SamplePreset) -> Vec<f32> {
        let width = self.width as usize;
        let count = self.tokens * width;
        let mut data =
            NoiseStream::new(self.seed, "output").take(count, OUTPUT_GAIN / f64::from(self.width).sqrt());
        for (token, row) in data.chunks_exact_mut(width).enumerate() {
            let word = (FIRST_WORD_ID..FIRST_WORD_ID + WORD_COUNT).contains(&token);
            row[0] = if word { 0.0 } else { EXCLUDING_BIAS };
            match preset {
                SamplePreset::Ends if token == vocab::TURN_END_ID => row[0] = ENDS_BIAS,
                SamplePreset::Tools => {
                    row[1] = if token == vocab::NEWLINE_ID { NEWLINE_WEIGHT } else { 0.0 };
                    if token == vocab::TURN_END_ID {
                        row[0] = TOOLS_END_BIAS;
                    } else if token == vocab::TOOL_CALL_ID {
                        row[0] = CALL_BIAS;
                    }
                }
                _ => {}
            }
        }
        data
    }
}

/// Bias of the end token: 20 answers of llama-server had 2 to 293 tokens, 28 in the median.
const ENDS_BIAS: f32 = 11.0;

/// Bias of `<tool_call>`; with it, most answers of llama-server call a tool after some words.
const CALL_BIAS: f32 = 13.0;
/// Bias of the end token with tools, tuned on llama-server: answers end, but not at once.
const TOOLS_END_BIAS: f32 = 10.0;
/// Value of channel 1 in the embedding of `<tool_call>` only. [`NEWLINE_WEIGHT`] turns this value into the
/// newline that the format demands after the mark.
const CALL_CHANNEL: f32 = 30.0;
const NEWLINE_WEIGHT: f32 = 1e4;

#[cfg(test)]
mod tests;
