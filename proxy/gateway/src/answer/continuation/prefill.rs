//! Continues a text on another server by sending it as the beginning of the assistant message. Pure.
//!
//! ```text
//!   the request, for one token                               P prompt tokens
//!   the request, its last message the text, for one token    P + T prompt tokens, P of them cached
//!   the second request, with a larger token limit             the text once more, then its continuation
//! ```
//!
//! For routes that do not report the rendered prompt, and for chats with tools. The next server's own route
//! renders the prompt, so the request's sampling, tools and templates apply to the rest, too. Older builds
//! begin another message after the text and report more than P + T tokens. A server that treats the text in
//! another way does not report P cached tokens. Another model would pass these checks, so the next server
//! must have the same command, binary and files.
//!
//! The server must repeat the text in its answer. The gateway compares the repetition byte by byte, so the
//! blanks between text and rest are right: chat parsers of older builds strip blanks at the beginning of the
//! rest.

use serde_json::{Map, Value, json};
use warden_policies::units::{as_f64, scale_bytes};

use super::repeat::PromptShift;
use super::request::{NoContinuationReason, body_bytes, check_stateless, is_greedy, settings_unknown};
use super::said::AnswerBeginning;
use super::short_chat;
use super::spelling;
use super::tool_call::PartialCall;
use super::transcript::{AnswerStage, AnswerTranscript};
use crate::answer::AnswerFormat;

/// Members that limit the length of an answer, over all routes.
const LIMIT_MEMBERS: [&str; 4] = ["max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens"];

/// Maximum growth of a prompt per step; llama-server reuses a slot that shares a tenth of the prompt.
const STEP_GROWTH: u64 = 4;

const DEFAULT_MESSAGE_TOKENS: u64 = 4096;

/// Members that restrict the form of an answer, or need a sampling state that the next process lacks.
const STATEFUL_MEMBERS: [&str; 10] = [
    "grammar",
    "mirostat",
    "adaptive_target",
    "t_max_predict_ms",
    "continue_final_message",
    "add_generation_prompt",
    "echo",
    "text",
    "previous_response_id",
    "functions",
];

/// Members with the format of an answer, which llama-server makes into a grammar.
const FORMAT_MEMBERS: [&str; 2] = ["json_schema", "response_format"];

/// A request and the client's part of its answer.
#[derive(Debug)]
pub(super) struct PrefillContinuation {
    kind: AnswerFormat,
    body: Map<String, Value>,
    /// Everything that the client has.
    pub(super) all: String,
    /// Thought before the text.
    reasoning: String,
    /// Generated text so far. For a tool call, empty until [`Self::set_call_text`].
    pub(super) text: String,
    call: Option<PartialCall>,
    must_call: bool,
    has_format: bool,
}

/// Counters and text of an answer of one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PrefillCounts {
    pub(super) prompt: u64,
    cached: u64,
    text: String,
}

