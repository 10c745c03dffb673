//! Keeps the conversations and slots of an unloaded model, so that its next process starts warm.
//!
//! ```text
//!     unloaded: drained -- pack -- TERM    ...    loaded again: ready -- unpack -- gate opens -- behind
//! ```
//!
//! The state contains texts of clients, so it is kept for a limited time. Slot files may take only a share of
//! the available memory.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::NoFileReason;

use super::unpack::{SharedWarmState, WarmState};
use crate::clock;
use crate::sync::lock;

#[derive(Debug)]
pub(crate) struct KeptState {
    pub(crate) replica: u32,
    pub(crate) from: GenerationId,
    pub(super) warm_state: SharedWarmState,
    pub(super) no_file: Option<NoFileReason>,
    pub(crate) until: Instant,
}

impl KeptState {
    /// State of a process without a successor. Its slots are added once they are saved.
    pub(super) fn new(
        replica: u32,
        from: GenerationId,
        no_file: Option<NoFileReason>,
        time: Duration,
    ) -> Self {
        let warm_state = Arc::new(Mutex::new(Some(WarmState::Saved(None))));
        Self { replica, from, warm_state, no_file, until: clock::after(Instant::now(), time) }
    }

    /// Removes slot files on a tmpfs, which occupy memory. The prompts are kept, to be evaluated again.
    pub(crate) fn clear_files(&self) {
        let mut state = lock(&self.warm_state);
        if matches!(&*state, Some(WarmState::Saved(Some(parcel))) if parcel.files.are_in_memory()) {
            *state = Some(WarmState::Saved(None));
        }
    }
}

/// Slot files of unloaded models may take at most a fourth of the available memory.
pub(super) const MEMORY_SHARE_DIVISOR: u64 = 4;

/// Short, because another model may wait for the memory of the ending process.
pub(super) const SLOT_SAVE_TIMEOUT: Duration = Duration::from_secs(2);
