//! What goes along when a process is replaced, so that the next turn of a conversation need not evaluate all of its prompt again,
//! and what became of it.
//!
//! ```text
//!   conversations, latest first ---+
//!   slots of the old process ------+--> order: which slots to save --> files --> restored in the new one
//!   room and time -----------------+                                                  |
//!                                                     proof: what did the new one count as cached?
//!                                                        | most of it      | nothing, or there is no file
//!                                                      carried        evaluated: before the gate, behind it, or not at all
//! ```
//!
//! That a server says it has restored a slot proves nothing: with sliding windows or recurrent state it says so, and evaluates the
//! prompt all the same. Only what it counts as cached does ([`proof`]).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::units::{ByteSize, exact, scale, whole};

/// What is known of a slot of the process that goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotFacts {
    /// Its number.
    pub id: u32,
    /// It computes: who wants to save it waits until it has ended.
    pub busy: bool,
    /// Tokens that it holds; `None` where the build does not tell.
    pub tokens: Option<u64>,
    /// Its last task: later ones have greater numbers. `None` where the build does not tell, or there was none.
    pub task: Option<u64>,
}

/// A slot may hold so many tokens more or fewer than prompt and answer have together: the last token of an answer is not in it, and
/// builds count those that end an answer differently.
const SLACK: u64 = 2;

/// Which slots are worth saving, the one with the latest conversation first. `conversations`: tokens of each, latest first. Slots
/// of which nothing is known come last. Of two that may have the same one, that with the later task has the later one.
pub fn order(slots: &[SlotFacts], conversations: &[u64], least: u64) -> Vec<u32> {
    let idle = slots.iter().filter(|slot| !slot.busy && slot.tokens.is_none_or(|tokens| tokens >= least));
    let rank = |slot: &SlotFacts| {
        let place = slot.tokens.and_then(|tokens| conversations.iter().position(|all| is_same(*all, tokens)));
        (place.unwrap_or(usize::MAX), Reverse(slot.task), slot.id)
    };
    let mut idle: Vec<&SlotFacts> = idle.collect();
    idle.sort_by_key(|slot| rank(slot));
    idle.iter().map(|slot| slot.id).collect()
}

/// The latest conversation that a slot of so many tokens may hold, of those that are not `taken`.
pub fn conversation_of(tokens: u64, conversations: &[u64], taken: &[usize]) -> Option<usize> {
    let mut all = conversations.iter().enumerate().filter(|(index, _)| !taken.contains(index));
    all.find(|(_, known)| is_same(**known, tokens)).map(|(index, _)| index)
}

fn is_same(conversation: u64, slot: u64) -> bool {
    conversation.abs_diff(slot) <= SLACK
}

/// The room that files have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    left: u64,
    /// Bytes of a token: what the last file showed, and before the first one what large models take.
    per_token: f64,
}

/// Bytes of a token before any file was seen: 80 layers with 8 heads of 128 in f16 take 320 KiB. Too much costs a file that is not
/// written, too little could fill what the directory lies in.
const ASSUMED: f64 = 512.0 * 1024.0;

impl Room {
    /// At most `bytes`, and that share of what is free; `None`: that is not known.
    pub fn new(bytes: u64, free: Option<u64>, share: f64) -> Self {
        let of_free = free.map_or(u64::MAX, |free| scale(free, share));
        Self { left: bytes.min(of_free), per_token: ASSUMED }
    }

    /// Whether there is room for a slot of so many tokens. Of one whose size nobody knows it cannot be told: none.
    pub fn has(&self, tokens: Option<u64>) -> bool {
        tokens.is_some_and(|tokens| scale(tokens, self.per_token) <= self.left)
    }

    /// A file of this size was written. False: it has no room, and must go.
    pub fn take(&mut self, tokens: u64, bytes: u64) -> bool {
        if tokens > 0 {
            self.per_token = exact(bytes) / exact(tokens);
        }
        let fits = bytes <= self.left;
        self.left -= if fits { bytes } else { 0 };
        fits
    }
}

/// Milliseconds that nobody notices: no file is too dear that took less.
const UNNOTICED: f64 = 100.0;

