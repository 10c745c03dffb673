//! Warms the new process before it serves: restores slots and proves that they are used. If the old process
//! still serves, the remaining prompts are evaluated too.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::{self, CacheProof, ColdReason, NoFileReason, WarmthReport};

use super::pack::{SavedSlot, SavedSlots, SlotPacking};
use super::stored::{LoadQuery, StoredSource};
use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::LeaseQueue;
use crate::lease::turns::KeptConversation;
use crate::process::slot_files::SlotFiles;
use crate::process::slot_talk::{self, TouchResult};
use crate::process::{BackendProcess, touch};
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_detached, run_job};

/// Conversations and slots to carry over. If they kill the first ready process, later ones get none.
pub(crate) type SharedWarmState = Arc<Mutex<Option<WarmState>>>;

#[derive(Debug)]
pub(crate) enum WarmState {
    /// The old process has ended; its saved slots, if any.
    Saved(Option<Box<SavedSlots>>),
    /// The old process still serves; inputs for saving its slots, if any.
    Serving(Option<Box<SlotPacking>>),
}

#[derive(Debug)]
pub(crate) struct ProcessWarming {
    pub(crate) warm_state: SharedWarmState,
    pub(crate) leases: Arc<LeaseQueue>,
    pub(crate) from: GenerationId,
    pub(crate) cell: Arc<GenerationCell>,
    pub(crate) files: Option<Arc<SlotFiles>>,
    /// Conversations of the model on disk, to be loaded first.
    pub(crate) stored: Option<StoredSource>,
    pub(crate) no_file: Option<NoFileReason>,
    pub(crate) shows_within: Duration,
    /// True if memory may run out, so that there is little time.
    pub(crate) urgent: bool,
    pub(crate) start: Option<Instant>,
}

/// Part of the start's time limit that is reserved for the steps after warming.
const START_RESERVE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct WarmingResult {
    pub(crate) from: GenerationId,
    pub(crate) warmth: WarmthReport,
    pub(crate) warm: Vec<Arc<KeptConversation>>,
    pub(crate) restored: Vec<Arc<KeptConversation>>,
    pub(crate) used: Vec<u32>,
    /// Slots with a partly evaluated prompt.
    pub(crate) begun: Vec<u32>,
    pub(crate) took: Duration,
}

impl ProcessWarming {
    /// Returns `None` if there is nothing to do.
    pub(crate) async fn run(
        mut self,
        process: &dyn BackendProcess,
        slots: Option<u32>,
    ) -> Option<WarmingResult> {
        let state = lock(&self.warm_state).take()?;
        let begun = Instant::now();
        let numbers = warden_policies::defaults().warmth;
        let is_beside = matches!(state, WarmState::Serving(_));
        let is_patient = is_beside && !self.urgent;
        let limit = match () {
            () if self.stored.is_some() => numbers.to_disk,
            () if is_patient => numbers.beside,
            () => numbers.before_gate,
        };
        let until = clock::after(begun, limit);
        let until = match self.start {
            Some(start) => until.min(start.checked_sub(START_RESERVE).unwrap_or(begun)).max(begun),
            None => until,
        };
        let parcel = match state {
            WarmState::Saved(parcel) => match self.stored.take() {
                Some(source) => self.load_stored(source, slots.unwrap_or(1), until).await,
                None => parcel,
            },
            WarmState::Serving(Some(mut packing)) => {
                // The old deadline was set when the new process began to load.
                packing.until = clock::after(begun, numbers.before_gate / 2);
                packing.conversations = self.leases.turns.conversations_of(self.from);
                Some(Box::new(packing.run().await))
            }
            WarmState::Serving(None) => None,
        };
        // Some conversations have continued since.
        let conversations = self.leases.turns.conversations_of(self.from);
        if conversations.is_empty() {
            return None;
        }
        let done = WarmingResult::new(self.from, conversations.len());
        let mut run = WarmingRun { inputs: &self, process, until, is_beside, conversations, done };
        if let Some(why) = self.no_file {
            run.done.warmth.record_no_file(why);
        }
        let restoring = Instant::now();
        if let Some(parcel) = parcel {
            run.restore_slots(*parcel).await;
        }
        run.done.warmth.restore_ms = clock::millis(restoring.elapsed());
        let evaluating = Instant::now();
        run.evaluate_rest(slots.unwrap_or(1)).await;
        run.done.warmth.evaluate_ms = clock::millis(evaluating.elapsed());
        run.done.took = begun.elapsed();
        Some(run.done)
    }

