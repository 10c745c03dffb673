//! The sizes of the presets with an architecture of their own.

/// An architecture, under llama.cpp's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// A plain transformer: every layer attends to all of the context.
    Llama,
    /// Five of six layers see a window, the sixth everything, with heads of another size; norms after every part; logits
    /// capped.
    Gemma4,
}

/// Heads of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Heads of keys and values; divides the number of heads.
    pub kv_heads: u32,
    /// Width of one head; even.
    pub head_size: u32,
}

/// The size of a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Layers, at most 512; gemma4 has at least two.
    pub layers: u32,
    /// Width of the embedding; a multiple of 32.
    pub width: u32,
    /// Width inside the feed-forward part; a multiple of 32.
    pub feed: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Layers that attend to everything.
    pub full: Attention,
    /// Layers that see a window, in gemma4.
    pub windowed: Attention,
    /// Tokens that such a layer sees.
    pub window: u32,
    /// Tokens in the vocabulary, of which 262 are no words.
    pub vocab: u32,
    /// Tokens of context that the model says it was trained with.
    pub context: u32,
}

/// The size of a vision encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sample_model) struct VisionSizes {
    /// Layers, at most 512.
    pub(super) layers: u32,
    /// Width; a multiple of four times the heads.
    pub(super) width: u32,
    /// Width inside the feed-forward part.
    pub(super) feed: u32,
    /// Heads.
    pub(super) heads: u32,
}

impl Sizes {
    /// Loads at once, for tests on a CPU.
    pub const LLAMA: Self = Self {
        layers: 2,
        width: 64,
        feed: 128,
        heads: 4,
        full: Attention { kv_heads: 2, head_size: 16 },
        windowed: Attention { kv_heads: 2, head_size: 16 },
        window: 0,
        vocab: 1024,
        context: 8192,
    };
    /// Gives a GPU something to do.
    pub const LLAMA_GPU: Self = Self {
        layers: 16,
        width: 2048,
        feed: 5632,
        heads: 16,
        full: Attention { kv_heads: 4, head_size: 128 },
        windowed: Attention { kv_heads: 4, head_size: 128 },
        window: 0,
        vocab: 8192,
        context: 131_072,
    };
    /// Flash attention on CUDA copies a quantised cache layer by layer: 1 GiB for all of the context.
    pub const LLAMA_WIDE: Self = Self {
        layers: 2,
        width: 2048,
        feed: 2048,
        heads: 16,
        full: Attention { kv_heads: 16, head_size: 128 },
        windowed: Attention { kv_heads: 16, head_size: 128 },
        window: 0,
        vocab: 1024,
        context: 131_072,
    };
    /// As [`Self::LLAMA`].
    pub const GEMMA4: Self = Self {
        layers: 6,
        width: 64,
        feed: 128,
        heads: 2,
        full: Attention { kv_heads: 1, head_size: 64 },
        windowed: Attention { kv_heads: 1, head_size: 32 },
        window: 512,
        vocab: 1024,
        context: 8192,
    };
    /// As [`Self::LLAMA_GPU`].
    pub const GEMMA4_GPU: Self = Self {
        layers: 18,
        width: 2048,
        feed: 6144,
        heads: 8,
        full: Attention { kv_heads: 2, head_size: 512 },
        windowed: Attention { kv_heads: 4, head_size: 256 },
        window: 1024,
        vocab: 8192,
        context: 32_768,
    };

    /// Whether a layer sees a window only: five of six do, and the last never does.
    pub(super) const fn is_windowed(&self, layer: u32) -> bool {
        layer % 6 != 5 && layer + 1 != self.layers
    }

    /// Heads of this layer.
    pub(super) const fn attention(&self, layer: u32) -> Attention {
        if self.is_windowed(layer) { self.windowed } else { self.full }
    }
}

impl VisionSizes {
    /// Loads at once, for tests on a CPU.
    pub(in crate::sample_model) const SMALL: Self = Self { layers: 2, width: 48, feed: 96, heads: 4 };
    /// Gives a GPU something to do.
    pub(in crate::sample_model) const GPU: Self = Self { layers: 12, width: 768, feed: 3072, heads: 12 };
}
