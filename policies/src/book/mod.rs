//! The book of memory: how much a model will need on the host and on GPUs. It is worked out before the model is loaded, from the model's
//! file and from llama-server's flags.
//!
//! ```text
//!   file ──> Shape ──────────┐
//!   flags ─> Run ────────────┼──> needs() ──> weights | cache | state | computing | fixed, each on the host or on GPUs
//!   build ─> ServerBuild ────┤                        └──> fit() ──> who fits together, and where
//!   GPUs ────────────────────┘
//!            Shape, Run ────────> LaterMemory: what fills up while the server runs, and is no need
//! ```
//!
//! It reckons as llama.cpp allocates: the cache for all tokens of context at once, windowed layers for their window and one
//! micro-batch, buffers for computing as large as the largest micro-batch needs. What a process holds beside that (its code,
//! the vocabulary, a CUDA context) is fixed, and was measured.
//!
//! Buffers for computing have two sizes. A GPU gives all that is *reserved* at once. The host gives pages when they are
//! first *touched*, so what is reserved there and never written costs nothing.

mod computing;
mod fit;
pub mod held;
mod later;
mod run;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use computing::LEAST_BUILD_NUMBER;
pub use computing::ServerBuild;
pub use fit::{Fit, Machine, Misfit, Wanted, fit};
pub use held::Held;
pub use later::LaterMemory;
pub use run::{CacheType, GpuLayers, OutputDemand, Run};
pub use shape::{Described, Layer, Shape};

use self::computing::{Batch, Buffers};
use crate::sample::MemoryKind;
use crate::units::MIB;

/// Slots where nothing is said, which share one cache then.
const SLOTS: u64 = 4;
/// Tokens computed at a time where nothing is said.
const UBATCH: u64 = 512;
/// Contexts of caches are multiples of this.
const CACHE_STEP: u64 = 256;
/// What a process holds before it has loaded anything: buffers of its libraries, threads.
const PROCESS: u64 = 18 * MIB;
/// For each token of the vocabulary: its text in two tables, its score, and its place in a third. Measured with
/// 262,144 tokens.
const PER_WORD: u64 = 150;
/// For each pair of tokens that a vocabulary joins: both texts and their rank. Measured with 48,900 pairs.
const PER_MERGE: u64 = 180;
/// A CUDA context with llama.cpp's kernels and cuBLAS, on an H100. Older GPUs have less.
const CUDA_CONTEXT: u64 = 690 * MIB;
/// The same on the host.
const CUDA_HOST: u64 = 212 * MIB;

/// What bytes are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Tensors of the model.
    Weights,
    /// Keys and values of all tokens of context.
    Cache,
    /// Recurrent state.
    State,
    /// Buffers for computing.
    Computing,
    /// The projector for images and sound.
    Projector,
    /// What each process holds.
    Fixed,
}

impl Part {
    /// In one word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Cache => "cache",
            Self::State => "state",
            Self::Computing => "computing",
            Self::Projector => "projector",
            Self::Fixed => "fixed",
        }
    }
}

/// What a model needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Bytes on the host that are its own.
    pub host: Vec<(Part, u64)>,
    /// Bytes of its file that are mapped: the kernel can take them back, for the price of reading them again at each token.
    pub mapped: u64,
    /// Bytes on GPUs together, by part.
    pub gpu: Vec<(Part, u64)>,
    /// What each GPU that has a part of it needs beside its share and the buffers for computing.
    pub each_gpu: u64,
    /// Bytes of buffers on the host that llama-server reserves beside those of `host`, and that it never touches.
    pub untouched: u64,
    /// Tokens of context of all slots together.
    pub context: u64,
    /// Slots.
    pub slots: u64,
    /// Flags that take memory and that this book leaves out.
    pub unknown: Vec<String>,
    /// What processes with the same command held, which counts instead of all that.
    pub measured: Measured,
}

/// What processes of a kind held at their most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// Bytes on the host; `None` if that was never read.
    pub host: Option<u64>,
    /// Bytes on all GPUs together, and how many GPUs those were.
    pub gpu: Option<(u64, u64)>,
}

impl Measured {
    /// Of what was seen while they served, and of an experiment with their largest prompts, whichever is more.
    pub fn of(held: &[Held], worst: &[(MemoryKind, u64)]) -> Self {
        let seen: Vec<(MemoryKind, u64)> = held.iter().map(|held| (held.series, held.most)).collect();
        let host = |all: &[(MemoryKind, u64)]| {
            all.iter().find(|(series, _)| *series == MemoryKind::Host).map(|(_, bytes)| *bytes)
        };
        // Each of the two may have been on other GPUs.
        let gpus = |all: &[(MemoryKind, u64)]| {
            let on_gpus = all.iter().filter(|(series, _)| *series != MemoryKind::Host);
            let bytes: Vec<u64> = on_gpus.map(|(_, bytes)| *bytes).collect();
            (!bytes.is_empty()).then(|| (bytes.iter().sum(), bytes.len() as u64))
        };
        let gpu = gpus(&seen).into_iter().chain(gpus(worst)).max();
        Self { host: host(&seen).into_iter().chain(host(worst)).max(), gpu }
    }
}

impl Needs {
    /// Bytes on the host.
    pub fn host_bytes(&self) -> u64 {
        self.measured.host.unwrap_or_else(|| self.planned_host())
    }

