//! A conversation that grows turn by turn, and starts over when it is long enough.

use serde_json::{Value, json};
use warden_policies::defaults::Diagnose;

use super::text::TextGenerator;
use crate::client::LabAnswer;

#[derive(Debug)]
pub(super) struct GrowingConversation {
    /// Index among concurrent conversations.
    slot: u64,
    messages: Vec<Value>,
    turns: u64,
    /// Number of turns so far, which makes their texts distinct.
    turn_count: u64,
    tokens: u64,
}

impl GrowingConversation {
    pub(super) fn new(slot: u64) -> Self {
        Self { slot, messages: Vec::new(), turns: 0, turn_count: 0, tokens: 0 }
    }

    /// The messages of the next turn. `room`: tokens that fit.
    pub(super) fn next_turn(&mut self, words: TextGenerator, numbers: &Diagnose, room: Option<u64>) -> Value {
        let next = self.tokens + numbers.turn + numbers.answer;
        if self.turns >= numbers.turns || room.is_some_and(|room| next > room) {
            self.messages.clear();
            (self.turns, self.tokens) = (0, 0);
        }
        self.turn_count += 1;
        self.turns += 1;
        let text = words.text(self.slot << 32 | self.turn_count, numbers.turn);
        self.messages.push(json!({ "role": "user", "content": text }));
        self.tokens += numbers.turn + numbers.answer;
        Value::Array(self.messages.clone())
    }

    /// Adds the answer; without one the conversation starts over.
    pub(super) fn add_answer(&mut self, answer: Option<&LabAnswer>) {
        let Some(answer) = answer else {
            self.turns = u64::MAX;
            return;
        };
        self.tokens = self.tokens.max(answer.prompt_size + answer.output_tokens);
        self.messages.push(json!({ "role": "assistant", "content": answer.text }));
    }
}
