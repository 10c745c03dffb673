//! Parts of a process from which memory can be reclaimed, and reports on reclaimed bytes.

use serde::{Deserialize, Serialize};

use crate::named::named_enum;
use crate::sample::MemoryKind;
use crate::units::ByteSize;

/// Kinds of memory that a process can give back on request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimParts {
    /// The heap of llama-server.
    pub heap: bool,
    /// CUDA memory: graphs, pools, cuBLAS.
    pub cuda: bool,
}

impl ReclaimParts {
    /// Returns true if any part supports reclaim.
    pub const fn any(self) -> bool {
        self.heap || self.cuda
    }

    /// Returns true if one of these parts uses this kind of memory. CUDA graphs use both host and GPU memory.
    pub const fn hold(self, series: MemoryKind) -> bool {
        match series {
            MemoryKind::Host => self.any(),
            MemoryKind::Vram(_) => self.cuda,
        }
    }

    /// Returns the reclaimable memory in words.
    pub const fn words(self) -> &'static str {
        match (self.cuda, self.heap) {
            (true, true) => "graphs, pools, cuBLAS and the heap",
            (true, false) => "graphs, pools and cuBLAS",
            (false, true) => "the heap",
            (false, false) => "nothing",
        }
    }
}

named_enum! {
    /// Outcome of a reclaim request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ReclaimOutcome {
        /// The process gave back all requested memory that it had.
        Done = "done",
        /// A part of the requested memory was given back.
        Partly = "partly",
        /// Nothing was given back: the memory was in use all the time.
        Refused = "refused",
        /// Nothing was given back: CUDA calls failed.
        Failed = "failed",
        /// Nothing was given back: the last request was too recent.
        TooSoon = "too_soon",
        /// Nothing was given back: the allocator does not support it.
        OtherAllocator = "other_allocator",
        /// No answer arrived in time.
        NoAnswer = "no_answer",
        /// No part of the process supports reclaim.
        Nobody = "nobody",
    }
}

impl ReclaimOutcome {
    /// Returns a phrase for people.
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Partly => "a part of it is in use",
            Self::Refused => "refused: it was in use all the time",
            Self::Failed => "failed: a call of CUDA returned an error",
            Self::TooSoon => "too soon after the last time",
            Self::OtherAllocator => "its allocator cannot",
            Self::NoAnswer => "no answer in time",
            Self::Nobody => "its build cannot be asked",
        }
    }

    /// Returns true if any memory was given back.
    pub const fn has_freed(self) -> bool {
        matches!(self, Self::Done | Self::Partly)
    }

    /// Combines two answers to one request: done, partly done, or the more serious failure.
    #[must_use]
    pub fn combine(self, other: Self) -> Self {
        match (self.has_freed(), other.has_freed()) {
            (true, true) if self == other => self,
            (true, _) | (_, true) => Self::Partly,
            (false, false) => {
                let rank = |outcome: Self| Self::ALL.iter().position(|known| *known == outcome);
                if rank(self) >= rank(other) { self } else { other }
            }
        }
    }
}

/// Reclaimed bytes as counted by the process. The values for graphs and cuBLAS are estimates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReclaimedBytes {
    /// Host memory of CUDA graphs.
    pub graphs_host: u64,
    /// VRAM of CUDA graphs.
    pub graphs_device: u64,
    /// VRAM of pools.
    pub pools: u64,
    /// VRAM of cuBLAS workspaces, if known.
    pub cublas: u64,
    /// Host memory of the heap.
    pub heap: u64,
}

impl ReclaimedBytes {
    /// Returns all parts with their names in JSON and metrics.
    pub const fn parts(self) -> [(&'static str, u64); 5] {
        [
            ("graphs_host", self.graphs_host),
            ("graphs_device", self.graphs_device),
            ("pools", self.pools),
            ("cublas", self.cublas),
            ("heap", self.heap),
        ]
    }

    /// Adds each part of `other` to this one's.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            graphs_host: self.graphs_host.saturating_add(other.graphs_host),
            graphs_device: self.graphs_device.saturating_add(other.graphs_device),
            pools: self.pools.saturating_add(other.pools),
            cublas: self.cublas.saturating_add(other.cublas),
            heap: self.heap.saturating_add(other.heap),
        }
    }
}

impl std::fmt::Display for ReclaimedBytes {
    /// Formats `graphs 1.2 GiB (host) and 300.0 MiB (GPU), pools 512.0 MiB, heap 80.0 MiB`, or `nothing`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut said = Vec::new();
        match (self.graphs_host, self.graphs_device) {
            (0, 0) => {}
            (host, 0) => said.push(format!("graphs {} (host)", ByteSize(host))),
            (0, device) => said.push(format!("graphs {} (GPU)", ByteSize(device))),
            (host, device) => {
                said.push(format!("graphs {} (host) and {} (GPU)", ByteSize(host), ByteSize(device)));
            }
        }
        for (name, bytes) in [("pools", self.pools), ("cuBLAS", self.cublas), ("heap", self.heap)] {
            if bytes > 0 {
                said.push(format!("{name} {}", ByteSize(bytes)));
            }
        }
        if said.is_empty() { f.write_str("nothing") } else { f.write_str(&said.join(", ")) }
    }
}
