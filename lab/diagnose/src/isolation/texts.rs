//! Texts of the conversations: lists of random words, and questions that all conversations share.
//!
//! A conversation begins with a list of labelled random words, its secret, which it repeats several times. Each
//! turn begins a line of the list, the same line in all conversations. Even a small trained model continues
//! such a line with the words of the secret that it has in memory, with near certainty, so its answers to
//! different conversations are whole nats apart. A list that stands there once was not enough: on a GPU,
//! SmolLM2's answers to different conversations differed little more than those to one conversation
//! (0.25 and 0.2 nats). The log probabilities of random models depend on the secret, too.

use std::collections::BTreeMap;

use serde_json::json;
use warden_experiment::isolation::{CONVERSATION_TURNS, PromptPlace};
use warden_policies::world::SplitMix;

use crate::client::LabRequest;
use crate::workload::{ServerLimits, TextGenerator};

/// Labels of the lines of a secret. Each turn asks for one, in this order.
const ASKED_LABELS: [u64; CONVERSATION_TURNS] = [7, 3, 10, 5];
/// Number of times that a secret repeats its lines; half of it if the context is small.
const REPETITIONS: u64 = 4;
/// Tokens of a secret: a few hundred, so that it is saved to a prompt cache and restored.
const SECRET_TOKENS: u64 = 240;
/// Tokens of a label, estimated generously.
const LABEL_TOKENS: u64 = 5;
/// Tokens of an answer. The first ones show the content; of later ones, several are often nearly as likely, and
/// on a GPU their probabilities change most with the batch.
const ANSWER_TOKENS: u64 = 2;
/// Text number of the beginning that every other conversation shares, as a system prompt.
const SHARED_TEXT: u64 = 0x5EED;

#[derive(Clone, Debug)]
pub(super) struct ConversationTexts {
    words: TextGenerator,
    seed: u64,
    secret: u64,
    /// Answers that are part of the conversations.
    said: BTreeMap<PromptPlace, String>,
}

impl ConversationTexts {
    pub(super) fn new(facts: ServerLimits, seed: u64) -> Self {
        let turns = u64::try_from(CONVERSATION_TURNS).unwrap_or(0);
        let rest = turns * (ANSWER_TOKENS + LABEL_TOKENS);
        // Half of the context, because tokens are known only to within some percent.
        let room = facts.n_ctx.map_or(SECRET_TOKENS, |context| context.saturating_sub(rest) / 2);
        let words = TextGenerator::new(facts.tokens_per_word);
        Self { words, seed, secret: SECRET_TOKENS.min(room), said: BTreeMap::new() }
    }

    /// Keeps the first answer to a prompt, which later turns contain.
    pub(super) fn add_answer(&mut self, place: PromptPlace, text: &str) {
        self.said.entry(place).or_insert_with(|| text.to_owned());
    }

    pub(super) fn prompt(&self, place: PromptPlace) -> String {
        let mut text = self.secret_text(place.conversation);
        for turn in 0..=place.turn {
            text.extend([format!("item {}:", ASKED_LABELS[turn % CONVERSATION_TURNS])]);
            if turn < place.turn {
                let answer = self.said.get(&PromptPlace { turn, ..place });
                text.extend([answer.map_or("", String::as_str), "\n"]);
            }
        }
        text
    }

    fn secret_text(&self, conversation: usize) -> String {
        let own = u64::try_from(conversation).unwrap_or(u64::MAX);
        let mut random = SplitMix::new(self.seed ^ own.wrapping_mul(0x9E37_79B9));
        let mut text = String::new();
        if conversation % 2 == 1 {
            text.extend([self.words.text(SHARED_TEXT, self.secret / 4).as_str(), "\n"]);
        }
        let repetitions = if self.secret < SECRET_TOKENS { REPETITIONS / 2 } else { REPETITIONS };
        let lines = repetitions * u64::try_from(CONVERSATION_TURNS).unwrap_or(1);
        let tokens = (self.secret / lines).saturating_sub(LABEL_TOKENS);
        let list: String = ASKED_LABELS
            .map(|label| format!("item {label}: {}\n", self.words.text(random.bits(), tokens)))
            .concat();
        for _ in 0..repetitions {
            text.push_str(&list);
        }
        text
    }
}

/// Returns a request for the likeliest tokens after a prompt. `reuses`: the server may use cached prompts.
pub(super) fn request(prompt: &str, top: u32, reuses: bool) -> LabRequest {
    let body = json!({
        "prompt": prompt,
        "n_predict": ANSWER_TOKENS,
        // An answer that ends at once would show nothing.
        "ignore_eos": true,
        "temperature": 0,
        "seed": 1,
        "cache_prompt": reuses,
        "n_probs": top,
    });
    LabRequest::post("/completion", body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_differ_in_their_secret_and_end_alike() {
        let facts = ServerLimits { slots: 4, n_ctx: None, tokens_per_word: 1.33 };
        let mut texts = ConversationTexts::new(facts, 1);
        let place = |conversation, turn| PromptPlace { conversation, turn };
        texts.add_answer(place(0, 0), " one");
        texts.add_answer(place(0, 0), " two");
        let (first, second) = (texts.prompt(place(0, 0)), texts.prompt(place(0, 1)));
        assert_eq!(second, format!("{first} one\nitem 3:"));
        let other = texts.prompt(place(2, 0));
        assert!(first.ends_with("\nitem 7:") && other.ends_with("\nitem 7:"));
        let shared = first.chars().zip(other.chars()).take_while(|(one, other)| one == other).count();
        assert!(shared * 10 < first.len(), "{shared} of {}", first.len());
        // A system prompt is common to every other conversation.
        let shared = |one: &str, other: &str| one.lines().next() == other.lines().next();
        assert!(shared(&texts.prompt(place(1, 0)), &texts.prompt(place(3, 0))));
        assert!(!shared(&texts.prompt(place(1, 0)), &first));
    }

    #[test]
    fn a_secret_fits_into_a_small_context() {
        let words = |n_ctx| {
            let facts = ServerLimits { slots: 1, n_ctx, tokens_per_word: 1.0 };
            ConversationTexts::new(facts, 1).prompt(PromptPlace::default()).split_whitespace().count()
        };
        assert!(words(Some(256)) < 200 && words(Some(256)) > 60);
        assert!(words(None) > 180 && words(None) < 300);
    }
}