    /// Bytes on the host as they were planned.
    pub fn planned_host(&self) -> u64 {
        self.host.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes on this many GPUs together.
    pub fn gpu_bytes(&self, gpus: u64) -> u64 {
        match self.measured.gpu {
            // One more of them has a context and buffers of its own.
            Some((bytes, were)) => bytes + self.own_of_each_gpu() * gpus.saturating_sub(were),
            None => self.planned_gpu(gpus),
        }
    }

    /// The same as it was planned.
    pub fn planned_gpu(&self, gpus: u64) -> u64 {
        let one: u64 = self.gpu.iter().map(|(_, bytes)| bytes).sum();
        if one == 0 { 0 } else { one + self.each_gpu + self.own_of_each_gpu() * gpus.saturating_sub(1) }
    }

    /// Bytes that no GPU shares with another one: its context, and buffers for computing.
    pub fn own_of_each_gpu(&self) -> u64 {
        let computing = self.gpu.iter().find(|(part, _)| *part == Part::Computing);
        self.each_gpu + computing.map_or(0, |(_, bytes)| *bytes)
    }

    /// Whether anything of it is on a GPU.
    pub fn uses_gpu(&self) -> bool {
        self.measured.gpu.is_some() || self.gpu.iter().any(|(_, bytes)| *bytes > 0)
    }
}

/// Tokens of context and slots that a server would have.
fn room(shape: &Shape, run: &Run) -> (u64, u64, bool) {
    let slots = run.slots.unwrap_or(SLOTS);
    let unified = run.is_one_pool();
    let context = run.context.unwrap_or(shape.context);
    // Each slot has a part of its own.
    let each = if unified { context } else { context.div_ceil(slots).next_multiple_of(CACHE_STEP) };
    let context = if unified { context.next_multiple_of(CACHE_STEP) } else { each * slots };
    (context, slots, unified)
}

/// What a model needs when this llama-server runs it with these flags. `projector`: bytes of the projector's file.
pub fn needs(shape: &Shape, run: &Run, server: ServerBuild, projector: u64) -> Needs {
    let gpus = server.has_gpu;
    let (context, slots, unified) = room(shape, run);
    let ubatch = run.ubatch.unwrap_or(UBATCH).min(context);
    let count = shape.layers.len() as u64;
    // The output counts as the last layer.
    let first_on_gpu = match run.gpu_layers {
        _ if !gpus => count + 1,
        None | Some(GpuLayers::All) => 0,
        Some(GpuLayers::Last(layers)) => (count + 1).saturating_sub(layers),
    };
    let windows = if unified { slots } else { 1 };
    let window = (shape.window * windows + ubatch).next_multiple_of(CACHE_STEP);
    let streams = if unified { 1 } else { slots };
    let short = if run.whole_windows { context } else { (window * streams).min(context) };
    let (mut host, mut gpu) = ([0_u64; 6], [0_u64; 6]);
    let mut copied = 0;
    let slot = |part: Part| part as usize;
    for (index, layer) in (0..).zip(&shape.layers) {
        let on_gpu = index >= first_on_gpu;
        let host_experts = if on_gpu && index < run.host_experts { layer.experts } else { 0 };
        let tokens = if layer.windowed { short } else { context };
        let cache = run.key_type.bytes(layer.keys * tokens) + run.value_type.bytes(layer.values * tokens);
        let side = if on_gpu { &mut gpu } else { &mut host };
        side[slot(Part::Weights)] += layer.bytes - host_experts;
        side[slot(Part::State)] += layer.state * 4 * slots;
        host[slot(Part::Weights)] += host_experts;
        let side = if on_gpu && !run.cache_on_host { &mut gpu } else { &mut host };
        side[slot(Part::Cache)] += cache;
        if on_gpu {
            copied = copied.max(computing::half_copies(layer, run, server, tokens));
        }
    }
    host[slot(Part::Weights)] += shape.input;
    if first_on_gpu <= count {
        gpu[slot(Part::Weights)] += if shape.tied { shape.input + shape.output } else { shape.output };
    } else {
        host[slot(Part::Weights)] += shape.output;
    }
    let computing = Buffers::of(shape, run, server, &Batch { context, ubatch, slots, copied });
    let uses_gpu = gpu[slot(Part::Weights)] > 0;
    if uses_gpu {
        gpu[slot(Part::Computing)] += computing.reserved;
        // What goes there and back: tokens, the mask, and the chosen numbers.
        host[slot(Part::Computing)] +=
            ubatch * (context * 4 + shape.embedding * 4) + slots * shape.vocabulary * 4;
        if projector > 0 {
            gpu[slot(Part::Projector)] += projector;
        }
    } else {
        host[slot(Part::Computing)] += computing.touched + slots * shape.vocabulary * 4;
        host[slot(Part::Projector)] += projector;
    }
    host[slot(Part::Fixed)] += PROCESS + shape.vocabulary * PER_WORD + shape.merges * PER_MERGE;
    host[slot(Part::Fixed)] += if gpus { CUDA_HOST } else { 0 };
    let mapped = if run.no_mmap { 0 } else { std::mem::take(&mut host[slot(Part::Weights)]) };
    let parts = [Part::Weights, Part::Cache, Part::State, Part::Computing, Part::Projector, Part::Fixed];
    let listed = |side: [u64; 6]| {
        parts.iter().map(|part| (*part, side[slot(*part)])).filter(|(_, bytes)| *bytes > 0).collect()
    };
    Needs {
        host: listed(host),
        mapped,
        gpu: listed(gpu),
        each_gpu: if uses_gpu { CUDA_CONTEXT } else { 0 },
        untouched: if uses_gpu { 0 } else { computing.reserved - computing.touched },
        context,
        slots,
        unknown: run.unknown.clone(),
        measured: Measured::default(),
    }
}
