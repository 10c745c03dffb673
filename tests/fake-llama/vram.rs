//! VRAM that exists only in what the test's own NVML tells: the figure of this process on GPU 0, written where that
//! library reads its script.
//!
//! The file is replaced whole, because the library may read it at any time. One process writes it at a time: a test that
//! runs several at once tells the GPUs itself.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::leak::Units;
use crate::say;
use crate::script::Script;

/// What the GPU has where nothing else is said.
const TOTAL: u64 = 80 << 30;

/// A CUDA pool grows by as much at a time.
const GRAIN: u64 = 2 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Vram(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    told: Option<PathBuf>,
    total: u64,
    bytes: u64,
}

impl Vram {
    /// Takes what is held from the start on, and tells it.
    pub(crate) fn open(&self, script: &Script, context: u64) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.told.clone_from(&script.vram_told);
        held.total = if script.vram_total_mib == 0 { TOTAL } else { script.vram_total_mib << 20 };
        held.bytes = (script.vram_base_mib << 20) + context * (script.vram_kib_per_context_token << 10);
        held.tell();
    }

    /// Takes for ever what this work costs; `larger` and `micro`: tokens by which the prompt, and its largest micro-batch,
    /// are larger than all before.
    pub(crate) fn pay(&self, script: &Script, units: Units, larger: u64, micro: u64) {
        let parts = [
            (script.vram_kib_per_request, units.requests),
            (script.vram_kib_per_image, units.images),
            (script.vram_buffer_kib_per_prompt_token, larger),
            (script.vram_buffer_kib_per_ubatch_token, micro),
        ];
        let kib: u64 = parts.iter().map(|(cost, count)| cost * count).sum();
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kib > 0 {
            held.bytes += kib << 10;
            held.tell();
        }
    }
}

impl Held {
    fn tell(&self) {
        let Some(path) = &self.told else { return };
        let bytes = self.bytes.next_multiple_of(GRAIN);
        let (pid, total) = (std::process::id(), self.total);
        let text =
            format!("device -1 {total} {bytes} 00000000:00:00.0 GPU-0 Fake GPU\ncompute 0 {pid} {bytes}\n");
        if let Err(error) = replace(path, &text) {
            say::err(&format!("fake-llama: {}: {error}", path.display()));
        }
    }
}

fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let new = path.with_extension(format!("new-{}", std::process::id()));
    std::fs::write(&new, text)?;
    std::fs::rename(new, path)
}
