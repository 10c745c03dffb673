//! State carried over in a replacement, so that a conversation's next turn need not evaluate its whole
//! prompt.
//!
//! ```text
//!   conversations, latest first ---+
//!   slots of the old process ------+--> order: slots to save --> files --> restored in the new process
//!   room and time -----------------+                                                  |
//!                                                     proof: tokens counted as cached by the new process
//!                                                        | most of it      | nothing, or there is no file
//!                                                     carried           evaluated: before or after the
//!                                                                       gate opens, or never
//! ```
//!
//! A successful restore proves nothing: with sliding windows or recurrent state a server reports success
//! and evaluates the prompt anyway. Only the server's count of cached tokens is proof ([`classify_proof`]).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::named::named_enum;
use crate::units::{ByteSize, as_f64, scale_bytes, truncate_to_u64};

/// State of a slot of the old process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotFacts {
    /// Number of the slot.
    pub id: u32,
    /// The slot is computing, so it can be saved only after its request has ended.
    pub busy: bool,
    /// Tokens that the slot holds; `None` if the build does not report them.
    pub tokens: Option<u64>,
    /// Number of the slot's last task; later tasks have greater numbers. `None` if not reported.
    pub task: Option<u64>,
}

/// Largest difference between the token counts of a slot and its conversation: end tokens differ.
const TOKEN_SLACK: u64 = 2;

/// Returns the idle slots worth saving, slots with the latest conversation first. `conversations`: token
/// count of each conversation, latest first; `least`: least tokens of a slot worth saving. If two slots may
/// hold the same conversation, the slot with the later task is preferred.
pub fn slots_to_save(slots: &[SlotFacts], conversations: &[u64], least: u64) -> Vec<u32> {
    let idle = slots.iter().filter(|slot| !slot.busy && slot.tokens.is_none_or(|tokens| tokens >= least));
    let rank = |slot: &SlotFacts| {
        let place =
            slot.tokens.and_then(|tokens| conversations.iter().position(|all| is_same_length(*all, tokens)));
        (place.unwrap_or(usize::MAX), Reverse(slot.task), slot.id)
    };
    let mut idle: Vec<&SlotFacts> = idle.collect();
    idle.sort_by_key(|slot| rank(slot));
    idle.iter().map(|slot| slot.id).collect()
}

/// Returns the index of the latest conversation, not in `taken`, that a slot with this many tokens may hold.
pub fn conversation_of(tokens: u64, conversations: &[u64], taken: &[usize]) -> Option<usize> {
    let mut all = conversations.iter().enumerate().filter(|(index, _)| !taken.contains(index));
    all.find(|(_, known)| is_same_length(**known, tokens)).map(|(index, _)| index)
}

fn is_same_length(conversation: u64, slot: u64) -> bool {
    conversation.abs_diff(slot) <= TOKEN_SLACK
}

/// Remaining room for slot files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileRoom {
    left: u64,
    /// Bytes that the disk has room for.
    on_disk: u64,
    /// Bytes per token of the last file; before the first file, an assumed value for large models.
    per_token: f64,
    /// True if the first file may be written wherever the disk has room at the assumed size.
    is_first_allowed: bool,
}

/// Assumed bytes per token before any file was written: 80 layers with 8 heads of 128 in f16 take 320 KiB. A
/// value that is too low could fill the disk.
const ASSUMED_TOKEN_BYTES: f64 = 512.0 * 1024.0;

impl FileRoom {
    /// Creates room for at most `bytes`, and at most this share of the free space, if known.
    pub fn new(bytes: u64, free: Option<u64>, share: f64) -> Self {
        let of_free = free.map_or(u64::MAX, |free| scale_bytes(free, share));
        let left = bytes.min(of_free);
        Self { left, on_disk: of_free, per_token: ASSUMED_TOKEN_BYTES, is_first_allowed: false }
    }

    /// Allows the first file wherever the disk has room at the assumed size per token, which is too large for
    /// most models. The file is kept only if it fits.
    pub const fn allow_first_file(&mut self) {
        self.is_first_allowed = true;
    }

    /// Returns true if the file of a slot with this many tokens fits; false if the number is unknown.
    pub fn has(&self, tokens: Option<u64>) -> bool {
        let left = if self.is_first_allowed { self.on_disk } else { self.left };
        tokens.is_some_and(|tokens| scale_bytes(tokens, self.per_token) <= left)
    }

