//! Warms the new process before it serves: restores slots from files and proves that they are used. If the
//! old process still serves, the remaining prompts are evaluated too.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::{self, CacheProof, ColdReason, NoFileReason, WarmthReport};

use super::pack::{SavedSlot, SavedSlots, SlotPacking};
use crate::clock;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::LeaseQueue;
use crate::lease::turns::KeptConversation;
use crate::process::slot_files::SlotFiles;
use crate::process::slot_talk::{self, TouchResult};
use crate::process::{BackendProcess, touch};
use crate::sync::lock;

/// Conversations and slots that a replacement carries over. The first process that is ready takes them; if
/// they kill that process, later ones start without them.
pub(in crate::model) type SharedWarmState = Arc<Mutex<Option<WarmState>>>;

/// Source of the slots for the next process.
#[derive(Debug)]
pub(in crate::model) enum WarmState {
    /// The old process has ended; its saved slots, or `None`.
    Saved(Option<Box<SavedSlots>>),
    /// The old process still serves; inputs for saving its slots, or `None`.
    Serving(Option<Box<SlotPacking>>),
}

/// Inputs for warming a process.
#[derive(Debug)]
pub(in crate::model) struct ProcessWarming {
    pub(in crate::model) warm_state: SharedWarmState,
    pub(in crate::model) leases: Arc<LeaseQueue>,
    /// Generation that held the conversations.
    pub(in crate::model) from: GenerationId,
    /// Shared state of the new generation.
    pub(in crate::model) cell: Arc<GenerationCell>,
    pub(in crate::model) files: Option<Arc<SlotFiles>>,
    /// Why there are no slot files, if known in advance.
    pub(in crate::model) no_file: Option<NoFileReason>,
    /// Minimum time to wait for evidence that a restored slot is used.
    pub(in crate::model) shows_within: Duration,
    /// True if memory may run out meanwhile, so that there is little time.
    pub(in crate::model) urgent: bool,
    /// Time at which the start has to be complete.
    pub(in crate::model) start: Option<Instant>,
}

/// Part of the time limit for the start that is reserved for the steps after warming.
const START_RESERVE: Duration = Duration::from_secs(5);

/// Result of warming.
#[derive(Debug)]
pub(crate) struct WarmingResult {
    pub(in crate::model) from: GenerationId,
    pub(in crate::model) warmth: WarmthReport,
    /// Conversations that the new process is proven to have.
    pub(in crate::model) warm: Vec<Arc<KeptConversation>>,
    /// Restored conversations whose use is not proven.
    pub(in crate::model) restored: Vec<Arc<KeptConversation>>,
    /// Slots that are not empty.
    pub(in crate::model) used: Vec<u32>,
    /// Slots in which the evaluation of a prompt was begun and not finished.
    pub(in crate::model) begun: Vec<u32>,
    pub(in crate::model) took: Duration,
}

