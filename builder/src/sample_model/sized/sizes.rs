//! How large a sample model is: the numbers, what they are by default, and what llama-server would not take.

use super::super::vocab;

/// What a model is built like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// A plain transformer: every layer attends to all of the context.
    Llama,
    /// Five of six layers see a window, the sixth everything, with heads of another size; norms after every part; logits
    /// capped.
    Gemma4,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Llama, Self::Gemma4];

    /// The name, which is llama.cpp's.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Gemma4 => "gemma4",
        }
    }

    /// The architecture of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.name() == name)
    }
}

/// A size to begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Size {
    /// Under a megabyte: loads at once, for tests on a CPU.
    #[default]
    Tiny,
    /// Some gigabytes: a GPU has something to do.
    Gpu,
}

impl Size {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Tiny, Self::Gpu];

    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Gpu => "gpu",
        }
    }

    /// The size of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|size| size.name() == name)
    }
}

/// Heads of one kind of layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Heads of keys and values; divides the number of heads.
    pub kv_heads: u32,
    /// Width of one head; even.
    pub head_size: u32,
}

/// How large a language model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Layers, 1 to 512.
    pub layers: u32,
    /// Width of the embedding; a multiple of 32.
    pub width: u32,
    /// Width inside the feed-forward part; a multiple of 32.
    pub feed: u32,
    /// Heads that ask.
    pub heads: u32,
    /// Layers that attend to everything.
    pub full: Attention,
    /// Layers that see a window, in gemma4.
    pub windowed: Attention,
    /// How many tokens such a layer sees.
    pub window: u32,
    /// Tokens in the vocabulary, of which 262 are no words.
    pub vocab: u32,
    /// Tokens of context that the model says it was trained with.
    pub context: u32,
}

/// How large a vision encoder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionSizes {
    /// Layers, 1 to 512.
    pub layers: u32,
    /// Width; a multiple of the heads, by an even number.
    pub width: u32,
    /// Width inside the feed-forward part.
    pub feed: u32,
    /// Heads.
    pub heads: u32,
}

/// Numbers that make no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {number}: {why}")]
pub struct Unusable {
    what: &'static str,
    number: u32,
    why: &'static str,
}

fn need(holds: bool, what: &'static str, number: u32, why: &'static str) -> Result<(), Unusable> {
    if holds { Ok(()) } else { Err(Unusable { what, number, why }) }
}

impl Sizes {
    /// The size of this name.
    pub const fn of(arch: Arch, size: Size) -> Self {
        match (arch, size) {
            (Arch::Llama, Size::Tiny) => Self {
                layers: 2,
                width: 64,
                feed: 128,
                heads: 4,
                full: Attention { kv_heads: 2, head_size: 16 },
                windowed: Attention { kv_heads: 2, head_size: 16 },
                window: 0,
                vocab: 1024,
                context: 8192,
            },
            (Arch::Llama, Size::Gpu) => Self {
                layers: 16,
                width: 2048,
                feed: 5632,
                heads: 16,
                full: Attention { kv_heads: 4, head_size: 128 },
                windowed: Attention { kv_heads: 4, head_size: 128 },
                window: 0,
                vocab: 8192,
                context: 131_072,
            },
            (Arch::Gemma4, Size::Tiny) => Self {
                layers: 6,
                width: 64,
                feed: 128,
                heads: 2,
                full: Attention { kv_heads: 1, head_size: 64 },
                windowed: Attention { kv_heads: 1, head_size: 32 },
                window: 512,
                vocab: 1024,
                context: 8192,
            },
            (Arch::Gemma4, Size::Gpu) => Self {
                layers: 18,
                width: 2048,
                feed: 6144,
                heads: 8,
                full: Attention { kv_heads: 2, head_size: 512 },
                windowed: Attention { kv_heads: 4, head_size: 256 },
                window: 1024,
                vocab: 8192,
                context: 32_768,
            },
        }
    }

    /// Whether a layer sees a window only: five of six do, and the last never does.
    pub(super) const fn is_windowed(&self, layer: u32) -> bool {
        layer % 6 != 5 && layer + 1 != self.layers
    }

    /// Heads of this layer.
    pub(super) const fn attention(&self, layer: u32) -> Attention {
        if self.is_windowed(layer) { self.windowed } else { self.full }
    }

    /// What of this makes no model.
    ///
    /// # Errors
    /// The first number that does not fit, and why.
    pub fn check(&self, arch: Arch) -> Result<(), Unusable> {
        need((1..=512).contains(&self.layers), "layers", self.layers, "llama.cpp takes 1 to 512")?;
        need(multiple(self.width, 32), "width", self.width, "it has to be a multiple of 32")?;
        need(multiple(self.feed, 32), "feed", self.feed, "it has to be a multiple of 32")?;
        need(self.heads > 0 && self.heads <= 512, "heads", self.heads, "it has to be 1 to 512")?;
        let fewest = u32::try_from(vocab::BESIDE_WORDS + 16).unwrap_or(u32::MAX);
        need(self.vocab >= fewest, "vocab", self.vocab, "278 is the least: 256 bytes, 6 marks, 16 words")?;
        need(self.vocab <= 1 << 20, "vocab", self.vocab, "1,048,576 is the most")?;
        need(self.context >= 64, "context", self.context, "64 is the least")?;
        let windowed = (arch == Arch::Gemma4).then_some(self.windowed);
        for Attention { kv_heads, head_size } in [Some(self.full), windowed].into_iter().flatten() {
            need(
                multiple(self.heads, kv_heads),
                "kv-heads",
                kv_heads,
                "it has to divide the number of heads",
            )?;
            need(multiple(head_size, 2), "head-size", head_size, "it has to be even")?;
            let wide = head_size.checked_mul(self.heads).is_some_and(|wide| wide <= 1 << 20);
            need(wide, "head-size", head_size, "all heads together may be 1,048,576 wide")?;
        }
        if arch == Arch::Gemma4 {
            need(self.window > 0, "window", self.window, "it has to be at least 1")?;
            need(
                self.layers > 1,
                "layers",
                self.layers,
                "gemma4 needs one layer with a window and one without",
            )?;
        }
        Ok(())
    }
}

impl VisionSizes {
    /// The size of this name.
    pub const fn of(size: Size) -> Self {
        match size {
            Size::Tiny => Self { layers: 2, width: 48, feed: 96, heads: 4 },
            Size::Gpu => Self { layers: 12, width: 768, feed: 3072, heads: 12 },
        }
    }

    /// What of this makes no encoder.
    ///
    /// # Errors
    /// The first number that does not fit, and why.
    pub fn check(&self) -> Result<(), Unusable> {
        need((1..=512).contains(&self.layers), "vision-layers", self.layers, "it has to be 1 to 512")?;
        need(self.heads > 0, "vision-heads", self.heads, "it has to be at least 1")?;
        // Positions turn a quarter of a head each way.
        let fits = self.heads.checked_mul(4).is_some_and(|unit| multiple(self.width, unit));
        need(fits, "vision-width", self.width, "it has to be a multiple of four times the encoder's heads")?;
        need(self.feed > 0, "vision-feed", self.feed, "it has to be at least 1")
    }
}

const fn multiple(number: u32, unit: u32) -> bool {
    unit > 0 && number > 0 && number.is_multiple_of(unit)
}