    /// Records a written file. Returns false if the file does not fit and must be deleted.
    pub fn record_file(&mut self, tokens: u64, bytes: u64) -> bool {
        self.is_first_allowed = false;
        if tokens > 0 {
            self.per_token = as_f64(bytes) / as_f64(tokens);
        }
        let fits = bytes <= self.left;
        self.left -= if fits { bytes } else { 0 };
        fits
    }
}

/// Delay in milliseconds that clients do not notice: a file written within this time is always worthwhile.
const UNNOTICEABLE_MS: f64 = 100.0;

/// Returns true if carrying tokens in a file that took `save_ms` to write is cheaper than evaluating them.
/// Reading the file is assumed to take as long as writing it.
pub fn is_worthwhile(tokens: u64, save_ms: f64, per_token_ms: Option<f64>) -> bool {
    save_ms <= UNNOTICEABLE_MS || per_token_ms.is_none_or(|each| 2.0 * save_ms <= as_f64(tokens) * each)
}

/// Result of sending a prompt that a server should have in its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheProof {
    /// Most of the prompt was cached.
    Reused,
    /// The prompt was evaluated, and is cached now.
    Evaluated,
}

/// Tokens that may be evaluated although the cache works: the end of a prompt may be tokenised differently.
const SEAM_TOKENS: u64 = 16;

/// Classifies a result by the counts of cached and evaluated tokens in the answer.
pub fn classify_proof(cached: u64, evaluated: u64) -> CacheProof {
    let all = cached.saturating_add(evaluated);
    if cached > 0 && evaluated <= SEAM_TOKENS.max(all / 10) {
        CacheProof::Reused
    } else {
        CacheProof::Evaluated
    }
}

/// Returns the time limit for a server to show that it has a prompt of `tokens` cached: `least` if clients
/// wait, else long enough to evaluate the prompt.
pub fn proof_timeout(
    tokens: u64,
    per_token_ms: Option<f64>,
    nobody_waits: bool,
    least: Duration,
) -> Duration {
    if !nobody_waits {
        // A cached prompt of any length costs one token; a longer limit would only allow an evaluation.
        return least;
    }
    let whole = per_token_ms.map_or(0.0, |each| as_f64(tokens) * each / 1000.0);
    Duration::try_from_secs_f64(whole * 1.5).map_or(least, |share| share.max(least))
}

/// Returns true if the next turn shows that a restored slot was useless. `held`: tokens in that slot;
/// `prompt`: tokens of the turn's prompt; `evaluated`: tokens that were not cached.
pub const fn is_useless(held: u64, prompt: u64, evaluated: u64) -> bool {
    // A server chooses the slot most similar to the prompt: for a much longer prompt, perhaps another slot.
    let is_taken = held.saturating_mul(2) >= prompt;
    // Add 1 for the token that begins every prompt, which may be cached in any case.
    is_taken && prompt > 0 && evaluated.saturating_add(1) >= prompt
}

/// Size of the prompt pieces evaluated after the gate has opened; a new request waits at most for one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptPieces {
    size: u64,
    time: Duration,
}

impl PromptPieces {
    /// Creates a size for pieces that take about this time.
    pub const fn new(time: Duration) -> Self {
        Self { size: Self::FIRST, time }
    }

    /// Number of tokens of the first piece, and least number of any piece.
    const FIRST: u64 = 32;

    /// Returns the number of tokens of the next piece.
    pub const fn size(self) -> u64 {
        self.size
    }

    /// Records the time of a piece. The next piece is at most four times as large: the speed may be wrong.
    pub fn record_time(&mut self, tokens: u64, time: Duration) {
        let fits = as_f64(tokens) * self.time.as_secs_f64() / time.as_secs_f64().max(1e-6);
        self.size = truncate_to_u64(fits).clamp(Self::FIRST, self.size.saturating_mul(4));
    }
}

