//! Simulated VRAM: this process's bytes on GPU 0, written to the script of the test's NVML.
//!
//! The file is replaced atomically, because the library may read it at any time. Only one process may write
//! it: a test with several processes sets the GPUs itself.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::leak::Units;
use crate::say;
use crate::script::Script;

const TOTAL: u64 = 80 << 30;

/// A CUDA pool grows by this amount.
const GRAIN: u64 = 2 << 20;

#[derive(Debug, Default)]
pub(crate) struct Vram(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    told: Option<PathBuf>,
    bytes: u64,
}

impl Vram {
    /// Allocates the VRAM of the start, and writes the script.
    pub(crate) fn open(&self, script: &Script) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.told.clone_from(&script.vram_told);
        held.bytes = script.vram_base_mib << 20;
        held.tell();
    }

    /// Leaks the amount for this work.
    pub(crate) fn pay(&self, script: &Script, units: Units) {
        let kib = script.vram_kib_per_request * units.requests + script.vram_kib_per_image * units.images;
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
        let pid = std::process::id();
        let text =
            format!("device -1 {TOTAL} {bytes} 00000000:00:00.0 GPU-0 Fake GPU\ncompute 0 {pid} {bytes}\n");
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
