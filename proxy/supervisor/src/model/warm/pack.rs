//! Saves the slots of the old process's latest conversations to files.
//!
//! With a unified KV cache, the server moves the contents of idle slots to its prompt cache. A small request
//! for the conversation brings them back into a slot, at the cost of one token.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::warmth::{self, CacheProof, FileRoom, NoFileReason, SlotFacts};

use crate::lease::turns::KeptConversation;
use crate::process::needs::AnswerIdentity;
use crate::process::slot_files::SlotFiles;
use crate::process::slot_talk::{self, SlotFailure, TouchResult};
use crate::process::{BackendProcess, touch};
use crate::worker_threads::{WorkKind, run_job};

#[derive(Debug)]
pub(crate) struct SlotPacking {
    pub(crate) process: Arc<dyn BackendProcess>,
    pub(crate) files: Arc<SlotFiles>,
    pub(crate) kin: AnswerIdentity,
    /// Conversations, latest first.
    pub(crate) conversations: Vec<Arc<KeptConversation>>,
    pub(crate) slots: u32,
    /// Maximum total size of the files, in bytes.
    pub(crate) bytes: u64,
    pub(crate) available: Option<u64>,
    pub(crate) pace: Option<f64>,
    pub(crate) shows_within: Duration,
    pub(crate) alone: bool,
    /// True if the files stay on disk. Slots that are there already are not saved again.
    pub(crate) to_disk: bool,
    pub(crate) until: Instant,
}

/// Slots saved to files. Dropping this value removes the files.
#[derive(Debug)]
pub(crate) struct SavedSlots {
    pub(crate) files: Arc<SlotFiles>,
    pub(crate) kin: AnswerIdentity,
    /// Saved slots, latest conversation first.
    pub(crate) slots: Vec<SavedSlot>,
    pub(crate) no_file: Option<NoFileReason>,
    pub(crate) bytes: u64,
    pub(crate) took: Duration,
}

#[derive(Debug)]
pub(crate) struct SavedSlot {
    pub(crate) name: String,
    /// Slot of the new process into which the file is to be restored.
    pub(crate) slot: u32,
    pub(crate) tokens: u64,
    pub(crate) conversation: Option<Arc<KeptConversation>>,
    /// True for a file that stays on disk.
    pub(crate) is_stored: bool,
}

impl SavedSlot {
    fn holds(&self, kept: &Arc<KeptConversation>) -> bool {
        self.conversation.as_ref().is_some_and(|of| Arc::ptr_eq(of, kept))
    }

    /// Notes that a process could not use the file.
    pub(crate) fn note_useless(&self) {
        if let Some(kept) = &self.conversation {
            kept.note_useless_slot();
        }
    }
}

impl SavedSlots {
    /// Takes the slot with this conversation out.
    pub(crate) fn take_slot_of(&mut self, kept: &Arc<KeptConversation>) -> Option<SavedSlot> {
        let index = self.slots.iter().position(|slot| slot.holds(kept))?;
        Some(self.slots.remove(index))
    }
}

/// Moves the smallest slot worth saving to the front. The bytes per token are unknown before the first file, so
/// a larger slot might not fit.
fn put_smallest_first(order: &mut Vec<u32>, tokens_of: impl Fn(u32) -> Option<u64>) {
    let least = warden_policies::defaults().warmth.least_tokens;
    let worth = |id: &u32| tokens_of(*id).filter(|tokens| *tokens >= least);
    if let Some(small) = order.iter().copied().filter(|id| worth(id).is_some()).min_by_key(worth) {
        order.retain(|id| *id != small);
        order.insert(0, small);
    }
}

/// Time for an operation on files after the time limit, so that files are not left behind.
const LEAST_DISK_TIME: Duration = Duration::from_millis(500);

enum SaveResult {
    Packed,
    /// The slot holds too few tokens.
    TooSmall,
    Failed(NoFileReason),
}

