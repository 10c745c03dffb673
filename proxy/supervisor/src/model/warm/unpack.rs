//! The new process's part, before it is used: slots are restored from files and shown to be of use, and where the old process still
//! serves, the other prompts are evaluated.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::{self, Cold, NoFile, Proof, Warmth};

use super::pack::{Packed, Packing, Parcel};
use crate::clock;
use crate::lease::cell::Cell;
use crate::lease::queue::Leases;
use crate::lease::turns::Kept;
use crate::process::slot_files::SlotFiles;
use crate::process::slot_talk::{self, Touched};
use crate::process::{Process, touch};
use crate::sync::lock;

/// What a replacement brings along. Taken by the first process that is ready: one that does not survive it is not followed by others.
pub(in crate::model) type Luggage = Arc<Mutex<Option<Bag>>>;

/// What is there for the next process.
#[derive(Debug)]
pub(in crate::model) enum Bag {
    /// Slots of a process that has ended, or none.
    Parcel(Option<Box<Parcel>>),
    /// The old process serves.
    Old(Option<Box<Packing>>),
}

/// What it takes to make a process warm.
#[derive(Debug)]
pub(in crate::model) struct Unpacking {
    pub(in crate::model) luggage: Luggage,
    pub(in crate::model) leases: Arc<Leases>,
    /// Whose conversations they are.
    pub(in crate::model) from: GenerationId,
    /// The new one.
    pub(in crate::model) cell: Arc<Cell>,
    pub(in crate::model) files: Option<Arc<SlotFiles>>,
    /// Why there are no files, if that is known before.
    pub(in crate::model) no_file: Option<NoFile>,
    /// How long a slot that was restored may take to show that it is used, at least.
    pub(in crate::model) shows_within: Duration,
    /// Memory runs out meanwhile.
    pub(in crate::model) urgent: bool,
    /// When it has to be ready.
    pub(in crate::model) start: Option<Instant>,
}

/// What is left of a start for all that comes after being made warm.
const SPARE: Duration = Duration::from_secs(5);

/// What came of it.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(in crate::model) from: GenerationId,
    pub(in crate::model) warmth: Warmth,
    /// The new process has these.
    pub(in crate::model) warm: Vec<Arc<Kept>>,
    /// It may have these: they were restored, and nothing showed whether that is of use.
    pub(in crate::model) restored: Vec<Arc<Kept>>,
    /// It has something in these slots.
    pub(in crate::model) used: Vec<u32>,
    /// A prompt was begun in these, and not finished.
    pub(in crate::model) begun: Vec<u32>,
    /// How long all of it took.
    pub(in crate::model) took: Duration,
}