    /// Reads conversations from disk. Returns the slot files that the process can use, latest first.
    async fn load_stored(&self, source: StoredSource, slots: u32, until: Instant) -> Option<Box<SavedSlots>> {
        let StoredSource { store, replica, replicas, limits } = source;
        // The other half of the time is for restoring them.
        let deadline = until - until.saturating_duration_since(Instant::now()) / 2;
        let kin = self.cell.kin.get().copied();
        let query = LoadQuery { replica, replicas, slots, kin, limits, deadline };
        let loading = run_job(WorkKind::Conversations, move || store.load(&query));
        let loaded = match tokio::time::timeout_at(until, loading).await {
            Ok(Ok(loaded)) => loaded,
            Ok(Err(error)) => {
                tracing::warn!(%error, "conversations on disk are not loaded");
                return None;
            }
            Err(_) => {
                tracing::warn!("conversations on disk cannot be loaded in time");
                return None;
            }
        };
        // A load that failed has left its conversations.
        self.leases.turns.forget_generation(self.from);
        let conversations = loaded.iter().map(|stored| Arc::clone(&stored.conversation));
        self.leases.turns.add_stored(self.from, conversations);
        let with_slot = loaded.into_iter().filter_map(|stored| stored.slot.zip(Some(stored.conversation)));
        let saved = (0..slots).zip(with_slot).map(|(slot, ((name, tokens), conversation))| SavedSlot {
            name,
            slot,
            tokens,
            conversation: Some(conversation),
            is_stored: true,
        });
        let (files, kin) = (self.files.clone().filter(|files| files.are_stored())?, kin?);
        let slots = saved.collect();
        Some(Box::new(SavedSlots { files, kin, slots, no_file: None, bytes: 0, took: Duration::ZERO }))
    }
}

struct WarmingRun<'a> {
    inputs: &'a ProcessWarming,
    process: &'a dyn BackendProcess,
    until: Instant,
    is_beside: bool,
    conversations: Vec<Arc<KeptConversation>>,
    done: WarmingResult,
}