impl SlotPacking {
    pub(crate) async fn run(self) -> SavedSlots {
        let begun = Instant::now();
        let numbers = warden_policies::defaults().warmth;
        let mut parcel = SavedSlots {
            files: Arc::clone(&self.files),
            kin: self.kin,
            slots: Vec::new(),
            no_file: None,
            bytes: 0,
            took: Duration::ZERO,
        };
        let available = self.available;
        let free = self.on_disk(move |files| files.free_bytes(available)).await.flatten();
        let mut room = FileRoom::new(self.bytes, free, numbers.room);
        if self.to_disk {
            room.allow_first_file();
        }
        let sizes: Vec<u64> = self.conversations.iter().map(|kept| kept.tokens()).collect();
        let told = slot_talk::list_slots(self.process.as_ref(), self.time_left()).await;
        let facts: Vec<SlotFacts> = match told {
            Some(told) => told.iter().map(|slot| slot.facts).collect(),
            // The server does not report its slots, but none is busy without requests.
            None if self.alone => {
                (0..self.slots).map(|id| SlotFacts { id, busy: false, tokens: None, task: None }).collect()
            }
            None => Vec::new(),
        };
        let mut empty = Vec::new();
        let tokens_of = |id: u32| facts.iter().find(|slot| slot.id == id).and_then(|slot| slot.tokens);
        let mut order = warmth::slots_to_save(&facts, &sizes, 0);
        if order.first().is_some_and(|first| !room.has(self.expected_tokens(tokens_of(*first)))) {
            put_smallest_first(&mut order, tokens_of);
        }
        for id in order {
            let tokens = tokens_of(id);
            if tokens.is_some_and(|tokens| tokens < numbers.least_tokens) {
                empty.push(id);
                continue;
            }
            if self.to_disk && tokens.is_some_and(|tokens| !self.is_to_store(tokens, &parcel)) {
                continue;
            }
            match self.save_slot(id, id, tokens, None, &mut room, &mut parcel).await {
                SaveResult::Packed => {}
                SaveResult::TooSmall => empty.push(id),
                SaveResult::Failed(why) => {
                    parcel.no_file = parcel.no_file.or(Some(why));
                    if matches!(why, NoFileReason::Time | NoFileReason::Failed | NoFileReason::Dearer) {
                        break;
                    }
                }
            }
        }
        if self.alone && !empty.is_empty() && parcel.no_file.is_none() {
            self.recall_cached(&empty, &mut room, &mut parcel).await;
        }
        let packed = |kept: &Arc<KeptConversation>| {
            self.is_stored(kept) || parcel.slots.iter().any(|slot| slot.holds(kept))
        };
        if parcel.no_file.is_none() && !empty.is_empty() && !self.conversations.iter().all(packed) {
            parcel.no_file = Some(NoFileReason::Empty);
        }
        let place = |of: &Option<Arc<KeptConversation>>| {
            let of = of.as_ref()?;
            self.conversations.iter().position(|kept| Arc::ptr_eq(kept, of))
        };
        parcel.slots.sort_by_key(|slot| place(&slot.conversation).unwrap_or(usize::MAX));
        parcel.took = begun.elapsed();
        parcel
    }

    fn time_left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Tokens of a slot; those of the largest conversation if slot sizes are not reported.
    fn expected_tokens(&self, tokens: Option<u64>) -> Option<u64> {
        tokens.or_else(|| self.conversations.iter().map(|kept| kept.tokens()).max())
    }

