//! The `llama` architecture: a plain transformer.

use super::super::vocab::{self, VocabKind};
use super::{ATTENTION_DEVIATION, SizedModel, SizedWriter, word_count};
use crate::gguf::{GgufWriter, MetadataValue};

pub(super) fn llama_file(model: &SizedModel) -> GgufWriter {
    let sizes = &model.sizes;
    let (width, feed) = (sizes.width, sizes.feed);
    let mut w = SizedWriter::new("llama", "llama", model.seed);
    w.file.numbers(
        "llama",
        [
            ("context_length", sizes.context),
            ("embedding_length", width),
            ("block_count", sizes.layers),
            ("feed_forward_length", feed),
            ("attention.head_count", sizes.heads),
            ("attention.head_count_kv", sizes.full.kv_heads),
            ("attention.key_length", sizes.full.head_size),
            ("attention.value_length", sizes.full.head_size),
            ("rope.dimension_count", sizes.full.head_size),
            ("vocab_size", sizes.vocab),
        ],
    );
    w.file
        .set("llama.rope.freq_base", MetadataValue::F32(500_000.0))
        .set("llama.attention.layer_norm_rms_epsilon", MetadataValue::F32(1e-5));
    vocab::add_vocab(&mut w.file, VocabKind::Images, word_count(sizes.vocab));

    w.embedding(sizes, 1.0);
    w.vector("output_norm", width, 1.0);
    model.add_output(&mut w.file);
    let (queries, keys) = (sizes.heads * sizes.full.head_size, sizes.full.kv_heads * sizes.full.head_size);
    let share = SizedModel::residual_share(2 * sizes.layers);
    for layer in 0..sizes.layers {
        let p = format!("blk.{layer}.");
        w.vector(&format!("{p}attn_norm"), width, 1.0);
        w.vector(&format!("{p}ffn_norm"), width, 1.0);
        // llama.cpp divides the product of both by the square root of the head size.
        w.matrix(&format!("{p}attn_q"), queries, width, ATTENTION_DEVIATION);
        w.matrix(&format!("{p}attn_k"), keys, width, 1.0);
        w.matrix(&format!("{p}attn_v"), keys, width, 1.0);
        w.matrix_sparing_constant(&format!("{p}attn_output"), width, queries, 1.5 * share);
        w.matrix(&format!("{p}ffn_gate"), feed, width, 1.5);
        w.matrix(&format!("{p}ffn_up"), feed, width, 1.5);
        w.matrix_sparing_constant(&format!("{p}ffn_down"), width, feed, share);
    }
    w.file
}