/// Whether carrying so many tokens by a file that took `save_ms` to write is cheaper than evaluating them at so many milliseconds a
/// token. Reading takes as long as writing did.
pub fn pays(tokens: u64, save_ms: f64, per_token_ms: Option<f64>) -> bool {
    save_ms <= UNNOTICED || per_token_ms.is_none_or(|each| 2.0 * save_ms <= exact(tokens) * each)
}

/// What a server did with a prompt that it should have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// It had most of it.
    Reused,
    /// It evaluated it, and has it now.
    Evaluated,
}

/// Tokens that may be evaluated although nearly all was there: the seam between prompt and answer may be spelled otherwise.
const SEAM: u64 = 16;

/// By what its answer counts.
pub fn proof(cached: u64, evaluated: u64) -> Proof {
    let all = cached.saturating_add(evaluated);
    if cached > 0 && evaluated <= SEAM.max(all / 10) { Proof::Reused } else { Proof::Evaluated }
}

/// Time limit for a server to show that it has a prompt of so many tokens, at so many milliseconds a token. Where
/// clients wait for that, `least`, which is long enough for a busy machine; where no client waits, long enough to
/// evaluate the prompt.
pub fn patience(tokens: u64, per_token_ms: Option<f64>, nobody_waits: bool, least: Duration) -> Duration {
    if !nobody_waits {
        // A prompt that is there costs one token, however long it is: clients would wait longer for nothing but an
        // evaluation.
        return least;
    }
    let whole = per_token_ms.map_or(0.0, |each| exact(tokens) * each / 1000.0);
    Duration::try_from_secs_f64(whole * 1.5).map_or(least, |share| share.max(least))
}

/// Whether the next turn of a conversation shows that its restored slot is of no use. `held`: tokens in that slot.
/// `prompt`, `evaluated`: tokens of the turn's prompt, and how many of them were evaluated.
pub const fn is_of_no_use(held: u64, prompt: u64, evaluated: u64) -> bool {
    // A server takes the slot whose contents are most like the prompt. For a prompt that is much longer than the
    // slot's contents it may have taken another one.
    let is_taken = held.saturating_mul(2) >= prompt;
    // The token that begins every prompt may be there all the same.
    is_taken && prompt > 0 && evaluated.saturating_add(1) >= prompt
}

/// How much of a prompt is evaluated at a time behind the gate, where whoever comes waits for the end of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    size: u64,
    time: Duration,
}

impl Pieces {
    /// Each is to take about this long.
    pub const fn new(time: Duration) -> Self {
        Self { size: Self::FIRST, time }
    }

    /// Tokens of the first one, and the fewest of any.
    const FIRST: u64 = 32;

    /// Tokens of the next one.
    pub const fn size(self) -> u64 {
        self.size
    }

    /// So many tokens took so long. The next one grows no more than fourfold: the speed may have been a guess.
    pub fn took(&mut self, tokens: u64, time: Duration) {
        let fits = exact(tokens) * self.time.as_secs_f64() / time.as_secs_f64().max(1e-6);
        self.size = whole(fits).clamp(Self::FIRST, self.size.saturating_mul(4));
    }
}

/// Why slots were not carried by files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoFile {
    /// `warm_bytes = 0`.
    Off,
    /// The build is not known to save slots.
    Build,
    /// A slot does not say with which adapters its contents were computed.
    Adapters,
    /// The state of a draft model is not in the file.
    Draft,
    /// The next process is made of something else, or that is not known.
    Other,
    /// They have no room within `warm_bytes`, or on the disk.
    Room,
    /// Evaluating is cheaper.
    Dearer,
    /// There was no time.
    Time,
    /// The server refused, or wrote something else.
    Failed,
    /// The slots were empty: with a unified KV cache idle ones are moved away.
    Empty,
    /// The next process did not use what it had restored: sliding windows, or recurrent state.
    NotReused,
}

impl NoFile {
    /// In words, as the reason why.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Off => "`warm_bytes` is 0",
            Self::Build => "the build is not known to save slots",
            Self::Adapters => "a slot does not say with which adapters it was computed",
            Self::Draft => "the state of the draft model would be missing",
            Self::Other => "the next process is made of something else",
            Self::Room => "slot files had no room within `warm_bytes` or on the disk",
            Self::Dearer => "slot files took longer than evaluating",
            Self::Time => "there was no time for slot files",
            Self::Failed => "slots could not be saved or restored",
            Self::Empty => "idle slots were empty (unified KV cache)",
            Self::NotReused => "restored slots were not used (sliding windows or recurrent state)",
        }
    }
}

