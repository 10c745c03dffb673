//! Saves the conversations of an ending process: first their prompts, which takes milliseconds, then their
//! slots, as far as time allows.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::warmth::NoFileReason;

use super::record::{ConversationRecord, SlotRecord};
use super::{StoreLimits, StoredConversations, record_file, slot_file};
use crate::clock;
use crate::lease::turns::KeptConversation;
use crate::model::warm::pack::{SavedSlots, SlotPacking};
use crate::process::conversation_name::ConversationName;
use crate::process::needs::AnswerIdentity;
use crate::process::trusted_path;
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_job};

/// Time left for checksums after the last slot was saved.
const CHECKSUM_TIME: Duration = Duration::from_secs(2);

/// Inputs for saving the conversations of a process.
#[derive(Debug)]
pub(crate) struct ConversationSave {
    pub(crate) store: Arc<StoredConversations>,
    pub(crate) ended: EndedConversations,
    /// Inputs for saving slots, or the reason for saving none.
    pub(crate) packing: Result<SlotPacking, NoFileReason>,
    pub(crate) limits: StoreLimits,
    pub(crate) until: Instant,
}

/// Conversations of a process that ends.
#[derive(Clone, Debug)]
pub(crate) struct EndedConversations {
    pub(crate) replica: u32,
    /// Identity of the process.
    pub(crate) kin: Option<AnswerIdentity>,
    /// Number of slots: as many conversations are saved.
    pub(crate) slots: usize,
    /// Conversations, latest first.
    pub(crate) conversations: Vec<Arc<KeptConversation>>,
}

/// Result of a save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoreReport {
    pub(crate) conversations: u64,
    /// Number of conversations whose slot is on disk.
    pub(crate) slots: u64,
    /// Bytes written by this save.
    pub(crate) bytes: u64,
    /// Reason why slots are missing.
    pub(crate) no_file: Option<NoFileReason>,
}

/// A conversation whose record is on disk.
#[derive(Debug)]
pub(super) struct SavedConversation {
    kept: Arc<KeptConversation>,
    name: ConversationName,
    /// True if its slot was on disk before.
    has_slot: bool,
    /// Earlier versions, which are removed if this one has its slot.
    superseded: Vec<ConversationName>,
}

/// Conversations of one save.
#[derive(Debug, Default)]
pub(super) struct SavedBatch {
    all: Vec<SavedConversation>,
    bytes: u64,
}

impl ConversationSave {
    pub(crate) async fn run(self) -> io::Result<StoreReport> {
        let Self { store, ended, packing, limits, until } = self;
        let writer = Arc::clone(&store);
        let writing = run_job(WorkKind::Conversations, move || writer.save_prompts(&ended, limits));
        let late = || io::Error::new(io::ErrorKind::TimedOut, "saving the prompts took too long");
        let batch = tokio::time::timeout_at(until, writing).await.map_err(|_| late())???;
        let (slots, no_file) = match packing {
            Ok(mut packing) => {
                packing.bytes = limits.bytes;
                packing.to_disk = true;
                packing.until = until.checked_sub(CHECKSUM_TIME).unwrap_or(until);
                let slots = packing.run().await;
                let no_file = slots.no_file;
                (Some(slots), no_file)
            }
            Err(why) => (None, Some(why)),
        };
        let attaching =
            run_job(WorkKind::Conversations, move || store.attach_slots(&batch, slots, limits, until));
        let report = attaching.await?;
        Ok(StoreReport { no_file, ..report })
    }
}

impl StoredConversations {
    /// Writes the latest conversations without their slots, unless they are on disk unchanged. Blocks.
    ///
    /// # Errors
    /// A file cannot be written, or the conversations were removed for good.
    pub(super) fn save_prompts(
        &self,
        ended: &EndedConversations,
        limits: StoreLimits,
    ) -> io::Result<SavedBatch> {
        let is_closed = lock(&self.is_closed);
        if *is_closed {
            return Err(io::Error::other("the model keeps no conversations any more"));
        }
        trusted_path::make_private_dir(&self.directory)?;
        let now = clock::unix_now_ms();
        let mut batch = SavedBatch::default();
        for (place, kept) in ended.conversations.iter().take(ended.slots).enumerate() {
            let kept = Arc::clone(kept);
            let mut superseded = kept.supersedes.clone();
            if let Some(known) = kept.usable_slot(ended.kin)
                && self.directory.join(record_file(known)).exists()
            {
                let name = known.clone();
                superseded.retain(|earlier| *earlier != name);
                batch.all.push(SavedConversation { kept, name, has_slot: true, superseded });
                continue;
            }
            let name = ConversationName::new(now, limits.age, ended.replica, place);
            batch.bytes += self.write_record(&name, &ConversationRecord::new(&kept.turn, None))?;
            batch.all.push(SavedConversation { kept, name, has_slot: false, superseded });
        }
        Ok(batch)
    }

    /// Adds slots to conversations on disk, and removes earlier versions. A slot that cannot be added in time
    /// is dropped. Blocks.
    pub(super) fn attach_slots(
        &self,
        batch: &SavedBatch,
        mut slots: Option<SavedSlots>,
        limits: StoreLimits,
        deadline: Instant,
    ) -> StoreReport {
        let mut report = StoreReport { bytes: batch.bytes, ..StoreReport::default() };
        for saved in &batch.all {
            let new = slots.as_mut().and_then(|slots| {
                let slot = slots.take_slot_of(&saved.kept)?;
                Some((slot, slots.kin, Arc::clone(&slots.files)))
            });
            let mut has_slot = saved.has_slot;
            if let Some((slot, kin, files)) = new.filter(|_| !saved.has_slot) {
                let file = slot_file(&saved.name);
                let attached = files.keep_file(&slot.name, &file).and_then(|()| {
                    let record = SlotRecord::of_file((&self.directory, &file), slot.tokens, kin, deadline)?;
                    self.attach_slot(saved, record)
                });
                match attached {
                    Ok(bytes) => {
                        report.bytes += bytes;
                        has_slot = true;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot keep the slot of a conversation on disk");
                        files.remove_file(&file);
                    }
                }
            }
            if !has_slot && saved.kept.turn.body.is_none() {
                // Nothing could be restored or evaluated.
                self.remove(&saved.name);
                continue;
            }
            report.conversations += 1;
            report.slots += u64::from(has_slot);
            if has_slot && !*lock(&self.is_closed) {
                saved.superseded.iter().for_each(|name| self.remove(name));
            }
        }
        // Slots beyond the limits.
        if let Some(rest) = slots {
            rest.slots.iter().for_each(|slot| rest.files.remove_file(&slot.name));
        }
        if *lock(&self.is_closed) {
            return StoreReport::default();
        }
        self.remove_excess(limits);
        report
    }

    /// Writes the record again, with the slot. Returns the written bytes.
    fn attach_slot(&self, saved: &SavedConversation, slot: SlotRecord) -> io::Result<u64> {
        let is_closed = lock(&self.is_closed);
        if *is_closed {
            return Err(io::Error::other("the model keeps no conversations any more"));
        }
        let bytes = slot.bytes();
        let record = ConversationRecord::new(&saved.kept.turn, Some(slot));
        Ok(bytes + self.write_record(&saved.name, &record)?)
    }
}
