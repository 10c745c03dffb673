//! The counts of a CUDA context, and their sums.

use serde::{Deserialize, Serialize};

use super::ContextReport;

/// Rule for summing a count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CountSpan {
    /// A present value: sums leave out ended contexts.
    Now,
    /// A counter since the start of the process: sums include ended contexts.
    Ever,
}

/// Declares the fields in the order of the file, so that the order is defined in one place.
macro_rules! counts {
    ($($(#[$meta:meta])* $span:ident $field:ident,)*) => {
        /// The counts of one context, or sums over several.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct ContextCounts { $($(#[$meta])* pub $field: u64,)* }

        impl ContextCounts {
            pub(super) fn from_words(words: impl IntoIterator<Item = u64>) -> Self {
                let mut words = words.into_iter();
                Self { $($field: words.next().unwrap_or(0),)* }
            }

            fn add(&mut self, more: &Self, live: bool) {
                $(if live || CountSpan::$span == CountSpan::Ever {
                    self.$field = self.$field.saturating_add(more.$field);
                })*
            }
        }
    };
}

counts! {
    /// Number of graph computations so far.
    Ever computes,
    /// Number of captured CUDA graphs that exist.
    Now graphs_live,
    /// Peak number of captured graphs.
    Now graphs_peak,
    /// Number of nodes in the graphs that exist.
    Now graph_nodes_live,
    /// Estimated host memory of the graphs that exist, in bytes.
    Now graph_host_bytes,
    /// Estimated device memory of the graphs that exist, in bytes.
    Now graph_device_bytes,
    /// Number of graphs destroyed because the cap was exceeded.
    Ever graphs_evicted,
    /// Number of graphs destroyed because they were unused for a while.
    Ever graphs_trimmed,
    /// Number of parts of the current computation, each of which has its own graph.
    Now live_splits,
    /// Maximum number of graphs: the configured cap, or more if the parts of the computation need more.
    Now effective_cap,
    /// Device memory cached in the memory pools, in bytes.
    Now pool_bytes,
    /// Peak of the bytes cached in the pools. For several contexts: the sum of their peaks.
    Now pool_bytes_peak,
    /// Number of purges of the pools.
    Ever pool_purges,
    /// Bytes released by purges.
    Ever pool_bytes_purged,
    /// Number of cuBLAS handles that exist.
    Now cublas_handles,
    /// Device memory of the workspaces of these handles, in bytes.
    Now cublas_workspace_bytes,
    /// Number of times that the handles were recreated.
    Ever cublas_resets,
    /// Number of captured graphs dropped because a purge or a reset invalidated them.
    Ever graph_invalidations,
    /// Number of times that a fix did nothing: context busy, capture running, or too little memory free.
    Ever skipped_busy,
    /// Number of errors in the fixes.
    Ever errors,
}

/// Sums over contexts, saturating on overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextTotals {
    /// Number of live contexts.
    pub contexts: u32,
    /// Present values summed over the live contexts, and counters summed over all.
    #[serde(flatten)]
    pub counts: ContextCounts,
}

impl ContextTotals {
    /// Adds one context.
    #[must_use]
    pub fn with(mut self, context: &ContextReport) -> Self {
        self.contexts = self.contexts.saturating_add(u32::from(context.live));
        self.counts.add(&context.counts, context.live);
        self
    }
}