    /// `place`: slot in which the file will be restored. `of`: conversation in the slot, if known.
    async fn save_slot(
        &self,
        slot: u32,
        place: u32,
        tokens: Option<u64>,
        of: Option<&Arc<KeptConversation>>,
        room: &mut FileRoom,
        parcel: &mut SavedSlots,
    ) -> SaveResult {
        if self.time_left().is_zero() {
            return SaveResult::Failed(NoFileReason::Time);
        }
        if !room.has(self.expected_tokens(tokens)) {
            return SaveResult::Failed(NoFileReason::Room);
        }
        let name = self.files.file_name(parcel.slots.len());
        let file = name.clone();
        match self.on_disk(move |files| files.create_file(&file)).await {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                tracing::warn!(%error, "cannot make a file for a slot");
                return SaveResult::Failed(NoFileReason::Failed);
            }
            None => return SaveResult::Failed(NoFileReason::Time),
        }
        let begun = Instant::now();
        let saved = slot_talk::save_slot(self.process.as_ref(), slot, &name, self.time_left()).await;
        let took = begun.elapsed();
        let file = name.clone();
        let sealed = self.on_disk(move |files| (files.seal_file(&file), files.seal_checkpoints(&file))).await;
        let (sealed, checkpoints) =
            sealed.unwrap_or_else(|| (Err(io::Error::from(io::ErrorKind::TimedOut)), 0));
        let outcome = match (saved, sealed) {
            // The slot has become busy: the server saves it only when it is free again.
            (Err(SlotFailure::Silent), _) => SaveResult::Failed(NoFileReason::Time),
            (Err(SlotFailure::Rejected), _) | (_, Err(_)) => SaveResult::Failed(NoFileReason::Failed),
            (Ok((tokens, _)), _) if tokens < warden_policies::defaults().warmth.least_tokens => {
                SaveResult::TooSmall
            }
            // The server reports success even if the disk is full, so compare the file size.
            (Ok((_, written)), Ok(bytes)) if written != bytes || bytes == 0 => {
                SaveResult::Failed(NoFileReason::Room)
            }
            (Ok((tokens, bytes)), Ok(_)) => {
                let bytes = bytes.saturating_add(checkpoints);
                if !room.record_file(tokens, bytes) {
                    SaveResult::Failed(NoFileReason::Room)
                } else if self.is_worthwhile(tokens, took) {
                    let of = of.cloned().or_else(|| self.find_conversation(tokens, parcel));
                    parcel.bytes += bytes;
                    parcel.slots.push(SavedSlot {
                        name: name.clone(),
                        slot: place,
                        tokens,
                        conversation: of,
                        is_stored: false,
                    });
                    return SaveResult::Packed;
                } else {
                    SaveResult::Failed(NoFileReason::Dearer)
                }
            }
        };
        self.on_disk(move |files| files.remove_file(&name)).await;
        outcome
    }

    fn is_worthwhile(&self, tokens: u64, took: Duration) -> bool {
        // A file that stays on disk is written while no client waits, so only reading it counts.
        let uses = if self.to_disk { 0.5 } else { 1.0 };
        warmth::is_worthwhile(tokens, took.as_secs_f64() * 1000.0 * uses, self.pace)
    }

    /// True if the slot of a conversation is on disk already.
    fn is_stored(&self, kept: &KeptConversation) -> bool {
        self.to_disk && kept.usable_slot(Some(self.kin)).is_some()
    }

    /// True if a slot with this many tokens has a known conversation that is not on disk.
    fn is_to_store(&self, tokens: u64, parcel: &SavedSlots) -> bool {
        self.find_conversation(tokens, parcel).is_some_and(|kept| !self.is_stored(&kept))
    }

    /// Does something with the files on a worker thread, because disks may hang. `None`: it takes too long.
    async fn on_disk<T: Send + 'static>(
        &self,
        job: impl FnOnce(&SlotFiles) -> T + Send + 'static,
    ) -> Option<T> {
        let files = Arc::clone(&self.files);
        let working = run_job(WorkKind::Conversations, move || job(&files));
        tokio::time::timeout(self.time_left().max(LEAST_DISK_TIME), working).await.ok()?.ok()
    }

    /// Finds the conversation that a slot holds, by its number of tokens.
    fn find_conversation(&self, tokens: u64, parcel: &SavedSlots) -> Option<Arc<KeptConversation>> {
        let sizes: Vec<u64> = self.conversations.iter().map(|kept| kept.tokens()).collect();
        let of = parcel.slots.iter().filter_map(|slot| slot.conversation.as_ref());
        let taken: Vec<usize> =
            of.filter_map(|of| self.conversations.iter().position(|kept| Arc::ptr_eq(kept, of))).collect();
        let index = warmth::conversation_of(tokens, &sizes, &taken)?;
        self.conversations.get(index).cloned()
    }

    /// Moves conversations from the prompt cache into empty slots and saves those slots. Stops at the first
    /// conversation that is not cached.
    async fn recall_cached(&self, empty: &[u32], room: &mut FileRoom, parcel: &mut SavedSlots) {
        let is_packed = |kept: &Arc<KeptConversation>| {
            self.is_stored(kept) || parcel.slots.iter().any(|slot| slot.holds(kept))
        };
        let missing: Vec<_> = self.conversations.iter().filter(|kept| !is_packed(kept)).collect();
        for (kept, place) in missing.into_iter().zip(empty) {
            // For a named slot, the server does not search the prompt cache.
            let request = kept.turn.body.as_ref();
            let Some(body) = request.and_then(|body| touch::touch_body(body, &kept.turn.said, None)) else {
                continue;
            };
            // A cached prompt is answered within a fraction of its evaluation time.
            let patience = warmth::proof_timeout(kept.turn.tokens, self.pace, false, self.shows_within)
                .min(self.time_left());
            let touched = slot_talk::touch(self.process.as_ref(), &kept.turn.path, body, patience).await;
            let TouchResult::Counted(cached, evaluated) = touched else { return };
            if warmth::classify_proof(cached, evaluated) != CacheProof::Reused {
                return;
            }
            let Some(slot) = self.find_slot(cached + evaluated).await else { return };
            let tokens = Some(kept.tokens());
            if let SaveResult::Failed(why) =
                self.save_slot(slot, *place, tokens, Some(kept), room, parcel).await
            {
                parcel.no_file = parcel.no_file.or(Some(why));
                return;
            }
        }
    }

    /// Finds an idle slot that holds this many tokens.
    async fn find_slot(&self, tokens: u64) -> Option<u32> {
        let told = slot_talk::list_slots(self.process.as_ref(), self.time_left()).await?;
        let found = told.iter().find(|slot| slot.facts.tokens == Some(tokens) && !slot.facts.busy);
        found.map(|slot| slot.facts.id)
    }
}
