//! Keeps the conversations and slots of an unloaded model, so that its next process starts warm.
//!
//! ```text
//!     unloaded: drained -- pack -- TERM    ...    loaded again: ready -- unpack -- gate opens -- behind
//! ```
//!
//! They are kept for a limited time, because they contain texts of clients, and slot files may take only a
//! share of the available memory, because others may need it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::NoFileReason;

use super::unpack::{SharedWarmState, WarmState};
use crate::clock;
use crate::sync::lock;

/// Conversations and slots left by the replicas of an unloaded model.
#[derive(Debug, Default)]
pub(in crate::model) struct UnloadedState(Vec<KeptState>);

/// Conversations and slots left by one replica.
#[derive(Debug)]
pub(in crate::model) struct KeptState {
    replica: u32,
    /// Generation that held the conversations.
    pub(in crate::model) from: GenerationId,
    pub(in crate::model) warm_state: SharedWarmState,
    /// Why there are no slot files.
    pub(in crate::model) no_file: Option<NoFileReason>,
    until: Instant,
}

impl UnloadedState {
    /// Stores the conversations of a process that ends without a successor.
    pub(super) fn store(
        &mut self,
        replica: u32,
        left: (GenerationId, WarmState, Option<NoFileReason>),
        time: Duration,
    ) {
        let (from, bag, no_file) = left;
        self.0.retain(|left| left.replica != replica);
        let until = clock::after(Instant::now(), time);
        self.0.push(KeptState { replica, from, warm_state: Arc::new(Mutex::new(Some(bag))), no_file, until });
    }

    /// Adds the saved slots of a generation. Returns false if nothing is stored for that generation.
    pub(super) fn add_slots(&self, from: GenerationId, bag: WarmState) -> bool {
        let left = self.0.iter().find(|left| left.from == from);
        left.map(|left| *lock(&left.warm_state) = Some(bag)).is_some()
    }

    /// Stored conversations and slots for the next process of a replica.
    pub(super) fn state_for(&self, replica: u32) -> Option<&KeptState> {
        self.0.iter().find(|left| left.replica == replica)
    }

    /// Removes what is stored for a generation, because it was used or is useless.
    pub(super) fn take(&mut self, from: GenerationId) -> bool {
        let before = self.0.len();
        self.0.retain(|left| left.from != from);
        self.0.len() < before
    }

    /// Removes slot files that are in memory (tmpfs).
    pub(super) fn clear_files(&self) {
        for left in &self.0 {
            let mut bag = lock(&left.warm_state);
            if matches!(&*bag, Some(WarmState::Saved(Some(parcel))) if parcel.files.are_in_memory()) {
                *bag = Some(WarmState::Saved(None));
            }
        }
    }

    /// Removes what is stored for a replica whose new process is ready.
    pub(super) fn drop_replica(&mut self, replica: u32) {
        self.0.retain(|left| left.replica != replica);
    }

    /// Drops what is stored for replicas that are no longer configured, and returns their generations.
    pub(super) fn retain_replicas(&mut self, replicas: u32) -> Vec<GenerationId> {
        self.0.extract_if(.., |left| left.replica >= replicas).map(|left| left.from).collect()
    }

    /// Drops what has been stored for too long, and returns the generations concerned.
    pub(super) fn drop_expired(&mut self, now: Instant) -> Vec<GenerationId> {
        self.0.extract_if(.., |left| left.until <= now).map(|left| left.from).collect()
    }

    /// Time of the next expiry.
    pub(in crate::model) fn next_expiry(&self) -> Option<Instant> {
        self.0.iter().map(|left| left.until).min()
    }
}

/// Divisor of the available memory: slot files of unloaded models may take at most a fourth of it.
pub(super) const MEMORY_SHARE_DIVISOR: u64 = 4;

/// Time limit for saving the slots of a process that ends without a successor; short, because another model
/// may be waiting for the memory.
pub(super) const SLOT_SAVE_TIMEOUT: Duration = Duration::from_secs(2);
