//! What a model leaves behind when it is unloaded, so that its return is warm, too.
//!
//! ```text
//!   unloaded: drained -- pack -- TERM      ... out ...      loaded again: ready -- unpack -- gate opens -- behind
//! ```
//!
//! It is kept for a while only, and by no more than a share of the memory that is available: files of slots have texts in them, and
//! their room may be wanted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::NoFile;

use super::unpack::{Bag, Luggage};
use crate::clock;
use crate::sync::lock;

/// What the replicas of a model left.
#[derive(Debug, Default)]
pub(in crate::model) struct Away(Vec<Left>);

/// What one of them left.
#[derive(Debug)]
pub(in crate::model) struct Left {
    replica: u32,
    /// Whose conversations they are.
    pub(in crate::model) from: GenerationId,
    pub(in crate::model) luggage: Luggage,
    /// Why there are no files in it.
    pub(in crate::model) no_file: Option<NoFile>,
    until: Instant,
}

impl Away {
    /// A process of a replica goes, with these slots in files, or none, and is not followed by another for now.
    pub(super) fn leave(&mut self, replica: u32, left: (GenerationId, Bag, Option<NoFile>), time: Duration) {
        let (from, bag, no_file) = left;
        self.0.retain(|left| left.replica != replica);
        let until = clock::after(Instant::now(), time);
        self.0.push(Left { replica, from, luggage: Arc::new(Mutex::new(Some(bag))), no_file, until });
    }

    /// Its slots are saved. False if it left nothing.
    pub(super) fn put(&self, from: GenerationId, bag: Bag) -> bool {
        let left = self.0.iter().find(|left| left.from == from);
        left.map(|left| *lock(&left.luggage) = Some(bag)).is_some()
    }

    /// What is there for the next process of a replica.
    pub(super) fn of(&self, replica: u32) -> Option<&Left> {
        self.0.iter().find(|left| left.replica == replica)
    }

    /// What a generation left is used, or useless.
    pub(super) fn take(&mut self, from: GenerationId) -> bool {
        let before = self.0.len();
        self.0.retain(|left| left.from != from);
        self.0.len() < before
    }

    /// Removes files that lie in memory.
    pub(super) fn clear_files(&self) {
        for left in &self.0 {
            let mut bag = lock(&left.luggage);
            if matches!(&*bag, Some(Bag::Parcel(Some(parcel))) if parcel.files.are_in_memory()) {
                *bag = Some(Bag::Parcel(None));
            }
        }
    }

    /// A process of a replica is ready without having used what was left for it.
    pub(super) fn arrived(&mut self, replica: u32) {
        self.0.retain(|left| left.replica != replica);
    }

    /// Keeps what so many replicas left; whose the rest was.
    pub(super) fn keep(&mut self, replicas: u32) -> Vec<GenerationId> {
        self.0.extract_if(.., |left| left.replica >= replicas).map(|left| left.from).collect()
    }

    /// Forgets what was left too long ago, and whose that was.
    pub(super) fn sweep(&mut self, now: Instant) -> Vec<GenerationId> {
        self.0.extract_if(.., |left| left.until <= now).map(|left| left.from).collect()
    }

    /// When something is due to be forgotten.
    pub(in crate::model) fn next(&self) -> Option<Instant> {
        self.0.iter().map(|left| left.until).min()
    }
}

/// Of the memory that is available, so much may be taken by files of models that are not there.
pub(super) const SHARE: u64 = 4;

/// A process that has drained for good waits no longer than this for its slots to be saved: somebody may wait for its room.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
