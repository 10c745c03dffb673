//! Host memory that a server takes while it runs: caches that fill with use. Their size depends on the
//! requests, so these caches do not count among a model's needs.

use super::{ModelShape, ServerRun, context_and_slots};

/// Upper bounds of caches that fill with use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaterMemory {
    /// Largest size of the prompt cache in bytes; `None` without a limit in bytes.
    pub prompt_cache: Option<u64>,
    /// Bytes of one context checkpoint: the cache of windowed layers, or the recurrent state, of one slot. 0
    /// for models without checkpoints.
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
        let window = if run.whole_windows { 0 } else { shape.window.min(context) };
        let kept = shape.layers.iter().map(|layer| {
            let tokens = if layer.windowed { window } else { 0 };
            let cache = run.key_type.bytes(layer.keys * tokens) + run.value_type.bytes(layer.values * tokens);
            cache + layer.state * 4
        });
        let checkpoint: u64 = kept.sum();
        let checkpoints = if checkpoint == 0 { 0 } else { slots * u64::from(checkpoints) };
        Self { prompt_cache, checkpoint, checkpoints }
    }

    /// Most bytes of all context checkpoints.
    pub const fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint.saturating_mul(self.checkpoints)
    }

    /// Most bytes of all caches; `None` without a limit.
    pub fn bytes(&self) -> Option<u64> {
        Some(self.prompt_cache?.saturating_add(self.checkpoint_bytes()))
    }
}
