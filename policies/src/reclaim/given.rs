//! What a process can be asked for, and what it said that it gave back. Values that are printed, stored and sent.

use serde::{Deserialize, Serialize};

use crate::sample::MemoryKind;
use crate::units::ByteSize;

/// Who in a process can be asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// llama-server itself: its heap.
    pub heap: bool,
    /// The CUDA part: graphs, pools, cuBLAS.
    pub cuda: bool,
}

impl Parts {
    /// Anybody at all.
    pub const fn any(self) -> bool {
        self.heap || self.cuda
    }

    /// Somebody who holds this memory. Graphs are on the host and on the GPU.
    pub const fn have(self, series: MemoryKind) -> bool {
        match series {
            MemoryKind::Host => self.any(),
            MemoryKind::Vram(_) => self.cuda,
        }
    }

    /// What it can be asked for, in words.
    pub const fn words(self) -> &'static str {
        match (self.cuda, self.heap) {
            (true, true) => "graphs, pools, cuBLAS and the heap",
            (true, false) => "graphs, pools and cuBLAS",
            (false, true) => "the heap",
            (false, false) => "nothing",
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All that was asked for and is there was given back.
    Done,
    /// A part of it.
    Partly,
    /// Nothing: it was in use all the time.
    Refused,
    /// Nothing: calls of CUDA failed.
    Failed,
    /// Nothing: the last time was a moment ago.
    TooSoon,
    /// Nothing: its allocator has no means to.
    OtherAllocator,
    /// There was no answer in time.
    NoAnswer,
    /// Nobody in it can be asked.
    Nobody,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Done,
        Self::Partly,
        Self::Refused,
        Self::Failed,
        Self::TooSoon,
        Self::OtherAllocator,
        Self::NoAnswer,
        Self::Nobody,
    ];

    /// The name in JSON and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Partly => "partly",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::TooSoon => "too_soon",
            Self::OtherAllocator => "other_allocator",
            Self::NoAnswer => "no_answer",
            Self::Nobody => "nobody",
        }
    }

    /// The same for people.
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

    /// Whether anything was given back.
    pub const fn gave(self) -> bool {
        matches!(self, Self::Done | Self::Partly)
    }

    /// Of two answers to one request: both are done, or a part of it is, or the graver one stands for both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self.gave(), other.gave()) {
            (true, true) if self == other => self,
            (true, _) | (_, true) => Self::Partly,
            (false, false) => {
                let rank = |outcome: Self| Self::ALL.iter().position(|known| *known == outcome);
                if rank(self) >= rank(other) { self } else { other }
            }
        }
    }
}

/// Bytes that were given back, by the process's own count. Graphs and cuBLAS are estimates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Given {
    /// Graphs, of host memory.
    pub graphs_host: u64,
    /// Graphs, of VRAM.
    pub graphs_device: u64,
    /// Pools, of VRAM.
    pub pools: u64,
    /// Workspaces of cuBLAS, of VRAM, where they are known.
    pub cublas: u64,
    /// The heap, of host memory.
    pub heap: u64,
}

impl Given {
    /// Each with its name in JSON and metrics.
    pub const fn parts(self) -> [(&'static str, u64); 5] {
        [
            ("graphs_host", self.graphs_host),
            ("graphs_device", self.graphs_device),
            ("pools", self.pools),
            ("cublas", self.cublas),
            ("heap", self.heap),
        ]
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self {
            graphs_host: self.graphs_host.saturating_add(other.graphs_host),
            graphs_device: self.graphs_device.saturating_add(other.graphs_device),
            pools: self.pools.saturating_add(other.pools),
            cublas: self.cublas.saturating_add(other.cublas),
            heap: self.heap.saturating_add(other.heap),
        }
    }
}

impl std::fmt::Display for Given {
    /// `graphs 1.2 GiB (host) and 300.0 MiB (GPU), pools 512.0 MiB, heap 80.0 MiB`; `nothing`.
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
