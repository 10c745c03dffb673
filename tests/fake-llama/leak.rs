//! Memory that is taken and never given back: private, anonymous and touched, so that it counts as `RssAnon`.

use std::sync::{Mutex, PoisonError};

/// Everything that has leaked so far.
#[derive(Debug, Default)]
pub(crate) struct Leak {
    held: Mutex<Vec<Vec<u8>>>,
}

impl Leak {
    /// Takes `kib` KiB for ever. Every byte is written, or the kernel would not count the page.
    pub(crate) fn grow_kib(&self, kib: u64) {
        if kib == 0 {
            return;
        }
        let bytes = usize::try_from(kib.saturating_mul(1024)).unwrap_or(usize::MAX);
        self.held.lock().unwrap_or_else(PoisonError::into_inner).push(vec![0xA5; bytes]);
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.iter().map(|block| block.len() as u64).sum()
    }
}
