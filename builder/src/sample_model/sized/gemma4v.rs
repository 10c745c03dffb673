//! The vision encoder and projector of the Gemma 4 family. llama.cpp's `tools/mtmd/models/gemma4v.cpp`
//! loads these keys and tensors. The encoder works with any of our language models of the same width.
//!
//! llama-server scales an image to between 70 and 1,120 tokens of 48 by 48 pixels each.

use std::io;

use super::super::noise::NoiseStream;
use super::{ATTENTION_DEVIATION, SizedWriter, VisionModel, block};
use crate::gguf::{FillFn, GgufWriter, MetadataValue, WeightKind};

const PATCH_EDGE: u32 = 16;
const POOL_EDGE: u32 = 3;
const MAX_PATCH_ROWS: u32 = 1024;
/// Edge in pixels stated in the metadata; images keep their aspect ratio.
const IMAGE_EDGE: u32 = 768;
/// Gain of the projection: image tokens weigh as much as words, or a little more.
const PROJECTION_GAIN: f64 = 1.5;

pub(super) fn gemma4v_file(vision: &VisionModel) -> GgufWriter {
    let sizes = &vision.sizes;
    let (width, feed) = (sizes.width, sizes.feed);
    let mut w = SizedWriter::new("clip", "gemma4v", vision.seed);
    w.file
        .set("general.type", MetadataValue::String("mmproj".to_owned()))
        .set("clip.has_vision_encoder", MetadataValue::Bool(true))
        .set("clip.projector_type", MetadataValue::String("gemma4v".to_owned()))
        .set("clip.use_gelu", MetadataValue::Bool(true))
        .set("clip.vision.attention.layer_norm_epsilon", MetadataValue::F32(1e-6))
        .set("clip.vision.image_mean", MetadataValue::F32s(vec![0.0; 3]))
        .set("clip.vision.image_std", MetadataValue::F32s(vec![1.0; 3]));
    w.file.numbers(
        "clip.vision",
        [
            ("embedding_length", width),
            ("feed_forward_length", feed),
            ("block_count", sizes.layers),
            ("projection_dim", vision.width),
            ("attention.head_count", sizes.heads),
            ("image_size", IMAGE_EDGE),
            ("patch_size", PATCH_EDGE),
            ("projector.scale_factor", POOL_EDGE),
        ],
    );

    let inputs = 3 * PATCH_EDGE * PATCH_EDGE;
    let name = "v.patch_embd.weight";
    let deviation = 2.0 / f64::from(inputs).sqrt();
    let fill = block::noise_rows(vision.seed, name, u64::from(width), u64::from(inputs), deviation, None);
    let edge = u64::from(PATCH_EDGE);
    w.file.computed_tensor(name, WeightKind::F16, &[edge, edge, 3, u64::from(width)], fill);
    let name = "v.position_embd.weight";
    let lengths = [u64::from(width), u64::from(MAX_PATCH_ROWS), 2];
    w.file.computed_tensor(
        name,
        WeightKind::F32,
        &lengths,
        position_rows(vision.seed, name, 2 * MAX_PATCH_ROWS, width),
    );
    // Images must not write to the constant channel of the language model.
    w.matrix_sparing_constant("mm.input_projection", vision.width, width, PROJECTION_GAIN);
    let head = width / sizes.heads;
    for layer in 0..sizes.layers {
        let p = format!("v.blk.{layer}.");
        for norm in ["ln1", "ln2", "attn_post_norm", "ffn_post_norm"] {
            w.vector(&format!("{p}{norm}"), width, 1.0);
        }
        w.vector(&format!("{p}attn_q_norm"), head, ATTENTION_DEVIATION / f64::from(head).sqrt());
        w.vector(&format!("{p}attn_k_norm"), head, 1.0);
        for part in ["attn_q", "attn_k", "attn_v", "attn_out"] {
            w.matrix(&format!("{p}{part}"), width, width, 1.0);
        }
        w.matrix(&format!("{p}ffn_gate"), feed, width, 1.5);
        w.matrix(&format!("{p}ffn_up"), feed, width, 1.5);
        w.matrix(&format!("{p}ffn_down"), width, feed, 1.0);
    }
    w.file
}

fn position_rows(seed: u64, name: &str, rows: u32, columns: u32) -> FillFn {
    let name = name.to_owned();
    Box::new(move |out| {
        let mut noise = NoiseStream::new(seed, &name);
        for _ in 0..rows {
            let row = noise.take(columns as usize, 0.3);
            out.write_all(&row.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>())?;
        }
        io::Result::Ok(())
    })
}