/// Reason why slots were not carried by files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoFileReason {
    /// Files are switched off with `warm_bytes = 0`.
    Off,
    /// The build is not known to support saving slots.
    Build,
    /// A slot does not report the adapters (`LoRA`) used for its content.
    Adapters,
    /// The file does not contain the draft model's state.
    Draft,
    /// The next process has other settings, or they are unknown.
    Other,
    /// The files do not fit into `warm_bytes` or on the disk.
    Room,
    /// Evaluating the prompts again is cheaper.
    Dearer,
    /// The time limit was reached.
    Time,
    /// The server refused to save, or wrote a wrong file.
    Failed,
    /// The slots were empty: with a unified KV cache, llama-server moves idle slots' content away.
    Empty,
    /// The next process did not use the restored content, because of sliding windows or recurrent state.
    NotReused,
}

impl NoFileReason {
    /// Returns the reason in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Off => "`warm_bytes` is 0",
            Self::Build => "the build is not known to save slots",
            Self::Adapters => "a slot does not say with which adapters it was computed",
            Self::Draft => "the state of the draft model would be missing",
            Self::Other => "the next process has another build or model",
            Self::Room => "slot files had no room within `warm_bytes` or on the disk",
            Self::Dearer => "slot files took longer than evaluating",
            Self::Time => "there was no time for slot files",
            Self::Failed => "slots could not be saved or restored",
            Self::Empty => "idle slots were empty (unified KV cache)",
            Self::NotReused => "restored slots were not used (sliding windows or recurrent state)",
        }
    }
}

named_enum! {
    /// Reason why a conversation is cold (not cached) in the next process.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ColdReason {
        /// The conversation has images or sound, and no file carried it.
        Media = "media",
        /// The request was not kept: it was too large, or requests of its route or kind are not kept.
        NotKept = "not_kept",
        /// The time limit was reached.
        Time = "time",
        /// The next process refused the conversation's request.
        Refused = "refused",
        /// There are more conversations than slots.
        Slots = "slots",
    }
}

impl ColdReason {
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

/// Result for the conversations of a replaced process. Each conversation counts once.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WarmthReport {
    /// Number of conversations of the old process.
    pub conversations: u64,
    /// Number of conversations carried by files and proven to be cached.
    pub carried: u64,
    /// Number of conversations that the next process evaluated again.
    pub evaluated: u64,
    /// Number of conversations to be evaluated after the gate has opened, when nothing else runs.
    pub later: u64,
    /// Number of restored conversations without evidence so far that the content is used.
    pub unproven: u64,
    /// Number of cold conversations by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cold: BTreeMap<ColdReason, u64>,
    /// Reason why slots were not carried by files; `None` if all were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_file: Option<NoFileReason>,
    /// Total size of the files in bytes.
    pub bytes: u64,
    /// Milliseconds spent saving slots.
    pub save_ms: u64,
    /// Milliseconds spent restoring slots and proving their use, before the next process got requests.
    pub restore_ms: u64,
    /// Milliseconds spent evaluating prompts.
    pub evaluate_ms: u64,
}

impl WarmthReport {
    /// Counts cold conversations.
    pub fn count_cold(&mut self, cold: ColdReason, count: u64) {
        if count > 0 {
            *self.cold.entry(cold).or_default() += count;
        }
    }

    /// Adds the results of evaluations that took place after the gate had opened.
    pub fn add_later(&mut self, behind: &Self) {
        self.later = 0;
        // Conversations that were active at the switch and returned to the old process were not yet counted.
        let known = self.carried + self.evaluated + self.unproven + self.cold.values().sum::<u64>();
        let due = self.conversations.saturating_sub(known);
        self.conversations += behind.conversations.saturating_sub(due);
        self.evaluated += behind.evaluated;
        self.evaluate_ms += behind.evaluate_ms;
        for (cold, count) in &behind.cold {
            self.count_cold(*cold, *count);
        }
        // Clients continued the remaining conversations before their evaluation, so these count as cold.
        let known = self.carried + self.evaluated + self.unproven + self.cold.values().sum::<u64>();
        self.count_cold(ColdReason::Time, self.conversations.saturating_sub(known));
    }

    /// Returns the number of warm conversations.
    pub fn warm_count(&self) -> u64 {
        self.carried + self.evaluated
    }

    /// Records the reason for a missing file; an earlier reason is kept.
    pub fn record_no_file(&mut self, why: NoFileReason) {
        self.no_file = self.no_file.or(Some(why));
    }
}

impl std::fmt::Display for WarmthReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "warm: {} of {}", self.warm_count(), self.conversations)?;
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
