//! A vision encoder and projector for the sample models, for `--mmproj`.
//!
//! A single layer of 32 channels works on patches of 8 by 8 pixels. Different images give different texts,
//! and equal images equal texts; the model has no other purpose. Keys and tensor names are those of
//! llama.cpp's `tools/mtmd/clip-impl.h` for the projector `gemma3`, which needs no special tokens.

use crate::gguf::{GgufWriter, MetadataValue};

use super::F32_WIDTH;
use super::noise::NoiseStream;

const CHANNELS: u32 = 32;
const FFN_WIDTH: u32 = 64;
/// Edge in pixels of the encoder's input image, and of a patch.
const IMAGE_EDGE: u32 = 64;
const PATCH_EDGE: u32 = 8;
/// Patches pooled in each direction: (64 / 8 / 2)^2 = 16 tokens per image.
const POOL_EDGE: u32 = 2;
/// Gain of the projection: high enough that the text depends on the image.
const PROJECTION_GAIN: f64 = 6.0;

pub(crate) fn mmproj_file(seed: u64) -> GgufWriter {
    let mut file = GgufWriter::new("clip");
    file.set("general.type", MetadataValue::String("mmproj".to_owned()))
        .set("general.name", MetadataValue::String("llama-warden sample (mmproj)".to_owned()))
        .set("general.file_type", MetadataValue::U32(0))
        .set("clip.has_vision_encoder", MetadataValue::Bool(true))
        .set("clip.projector_type", MetadataValue::String("gemma3".to_owned()))
        .set("clip.use_gelu", MetadataValue::Bool(true));
    file.numbers(
        "clip.vision",
        [
            ("embedding_length", CHANNELS),
            ("feed_forward_length", FFN_WIDTH),
            ("block_count", 1),
            ("projection_dim", F32_WIDTH),
            ("attention.head_count", 2),
            ("image_size", IMAGE_EDGE),
            ("patch_size", PATCH_EDGE),
            ("projector.scale_factor", POOL_EDGE),
        ],
    );
    file.set("clip.vision.attention.layer_norm_epsilon", MetadataValue::F32(1e-6))
        .set("clip.vision.image_mean", MetadataValue::F32s(vec![0.5; 3]))
        .set("clip.vision.image_std", MetadataValue::F32s(vec![0.5; 3]));

    let (channels, inner, width, patch) =
        (CHANNELS as usize, FFN_WIDTH as usize, F32_WIDTH as usize, PATCH_EDGE as usize);
    let noise = |name: &str, count: usize, inputs: usize, gain: f64| {
        let inputs = u32::try_from(inputs).unwrap_or(u32::MAX);
        NoiseStream::new(seed, name).take(count, gain / f64::from(inputs).sqrt())
    };
    let inputs = 3 * patch * patch;
    let name = "v.patch_embd.weight";
    file.tensor(name, &[patch, patch, 3, channels], noise(name, inputs * channels, inputs, 4.0));
    file.vector("v.patch_embd.bias", vec![0.0; channels]);
    let places = (IMAGE_EDGE as usize / patch).pow(2);
    let name = "v.position_embd.weight";
    file.matrix(name, channels, noise(name, places * channels, 1, 0.3));
    for part in ["attn_q", "attn_k", "attn_v", "attn_out"] {
        let name = format!("v.blk.0.{part}.weight");
        file.matrix(&name, channels, noise(&name, channels * channels, channels, 1.0));
        file.vector(&format!("v.blk.0.{part}.bias"), vec![0.0; channels]);
    }
    for (part, rows, columns) in [("ffn_up", inner, channels), ("ffn_down", channels, inner)] {
        let name = format!("v.blk.0.{part}.weight");
        file.matrix(&name, columns, noise(&name, rows * columns, columns, 1.0));
        file.vector(&format!("v.blk.0.{part}.bias"), vec![0.0; rows]);
    }
    for norm in ["v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"] {
        file.vector(&format!("{norm}.weight"), vec![1.0; channels]);
        file.vector(&format!("{norm}.bias"), vec![0.0; channels]);
    }
    file.vector("mm.soft_emb_norm.weight", vec![1.0; channels]);
    // Stored transposed: a row per channel of the encoder.
    let name = "mm.input_projection.weight";
    let mut projection = noise(name, channels * width, width, PROJECTION_GAIN);
    // Images must not write to the first two channels of the embedding (see `super`).
    projection.chunks_exact_mut(width).for_each(|row| row[..2].fill(0.0));
    file.matrix(name, width, projection);
    file
}
