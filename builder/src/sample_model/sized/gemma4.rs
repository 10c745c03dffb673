//! The language model of the Gemma 4 family: windows, two head sizes, norms before and after every part.
//!
//! llama.cpp's `src/models/gemma4.cpp` loads these keys and tensors. Unlike a real model, this one has its
//! own output matrix, which restricts answers to words.

use super::super::vocab::{self, VocabKind};
use super::{ATTENTION_DEVIATION, SizedModel, SizedWriter, word_count};
use crate::gguf::{GgufWriter, MetadataValue};

pub(super) fn gemma4_file(model: &SizedModel) -> GgufWriter {
    let sizes = &model.sizes;
    let (width, feed) = (sizes.width, sizes.feed);
    let mut w = SizedWriter::new("gemma4", "gemma4", model.seed);
    metadata(&mut w.file, model);
    w.file.numbers(
        "gemma4",
        [
            ("context_length", sizes.context),
            ("embedding_length", width),
            ("block_count", sizes.layers),
            ("feed_forward_length", feed),
            ("attention.head_count", sizes.heads),
            ("attention.key_length", sizes.full.head_size),
            ("attention.value_length", sizes.full.head_size),
            ("attention.key_length_swa", sizes.windowed.head_size),
            ("attention.value_length_swa", sizes.windowed.head_size),
            ("attention.sliding_window", sizes.window),
            ("attention.shared_kv_layers", 0),
            ("rope.dimension_count", sizes.full.head_size),
            ("rope.dimension_count_swa", sizes.windowed.head_size),
            ("embedding_length_per_layer_input", 0),
            ("vocab_size", sizes.vocab),
        ],
    );
    vocab::add_vocab(&mut w.file, VocabKind::Images, word_count(sizes.vocab));

    // llama.cpp multiplies embeddings by the square root of the width.
    w.embedding(sizes, 1.0 / f64::from(width).sqrt());
    w.vector("output_norm", width, 1.0);
    model.add_output(&mut w.file);
    w.vector("rope_freqs", sizes.full.head_size / 2, 1.0);
    let share = SizedModel::residual_share(2 * sizes.layers);
    for layer in 0..sizes.layers {
        let attention = sizes.attention(layer);
        let (queries, keys) = (sizes.heads * attention.head_size, attention.kv_heads * attention.head_size);
        let p = format!("blk.{layer}.");
        w.vector(&format!("{p}attn_norm"), width, 1.0);
        w.vector(&format!("{p}ffn_norm"), width, 1.0);
        // The norm after each part scales its output; the constant channel is excluded there.
        w.vector_sparing_constant(&format!("{p}post_attention_norm"), width, share);
        w.vector_sparing_constant(&format!("{p}post_ffw_norm"), width, share);
        // Queries and keys are normalized, too, and their product is not divided by the square root of the
        // head size.
        let head = attention.head_size;
        w.vector(&format!("{p}attn_q_norm"), head, ATTENTION_DEVIATION / f64::from(head).sqrt());
        w.vector(&format!("{p}attn_k_norm"), head, 1.0);
        w.matrix(&format!("{p}attn_q"), queries, width, 1.0);
        w.matrix(&format!("{p}attn_k"), keys, width, 1.0);
        w.matrix(&format!("{p}attn_v"), keys, width, 1.0);
        w.matrix(&format!("{p}attn_output"), width, queries, 1.0);
        w.matrix(&format!("{p}ffn_gate"), feed, width, 1.5);
        w.matrix(&format!("{p}ffn_up"), feed, width, 1.5);
        w.matrix(&format!("{p}ffn_down"), width, feed, 1.0);
    }
    w.file
}

fn metadata(file: &mut GgufWriter, model: &SizedModel) {
    let sizes = &model.sizes;
    let layers = 0..sizes.layers;
    let kv_heads = layers.clone().map(|layer| sizes.attention(layer).kv_heads).collect();
    let pattern = layers.map(|layer| sizes.is_windowed(layer)).collect();
    file.set("gemma4.attention.head_count_kv", MetadataValue::U32s(kv_heads))
        .set("gemma4.attention.sliding_window_pattern", MetadataValue::Bools(pattern))
        .set("gemma4.attention.layer_norm_rms_epsilon", MetadataValue::F32(1e-6))
        .set("gemma4.rope.freq_base", MetadataValue::F32(1e6))
        .set("gemma4.rope.freq_base_swa", MetadataValue::F32(1e4))
        .set("gemma4.final_logit_softcapping", MetadataValue::F32(30.0));
}
