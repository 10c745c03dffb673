//! Sizes of the presets with their own architecture.

/// Model architecture, by llama.cpp's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelArch {
    /// A plain transformer: every layer attends to the whole context.
    Llama,
    /// Five of six layers attend to a window; two head sizes, norms after every part, capped logits.
    Gemma4,
}

/// Attention heads of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionHeads {
    /// KV heads; must divide the number of query heads.
    pub kv_heads: u32,
    /// Width of one head; must be even.
    pub head_size: u32,
}

/// Size of a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelSizes {
    /// Layers, at most 512; at least two for gemma4.
    pub layers: u32,
    /// Width of the embedding; a multiple of 32.
    pub width: u32,
    /// Width inside the feed-forward part; a multiple of 32.
    pub feed: u32,
    /// Query heads.
    pub heads: u32,
    /// Heads of layers that attend to the whole context.
    pub full: AttentionHeads,
    /// Heads of layers with a window, in gemma4.
    pub windowed: AttentionHeads,
    /// Window in tokens.
    pub window: u32,
    /// Vocabulary size in tokens; 262 of them are no words.
    pub vocab: u32,
    /// Training context in tokens, as stated in the metadata.
    pub context: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sample_model) struct VisionSizes {
    /// Layers, at most 512.
    pub(super) layers: u32,
    /// Width; must be a multiple of four times the heads.
    pub(super) width: u32,
    pub(super) feed: u32,
    pub(super) heads: u32,
}

impl ModelSizes {
    /// Small, for tests on a CPU.
    pub const LLAMA: Self = Self {
        layers: 2,
        width: 64,
        feed: 128,
        heads: 4,
        full: AttentionHeads { kv_heads: 2, head_size: 16 },
        windowed: AttentionHeads { kv_heads: 2, head_size: 16 },
        window: 0,
        vocab: 1024,
        context: 8192,
    };
    /// Large enough to load a GPU.
    pub const LLAMA_GPU: Self = Self {
        layers: 16,
        width: 2048,
        feed: 5632,
        heads: 16,
        full: AttentionHeads { kv_heads: 4, head_size: 128 },
        windowed: AttentionHeads { kv_heads: 4, head_size: 128 },
        window: 0,
        vocab: 8192,
        context: 131_072,
    };
    /// Wide: flash attention on CUDA copies a quantised cache layer by layer, 1 GiB for the whole context.
    pub const LLAMA_WIDE: Self = Self {
        layers: 2,
        width: 2048,
        feed: 2048,
        heads: 16,
        full: AttentionHeads { kv_heads: 16, head_size: 128 },
        windowed: AttentionHeads { kv_heads: 16, head_size: 128 },
        window: 0,
        vocab: 1024,
        context: 131_072,
    };
    /// Small, like [`Self::LLAMA`].
    pub const GEMMA4: Self = Self {
        layers: 6,
        width: 64,
        feed: 128,
        heads: 2,
        full: AttentionHeads { kv_heads: 1, head_size: 64 },
        windowed: AttentionHeads { kv_heads: 1, head_size: 32 },
        window: 512,
        vocab: 1024,
        context: 8192,
    };
    /// Large, like [`Self::LLAMA_GPU`].
    pub const GEMMA4_GPU: Self = Self {
        layers: 18,
        width: 2048,
        feed: 6144,
        heads: 8,
        full: AttentionHeads { kv_heads: 2, head_size: 512 },
        windowed: AttentionHeads { kv_heads: 4, head_size: 256 },
        window: 1024,
        vocab: 8192,
        context: 32_768,
    };

    /// Returns true for layers with a window: five of six, and never the last one.
    pub(super) const fn is_windowed(&self, layer: u32) -> bool {
        layer % 6 != 5 && layer + 1 != self.layers
    }

    pub(super) const fn attention(&self, layer: u32) -> AttentionHeads {
        if self.is_windowed(layer) { self.windowed } else { self.full }
    }
}

impl VisionSizes {
    /// Small, for tests on a CPU.
    pub(in crate::sample_model) const SMALL: Self = Self { layers: 2, width: 48, feed: 96, heads: 4 };
    /// Large enough to load a GPU.
    pub(in crate::sample_model) const GPU: Self = Self { layers: 12, width: 768, feed: 3072, heads: 12 };
}
