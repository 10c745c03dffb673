//! What a server comes to hold on the host while it runs, beside what its model needs: caches that fill up with use.
//! Whether they do depends on the requests, so a model fits without them.

use super::{Run, Shape, room};

/// Caches that fill up, as bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaterMemory {
    /// Bytes of the prompt cache at most; `None` where it has no bound in bytes.
    pub prompt_cache: Option<u64>,
    /// Bytes of one context checkpoint: what the windowed layers keep of one slot, or the recurrent state of one slot.
    /// 0 for models that need none.
    pub checkpoint: u64,
    /// Checkpoints of all slots together at most.
    pub checkpoints: u64,
}

impl LaterMemory {
    /// Of a model. `prompt_cache`: its bound in bytes, `None` without one. `checkpoints`: how many each slot may have.
    pub fn of(shape: &Shape, run: &Run, prompt_cache: Option<u64>, checkpoints: u32) -> Self {
        let (context, slots, _) = room(shape, run);
        // A whole window can be cut anywhere, and needs no checkpoints.
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

    /// Bytes of all context checkpoints at most.
    pub const fn checkpoint_bytes(&self) -> u64 {
        self.checkpoint.saturating_mul(self.checkpoints)
    }

    /// Bytes of all of it at most; `None` where there is no bound.
    pub fn bytes(&self) -> Option<u64> {
        Some(self.prompt_cache?.saturating_add(self.checkpoint_bytes()))
    }
}
