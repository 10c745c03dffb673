//! Latest conversations of one model, each as its last request with the answer, for warming the next process.
//! They stay in bounded memory and are never logged, because they contain clients' texts.
//!
//! A request continues an earlier one if it contains all its messages (the last one may be edited), or begins
//! with its prompt. It then replaces the earlier one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use warden_policies::{GenerationId, warmth};

use crate::lease::prints::PromptHashes;
use crate::process::conversation_name::ConversationName;
use crate::process::needs::AnswerIdentity;
use crate::process::touch::AnswerText;
use crate::sync::lock;

/// Request with its complete answer.
pub struct ConversationTurn {
    /// Path without a query.
    pub path: String,
    /// Body as sent; `None` if another process cannot use it.
    pub body: Option<Bytes>,
    /// Text of the answer.
    pub said: AnswerText,
    /// Prompt tokens.
    pub prompt: u64,
    /// Tokens of prompt and answer.
    pub tokens: u64,
    /// True if the request has images or sound.
    pub has_media: bool,
    /// Evaluated prompt tokens and their milliseconds, if reported.
    pub prefill: Option<(u64, f64)>,
}

impl std::fmt::Debug for ConversationTurn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.body.as_ref().map(Bytes::len);
        write!(f, "ConversationTurn({}, {bytes:?} bytes, {} tokens)", self.path, self.tokens)
    }
}

#[derive(Debug)]
pub(crate) struct KeptConversation {
    pub(crate) turn: ConversationTurn,
    prints: PromptHashes,
    /// Files of the conversation, if its slot is on disk and it has not been continued since.
    stored_as: Option<StoredAs>,
    /// Names of this conversation and of its earlier versions on disk.
    pub(crate) supersedes: Vec<ConversationName>,
}

/// Files of a conversation on disk.
#[derive(Debug)]
pub(crate) struct StoredAs {
    name: ConversationName,
    /// Identity of the process that saved the slot.
    kin: AnswerIdentity,
    /// True if a process could not use the slot.
    is_useless: AtomicBool,
}

impl StoredAs {
    pub(crate) fn new(name: ConversationName, kin: AnswerIdentity) -> Self {
        Self { name, kin, is_useless: AtomicBool::new(false) }
    }
}

impl KeptConversation {
    /// Keeps the body only if another process can use it.
    pub(crate) fn new(mut turn: ConversationTurn) -> Self {
        let most = warden_policies::defaults().warmth.kept_bytes.0;
        let fits = |body: &&Bytes| body.len() as u64 <= most / 2;
        let prints = turn.body.as_ref().filter(fits).and_then(|body| PromptHashes::from_body(body));
        if prints.is_none() {
            turn.body = None;
        }
        Self { turn, prints: prints.unwrap_or_default(), stored_as: None, supersedes: Vec::new() }
    }

    /// A conversation that was read from disk, where it has this name.
    pub(crate) fn from_disk(
        turn: ConversationTurn,
        stored_as: Option<StoredAs>,
        name: ConversationName,
    ) -> Self {
        Self { stored_as, supersedes: vec![name], ..Self::new(turn) }
    }

    /// True if this conversation continues or repeats the other one.
    pub(crate) fn continues(&self, other: &Self) -> bool {
        self.prints.continues(&other.prints)
    }

    /// Name on disk, if the slot there is of use for a process with this identity.
    pub(crate) fn usable_slot(&self, kin: Option<AnswerIdentity>) -> Option<&ConversationName> {
        let stored = self.stored_as.as_ref()?;
        let is_usable = Some(stored.kin) == kin && !stored.is_useless.load(Ordering::Relaxed);
        is_usable.then_some(&stored.name)
    }