impl Unpacking {
    /// `None`: there is nothing to do.
    pub(in crate::model) async fn run(self, process: &dyn Process, slots: Option<u32>) -> Option<Unpacked> {
        let bag = lock(&self.luggage).take()?;
        let begun = Instant::now();
        let numbers = warden_policies::defaults().warmth;
        let beside = matches!(bag, Bag::Old(_));
        let patient = beside && !self.urgent;
        let until = clock::after(begun, if patient { numbers.beside } else { numbers.before_gate });
        let until = match self.start {
            Some(start) => until.min(start.checked_sub(SPARE).unwrap_or(begun)).max(begun),
            None => until,
        };
        let parcel = match bag {
            Bag::Parcel(parcel) => parcel,
            Bag::Old(Some(mut packing)) => {
                // It was made when the next one began to load.
                packing.until = clock::after(begun, numbers.before_gate / 2);
                packing.conversations = self.leases.turns.of(self.from);
                Some(Box::new(packing.run().await))
            }
            Bag::Old(None) => None,
        };
        // As they are now: some have come further meanwhile.
        let conversations = self.leases.turns.of(self.from);
        if conversations.is_empty() {
            return None;
        }
        let mut done = Unpacked {
            from: self.from,
            warmth: Warmth { conversations: conversations.len() as u64, ..Warmth::default() },
            warm: Vec::new(),
            restored: Vec::new(),
            used: Vec::new(),
            begun: Vec::new(),
            took: Duration::ZERO,
        };
        if let Some(why) = self.no_file {
            done.warmth.without(why);
        }
        let unpacking = Instant::now();
        if let Some(parcel) = parcel {
            self.restore(process, *parcel, &conversations, (until, beside), &mut done).await;
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
                done.warmth.chill(if kept.turn.has_media { Cold::Media } else { Cold::NotKept }, 1);
                continue;
            };
            let Some(slot) = free.pop() else {
                done.warmth.chill(Cold::Slots, 1);
                continue;
            };
            if !beside {
                done.warmth.later += 1;
                continue;
            }
            let left = self.left(until, beside);
            if left.is_zero() {
                done.warmth.later += 1;
                continue;
            }
            match evaluated(process, kept, request, Some(slot), left).await {
                Touched::Counted(..) => {
                    done.warmth.evaluated += 1;
                    done.warm.push(Arc::clone(kept));
                    done.used.push(slot);
                }
                Touched::Refused => done.warmth.chill(Cold::Refused, 1),
                Touched::Silent => {
                    done.warmth.later += 1;
                    done.begun.push(slot);
                }
            }
        }
        done.warmth.evaluate_ms = clock::millis(evaluating.elapsed());
        done.took = begun.elapsed();
        Some(done)
    }

    /// How much time is left. None while nobody serves any more: then those who wait for this one come first.
    fn left(&self, until: Instant, beside: bool) -> Duration {
        if beside && !self.leases.is_open(self.from) {
            return Duration::ZERO;
        }
        until.saturating_duration_since(Instant::now())
    }

    /// Restores what is in files, the latest conversation last, and looks whether it is used.
    async fn restore(
        &self,
        process: &dyn Process,
        mut parcel: Parcel,
        conversations: &[Arc<Kept>],
        (until, beside): (Instant, bool),
        done: &mut Unpacked,
    ) {
        (done.warmth.bytes, done.warmth.save_ms) = (parcel.bytes, clock::millis(parcel.took));
        if let Some(why) = parcel.no_file {
            done.warmth.without(why);
        }
        let Some(files) = &self.files else {
            done.warmth.without(NoFile::Build);
            return;
        };
        if self.cell.kin.get() != Some(&parcel.kin) {
            done.warmth.without(NoFile::Other);
            return;
        }
        let mut restored = Vec::new();
        for packed in std::mem::take(&mut parcel.slots).into_iter().rev() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                done.warmth.without(NoFile::Time);
                break;
            }
            let tokens = match files.adopt(&parcel.files, &packed.name) {
                Ok(()) => slot_talk::restore(process, packed.slot, &packed.name, left).await.ok(),
                Err(error) => {
                    tracing::warn!(%error, "a slot's file is gone");
                    None
                }
            };
            // It was needed for that alone.
            files.remove(&packed.name);
            if tokens == Some(packed.tokens) {
                done.used.push(packed.slot);
                restored.push(packed);
            } else {
                done.warmth.without(NoFile::Failed);
            }
        }
        // Behind all of them: which slot has which conversation is known by their sizes alone.
        let mut unseen = restored.into_iter();
        let mut use_of = Use::Shown;
        while use_of == Use::Shown
            && let Some(packed) = unseen.next()
        {
            let left = self.left(until, beside);
            use_of = if left.is_zero() {
                done.unseen(packed, conversations);
                Use::Unknown
            } else {
                self.prove(process, packed, conversations, (left, beside), done).await
            };
        }
        if use_of == Use::Unknown {
            // It holds them, and what that is worth shows when they come.
            unseen.for_each(|packed| done.unseen(packed, conversations));
        }
    }

    /// Whether what was restored is used.
    async fn prove(
        &self,
        process: &dyn Process,
        packed: Packed,
        conversations: &[Arc<Kept>],
        (left, beside): (Duration, bool),
        done: &mut Unpacked,
    ) -> Use {
        let Some(kept) = packed.of.clone().filter(|kept| is_known(conversations, kept)) else {
            done.unseen(packed, conversations);
            return Use::Shown;
        };
        let Some(request) = kept.turn.body.clone() else {
            done.unproven(Some(kept));
            return Use::Shown;
        };
        let nobody_waits = beside && !self.urgent;
        let pace = self.leases.turns.pace();
        let patience = warmth::patience(kept.turn.tokens, pace, nobody_waits, self.shows_within).min(left);
        let touched = evaluated(process, &kept, &request, None, patience).await;
        let none_before = done.warmth.carried == 0;
        match touched {
            Touched::Counted(cached, evaluated) if warmth::proof(cached, evaluated) == Proof::Reused => {
                done.warmth.carried += 1;
                done.warm.push(kept);
                Use::Shown
            }
            Touched::Counted(cached, evaluated) => {
                // By that very question it has it now.
                done.warmth.evaluated += 1;
                done.warm.push(kept);
                let told = slot_talk::slots(process, left).await.unwrap_or_default();
                let all = cached + evaluated;
                let holder =
                    told.iter().find(|slot| slot.facts.tokens == Some(all)).map(|slot| slot.facts.id);
                done.not_used(none_before, holder.as_slice());
                if none_before { Use::None } else { Use::Shown }
            }
            // It had no time to show anything, and what it holds may be of use.
            Touched::Silent => {
                done.unproven(Some(kept));
                Use::Unknown
            }
            Touched::Refused => {
                done.unproven(Some(kept));
                Use::Shown
            }
        }
    }
}