/// Why a conversation is cold in the next process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cold {
    /// It has images or sound, and no file carried it.
    Media,
    /// Its request was not kept: too large, by a route whose requests are not kept, or in a manner that forbids it.
    NotKept,
    /// There was no time.
    Time,
    /// The next process refused its request.
    Refused,
    /// There are more conversations than slots.
    Slots,
}

impl Cold {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Media, Self::NotKept, Self::Time, Self::Refused, Self::Slots];

    /// The name in the ledger and in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Media => "media",
            Self::NotKept => "not_kept",
            Self::Time => "time",
            Self::Refused => "refused",
            Self::Slots => "slots",
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Media => "with images or sound",
            Self::NotKept => "whose requests are not kept",
            Self::Time => "for lack of time",
            Self::Refused => "refused by the next process",
            Self::Slots => "beyond the number of slots",
        }
    }
}

/// What became of the conversations of a process that was replaced. Each is counted once: as carried, evaluated, due later,
/// unproven or cold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Warmth {
    /// Conversations that the old process had.
    pub conversations: u64,
    /// The next one has them from files, and counted them as cached.
    pub carried: u64,
    /// The next one has evaluated them again.
    pub evaluated: u64,
    /// They are evaluated behind the gate, when nothing else runs.
    pub later: u64,
    /// Restored, and nothing showed whether that is of use.
    pub unproven: u64,
    /// Those that begin anew, by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cold: BTreeMap<Cold, u64>,
    /// Why slots were not carried by files, if not all were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_file: Option<NoFile>,
    /// Bytes of files.
    pub bytes: u64,
    /// Milliseconds that saving took.
    pub save_ms: u64,
    /// Milliseconds that restoring and proving took, while the next process was not yet used.
    pub restore_ms: u64,
    /// Milliseconds that evaluating took.
    pub evaluate_ms: u64,
}

impl Warmth {
    /// Counts conversations that begin anew.
    pub fn chill(&mut self, cold: Cold, count: u64) {
        if count > 0 {
            *self.cold.entry(cold).or_default() += count;
        }
    }

    /// What was due is done.
    pub fn settle(&mut self, behind: &Self) {
        self.later = 0;
        // What was in use at the switch and went to the old process once more was not known to be due.
        let known = self.carried + self.evaluated + self.unproven + self.cold.values().sum::<u64>();
        let due = self.conversations.saturating_sub(known);
        self.conversations += behind.conversations.saturating_sub(due);
        self.evaluated += behind.evaluated;
        self.evaluate_ms += behind.evaluate_ms;
        for (cold, count) in &behind.cold {
            self.chill(*cold, *count);
        }
        // The others have come by themselves, and paid for it.
        let known = self.carried + self.evaluated + self.unproven + self.cold.values().sum::<u64>();
        self.chill(Cold::Time, self.conversations.saturating_sub(known));
    }

    /// What is warm.
    pub fn warm(&self) -> u64 {
        self.carried + self.evaluated
    }

    /// Notes why there was no file; what was first stays.
    pub fn without(&mut self, why: NoFile) {
        self.no_file = self.no_file.or(Some(why));
    }
}

impl std::fmt::Display for Warmth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "warm: {} of {}", self.warm(), self.conversations)?;
        if self.evaluated > 0 {
            write!(f, ", {} re-evaluated", self.evaluated)?;
        }
        if self.later > 0 {
            write!(f, ", {} to be evaluated behind the gate", self.later)?;
        }
        if self.unproven > 0 {
            write!(f, ", {} restored and not proven", self.unproven)?;
        }
        for (cold, count) in &self.cold {
            write!(f, ", {count} cold {}", cold.words())?;
        }
        if self.bytes > 0 {
            write!(f, "; {} in files", ByteSize(self.bytes))?;
        }
        if let Some(why) = self.no_file.filter(|_| self.carried < self.conversations) {
            write!(f, "; {}", why.words())?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "warmth_tests.rs"]
mod tests;