impl WarmingRun<'_> {
    /// Zero if the old process no longer serves, because requests then wait for this process.
    fn time_left(&self) -> Duration {
        if self.is_beside && !self.inputs.leases.is_open(self.inputs.from) {
            return Duration::ZERO;
        }
        self.until.saturating_duration_since(Instant::now())
    }

    fn is_known(&self, kept: &Arc<KeptConversation>) -> bool {
        self.conversations.iter().any(|known| Arc::ptr_eq(known, kept))
    }

    /// Evaluates conversations that were not restored while the old process serves.
    async fn evaluate_rest(&mut self, slots: u32) {
        let used = &self.done.used;
        let mut free: Vec<u32> = (0..slots).filter(|slot| !used.contains(slot)).rev().collect();
        for kept in self.conversations.clone() {
            if self.done.warm.iter().chain(&self.done.restored).any(|known| Arc::ptr_eq(known, &kept)) {
                continue;
            }
            let Some(request) = &kept.turn.body else {
                let why = if kept.turn.has_media { ColdReason::Media } else { ColdReason::NotKept };
                self.done.warmth.count_cold(why, 1);
                continue;
            };
            let Some(slot) = free.pop() else {
                self.done.warmth.count_cold(ColdReason::Slots, 1);
                continue;
            };
            let left = self.time_left();
            if !self.is_beside || left.is_zero() {
                self.done.warmth.later += 1;
                continue;
            }
            match evaluate_prompt(self.process, &kept, request, Some(slot), left).await {
                TouchResult::Counted(..) => {
                    self.done.warmth.evaluated += 1;
                    self.done.warm.push(kept);
                    self.done.used.push(slot);
                }
                TouchResult::Refused => self.done.warmth.count_cold(ColdReason::Refused, 1),
                TouchResult::Silent => {
                    self.done.warmth.later += 1;
                    self.done.begun.push(slot);
                }
            }
        }
    }

    /// Restores slots from files, the latest conversation last, and checks that the process uses them.
    async fn restore_slots(&mut self, mut parcel: SavedSlots) {
        let warmth = &mut self.done.warmth;
        warmth.bytes = parcel.bytes;
        warmth.save_ms = clock::millis(parcel.took);
        if let Some(why) = parcel.no_file {
            warmth.record_no_file(why);
        }
        let Some(files) = &self.inputs.files else {
            warmth.record_no_file(NoFileReason::Build);
            return;
        };
        if self.inputs.cell.kin.get() != Some(&parcel.kin) {
            warmth.record_no_file(NoFileReason::Other);
            return;
        }
        let mut restored = Vec::new();
        for packed in std::mem::take(&mut parcel.slots).into_iter().rev() {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.done.warmth.record_no_file(NoFileReason::Time);
                break;
            }
            let is_there = packed.is_stored || adopt_file(files, &parcel.files, &packed.name, left).await;
            let tokens = if is_there {
                slot_talk::restore_slot(self.process, packed.slot, &packed.name, left).await.ok()
            } else {
                None
            };
            if !packed.is_stored {
                let (files, name) = (Arc::clone(files), packed.name.clone());
                let removal = run_detached(WorkKind::Conversations, move || files.remove_file(&name));
                if let Err(error) = removal {
                    tracing::warn!(%error, "a slot's file is removed with its process");
                }
            }
            if tokens == Some(packed.tokens) {
                self.done.used.push(packed.slot);
                restored.push(packed);
            } else {
                packed.note_useless();
                self.done.warmth.record_no_file(NoFileReason::Failed);
            }
        }
        // Check after all restores, because slots are matched with conversations by their sizes.
        let mut unseen = restored.into_iter();
        let mut use_of = RestoreUse::Shown;
        while use_of == RestoreUse::Shown
            && let Some(packed) = unseen.next()
        {
            let left = self.time_left();
            use_of = if left.is_zero() {
                self.note_unchecked(packed);
                RestoreUse::Unknown
            } else {
                self.prove_use(packed, left).await
            };
        }
        match use_of {
            // The first request to each remaining slot will show whether it is used.
            RestoreUse::Unknown => unseen.for_each(|packed| self.note_unchecked(packed)),
            RestoreUse::None => unseen.for_each(|packed| packed.note_useless()),
            RestoreUse::Shown => {}
        }
    }

    /// Checks with a small request that the process uses a restored slot.
    async fn prove_use(&mut self, packed: SavedSlot, left: Duration) -> RestoreUse {
        let Some(kept) = packed.conversation.clone().filter(|kept| self.is_known(kept)) else {
            self.note_unchecked(packed);
            return RestoreUse::Shown;
        };
        let Some(request) = &kept.turn.body else {
            self.done.note_unproven(Some(kept));
            return RestoreUse::Shown;
        };
        let nobody_waits = self.is_beside && !self.inputs.urgent;
        let pace = self.inputs.leases.turns.prompt_pace();
        let shows_within = self.inputs.shows_within;
        let patience = warmth::proof_timeout(kept.turn.tokens, pace, nobody_waits, shows_within).min(left);
        match evaluate_prompt(self.process, &kept, request, None, patience).await {
            TouchResult::Counted(cached, evaluated)
                if warmth::classify_proof(cached, evaluated) == CacheProof::Reused =>
            {
                self.done.warmth.carried += 1;
                self.done.warm.push(kept);
                RestoreUse::Shown
            }
            TouchResult::Counted(cached, evaluated) => {
                kept.note_useless_slot();
                let is_first = self.done.warmth.carried == 0;
                // The check itself has evaluated the prompt.
                self.done.warmth.evaluated += 1;
                self.done.warm.push(kept);
                let told = slot_talk::list_slots(self.process, left).await.unwrap_or_default();
                let holder = told.iter().find(|slot| slot.facts.tokens == Some(cached + evaluated));
                self.done.note_unused(is_first, holder.map(|slot| slot.facts.id));
                if is_first { RestoreUse::None } else { RestoreUse::Shown }
            }
            // The slot may still be useful.
            TouchResult::Silent => {
                self.done.note_unproven(Some(kept));
                RestoreUse::Unknown
            }
            TouchResult::Refused => {
                self.done.note_unproven(Some(kept));
                RestoreUse::Shown
            }
        }
    }

    /// Records a restored slot without a proof. A slot whose conversation is unknown counts as one
    /// conversation; a continued conversation is counted already.
    fn note_unchecked(&mut self, packed: SavedSlot) {
        match packed.conversation {
            None => {
                self.done.warmth.conversations += 1;
                self.done.note_unproven(None);
            }
            Some(kept) if self.is_known(&kept) => self.done.note_unproven(Some(kept)),
            Some(_) => {}
        }
    }
}

