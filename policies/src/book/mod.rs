//! The book of memory: predicts a model's host and GPU memory before it is loaded, from its file and
//! llama-server's flags.
//!
//! ```text
//!   file ──> ModelShape ─────┐
//!   flags ─> ServerRun ──────┼──> predict_needs ──> weights | cache | state | computing | fixed, host or GPU
//!   build ─> ServerBuild ────┤                        └──> fit_models ──> GPUs of each model
//!   GPUs ────────────────────┘
//!  ModelShape, ServerRun ──> LaterMemory: caches that fill while the server runs, not part of the needs
//! ```
//!
//! The book follows llama.cpp's allocations: the cache of a layer for all tokens of context, or, for windowed
//! layers, for the window and one micro-batch; compute buffers for the largest micro-batch. Other memory of a
//! process (code, vocabulary, CUDA context) is estimated with measured constants.
//!
//! Compute buffers have two sizes. A GPU provides all *reserved* bytes at once. The host provides pages
//! when they are first *touched*, so reserved bytes that are never written cost nothing.

mod computing;
mod fit;
pub mod held;
mod run;
mod shape;
#[cfg(test)]
mod tests;

pub(crate) use computing::LEAST_BUILD_NUMBER;
pub use computing::ServerBuild;
pub use fit::{FitError, MachineCapacity, ModelFit, PlacementRequest, fit_models};
pub use held::HeldMemory;
pub(crate) use run::CommandWords;
pub use run::{CacheSettings, CacheType, GpuLayers, GpuPlacement, OutputDemand, ServerRun};
pub use shape::{GgufDescription, LayerShape, ModelShape};

use self::computing::{BatchSizes, ComputeBuffers};
use crate::named::named_enum;
use crate::sample::MemoryKind;
use crate::units::MIB;

/// llama-server's default number of slots; with this default, all slots share one cache.
const DEFAULT_SLOTS: u64 = 4;
/// llama-server's default number of tokens per micro-batch.
const DEFAULT_UBATCH: u64 = 512;
/// Cache sizes, in tokens of context, are multiples of this.
const CACHE_STEP: u64 = 256;
/// Bytes of a process before it has loaded anything: library buffers, threads.
const PROCESS_BYTES: u64 = 18 * MIB;
/// Host bytes per vocabulary token: text, score and index. Measured with 262,144 tokens.
const BYTES_PER_WORD: u64 = 150;
/// Host bytes per merge rule of the vocabulary: two texts and a rank. Measured with 48,900 merges.
const BYTES_PER_MERGE: u64 = 180;
/// GPU bytes of a CUDA context with llama.cpp's kernels and cuBLAS, on an H100; less on older GPUs.
const CUDA_CONTEXT_BYTES: u64 = 690 * MIB;
/// Host bytes of a CUDA context with llama.cpp's kernels and cuBLAS.
const CUDA_HOST_BYTES: u64 = 212 * MIB;

named_enum! {
    /// Purpose of a part of memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum NeedPurpose {
        /// Tensors of the model.
        Weights = "weights",
        /// Keys and values of all tokens of context.
        Cache = "cache",
        /// Recurrent state.
        State = "state",
        /// Compute buffers.
        Computing = "computing",
        /// The projector for images and sound.
        Projector = "projector",
        /// Fixed memory of each process.
        Fixed = "fixed",
    }
}

/// Memory needs of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Host bytes of the process itself, without mapped files, by purpose.
    pub host: Vec<(NeedPurpose, u64)>,
    /// Mapped bytes of the model file; the kernel can reclaim them, but each token would read them again.
    pub mapped: u64,
    /// Bytes on all GPUs together, by purpose.
    pub gpu: Vec<(NeedPurpose, u64)>,
    /// Fixed bytes on each used GPU, besides weights, cache and compute buffers.
    pub each_gpu: u64,
    /// Bytes of host buffers that llama-server reserves but never touches; not included in `host`.
    pub untouched: u64,
    /// Tokens of context of all slots together.
    pub context: u64,
    /// Number of slots.
    pub slots: u64,
    /// Flags that take memory and that this book does not support.
    pub unknown: Vec<String>,
    /// Measured needs of processes with the same command; measured values replace predicted ones.
    pub measured: MeasuredNeeds,
}

/// Most memory measured in processes with the same command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredNeeds {
    /// Bytes on the host; `None` if never measured.
    pub host: Option<u64>,
    /// Bytes on all GPUs together, and the number of GPUs; `None` if never measured.
    pub gpu: Option<(u64, u64)>,
}

