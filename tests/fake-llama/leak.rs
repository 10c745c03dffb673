//! Memory that is taken and never given back: private, anonymous and touched, so that it counts as `RssAnon`.
//!
//! Small amounts are saved up until they make a whole block, because a few bytes would be found in memory that the
//! process holds anyway. So the figure grows by what was owed, to within one block.

use std::sync::{Mutex, PoisonError};

use memmap2::MmapMut;

use crate::script::Script;

/// What is saved up, at most: small beside any leak that a test can tell from noise, and a multiple of every page size.
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

/// Everything that has leaked so far.
#[derive(Debug, Default)]
pub(crate) struct Leak(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    blocks: Vec<Block>,
    owed: usize,
    total: u64,
    mapped: bool,
}

/// Memory of its own from the system where it can go back, so that it does at once; else of the heap.
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
    /// Takes for ever what the script says that this work costs.
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

    /// Takes as many bytes for ever. Every byte is written, or the kernel would not count the page.
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

    /// What leaks from now on is to go back when somebody asks for it.
    pub(crate) fn can_go_back(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).mapped = true;
    }

    /// Gives back this share of what has leaked, in whole blocks. Returns how many bytes that were.
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

    /// Bytes leaked, those included that are still saved up.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).total
    }
}
