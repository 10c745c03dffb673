//! Compute buffers of llama-server for one micro-batch: reserved and touched bytes.

use super::{CacheType, LayerShape, ModelShape, OutputDemand, ServerRun};

/// Least plausible build number: a source archive without git history reports build 0 or 1.
pub(crate) const LEAST_BUILD_NUMBER: u32 = 1000;
/// First build known to reserve output rows for one token per slot (llama.cpp #23861, after b9413). Earlier
/// builds reserve them for each token of a micro-batch.
const OUTPUTS_BY_SLOT_SINCE: u32 = 9489;
/// First build that reserves the copies of a quantised cache with the compute buffers (llama.cpp #23907).
/// Earlier builds take them from the CUDA backend's pool while computing.
const COPIES_RESERVED_SINCE: u32 = 9489;

/// Known properties of the llama-server that will run a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerBuild {
    /// The machine has a GPU that the build can use.
    pub has_gpu: bool,
    /// The build uses GPUs through ggml's CUDA backend; builds for HIP and MUSA do, too.
    pub is_cuda: bool,
    /// Build number of llama.cpp. If absent or below 1,000, the build counts as the newest.
    pub number: Option<u32>,
}

impl ServerBuild {
    /// Returns the newest build, for CUDA if there is a GPU.
    pub const fn newest(has_gpu: bool) -> Self {
        Self { has_gpu, is_cuda: true, number: None }
    }

    fn is_since(self, first: u32) -> bool {
        self.number.is_none_or(|number| number < LEAST_BUILD_NUMBER || number >= first)
    }
}

pub(super) struct BatchSizes {
    /// Tokens of context of all slots together.
    pub(super) context: u64,
    pub(super) ubatch: u64,
    pub(super) slots: u64,
    /// Bytes of the copies of one layer's cache; see [`half_copy_bytes`].
    pub(super) copied: u64,
}

pub(super) struct ComputeBuffers {
    /// Bytes allocated at load; before [`COPIES_RESERVED_SINCE`], with the later growth of the CUDA pool.
    pub(super) reserved: u64,
    /// Bytes written while the longest prompt is evaluated; never more than `reserved`.
    pub(super) touched: u64,
}

impl ComputeBuffers {
    pub(super) fn estimate(
        shape: &ModelShape,
        run: &ServerRun,
        server: ServerBuild,
        batch: &BatchSizes,
    ) -> Self {
        let row = 4 * batch.ubatch;
        let inner = row * (3 * shape.feed_forward.max(shape.embedding) + 2 * shape.embedding);
        let attention = if run.flash == Some(false) {
            // Attention scores of all heads over all tokens, before and after softmax.
            row * batch.context * shape.heads + row * batch.context
        } else {
            row * batch.context / 2
        };
        let in_pool = !server.is_since(COPIES_RESERVED_SINCE);
        let copied = if in_pool { 0 } else { batch.copied };
        let layers = (inner + attention).max(attention + row * shape.embedding * 2 + copied);
        let with_outputs = |tokens: u64| layers.max(4 * tokens * (shape.vocabulary + shape.embedding));
        // A slot needs the output of its prompt's last token, an embedding request the outputs of all tokens.
        let asked = match run.outputs {
            OutputDemand::EachToken => batch.ubatch,
            OutputDemand::LastToken => batch.slots.min(batch.ubatch),
        };
        let allowed = if server.is_since(OUTPUTS_BY_SLOT_SINCE) { asked } else { batch.ubatch };
        let pool = if in_pool { batch.copied } else { 0 };
        Self { reserved: with_outputs(allowed) + pool, touched: with_outputs(asked) }
    }
}

/// Returns the bytes of the f16 copies that CUDA flash attention makes of a layer's cache of another type.
pub(super) fn half_copy_bytes(layer: &LayerShape, run: &ServerRun, server: ServerBuild, tokens: u64) -> u64 {
    if run.flash == Some(false) || run.cache.on_host || !server.is_cuda {
        return 0;
    }
    let copied = |kind: CacheType, numbers: u64| if kind == CacheType::F16 { 0 } else { numbers * tokens };
    CacheType::F16.bytes(copied(run.cache.key_type, layer.keys) + copied(run.cache.value_type, layer.values))
}
