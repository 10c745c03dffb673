//! Storage formats of weights: plain floats, and the quantised blocks of llama.cpp.

/// Storage format of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightKind {
    /// 32-bit floats.
    #[default]
    F32,
    /// 16-bit floats (IEEE binary16).
    F16,
    /// 8-bit integers, with one scale per 32 weights.
    Q8_0,
    /// 4-bit integers, with one scale per 32 weights.
    Q4_0,
    /// 4-bit integers, with one scale and one minimum per 32 weights, in blocks of 256.
    Q4K,
    /// 5-bit integers, with one scale and one minimum per 32 weights, in blocks of 256.
    Q5K,
    /// 6-bit integers, with one scale per 16 weights, in blocks of 256.
    Q6K,
    /// 4-bit indices into a fixed table, with one scale per 32 weights.
    Iq4Nl,
    /// 4-bit floats, with a power of two as scale per 32 weights (OCP Microscaling).
    Mxfp4,
}

struct BlockLayout {
    name: &'static str,
    tensor_type: u32,
    file_type: u32,
    length: usize,
    bytes: usize,
}

impl WeightKind {
    /// All formats, plain floats first.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Mxfp4,
    ];

    const fn layout(self) -> BlockLayout {
        let (name, tensor_type, file_type, length, bytes) = match self {
            Self::F32 => ("f32", 0, 0, 1, 4),
            Self::F16 => ("f16", 1, 1, 1, 2),
            Self::Q8_0 => ("q8_0", 8, 7, 32, 34),
            Self::Q4_0 => ("q4_0", 2, 2, 32, 18),
            Self::Q4K => ("q4_k", 12, 14, 256, 144),
            Self::Q5K => ("q5_k", 13, 16, 256, 176),
            Self::Q6K => ("q6_k", 14, 18, 256, 210),
            Self::Iq4Nl => ("iq4_nl", 20, 25, 32, 18),
            Self::Mxfp4 => ("mxfp4", 39, 38, 32, 17),
        };
        BlockLayout { name, tensor_type, file_type, length, bytes }
    }

    /// The name in options and reports, such as `q4_0`.
    pub const fn name(self) -> &'static str {
        self.layout().name
    }

    /// Parses a format's name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Numbers per block; a tensor's row consists of whole blocks.
    pub const fn block_length(self) -> usize {
        self.layout().length
    }

    /// Bytes of `numbers` weights, a multiple of the block length.
    pub const fn bytes(self, numbers: u64) -> u64 {
        let BlockLayout { length, bytes, .. } = self.layout();
        numbers / length as u64 * bytes as u64
    }

    pub(crate) const fn tensor_type(self) -> u32 {
        self.layout().tensor_type
    }

    /// llama.cpp's file type for files whose matrices mostly have this format.
    pub(crate) const fn file_type(self) -> u32 {
        self.layout().file_type
    }
}