    /// Notes that a process could not use the slot on disk.
    pub(crate) fn note_useless_slot(&self) {
        if let Some(stored) = &self.stored_as {
            stored.is_useless.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        let body = self.turn.body.as_ref().map_or(0, Bytes::len);
        (body + self.turn.said.bytes() + self.prints.bytes()) as u64
    }

    /// Tokens in a slot: an answer's last token is never evaluated.
    pub(crate) fn tokens(&self) -> u64 {
        self.turn.tokens.saturating_sub(1)
    }

    /// True if this turn shows that the slot restored for `old` was not used.
    fn disproves_restore(&self, old: &Self) -> bool {
        let evaluated = self.turn.prefill.map_or(0, |(tokens, _)| tokens);
        self.prints.contains_prompt(&old.prints)
            && warmth::is_useless(old.tokens(), self.turn.prompt, evaluated)
    }
}

#[derive(Debug, Default)]
pub(crate) struct ConversationStore {
    enabled: AtomicBool,
    /// Shortest time per prompt token, in milliseconds as the bits of an `f64`; 0 while unknown.
    pace: AtomicU64,
    /// Conversations, latest first, each with the generation that holds it.
    all: Mutex<VecDeque<(GenerationId, Arc<KeptConversation>)>>,
    restored: Mutex<RestoredSlots>,
}

/// Evidence from clients' requests that restored slots are used.
#[derive(Debug, Default)]
struct RestoredSlots {
    /// Generation that restored slots, its hash (`made_of`), and the conversations; kept until its first
    /// request.
    unproven: Option<(GenerationId, u64, Vec<Arc<KeptConversation>>)>,
    /// Hash (`made_of`) of processes that do not use restored slots.
    unused_by: Option<u64>,
}

/// Speeds of shorter evaluations are not meaningful.
const MIN_TELLING_TOKENS: u64 = 64;

impl ConversationStore {
    /// Enables or disables keeping conversations. Disabling drops them.
    pub(crate) fn set_enabled(&self, keeps: bool) {
        self.enabled.store(keeps, Ordering::Relaxed);
        if !keeps {
            lock(&self.all).clear();
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    pub(crate) fn note_turn(&self, generation: GenerationId, turn: ConversationTurn) {
        let numbers = &warden_policies::defaults().warmth;
        if let Some((tokens, ms)) = turn.prefill.filter(|(tokens, _)| *tokens >= MIN_TELLING_TOKENS) {
            self.note_pace(tokens, ms);
        }
        // A later request may find its slot overwritten, so only the first one is evidence.
        let unproven = lock(&self.restored).unproven.take_if(|(restored_by, ..)| *restored_by == generation);
        if !self.is_enabled() || turn.tokens < numbers.least_tokens {
            return;
        }
        let mut new = KeptConversation::new(turn);
        // The body may be part of a larger buffer that would stay allocated.
        new.turn.body = new.turn.body.map(|body| Bytes::copy_from_slice(&body));
        if let Some((_, made_of, restored)) = unproven
            && restored.iter().any(|old| new.disproves_restore(old))
        {
            lock(&self.restored).unused_by = Some(made_of);
        }
        let mut all = lock(&self.all);
        let mut earlier = Vec::new();
        all.retain(|(_, old)| {
            let is_earlier = new.continues(old);
            if is_earlier {
                earlier.extend(old.supersedes.iter().cloned());
            }
            !is_earlier
        });
        new.supersedes = earlier;
        all.push_front((generation, Arc::new(new)));
        drop_excess(&mut all);
    }

    /// Adds conversations from disk, latest first, behind all others. Newer versions of them are kept.
    pub(crate) fn add_stored(
        &self,
        generation: GenerationId,
        stored: impl IntoIterator<Item = Arc<KeptConversation>>,
    ) {
        if !self.is_enabled() {
            return;
        }
        let mut all = lock(&self.all);
        for old in stored {
            if !all.iter().any(|(_, newer)| newer.continues(&old)) {
                all.push_back((generation, old));
            }
        }
        drop_excess(&mut all);
    }

    pub(crate) fn watch_restored(
        &self,
        generation: GenerationId,
        made_of: u64,
        restored: &[Arc<KeptConversation>],
    ) {
        if !restored.is_empty() {
            lock(&self.restored).unproven = Some((generation, made_of, restored.to_vec()));
        }
    }

    /// True if a request has shown that such processes do not use restored slots.
    pub(crate) fn are_slots_unused_by(&self, made_of: u64) -> bool {
        lock(&self.restored).unused_by == Some(made_of)
    }

    fn note_pace(&self, tokens: u64, ms: f64) {
        let each = ms / warden_policies::units::as_f64(tokens);
        if !(each.is_finite() && each > 0.0) {
            return;
        }
        let known = f64::from_bits(self.pace.load(Ordering::Relaxed));
        if known == 0.0 || each < known {
            self.pace.store(each.to_bits(), Ordering::Relaxed);
        }
    }

    /// Shortest time per prompt token, in milliseconds.
    pub(crate) fn prompt_pace(&self) -> Option<f64> {
        let each = f64::from_bits(self.pace.load(Ordering::Relaxed));
        (each > 0.0).then_some(each)
    }

    /// Estimated time for evaluating the conversations again; zero without a known speed. Older ones are less
    /// likely to be continued, so each counts half as much as the next more recent one.
    pub(crate) fn evaluation_cost(&self) -> Duration {
        let Some(pace) = self.prompt_pace() else { return Duration::ZERO };
        let all = lock(&self.all);
        let (tokens, _) = all.iter().fold((0.0, 1.0), |(sum, share), (_, kept)| {
            (sum + share * warden_policies::units::as_f64(kept.tokens()), share / 2.0)
        });
        Duration::try_from_secs_f64(tokens * pace / 1e3).unwrap_or(Duration::MAX)
    }

    /// Conversations of a generation, latest first.
    pub(crate) fn conversations_of(&self, generation: GenerationId) -> Vec<Arc<KeptConversation>> {
        let all = lock(&self.all);
        all.iter().filter(|(has, _)| *has == generation).map(|(_, kept)| Arc::clone(kept)).collect()
    }

    pub(crate) fn forget_generation(&self, generation: GenerationId) {
        lock(&self.all).retain(|(has, _)| *has != generation);
    }

    /// Assigns conversations to another generation, and drops those that cannot be evaluated again.
    pub(crate) fn move_all(&self, from: GenerationId, to: GenerationId) {
        let mut all = lock(&self.all);
        all.retain(|(has, kept)| *has != from || kept.turn.body.is_some() || kept.stored_as.is_some());
        all.iter_mut().filter(|(has, _)| *has == from).for_each(|(has, _)| *has = to);
    }

    /// Assigns a conversation to another generation, unless the client has continued it.
    pub(crate) fn move_conversation(&self, kept: &Arc<KeptConversation>, to: GenerationId) {
        let mut all = lock(&self.all);
        if let Some((has, _)) = all.iter_mut().find(|(_, known)| Arc::ptr_eq(known, kept)) {
            *has = to;
        }
    }
}

/// Drops the oldest conversations beyond the limits of a model.
fn drop_excess(all: &mut VecDeque<(GenerationId, Arc<KeptConversation>)>) {
    let numbers = &warden_policies::defaults().warmth;
    let mut bytes = 0_u64;
    let mut count = 0;
    all.retain(|(_, one)| {
        bytes = bytes.saturating_add(one.bytes());
        count += 1;
        count <= numbers.conversations && bytes <= numbers.kept_bytes.0
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn turn(body: impl Into<Option<serde_json::Value>>, tokens: u64) -> ConversationTurn {
        ConversationTurn {
            path: "/v1/chat/completions".to_owned(),
            body: body.into().map(|body| body.to_string().into()),
            said: AnswerText::Nothing,
            prompt: tokens,
            tokens,
            has_media: false,
            prefill: None,
        }
    }

    fn chat(messages: &[&str]) -> serde_json::Value {
        let messages: Vec<_> =
            messages.iter().map(|text| json!({ "role": "user", "content": text })).collect();
        json!({ "messages": messages })
    }

    const ONE: GenerationId = GenerationId(1);

    fn kept() -> ConversationStore {
        let turns = ConversationStore::default();
        turns.set_enabled(true);
        turns
    }

    #[test]
    fn a_conversation_is_kept_once_as_far_as_it_has_come() {
        let turns = kept();
        turns.note_turn(ONE, turn(chat(&["be brief", "a"]), 300));
        turns.note_turn(ONE, turn(chat(&["be brief", "b"]), 400));
        turns.note_turn(ONE, turn(chat(&["be brief", "a", "well", "more"]), 500));
        turns.note_turn(ONE, turn(chat(&["be brief", "a", "well", "edited"]), 501));
        turns.note_turn(ONE, turn(chat(&["be brief", "small"]), 255));
        let tokens = |of: &ConversationStore| {
            of.conversations_of(ONE).iter().map(|kept| kept.turn.tokens).collect::<Vec<_>>()
        };
        assert_eq!(tokens(&turns), [501, 400]);
        let prompt = |text: String| json!({ "prompt": text });
        turns.note_turn(ONE, turn(prompt("x".repeat(700)), 600));
        turns.note_turn(ONE, turn(prompt("x".repeat(900)), 700));
        turns.note_turn(ONE, turn(prompt("y".repeat(900)), 800));
        assert_eq!(tokens(&turns), [800, 700, 501, 400]);
        turns.set_enabled(false);
        assert_eq!(tokens(&turns), [0_u64; 0]);
        turns.note_turn(ONE, turn(chat(&["off"]), 900));
        assert_eq!(tokens(&turns), [0_u64; 0]);
    }

    #[test]
    fn what_is_kept_is_bounded_and_belongs_to_a_generation() {
        let turns = kept();
        for n in 0..100 {
            turns.note_turn(ONE, turn(chat(&[&format!("conversation {n}")]), 1000 + n));
        }
        let all = turns.conversations_of(ONE);
        assert_eq!((all.len(), all[0].turn.tokens), (64, 1099));
        turns.move_conversation(&all[3], GenerationId(2));
        assert_eq!(
            (turns.conversations_of(ONE).len(), turns.conversations_of(GenerationId(2)).len()),
            (63, 1)
        );
        turns.forget_generation(GenerationId(2));
        assert_eq!(
            (turns.conversations_of(ONE).len(), turns.conversations_of(GenerationId(2)).len()),
            (63, 0)
        );
        for n in 0..4 {
            turns.note_turn(ONE, turn(chat(&[&format!("{n}{}", "x".repeat(7 << 20))]), 5000 + n));
        }
        assert_eq!(
            turns.conversations_of(ONE).iter().map(|kept| kept.turn.tokens).collect::<Vec<_>>(),
            [5003, 5002]
        );
        turns.note_turn(ONE, turn(chat(&[&"x".repeat(9 << 20)]), 9000));
        assert!(turns.conversations_of(ONE)[0].turn.body.is_none(), "too large to be kept, but known");
        let shown = format!("{:?}", turns.conversations_of(ONE));
        assert!(!shown.contains("xxx"), "nothing of a text is shown");
    }

    #[test]
    fn the_first_request_after_a_restore_shows_whether_it_is_of_use() {
        let shows = |first: ConversationTurn, generation: GenerationId| {
            let turns = kept();
            turns.note_turn(ONE, turn(chat(&["a"]), 1000));
            turns.watch_restored(GenerationId(2), 7, &turns.conversations_of(ONE));
            turns.note_turn(generation, first);
            let next = ConversationTurn { prefill: Some((1100, 1.0)), ..turn(chat(&["a", "b", "c"]), 1100) };
            turns.note_turn(GenerationId(2), next);
            assert!(!turns.are_slots_unused_by(8));
            turns.are_slots_unused_by(7)
        };
        let second = GenerationId(2);
        let of_all =
            |messages: &[&str]| ConversationTurn { prefill: Some((1100, 1.0)), ..turn(chat(messages), 1100) };
        assert!(shows(of_all(&["a", "b", "c"]), second));
        assert!(shows(of_all(&["other"]), ONE), "a request to another process");
        assert!(!shows(of_all(&["other"]), second), "it may have taken the slot");
        assert!(!shows(turn(chat(&["small"]), 5), second));
        let few = ConversationTurn { prefill: Some((100, 1.0)), ..turn(chat(&["a", "b", "c"]), 1100) };
        assert!(!shows(few, second));
    }

    #[test]
    fn the_best_speed_of_prompts_is_known() {
        let turns = kept();
        assert_eq!(turns.prompt_pace(), None);
        for prefill in [(10, 1.0), (100, 400.0), (200, 100.0), (100, f64::NAN), (100, 300.0)] {
            turns.note_turn(ONE, ConversationTurn { prefill: Some(prefill), ..turn(None, 1) });
        }
        assert_eq!((turns.prompt_pace(), turns.evaluation_cost()), (Some(0.5), Duration::ZERO));
        turns.note_turn(ONE, turn(chat(&["a"]), 1001));
        turns.note_turn(ONE, turn(chat(&["b"]), 2001));
        assert_eq!(
            turns.evaluation_cost(),
            Duration::from_millis(1250),
            "the earlier one is half as likely to go on"
        );
    }
}