/// Whether restored slots are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// The next one is looked at.
    Shown,
    /// They are not, nor will the next one be.
    None,
    /// There was no time to see it.
    Unknown,
}

fn is_known(conversations: &[Arc<Kept>], kept: &Arc<Kept>) -> bool {
    conversations.iter().any(|known| Arc::ptr_eq(known, kept))
}

impl Unpacked {
    /// It was restored, and is not looked at. One that nothing is known of is a conversation more; one that has come further
    /// meanwhile is counted as that.
    fn unseen(&mut self, packed: Packed, conversations: &[Arc<Kept>]) {
        match packed.of {
            None => {
                self.warmth.conversations += 1;
                self.unproven(None);
            }
            Some(kept) if is_known(conversations, &kept) => self.unproven(Some(kept)),
            Some(_) => {}
        }
    }

    /// It was restored, and nothing shows whether that is of use.
    fn unproven(&mut self, kept: Option<Arc<Kept>>) {
        self.warmth.unproven += 1;
        self.restored.extend(kept);
    }

    /// What was restored is not used. That is the model's way, unless another one was.
    /// `holds`: what holds something all the same.
    fn not_used(&mut self, is_way: bool, holds: &[u32]) {
        if is_way {
            self.warmth.without(NoFile::NotReused);
            self.used = holds.to_vec();
        } else {
            self.warmth.without(NoFile::Failed);
            // A conversation may be there that was evaluated just now.
            self.used.extend_from_slice(holds);
        }
    }
}

/// Has a prompt evaluated: with the answer behind it, and where that is refused without.
async fn evaluated(
    process: &dyn Process,
    kept: &Kept,
    request: &[u8],
    slot: Option<u32>,
    left: Duration,
) -> Touched {
    let until = clock::after(Instant::now(), left);
    let mut said = &kept.turn.said;
    loop {
        let Some(body) = touch::body(request, said, slot) else { return Touched::Refused };
        let left = until.saturating_duration_since(Instant::now());
        let touched = slot_talk::touch(process, &kept.turn.path, body, left).await;
        if touched != Touched::Refused || *said == touch::Said::Nothing {
            return touched;
        }
        said = &touch::Said::Nothing;
    }
}
