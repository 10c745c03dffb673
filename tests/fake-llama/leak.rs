//! Memory that is never given back: private, anonymous and touched, so that it counts as `RssAnon`.
//!
//! Small amounts are added up to whole blocks, because the process's free heap memory could absorb a few
//! bytes. So the figure is right to within one block.

use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;

use crate::script::Script;

/// Small compared with any leak that a test can detect, and a multiple of every page size.
const BLOCK: usize = 64 << 10;

/// Units of work that a script may make leak.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Units {
    pub(crate) requests: u64,
    pub(crate) images: u64,
    pub(crate) audio: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Leak(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    blocks: Vec<Block>,
    owed: usize,
    total: u64,
    mapped: bool,
}

/// A mapping, which can be given back at once, or heap memory.
#[derive(Debug)]
enum Block {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl Block {
    fn new(bytes: usize, mapped: bool) -> Self {
        match MmapMut::map_anon(bytes) {
            Ok(mut memory) if mapped => {
                memory.fill(0xA5);
                Self::Mapped(memory)
            }
            _ => Self::Heap(vec![0xA5; bytes]),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Heap(bytes) => bytes.len(),
            Self::Mapped(bytes) => bytes.len(),
        }
    }
}

impl Leak {
    /// Leaks the script's amount for this work.
    pub(crate) fn pay(&self, script: &Script, units: Units) {
        let parts = [
            (script.leak_kib_per_request, units.requests),
            (script.leak_kib_per_image, units.images),
            (script.leak_kib_per_audio, units.audio),
            (script.leak_kib_per_prompt_token, units.prompt_tokens),
            (script.leak_kib_per_token, units.output_tokens),
        ];
        let kib =
            parts.iter().fold(0_u64, |sum, (cost, count)| sum.saturating_add(cost.saturating_mul(*count)));
        self.grow(kib.saturating_mul(1024));
    }

    /// Leaks bytes. Every byte is written, or the kernel would not count the page.
    pub(crate) fn grow(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.total = held.total.saturating_add(bytes);
        held.owed = held.owed.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX));
        if held.owed >= BLOCK {
            let block = Block::new(std::mem::take(&mut held.owed), held.mapped);
            held.blocks.push(block);
        }
    }

    /// Leaks into mappings from now on, so that memory can be given back on request.
    pub(crate) fn can_go_back(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).mapped = true;
    }

    /// Gives back this share of the leaked memory, in whole blocks; returns the bytes.
    pub(crate) fn give_back(&self, share: f64) -> u64 {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of what there is"
        )]
        #[expect(clippy::cast_precision_loss, reason = "some bytes more or less")]
        let wanted = (held.total as f64 * share.clamp(0.0, 1.0)) as u64;
        let mut given = 0;
        while given < wanted
            && let Some(block) = held.blocks.pop()
        {
            given += block.len() as u64;
        }
        held.total = held.total.saturating_sub(given);
        given
    }

    /// Leaked bytes, including those not yet in a block.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).total
    }
}