impl MeasuredNeeds {
    /// Creates the needs from what processes held while they served.
    pub fn from_held(held: &[HeldMemory]) -> Self {
        let host = held.iter().find(|held| held.series == MemoryKind::Host).map(|held| held.most);
        let on_gpus = held.iter().filter(|held| held.series != MemoryKind::Host);
        let bytes: Vec<u64> = on_gpus.map(|held| held.most).collect();
        Self { host, gpu: (!bytes.is_empty()).then(|| (bytes.iter().sum(), bytes.len() as u64)) }
    }
}

impl MemoryNeeds {
    /// Returns the bytes on the host: measured if known, else predicted.
    pub fn host_bytes(&self) -> u64 {
        self.measured.host.unwrap_or_else(|| self.planned_host())
    }

    /// Returns the predicted bytes on the host.
    pub fn planned_host(&self) -> u64 {
        self.host.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes on this many GPUs together: measured if known, else predicted.
    pub fn gpu_bytes(&self, gpus: u64) -> u64 {
        match self.measured.gpu {
            // Each additional GPU has its own context and compute buffers.
            Some((bytes, were)) => bytes + self.own_of_each_gpu() * gpus.saturating_sub(were),
            None => self.planned_gpu(gpus),
        }
    }

    /// Returns the predicted bytes on this many GPUs together.
    pub fn planned_gpu(&self, gpus: u64) -> u64 {
        let one: u64 = self.gpu.iter().map(|(_, bytes)| bytes).sum();
        if one == 0 { 0 } else { one + self.each_gpu + self.own_of_each_gpu() * gpus.saturating_sub(1) }
    }

    /// Returns the bytes that each GPU needs for itself: its context and the compute buffers.
    pub fn own_of_each_gpu(&self) -> u64 {
        let computing = self.gpu.iter().find(|(part, _)| *part == NeedPurpose::Computing);
        self.each_gpu + computing.map_or(0, |(_, bytes)| *bytes)
    }

    /// Returns true if any part is on a GPU.
    pub fn uses_gpu(&self) -> bool {
        self.measured.gpu.is_some() || self.gpu.iter().any(|(_, bytes)| *bytes > 0)
    }
}

/// Returns the tokens of context, the number of slots, and true if all slots share one cache.
fn context_and_slots(shape: &ModelShape, run: &ServerRun) -> (u64, u64, bool) {
    let slots = run.slots.unwrap_or(DEFAULT_SLOTS);
    let unified = run.is_one_pool();
    let context = run.context.unwrap_or(shape.context);
    // Each slot has its own part of the context.
    let each = if unified { context } else { context.div_ceil(slots).next_multiple_of(CACHE_STEP) };
    let context = if unified { context.next_multiple_of(CACHE_STEP) } else { each * slots };
    (context, slots, unified)
}

#[derive(Default)]
struct NeedParts {
    host: [u64; 6],
    gpu: [u64; 6],
}

impl NeedParts {
    fn add(&mut self, on_gpu: bool, purpose: NeedPurpose, bytes: u64) {
        let side = if on_gpu { &mut self.gpu } else { &mut self.host };
        side[purpose as usize] += bytes;
    }

