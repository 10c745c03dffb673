//! The numbers of a context, and their sums.

use serde::{Deserialize, Serialize};

use super::ContextReport;

/// What a number is about, and so how it is summed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Span {
    /// What is there now: that of an ended context does not count.
    Now,
    /// All that has happened.
    Ever,
}

/// The fields in the order of the file, so that the order is written down once.
macro_rules! counts {
    ($($(#[$meta:meta])* $span:ident $field:ident,)*) => {
        /// The numbers of one context, or sums of them.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Counts { $($(#[$meta])* pub $field: u64,)* }

        impl Counts {
            /// Takes the fields from the beginning of `words`; what is missing is 0.
            pub(super) fn from_words(words: impl IntoIterator<Item = u64>) -> Self {
                let mut words = words.into_iter();
                Self { $($field: words.next().unwrap_or(0),)* }
            }

            fn add(&mut self, more: &Self, live: bool) {
                $(if live || Span::$span == Span::Ever {
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
    /// The most of them at one time.
    Now graphs_peak,
    /// Nodes in the graphs that exist.
    Now graph_nodes_live,
    /// Host memory of the graphs that exist, in bytes: an estimate.
    Now graph_host_bytes,
    /// Device memory of the graphs that exist, in bytes: an estimate.
    Now graph_device_bytes,
    /// Graphs destroyed because there were more than the cap.
    Ever graphs_evicted,
    /// Graphs destroyed because nobody had used them for a while.
    Ever graphs_trimmed,
    /// Parts of the current computation, each with a graph of its own.
    Now live_splits,
    /// Graphs that may exist: the cap, or more where the live splits need more.
    Now effective_cap,
    /// Device memory cached in the pools, in bytes.
    Now pool_bytes,
    /// The most of it, in bytes. Of several contexts the sum, which is at least their common peak.
    Now pool_bytes_peak,
    /// Times that the pools were given back.
    Ever pool_purges,
    /// Bytes given back by it.
    Ever pool_bytes_purged,
    /// cuBLAS handles that exist.
    Now cublas_handles,
    /// Device memory of their workspaces, in bytes.
    Now cublas_workspace_bytes,
    /// Times that the handles were made anew.
    Ever cublas_resets,
    /// Captured graphs that were dropped because a purge or a reset had made them useless.
    Ever graph_invalidations,
    /// Safe points that were passed over because something was in use.
    Ever skipped_busy,
    /// Errors of the fixes.
    Ever errors,
}

/// Sums over contexts. No sum passes the end of its type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Contexts that live.
    pub contexts: u32,
    /// What they hold, and what they and the ended ones have done.
    #[serde(flatten)]
    pub counts: Counts,
}

impl Totals {
    /// These with one context more.
    #[must_use]
    pub fn with(mut self, context: &ContextReport) -> Self {
        self.contexts = self.contexts.saturating_add(u32::from(context.live));
        self.counts.add(&context.counts, context.live);
        self
    }
}