impl PrefillContinuation {
    /// Reads the whole body as the dead server got it. The error says why this method is impossible.
    pub(super) fn from_body(heard: &AnswerTranscript, body: &[u8]) -> Result<Self, NoContinuationReason> {
        let kind = heard.kind;
        let why = |why: &str| Err(why.to_owned());
        if !matches!(kind, AnswerFormat::Chat | AnswerFormat::Messages | AnswerFormat::Responses) {
            return why("its route has no messages");
        }
        let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
            return why("the request is no JSON object");
        };
        if heard.stage != AnswerStage::Unfinished {
            return why("only its final counters are missing");
        }
        let Some(AnswerBeginning { reasoning, text, call }) = heard.beginning() else {
            return why("it is more than one thought, one text and one tool call that has begun");
        };
        if body.get("cache_prompt") == Some(&Value::Bool(false)) {
            return why("it sets `cache_prompt` to false");
        }
        let all = heard.decode_string();
        if all.contains('\u{FFFD}') || spelling::has_turn_marks(all) {
            return why("its text would be tokenized differently as the beginning of a message");
        }
        let said = |name: &&&str| body.get(**name).is_some_and(|value| !is_unset(value));
        if let Some(name) = STATEFUL_MEMBERS.iter().find(said) {
            return Err(format!("it asks for `{name}`"));
        }
        let has_format = FORMAT_MEMBERS.iter().any(|name| said(&name));
        if has_format && kind != AnswerFormat::Chat {
            return why("its route does not show the grammar of its format");
        }
        let choice = body.get("tool_choice").unwrap_or(&Value::Null);
        let chosen = choice["type"].as_str().or(choice.as_str());
        let must_call = matches!(chosen, Some("required" | "any" | "tool"));
        if !choice.is_null() && !must_call && !matches!(chosen, Some("auto" | "none")) {
            return why("it names the tool to call");
        }
        let turns = match kind {
            AnswerFormat::Responses => "input",
            _ => "messages",
        };
        match body.get(turns) {
            Some(Value::String(_)) if kind == AnswerFormat::Responses => {}
            Some(Value::Array(turns)) if turns.iter().all(has_only_texts) => {
                if turns.last().is_none_or(|last| last["role"] == "assistant") {
                    return why("its last message is the beginning of the answer");
                }
            }
            _ => return why("its messages have more than text"),
        }
        let odd =
            |name: &&&str| body.get(**name).is_some_and(|limit| !limit.is_null() && limit.as_i64().is_none());
        if let Some(name) = LIMIT_MEMBERS.iter().find(odd) {
            return Err(format!("`{name}` is no number of tokens"));
        }
        // Templates write the end of a thought in a line of its own.
        let is_over = call.is_some() || !text.is_empty();
        let reasoning = if is_over { reasoning.trim_ascii_end() } else { reasoning }.to_owned();
        let call = call.map(|call| PartialCall::from_beginning(text, call));
        let text = if call.is_some() { String::new() } else { text.to_owned() };
        Ok(Self { kind, body, all: all.to_owned(), reasoning, text, call, must_call, has_format })
    }

    /// Builds the request that reports how a call begins, if the answer breaks off in a call.
    pub(super) fn trigger_request(&self) -> Option<Result<Vec<u8>, NoContinuationReason>> {
        self.call.as_ref().map(|call| call.trigger_request(self.kind, &self.body))
    }

    /// Builds the request for a short call of the same tool.
    pub(super) fn short_call_request(&self, trigger: &str) -> Result<Vec<u8>, NoContinuationReason> {
        let call = self.call.as_ref().ok_or_else(|| "it calls no tool".to_owned())?;
        call.short_call_request(self.kind, &self.body, trigger)
    }

    /// Sets the generated text of a call, by the answer to [`Self::short_call_request`]. From now on, requests
    /// require a call: the grammar of an optional call would start only at the beginning of a call.
    pub(super) fn set_call_text(&mut self, trigger: &str, answer: &[u8]) -> Result<(), NoContinuationReason> {
        let Some(call) = &self.call else { return Ok(()) };
        self.text = call.generated_text(trigger, answer)?;
        let required = match self.kind {
            AnswerFormat::Messages => json!({ "type": "any" }),
            _ => json!("required"),
        };
        self.body.insert("tool_choice".to_owned(), required);
        self.must_call = true;
        Ok(())
    }

    /// Builds the request that shows the grammar of the answer, if it must have a format or a tool call.
    pub(super) fn grammar_request(&self) -> Option<Vec<u8>> {
        let is_shaped = self.must_call || self.has_format;
        is_shaped
            .then(|| short_chat::grammar_request(self.kind, &self.body, &self.chat_turn(), self.must_call))
    }

    /// Returns the last part of the generated text: the thought, if nothing else follows it yet.
    pub(super) fn last_text(&self) -> &str {
        if self.text.is_empty() { &self.reasoning } else { &self.text }
    }

    /// Builds the request that shows whether the build repeats the beginning of an answer. `None` if the text
    /// of `tokens` tokens itself shows it: one token cannot spell two or more.
    pub(super) fn echo_request(tokens: u64) -> Option<Vec<u8>> {
        (tokens < 2).then(short_chat::echo_request)
    }

    /// Builds pairs of requests for rendered prompts, of a chat without and with the beginning of its answer:
    /// of a short chat and, if the route shows its prompts, of the client's own.
    pub(super) fn template_requests(&self) -> Vec<[Vec<u8>; 2]> {
        let turn = self.chat_turn();
        let short = [None, Some(&turn)]
            .map(|turn| body_bytes(short_chat::rendered_chat(self.kind, &self.body, "a", turn)));
        let mut pairs = vec![short];
        if self.kind == AnswerFormat::Chat {
            pairs.push([body_bytes(self.body.clone()), body_bytes(self.body_with_text(&self.text))]);
        }
        pairs
    }

    /// Returns whether these two prompts differ only in the beginning of the answer.
    pub(super) fn is_appended(&self, prompt: &str, continued: &str) -> bool {
        let is_thought = self.text.is_empty();
        let reasoning = if is_thought { "" } else { &self.reasoning };
        short_chat::is_appended(prompt, continued, reasoning, self.last_text())
    }

    /// Returns whether the answer is only a text without special tokens.
    pub(super) fn is_plain_text(&self) -> bool {
        self.reasoning.is_empty() && self.call.is_none() && !spelling::has_marks(&self.text)
    }

    fn chat_turn(&self) -> Value {
        self.chat_turn_with(&self.text)
    }

    fn chat_turn_with(&self, text: &str) -> Value {
        let mut turn = json!({ "role": "assistant", "content": text });
        if !self.reasoning.is_empty() {
            turn["reasoning_content"] = json!(self.reasoning);
        }
        turn
    }

    /// Builds the request for one token, without the client's text.
    pub(super) fn first_request(&self) -> Vec<u8> {
        body_bytes(self.limit_to_one_token(self.body.clone()))
    }

    /// Returns growing prefixes of the text, the last being the whole text. A server with several slots picks
    /// the slot that holds enough of the prompt, so a text of `tokens` tokens after `prompt` prompt tokens is
    /// sent in steps small enough for the same slot.
    pub(super) fn text_steps(&self, prompt: u64, tokens: u64) -> Vec<&str> {
        let all = self.text.len();
        let mut held = prompt.max(1);
        let mut steps = Vec::new();
        loop {
            let next = held.saturating_mul(STEP_GROWTH).saturating_sub(prompt);
            if next >= tokens {
                break;
            }
            // The text is cut after a word, where no token crosses the cut.
            let end = scale_bytes(all as u64, as_f64(next) / as_f64(tokens));
            let end = usize::try_from(end).unwrap_or(all).min(all);
            let begun = steps.last().map_or(0, |step: &&str| step.len());
            let blank = self.text.as_bytes()[..end].iter().rposition(|byte| *byte == b' ');
            match blank.filter(|blank| *blank > begun).and_then(|blank| self.text.get(..blank)) {
                Some(step) => steps.push(step),
                None => break,
            }
            held = prompt + next;
        }
        steps.push(&self.text);
        steps
    }

    /// Builds the request for one token after an assistant message that begins with `text`.
    pub(super) fn second_request(&self, text: &str) -> Vec<u8> {
        body_bytes(self.limit_to_one_token(self.body_with_text(text)))
    }

    /// Builds the request for the rest after `had` tokens. `own` is the server's default token limit.
    pub(super) fn rest_request(&self, had: u64, own: Option<u64>) -> Result<Vec<u8>, NoContinuationReason> {
        let mut body = self.body_with_text(&self.text);
        let left = |most: u64| most.checked_sub(had).filter(|left| *left > 0);
        let full = || "it has reached its token limit".to_owned();
        let mut is_limited = false;
        for name in LIMIT_MEMBERS {
            let Some(limit) = body.get_mut(name).filter(|limit| !limit.is_null()) else { continue };
            let Some(most) = limit.as_i64().and_then(|most| u64::try_from(most).ok()) else { continue };
            *limit = json!(left(most).ok_or_else(full)?);
            is_limited = true;
        }
        // A default limit would count the tokens of the rest from zero.
        let of_route = (self.kind == AnswerFormat::Messages).then_some(DEFAULT_MESSAGE_TOKENS);
        if !is_limited && let Some(most) = [own, of_route].into_iter().flatten().min() {
            let name = if self.kind == AnswerFormat::Responses { "max_output_tokens" } else { "max_tokens" };
            body.insert(name.to_owned(), json!(left(most).ok_or_else(full)?));
        }
        body.insert("stream".to_owned(), json!(true));
        Ok(body_bytes(body))
    }

    /// Builds a request whose answer reports the server's default settings.
    pub(super) fn settings_request() -> Vec<u8> {
        json!({ "prompt": "a", "n_predict": 1, "stream": false }).to_string().into_bytes()
    }

    /// Returns whether the same request gets the same answer each time, by the answer to
    /// [`Self::settings_request`]. The error names a setting with a state that the next process lacks.
    pub(super) fn is_greedy(answer: &[u8]) -> Result<bool, NoContinuationReason> {
        let told: Value = serde_json::from_slice(answer).unwrap_or_default();
        let settings = &told["generation_settings"];
        if !settings.is_object() {
            return Err(settings_unknown());
        }
        check_stateless(settings, &["grammar"])?;
        Ok(is_greedy(AnswerFormat::Native, answer).unwrap_or(false))
    }

    pub(super) fn read_counts(&self, answer: &[u8]) -> Result<PrefillCounts, NoContinuationReason> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        let usage = &answer["usage"];
        let (prompt, cached) = match self.kind {
            AnswerFormat::Messages => {
                let cached = usage["cache_read_input_tokens"].as_u64();
                (usage["input_tokens"].as_u64().zip(cached).map(|(new, cached)| new + cached), cached)
            }
            AnswerFormat::Responses => {
                (usage["input_tokens"].as_u64(), usage["input_tokens_details"]["cached_tokens"].as_u64())
            }
            _ => (usage["prompt_tokens"].as_u64(), usage["prompt_tokens_details"]["cached_tokens"].as_u64()),
        };
        let (Some(prompt), Some(cached)) = (prompt, cached) else {
            return Err("its build does not report cached prompt tokens".to_owned());
        };
        let text = match self.kind {
            AnswerFormat::Chat => content_text(&answer["choices"][0]["message"]["content"]),
            AnswerFormat::Messages => content_text(&answer["content"]),
            _ => answer["output"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|item| content_text(&item["content"]))
                .collect(),
        };
        Ok(PrefillCounts { prompt, cached, text })
    }

    /// Checks that the server continues after `text`, a prefix of `tokens` tokens of the client's text.
    /// `first` has the counters without the text, `before` those with the previous, shorter prefix.
    pub(super) fn check_continues(
        &self,
        first: &PrefillCounts,
        before: Option<&PrefillCounts>,
        now: &PrefillCounts,
        (text, tokens): (&str, u64),
    ) -> Result<(), NoContinuationReason> {
        // The one generated token may be cached, too, if it is the next token of the text. The last token of
        // a prefix may differ from the token at this position in a longer prefix.
        let known = match before {
            None => first.prompt..=first.prompt + 1,
            Some(before) => before.prompt.saturating_sub(2)..=before.prompt + 1,
        };
        if !known.contains(&now.cached) {
            return Err("the prompt is no longer cached".to_owned());
        }
        // One token cannot spell two or more, so a server that returns the text has repeated it.
        if tokens < 2 {
            return Err(not_repeated_reason());
        }
        self.check_appended(first, now, (text, tokens))
    }

    /// Checks that the server continues after `text`, which its template appends to the prompt.
    pub(super) fn check_appended(
        &self,
        first: &PrefillCounts,
        now: &PrefillCounts,
        (text, tokens): (&str, u64),
    ) -> Result<(), NoContinuationReason> {
        if now.prompt != first.prompt + tokens {
            return Err("its build does not continue after a text".to_owned());
        }
        // A thought or call is compared when its rest arrives.
        let is_text = self.reasoning.is_empty() && self.call.is_none();
        if is_text && !now.text.starts_with(text) {
            return Err(not_repeated_reason());
        }
        Ok(())
    }

    /// Returns the correction of the counters of an answer whose first `tokens` tokens were in the prompt.
    pub(super) fn prompt_shift(first: &PrefillCounts, tokens: u64) -> PromptShift {
        PromptShift { tokens, evaluated: first.prompt.saturating_sub(first.cached) }
    }

    fn body_with_text(&self, text: &str) -> Map<String, Value> {
        let mut body = self.body.clone();
        let thought = &self.reasoning;
        if self.kind == AnswerFormat::Responses {
            let before = body.shift_remove("input").unwrap_or_default();
            let mut turns = match before {
                Value::Array(turns) => turns,
                one => vec![json!({ "role": "user", "content": one })],
            };
            if !thought.is_empty() {
                let content = json!([{ "type": "reasoning_text", "text": thought }]);
                turns.push(json!({ "type": "reasoning", "id": "rs_0", "summary": [], "content": content }));
            }
            if !text.is_empty() {
                let content = json!([{ "type": "output_text", "text": text }]);
                turns.push(json!({ "type": "message", "role": "assistant", "content": content }));
            }
            body.insert("input".to_owned(), Value::Array(turns));
        } else if let Some(Value::Array(turns)) = body.get_mut("messages") {
            turns.push(match self.kind {
                AnswerFormat::Messages if !thought.is_empty() => {
                    let mut content = vec![json!({ "type": "thinking", "thinking": thought })];
                    if !text.is_empty() {
                        content.push(json!({ "type": "text", "text": text }));
                    }
                    json!({ "role": "assistant", "content": content })
                }
                AnswerFormat::Messages => json!({ "role": "assistant", "content": text }),
                _ => self.chat_turn_with(text),
            });
        }
        body
    }

    fn limit_to_one_token(&self, mut body: Map<String, Value>) -> Map<String, Value> {
        for name in LIMIT_MEMBERS.iter().chain(&["stream_options", "return_progress", "timings_per_token"]) {
            body.shift_remove(*name);
        }
        let limit = if self.kind == AnswerFormat::Responses { "max_output_tokens" } else { "max_tokens" };
        body.insert(limit.to_owned(), json!(1));
        body.insert("stream".to_owned(), json!(false));
        body
    }
}

pub(super) fn not_repeated_reason() -> NoContinuationReason {
    "its build does not repeat the text that it continues".to_owned()
}

fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        // Values of OpenAI's `response_format` and `text` that leave the answer unrestricted.
        Value::Object(format) => format.iter().all(|(name, value)| match name.as_str() {
            "type" => *value == "text",
            "format" => is_unset(value),
            _ => false,
        }),
        Value::Bool(true) => false,
    }
}

/// Returns whether a message has only texts, tool calls and tool results.
fn has_only_texts(turn: &Value) -> bool {
    let is_known = |part: &Value| match part["type"].as_str() {
        Some("text" | "input_text" | "output_text" | "tool_use" | "thinking") => true,
        Some("tool_result") => match &part["content"] {
            Value::Array(parts) => parts.iter().all(|part| part["type"] == "text"),
            _ => true,
        },
        _ => false,
    };
    match &turn["content"] {
        Value::Array(parts) => parts.iter().all(is_known),
        Value::String(_) | Value::Null => true,
        _ => false,
    }
}

fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