/// Moves a slot file to the directory of the new process. Returns false if that is not possible in time.
async fn adopt_file(to: &Arc<SlotFiles>, from: &Arc<SlotFiles>, name: &str, limit: Duration) -> bool {
    let (to, from, name) = (Arc::clone(to), Arc::clone(from), name.to_owned());
    let moving = run_job(WorkKind::Conversations, move || to.adopt_file(&from, &name));
    let error = match tokio::time::timeout(limit, moving).await {
        Ok(Ok(Ok(()))) => return true,
        Ok(Ok(Err(error))) => error,
        Ok(Err(error)) => error.into(),
        Err(_) => io::ErrorKind::TimedOut.into(),
    };
    tracing::warn!(%error, "a slot's file is gone");
    false
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestoreUse {
    /// The slot is used, or proves nothing about other slots: check the next one.
    Shown,
    /// No restored slot is used.
    None,
    /// There was not enough time for a proof.
    Unknown,
}

impl WarmingResult {
    fn new(from: GenerationId, conversations: usize) -> Self {
        Self {
            from,
            warmth: WarmthReport { conversations: conversations as u64, ..WarmthReport::default() },
            warm: Vec::new(),
            restored: Vec::new(),
            used: Vec::new(),
            begun: Vec::new(),
            took: Duration::ZERO,
        }
    }

    /// Records a restored conversation whose use is not proven.
    fn note_unproven(&mut self, kept: Option<Arc<KeptConversation>>) {
        self.warmth.unproven += 1;
        self.restored.extend(kept);
    }

    /// Records that a restored slot is not used. `is_way`: the process never uses restored slots. `holder`:
    /// slot with the conversation just evaluated.
    fn note_unused(&mut self, is_way: bool, holder: Option<u32>) {
        if is_way {
            self.warmth.record_no_file(NoFileReason::NotReused);
            self.used.clear();
        } else {
            self.warmth.record_no_file(NoFileReason::Failed);
        }
        // The slot may hold a conversation that was just evaluated, so it is not empty.
        self.used.extend(holder);
    }
}

/// Evaluates a prompt with its answer, or without it if the server rejects the answer.
async fn evaluate_prompt(
    process: &dyn BackendProcess,
    kept: &KeptConversation,
    request: &[u8],
    slot: Option<u32>,
    left: Duration,
) -> TouchResult {
    let until = clock::after(Instant::now(), left);
    let mut said = &kept.turn.said;
    loop {
        let Some(body) = touch::touch_body(request, said, slot) else { return TouchResult::Refused };
        let left = until.saturating_duration_since(Instant::now());
        let touched = slot_talk::touch(process, &kept.turn.path, body, left).await;
        if touched != TouchResult::Refused || *said == touch::AnswerText::Nothing {
            return touched;
        }
        said = &touch::AnswerText::Nothing;
    }
}
