//! Buffers in which llama-server computes one micro-batch: what it reserves, and what it touches.

use super::{CacheType, Layer, OutputDemand, Run, Shape};

/// Builds with a number below this say nothing about their age: a source archive without a history calls itself build 0 or 1.
pub(crate) const LEAST_BUILD_NUMBER: u32 = 1000;
/// First build of which this is certain: a server reserves room for the numbers of as many tokens as it has slots
/// (llama.cpp #23861, which came between b9413 and this one). Earlier ones reserve it for each token of a micro-batch.
const OUTPUTS_BY_SLOT_SINCE: u32 = 9489;
/// First build that reserves the copies of a quantised cache with the buffers (llama.cpp #23907). Earlier ones take
/// them from the pool of the CUDA backend while they compute.
const COPIES_RESERVED_SINCE: u32 = 9489;

/// What is known of the llama-server that will run a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerBuild {
    /// The machine has a GPU, and the build can use it.
    pub has_gpu: bool,
    /// It uses GPUs through ggml's CUDA backend, as builds for HIP and MUSA do, too.
    pub is_cuda: bool,
    /// llama.cpp's build number. Where it is not known, or is below 1,000, the build counts as the newest.
    pub number: Option<u32>,
}

impl ServerBuild {
    /// The newest build, for CUDA where there is a GPU.
    pub const fn newest(has_gpu: bool) -> Self {
        Self { has_gpu, is_cuda: true, number: None }
    }

    fn is_since(self, first: u32) -> bool {
        self.number.is_none_or(|number| number < LEAST_BUILD_NUMBER || number >= first)
    }
}

/// The sizes on which buffers depend.
pub(super) struct Batch {
    /// Tokens of context of all slots together.
    pub(super) context: u64,
    /// Tokens computed at a time.
    pub(super) ubatch: u64,
    /// Slots.
    pub(super) slots: u64,
    /// Bytes of the copies of one layer's cache: see [`half_copies`].
    pub(super) copied: u64,
}

/// Bytes of buffers for computing.
pub(super) struct Buffers {
    /// Allocated when the model is loaded; of builds before [`COPIES_RESERVED_SINCE`] with what the pool grows to.
    pub(super) reserved: u64,
    /// Written by the longest prompt. Never more than what is reserved.
    pub(super) touched: u64,
}

impl Buffers {
    pub(super) fn of(shape: &Shape, run: &Run, server: ServerBuild, batch: &Batch) -> Self {
        let row = 4 * batch.ubatch;
        let inner = row * (3 * shape.feed_forward.max(shape.embedding) + 2 * shape.embedding);
        let attention = if run.flash == Some(false) {
            // Scores of all heads over all tokens, before and after they are normalised.
            row * batch.context * shape.heads + row * batch.context
        } else {
            row * batch.context / 2
        };
        let in_pool = !server.is_since(COPIES_RESERVED_SINCE);
        let copied = if in_pool { 0 } else { batch.copied };
        let layers = (inner + attention).max(attention + row * shape.embedding * 2 + copied);
        let with_outputs = |tokens: u64| layers.max(4 * tokens * (shape.vocabulary + shape.embedding));
        // A slot asks for the numbers of the last token of its prompt; requests for embeddings ask for those of each token.
        let asked = match run.outputs {
            OutputDemand::EachToken => batch.ubatch,
            OutputDemand::LastToken => batch.slots.min(batch.ubatch),
        };
        let allowed = if server.is_since(OUTPUTS_BY_SLOT_SINCE) { asked } else { batch.ubatch };
        let pool = if in_pool { batch.copied } else { 0 };
        Self { reserved: with_outputs(allowed) + pool, touched: with_outputs(asked) }
    }
}

/// Bytes of the copies in 16 bits that flash attention on CUDA makes of a layer's keys and values, for prompts, where the
/// cache has them in another type. One layer at a time needs them.
pub(super) fn half_copies(layer: &Layer, run: &Run, server: ServerBuild, tokens: u64) -> u64 {
    if run.flash == Some(false) || run.cache_on_host || !server.is_cuda {
        return 0;
    }
    let copied = |kind: CacheType, numbers: u64| if kind == CacheType::F16 { 0 } else { numbers * tokens };
    CacheType::F16.bytes(copied(run.key_type, layer.keys) + copied(run.value_type, layer.values))
}
