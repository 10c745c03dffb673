//! The numbers of a context, and their sums.

use serde::{Deserialize, Serialize};

use super::ContextReport;

/// Meaning of a number, which determines how it is summed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CountSpan {
    /// A current value; ended contexts do not count.
    Now,
    /// A counter since the start; ended contexts count.
    Ever,
}

/// Declares the fields in the order of the file, so that the order is defined in one place.
macro_rules! counts {
    ($($(#[$meta:meta])* $span:ident $field:ident,)*) => {
        /// The numbers of one context, or sums of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct ContextCounts { $($(#[$meta])* pub $field: u64,)* }

        impl ContextCounts {
            /// Takes the fields from the beginning of `words`; missing ones are 0.
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
    /// Graph computes so far.
    Ever computes,
    /// Captured graphs that exist.
    Now graphs_live,
    /// Peak number of captured graphs.
    Now graphs_peak,
    /// Nodes in the graphs that exist.
    Now graph_nodes_live,
    /// Host memory of the graphs that exist, in bytes: an estimate.
    Now graph_host_bytes,
    /// Device memory of the graphs that exist, in bytes: an estimate.
    Now graph_device_bytes,
    /// Graphs destroyed because the cap was exceeded.
    Ever graphs_evicted,
    /// Graphs destroyed because they were unused for a while.
    Ever graphs_trimmed,
    /// Parts of the current computation, each with a graph of its own.
    Now live_splits,
    /// Graphs that may exist: the cap, or more if the live splits need more.
    Now effective_cap,
    /// Device memory cached in the pools, in bytes.
    Now pool_bytes,
    /// Peak bytes cached in the pools. Over several contexts the sum, which is at least their common peak.
    Now pool_bytes_peak,
    /// Purges of the pools.
    Ever pool_purges,
    /// Bytes released by purges.
    Ever pool_bytes_purged,
    /// cuBLAS handles that exist.
    Now cublas_handles,
    /// Device memory of their workspaces, in bytes.
    Now cublas_workspace_bytes,
    /// Times that the handles were recreated.
    Ever cublas_resets,
    /// Captured graphs dropped because a purge or a reset invalidated them.
    Ever graph_invalidations,
    /// Safe points skipped because something was in use.
    Ever skipped_busy,
    /// Errors of the fixes.
    Ever errors,
}

/// Sums over contexts, saturating.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextTotals {
    /// Live contexts.
    pub contexts: u32,
    /// Current values of the live contexts, and counters of all.
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
