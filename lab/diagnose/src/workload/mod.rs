//! Turns a workload into requests, step by step.
//!
//! The first step is the largest of its kind, so that its buffers exist before the first reading. Later sizes
//! are in random order, the same for every run, so that growth with size differs from growth with time.

pub(crate) mod media;
mod text;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use warden_experiment::Workload;
use warden_policies::defaults::Diagnose;
use warden_policies::world::SplitMix;

pub(crate) use self::text::{SAMPLE_WORDS, TextGenerator};
use crate::client::{LabAnswer, LabRequest};
use crate::error::DiagnoseError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerLimits {
    pub(crate) slots: u32,
    pub(crate) n_ctx: Option<u64>,
    pub(crate) tokens_per_word: f64,
}

impl ServerLimits {
    /// Limits a prompt to the tokens that fit together with the answer.
    pub(crate) fn limit_prompt(self, tokens: u64, answer: u64) -> u64 {
        let room = self.n_ctx.map(|context| context.saturating_sub(answer + TEMPLATE_TOKENS));
        room.map_or(tokens, |room| tokens.min(room.max(1)))
    }
}

#[derive(Debug)]
pub(crate) struct WorkloadScript {
    workload: Workload,
    numbers: Diagnose,
    facts: ServerLimits,
    words: TextGenerator,
    order: SplitMix,
    step: u64,
    conversations: Vec<GrowingConversation>,
    pictures: Vec<String>,
    clip: Option<String>,
}

/// Tokens that a chat template adds to a prompt, estimated generously.
const TEMPLATE_TOKENS: u64 = 96;

impl WorkloadScript {
    pub(crate) fn new(
        workload: Workload,
        numbers: &Diagnose,
        facts: ServerLimits,
    ) -> Result<Self, DiagnoseError> {
        let sizes: &[(u32, u32)] = match workload {
            Workload::SameImage => std::slice::from_ref(&numbers.image),
            Workload::ImageSizes => &numbers.images,
            _ => &[],
        };
        let mut sizes = sizes.to_vec();
        sizes.sort_by_key(|(width, height)| std::cmp::Reverse(u64::from(*width) * u64::from(*height)));
        let pictures = sizes.iter().map(|(width, height)| media::picture_url(*width, *height));
        let slots = facts.slots.clamp(1, numbers.conversations.max(1));
        let conversations = match workload {
            Workload::Conversation => {
                (0..slots).map(|slot| GrowingConversation::new(u64::from(slot))).collect()
            }
            _ => Vec::new(),
        };
        Ok(Self {
            workload,
            facts,
            words: TextGenerator::new(facts.tokens_per_word),
            order: SplitMix::new(7),
            step: 0,
            conversations,
            pictures: pictures.collect::<Result<_, DiagnoseError>>()?,
            clip: (workload == Workload::Audio)
                .then(|| STANDARD.encode(media::make_wav(numbers.audio_seconds))),
            numbers: numbers.clone(),
        })
    }

    /// Returns the requests of the next step, to be sent concurrently.
    pub(crate) fn next(&mut self) -> Vec<LabRequest> {
        let step = self.step;
        self.step += 1;
        let numbers = &self.numbers;
        let one = match self.workload {
            Workload::ShortText => self.chat_request(0, numbers.short_prompt, numbers.answer),
            Workload::LongText => self.chat_request(0, numbers.long_prompt, numbers.answer),
            Workload::DistinctPrompts => self.chat_request(step + 1, numbers.distinct_prompt, numbers.answer),
            Workload::OutputLengths => {
                let tokens = largest_first(&numbers.answers, step, &mut self.order).unwrap_or(numbers.answer);
                self.chat_request(0, numbers.short_prompt, tokens)
            }
            Workload::PrefillSweep => {
                let context = self.facts.n_ctx.unwrap_or(numbers.long_prompt);
                let most = numbers.sweep_most.min(context);
                let sizes: Vec<u64> = numbers
                    .sweep
                    .iter()
                    .map(|share| warden_policies::units::scale_bytes(most, *share).max(numbers.short_prompt))
                    .collect();
                let tokens = largest_first(&sizes, step, &mut self.order).unwrap_or(most);
                self.chat_request(step + 1, tokens, 1)
            }
            Workload::SameImage | Workload::ImageSizes => self.picture_request(step),
            Workload::Audio => self.audio_request(step),
            Workload::Embeddings => {
                let sizes = [8, 4, 2, 1].map(|part| numbers.distinct_prompt / 2 / part);
                let tokens = largest_first(&sizes, step, &mut self.order).unwrap_or(numbers.short_prompt);
                let input = self.words.text(step + 1, self.facts.limit_prompt(tokens, 0));
                LabRequest::post("/v1/embeddings", json!({ "input": input }))
            }
            Workload::Conversation => return self.conversation_requests(),
        };
        vec![one]
    }