impl ProcessWarming {
    /// Warms the process. Returns `None` if there is nothing to do.
    pub(in crate::model) async fn run(
        self,
        process: &dyn BackendProcess,
        slots: Option<u32>,
    ) -> Option<WarmingResult> {
        let bag = lock(&self.warm_state).take()?;
        let begun = Instant::now();
        let numbers = warden_policies::defaults().warmth;
        let beside = matches!(bag, WarmState::Serving(_));
        let patient = beside && !self.urgent;
        let until = clock::after(begun, if patient { numbers.beside } else { numbers.before_gate });
        let until = match self.start {
            Some(start) => until.min(start.checked_sub(START_RESERVE).unwrap_or(begun)).max(begun),
            None => until,
        };
        let parcel = match bag {
            WarmState::Saved(parcel) => parcel,
            WarmState::Serving(Some(mut packing)) => {
                // Set the deadline anew: the old one is from the time when the new process began to load.
                packing.until = clock::after(begun, numbers.before_gate / 2);
                packing.conversations = self.leases.turns.conversations_of(self.from);
                Some(Box::new(packing.run().await))
            }
            WarmState::Serving(None) => None,
        };
        // Read the conversations again, because some have continued since.
        let conversations = self.leases.turns.conversations_of(self.from);
        if conversations.is_empty() {
            return None;
        }
        let mut done = WarmingResult {
            from: self.from,
            warmth: WarmthReport { conversations: conversations.len() as u64, ..WarmthReport::default() },
            warm: Vec::new(),
            restored: Vec::new(),
            used: Vec::new(),
            begun: Vec::new(),
            took: Duration::ZERO,
        };
        if let Some(why) = self.no_file {
            done.warmth.record_no_file(why);
        }
        let unpacking = Instant::now();
        if let Some(parcel) = parcel {
            self.restore_slots(process, *parcel, &conversations, (until, beside), &mut done).await;
        }
        done.warmth.restore_ms = clock::millis(unpacking.elapsed());
        let evaluating = Instant::now();
        let slots = slots.unwrap_or(1);
        let mut free: Vec<u32> = (0..slots).filter(|slot| !done.used.contains(slot)).rev().collect();
        for kept in &conversations {
            if done.warm.iter().chain(&done.restored).any(|known| Arc::ptr_eq(known, kept)) {
                continue;
            }
            let Some(request) = &kept.turn.body else {
                done.warmth
                    .count_cold(if kept.turn.has_media { ColdReason::Media } else { ColdReason::NotKept }, 1);
                continue;
            };
            let Some(slot) = free.pop() else {
                done.warmth.count_cold(ColdReason::Slots, 1);
                continue;
            };
            if !beside {
                done.warmth.later += 1;
                continue;
            }
            let left = self.time_left(until, beside);
            if left.is_zero() {
                done.warmth.later += 1;
                continue;
            }
            match evaluate_prompt(process, kept, request, Some(slot), left).await {
                TouchResult::Counted(..) => {
                    done.warmth.evaluated += 1;
                    done.warm.push(Arc::clone(kept));
                    done.used.push(slot);
                }
                TouchResult::Refused => done.warmth.count_cold(ColdReason::Refused, 1),
                TouchResult::Silent => {
                    done.warmth.later += 1;
                    done.begun.push(slot);
                }
            }
        }
        done.warmth.evaluate_ms = clock::millis(evaluating.elapsed());
        done.took = begun.elapsed();
        Some(done)
    }

    /// Time left until `until`. Zero if the old process no longer serves, because requests then wait for
    /// this process.
    fn time_left(&self, until: Instant, beside: bool) -> Duration {
        if beside && !self.leases.is_open(self.from) {
            return Duration::ZERO;
        }
        until.saturating_duration_since(Instant::now())
    }

