//! Keeps the conversations and slots of an unloaded model, so that its next process starts warm.
//!
//! ```text
//!     unloaded: drained -- pack -- TERM    ...    loaded again: ready -- unpack -- gate opens -- behind
//! ```
//!
//! Conversations and slots are kept for a limited time, because they contain texts of clients. Slot files may
//! take only a share of the available memory, because other models may need it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::NoFileReason;

use super::unpack::{SharedWarmState, WarmState};
use crate::clock;
use crate::sync::lock;

/// Conversations and slots left by one replica.
#[derive(Debug)]
pub(in crate::model) struct KeptState {
    pub(super) replica: u32,
    /// Generation that held the conversations.
    pub(super) from: GenerationId,
    pub(super) warm_state: SharedWarmState,
    /// Why there are no slot files.
    pub(super) no_file: Option<NoFileReason>,
    pub(in crate::model) until: Instant,
}

impl KeptState {
    /// State of a process that ends without a successor. Its slots are added once they are saved.
    pub(super) fn new(
        replica: u32,
        from: GenerationId,
        no_file: Option<NoFileReason>,
        time: Duration,
    ) -> Self {
        let warm_state = Arc::new(Mutex::new(Some(WarmState::Saved(None))));
        Self { replica, from, warm_state, no_file, until: clock::after(Instant::now(), time) }
    }

    /// Removes slot files that are in memory (tmpfs). The prompts are kept, to be evaluated again.
    pub(in crate::model) fn clear_files(&self) {
        let mut state = lock(&self.warm_state);
        if matches!(&*state, Some(WarmState::Saved(Some(parcel))) if parcel.files.are_in_memory()) {
            *state = Some(WarmState::Saved(None));
        }
    }
}

/// Divisor of the available memory: slot files of unloaded models may take at most a fourth of it.
pub(super) const MEMORY_SHARE_DIVISOR: u64 = 4;

/// Time limit for saving the slots of a process that ends without a successor; short, because another model
/// may be waiting for the memory.
pub(super) const SLOT_SAVE_TIMEOUT: Duration = Duration::from_secs(2);
