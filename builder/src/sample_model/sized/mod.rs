//! Sample models by architecture and size: they load a GPU, or exercise parts of llama-server that the
//! smaller presets do not reach (sliding windows, two head sizes, a vision encoder).
//!
//! Weights are f16 noise, written as a stream. As in the smaller presets, the same options give the same
//! bytes, and the constant channel excludes all tokens but words (see the parent module). No answer has an
//! end token.

mod block;
mod gemma4;
mod gemma4v;
mod llama;
mod sizes;

use std::io;
use std::path::Path;

use super::{EXCLUDING_BIAS, OUTPUT_GAIN, vocab, write_atomically};
use crate::gguf::{GgufWriter, MetadataValue, WeightKind};

pub(super) use sizes::VisionSizes;
pub use sizes::{AttentionHeads, ModelArch, ModelSizes};

/// A sample model by architecture and size.
#[derive(Clone, Debug, PartialEq)]
pub struct SizedModel {
    /// Architecture.
    pub arch: ModelArch,
    /// Size.
    pub sizes: ModelSizes,
    /// Seed of the weights; models with different seeds answer differently.
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct VisionModel {
    pub(super) sizes: VisionSizes,
    pub(super) width: u32,
    pub(super) seed: u64,
}

impl SizedModel {
    /// Writes the model atomically.
    ///
    /// # Errors
    /// Fails if the file cannot be written; an older file stays then.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_atomically(path, &self.file())
    }

    pub(super) fn file(&self) -> GgufWriter {
        match self.arch {
            ModelArch::Llama => llama::llama_file(self),
            ModelArch::Gemma4 => gemma4::gemma4_file(self),
        }
    }

    /// Amount that each of `parts` parts adds to the residual stream; the sum equals that of the presets.
    fn residual_share(parts: u32) -> f64 {
        (RESIDUAL_ENERGY / f64::from(parts)).sqrt()
    }

    /// The output matrix: words get random rows, other tokens a bias through the constant channel.
    fn add_output(&self, file: &mut GgufWriter) {
        let last = vocab::FIRST_WORD_ID + word_count(self.sizes.vocab);
        let (rows, columns) = (u64::from(self.sizes.vocab), u64::from(self.sizes.width));
        let only_words = move |row: u64, numbers: &mut block::MatrixRow<'_>| {
            let word = (vocab::FIRST_WORD_ID as u64..last as u64).contains(&row);
            numbers.set(0, if word { 0.0 } else { EXCLUDING_BIAS });
        };
        let name = "output.weight";
        let deviation = OUTPUT_GAIN / f64::from(self.sizes.width).sqrt();
        let words = block::noise_rows(self.seed, name, rows, columns, deviation, Some(Box::new(only_words)));
        file.computed_tensor(name, WeightKind::F16, &[columns, rows], words);
    }
}

impl VisionModel {
    pub(super) fn file(&self) -> GgufWriter {
        gemma4v::gemma4v_file(self)
    }
}

/// Energy of everything that the layers add, relative to the embedding's.
const RESIDUAL_ENERGY: f64 = 3.0;
/// The constant channel, in units of the other channels of the embedding. After the last norm it is 4 at
/// any width: enough for a bias, and a small part of the energy.
const CONSTANT_CHANNEL: f64 = 8.0;
/// Standard deviation of attention logits, so that attention is neither uniform nor restricted to one token.
const ATTENTION_DEVIATION: f64 = 1.5;

fn word_count(vocab: u32) -> usize {
    (vocab as usize).saturating_sub(vocab::NON_WORD_COUNT)
}

#[expect(clippy::cast_possible_truncation, reason = "weights are stored with less precision than f32 has")]
fn rounded(number: f64) -> f32 {
    number as f32
}

struct SizedWriter {
    file: GgufWriter,
    seed: u64,
}

impl SizedWriter {
    fn new(arch: &str, name: &str, seed: u64) -> Self {
        let mut file = GgufWriter::new(arch);
        file.set("general.name", MetadataValue::String(format!("llama-warden sample ({name})")));
        // llama.cpp's file type "mostly f16".
        file.set("general.file_type", MetadataValue::U32(1));
        Self { file, seed }
    }

    fn vector(&mut self, name: &str, length: u32, number: f64) {
        self.file.vector(&format!("{name}.weight"), vec![rounded(number); length as usize]);
    }

    /// Adds a vector that repeats one number, with 0 for the constant channel.
    fn vector_sparing_constant(&mut self, name: &str, length: u32, number: f64) {
        let mut numbers = vec![rounded(number); length as usize];
        if let Some(first) = numbers.first_mut() {
            *first = 0.0;
        }
        self.file.vector(&format!("{name}.weight"), numbers);
    }

    /// Adds a matrix whose product with a unit-variance vector has the standard deviation `gain`.
    fn matrix(&mut self, name: &str, rows: u32, columns: u32, gain: f64) {
        self.add_matrix(name, rows, columns, gain, false);
    }

    /// Like [`Self::matrix`], with a zero row 0, which never writes to the constant channel.
    fn matrix_sparing_constant(&mut self, name: &str, rows: u32, columns: u32, gain: f64) {
        self.add_matrix(name, rows, columns, gain, true);
    }

    fn add_matrix(&mut self, name: &str, rows: u32, columns: u32, gain: f64, but_first: bool) {
        let name = format!("{name}.weight");
        let deviation = gain / f64::from(columns).sqrt();
        let (rows, columns) = (u64::from(rows), u64::from(columns));
        let clear_first = |row: u64, numbers: &mut block::MatrixRow<'_>| {
            if row == 0 {
                numbers.clear();
            }
        };
        let edit = but_first.then(|| Box::new(clear_first) as block::RowEdit);
        let fill = block::noise_rows(self.seed, &name, rows, columns, deviation, edit);
        self.file.computed_tensor(&name, WeightKind::F16, &[columns, rows], fill);
    }

    fn embedding(&mut self, sizes: &ModelSizes, deviation: f64) {
        let name = "token_embd.weight";
        let (rows, columns) = (u64::from(sizes.vocab), u64::from(sizes.width));
        let constant = rounded(CONSTANT_CHANNEL * deviation);
        let edit = move |_: u64, numbers: &mut block::MatrixRow<'_>| numbers.set(0, constant);
        let fill = block::noise_rows(self.seed, name, rows, columns, deviation, Some(Box::new(edit)));
        self.file.computed_tensor(name, WeightKind::F16, &[columns, rows], fill);
    }
}

#[cfg(test)]
mod tests;