    /// Restores slots from files, the latest conversation last, and checks that the process uses them.
    async fn restore_slots(
        &self,
        process: &dyn BackendProcess,
        mut parcel: SavedSlots,
        conversations: &[Arc<KeptConversation>],
        (until, beside): (Instant, bool),
        done: &mut WarmingResult,
    ) {
        (done.warmth.bytes, done.warmth.save_ms) = (parcel.bytes, clock::millis(parcel.took));
        if let Some(why) = parcel.no_file {
            done.warmth.record_no_file(why);
        }
        let Some(files) = &self.files else {
            done.warmth.record_no_file(NoFileReason::Build);
            return;
        };
        if self.cell.kin.get() != Some(&parcel.kin) {
            done.warmth.record_no_file(NoFileReason::Other);
            return;
        }
        let mut restored = Vec::new();
        for packed in std::mem::take(&mut parcel.slots).into_iter().rev() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                done.warmth.record_no_file(NoFileReason::Time);
                break;
            }
            let tokens = match files.adopt_file(&parcel.files, &packed.name) {
                Ok(()) => slot_talk::restore_slot(process, packed.slot, &packed.name, left).await.ok(),
                Err(error) => {
                    tracing::warn!(%error, "a slot's file is gone");
                    None
                }
            };
            // The file has been read and is not needed any more.
            files.remove_file(&packed.name);
            if tokens == Some(packed.tokens) {
                done.used.push(packed.slot);
                restored.push(packed);
            } else {
                done.warmth.record_no_file(NoFileReason::Failed);
            }
        }
        // Check only after all restores, because slots are matched with conversations by their sizes.
        let mut unseen = restored.into_iter();
        let mut use_of = RestoreUse::Shown;
        while use_of == RestoreUse::Shown
            && let Some(packed) = unseen.next()
        {
            let left = self.time_left(until, beside);
            use_of = if left.is_zero() {
                done.note_unchecked(packed, conversations);
                RestoreUse::Unknown
            } else {
                self.prove_use(process, packed, conversations, (left, beside), done).await
            };
        }
        if use_of == RestoreUse::Unknown {
            // Not all slots were checked; the first request to each will show whether it is used.
            unseen.for_each(|packed| done.note_unchecked(packed, conversations));
        }
    }

    /// Checks with a small request that the process uses a restored slot.
    async fn prove_use(
        &self,
        process: &dyn BackendProcess,
        packed: SavedSlot,
        conversations: &[Arc<KeptConversation>],
        (left, beside): (Duration, bool),
        done: &mut WarmingResult,
    ) -> RestoreUse {
        let Some(kept) = packed.conversation.clone().filter(|kept| is_known(conversations, kept)) else {
            done.note_unchecked(packed, conversations);
            return RestoreUse::Shown;
        };
        let Some(request) = kept.turn.body.clone() else {
            done.note_unproven(Some(kept));
            return RestoreUse::Shown;
        };
        let nobody_waits = beside && !self.urgent;
        let pace = self.leases.turns.prompt_pace();
        let patience =
            warmth::proof_timeout(kept.turn.tokens, pace, nobody_waits, self.shows_within).min(left);
        let touched = evaluate_prompt(process, &kept, &request, None, patience).await;
        let none_before = done.warmth.carried == 0;
        match touched {
            TouchResult::Counted(cached, evaluated)
                if warmth::classify_proof(cached, evaluated) == CacheProof::Reused =>
            {
                done.warmth.carried += 1;
                done.warm.push(kept);
                RestoreUse::Shown
            }
            TouchResult::Counted(cached, evaluated) => {
                // The check itself has evaluated the prompt.
                done.warmth.evaluated += 1;
                done.warm.push(kept);
                let told = slot_talk::list_slots(process, left).await.unwrap_or_default();
                let all = cached + evaluated;
                let holder =
                    told.iter().find(|slot| slot.facts.tokens == Some(all)).map(|slot| slot.facts.id);
                done.note_unused(none_before, holder.as_slice());
                if none_before { RestoreUse::None } else { RestoreUse::Shown }
            }
            // There was not enough time for a proof; the slot may still be useful.
            TouchResult::Silent => {
                done.note_unproven(Some(kept));
                RestoreUse::Unknown
            }
            TouchResult::Refused => {
                done.note_unproven(Some(kept));
                RestoreUse::Shown
            }
        }
    }
}

/// Result of checking that the process uses a restored slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestoreUse {
    /// The slot is used; check the next one, too.
    Shown,
    /// The slot is not used, and the remaining ones will not be either.
    None,
    /// There was not enough time for a proof.
    Unknown,
}

fn is_known(conversations: &[Arc<KeptConversation>], kept: &Arc<KeptConversation>) -> bool {
    conversations.iter().any(|known| Arc::ptr_eq(known, kept))
}

impl WarmingResult {
    /// Records a restored slot whose use was not checked. A slot whose conversation is unknown counts as one
    /// conversation; a conversation that has continued meanwhile is counted already.
    fn note_unchecked(&mut self, packed: SavedSlot, conversations: &[Arc<KeptConversation>]) {
        match packed.conversation {
            None => {
                self.warmth.conversations += 1;
                self.note_unproven(None);
            }
            Some(kept) if is_known(conversations, &kept) => self.note_unproven(Some(kept)),
            Some(_) => {}
        }
    }

    /// Records a restored conversation whose use is not proven.
    fn note_unproven(&mut self, kept: Option<Arc<KeptConversation>>) {
        self.warmth.unproven += 1;
        self.restored.extend(kept);
    }

    /// Records that restored slots are not used. `is_way`: the process never uses restored slots. `holds`:
    /// slots that are not empty.
    fn note_unused(&mut self, is_way: bool, holds: &[u32]) {
        if is_way {
            self.warmth.record_no_file(NoFileReason::NotReused);
            self.used = holds.to_vec();
        } else {
            self.warmth.record_no_file(NoFileReason::Failed);
            // Do not treat these slots as empty: they may hold a conversation that was just evaluated.
            self.used.extend_from_slice(holds);
        }
    }
}

/// Evaluates a prompt together with its answer, or without the answer if the server rejects that.
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