    fn listed(side: [u64; 6]) -> Vec<(NeedPurpose, u64)> {
        NeedPurpose::ALL.into_iter().zip(side).filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// Predicts a model's memory needs. `projector`: bytes of the projector's file.
pub fn predict_needs(
    shape: &ModelShape,
    run: &ServerRun,
    server: ServerBuild,
    projector: u64,
) -> MemoryNeeds {
    let gpus = server.has_gpu;
    let (context, slots, unified) = context_and_slots(shape, run);
    let ubatch = run.ubatch.unwrap_or(DEFAULT_UBATCH).min(context);
    let count = shape.layers.len() as u64;
    // llama.cpp counts the output as the last layer.
    let first_on_gpu = match run.gpus.layers {
        _ if !gpus => count + 1,
        None | Some(GpuLayers::All) => 0,
        Some(GpuLayers::Last(layers)) => (count + 1).saturating_sub(layers),
    };
    let windows = if unified { slots } else { 1 };
    let window = (shape.window * windows + ubatch).next_multiple_of(CACHE_STEP);
    let streams = if unified { 1 } else { slots };
    let short = if run.cache.whole_windows { context } else { (window * streams).min(context) };
    let mut parts = NeedParts::default();
    let mut copied = 0;
    for (index, layer) in (0..).zip(&shape.layers) {
        let on_gpu = index >= first_on_gpu;
        let host_experts = if on_gpu && index < run.gpus.host_experts { layer.experts } else { 0 };
        let tokens = if layer.windowed { short } else { context };
        parts.add(on_gpu, NeedPurpose::Weights, layer.bytes - host_experts);
        parts.add(on_gpu, NeedPurpose::State, layer.state * 4 * slots);
        parts.add(false, NeedPurpose::Weights, host_experts);
        let cache_on_gpu = on_gpu && !run.cache.on_host;
        parts.add(cache_on_gpu, NeedPurpose::Cache, run.cache.layer_bytes(layer, tokens));
        if on_gpu {
            copied = copied.max(computing::half_copy_bytes(layer, run, server, tokens));
        }
    }
    parts.add(false, NeedPurpose::Weights, shape.input);
    let output_on_gpu = first_on_gpu <= count;
    let copy = if output_on_gpu && shape.tied { shape.input } else { 0 };
    parts.add(output_on_gpu, NeedPurpose::Weights, copy + shape.output);
    let computing =
        ComputeBuffers::estimate(shape, run, server, &BatchSizes { context, ubatch, slots, copied });
    let uses_gpu = parts.gpu[NeedPurpose::Weights as usize] > 0;
    let output_rows = slots * shape.vocabulary * 4;
    if uses_gpu {
        parts.add(true, NeedPurpose::Computing, computing.reserved);
        // Buffers for data transferred to and from the GPUs: tokens, the mask, and the output rows.
        let transferred = ubatch * (context * 4 + shape.embedding * 4) + output_rows;
        parts.add(false, NeedPurpose::Computing, transferred);
    } else {
        parts.add(false, NeedPurpose::Computing, computing.touched + output_rows);
    }
    parts.add(uses_gpu, NeedPurpose::Projector, projector);
    let vocabulary = shape.vocabulary * BYTES_PER_WORD + shape.merges * BYTES_PER_MERGE;
    let cuda = if gpus { CUDA_HOST_BYTES } else { 0 };
    parts.add(false, NeedPurpose::Fixed, PROCESS_BYTES + vocabulary + cuda);
    let weights = &mut parts.host[NeedPurpose::Weights as usize];
    let mapped = if run.no_mmap { 0 } else { std::mem::take(weights) };
    MemoryNeeds {
        host: NeedParts::listed(parts.host),
        mapped,
        gpu: NeedParts::listed(parts.gpu),
        each_gpu: if uses_gpu { CUDA_CONTEXT_BYTES } else { 0 },
        untouched: if uses_gpu { 0 } else { computing.reserved - computing.touched },
        context,
        slots,
        unknown: run.unknown.clone(),
        measured: MeasuredNeeds::default(),
    }
}

/// Upper bounds of host caches that fill while a server runs; they are not part of a model's needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaterMemory {
    /// Largest size of the prompt cache in bytes; `None` without a limit in bytes.
    pub prompt_cache: Option<u64>,
    /// Bytes of one context checkpoint; 0 for models without checkpoints.
    pub checkpoint: u64,
    /// Most checkpoints that all slots together can hold.
    pub checkpoints: u64,
}

impl LaterMemory {
    /// Computes the bounds. `prompt_cache`: limit in bytes; `checkpoints`: limit per slot.
    pub fn estimate(
        shape: &ModelShape,
        run: &ServerRun,
        prompt_cache: Option<u64>,
        checkpoints: u32,
    ) -> Self {
        let (context, slots, _) = context_and_slots(shape, run);
        // With `--swa-full` the cache can be truncated at any token, so no checkpoints are needed.
        let window = if run.cache.whole_windows { 0 } else { shape.window.min(context) };
        let kept = shape.layers.iter().map(|layer| {
            let tokens = if layer.windowed { window } else { 0 };
            run.cache.layer_bytes(layer, tokens) + layer.state * 4
        });
        let checkpoint: u64 = kept.sum();
        let checkpoints = if checkpoint == 0 { 0 } else { slots * u64::from(checkpoints) };
        Self { prompt_cache, checkpoint, checkpoints }
    }

    /// Returns the most bytes that all context checkpoints can hold.
    pub const fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint.saturating_mul(self.checkpoints)
    }

    /// Returns the most bytes that all caches can hold; `None` without a limit.
    pub fn bytes(&self) -> Option<u64> {
        Some(self.prompt_cache?.saturating_add(self.checkpoint_bytes()))
    }
}