    pub(crate) fn take_answers(&mut self, answers: &[Option<LabAnswer>]) {
        for (conversation, answer) in self.conversations.iter_mut().zip(answers) {
            conversation.add_answer(answer.as_ref());
        }
    }

    /// Returns a chat request with text number `which`.
    fn chat_request(&self, which: u64, tokens: u64, answer: u64) -> LabRequest {
        let text = self.words.text(which, self.facts.limit_prompt(tokens, answer));
        LabRequest::post(CHAT_PATH, chat_body(&json!([{ "role": "user", "content": text }]), answer))
    }

    fn picture_request(&mut self, step: u64) -> LabRequest {
        let which: Vec<usize> = (0..self.pictures.len()).collect();
        let picture = match step {
            0 => 0,
            _ => usize::try_from(self.order.below(u64::try_from(which.len()).unwrap_or(1))).unwrap_or(0),
        };
        // A new text before the image prevents an answer from the prompt cache.
        let text = self.words.text(step + 1, self.numbers.short_prompt / 4);
        let url = self.pictures.get(picture).cloned().unwrap_or_default();
        let content = json!([
            { "type": "text", "text": text },
            { "type": "image_url", "image_url": { "url": url } },
            { "type": "text", "text": "What is in this picture?" },
        ]);
        let body = chat_body(&json!([{ "role": "user", "content": content }]), self.numbers.image_answer);
        LabRequest { images: 1, ..LabRequest::post(CHAT_PATH, body) }
    }

    fn audio_request(&self, step: u64) -> LabRequest {
        let text = self.words.text(step + 1, self.numbers.short_prompt / 4);
        let data = self.clip.clone().unwrap_or_default();
        let content = json!([
            { "type": "text", "text": text },
            { "type": "input_audio", "input_audio": { "data": data, "format": "wav" } },
        ]);
        let body = chat_body(&json!([{ "role": "user", "content": content }]), self.numbers.answer);
        LabRequest { audio: 1, ..LabRequest::post(CHAT_PATH, body) }
    }

    fn conversation_requests(&mut self) -> Vec<LabRequest> {
        let numbers = &self.numbers;
        let words = self.words;
        let room = self.facts.n_ctx.map(|context| context.saturating_sub(TEMPLATE_TOKENS));
        let next = |conversation: &mut GrowingConversation| {
            let messages = conversation.next_turn(words, numbers, room);
            LabRequest::post(CHAT_PATH, chat_body(&messages, numbers.answer))
        };
        self.conversations.iter_mut().map(next).collect()
    }
}

const CHAT_PATH: &str = "/v1/chat/completions";

/// Returns the body of a streamed chat whose answer has exactly `answer` tokens.
fn chat_body(messages: &Value, answer: u64) -> Value {
    json!({
        "messages": messages,
        "max_tokens": answer,
        "ignore_eos": true,
        "temperature": 0,
        "seed": 1,
        "stream": true,
        "stream_options": { "include_usage": true },
    })
}

/// Returns the largest size for the first step, then random sizes.
fn largest_first(sizes: &[u64], step: u64, order: &mut SplitMix) -> Option<u64> {
    if step == 0 {
        return sizes.iter().copied().max();
    }
    let which = order.below(u64::try_from(sizes.len()).ok()?);
    sizes.get(usize::try_from(which).ok()?).copied()
}

/// Conversation that grows turn by turn, and starts over when it is long enough.
#[derive(Debug)]
struct GrowingConversation {
    slot: u64,
    messages: Vec<Value>,
    turns: u64,
    /// Turns so far, restarts included; the number makes texts distinct.
    turn_count: u64,
    tokens: u64,
}

impl GrowingConversation {
    fn new(slot: u64) -> Self {
        Self { slot, messages: Vec::new(), turns: 0, turn_count: 0, tokens: 0 }
    }

    /// Returns the messages of the next turn. `room` is the number of tokens that fit.
    fn next_turn(&mut self, words: TextGenerator, numbers: &Diagnose, room: Option<u64>) -> Value {
        let next = self.tokens + numbers.turn + numbers.answer;
        if self.turns >= numbers.turns || room.is_some_and(|room| next > room) {
            self.messages.clear();
            self.turns = 0;
            self.tokens = 0;
        }
        self.turn_count += 1;
        self.turns += 1;
        let text = words.text(self.slot << 32 | self.turn_count, numbers.turn);
        self.messages.push(json!({ "role": "user", "content": text }));
        self.tokens += numbers.turn + numbers.answer;
        Value::Array(self.messages.clone())
    }

    /// Without an answer the conversation starts over.
    fn add_answer(&mut self, answer: Option<&LabAnswer>) {
        let Some(answer) = answer else {
            self.turns = u64::MAX;
            return;
        };
        self.tokens = self.tokens.max(answer.prompt_size + answer.output_tokens);
        self.messages.push(json!({ "role": "assistant", "content": answer.text }));
    }
}

#[cfg(test)]
mod tests;
