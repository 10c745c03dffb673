//! A text that another server goes on with, as the beginning of the answer's own message. Pure.
//!
//! ```text
//!   the request, for one token                               P tokens of prompt
//!   the request, its last message the text, for one token    P + T tokens of prompt, P of them known already
//!   the same, for the rest                                    the text once more, and what is behind it
//! ```
//!
//! It is the way of those routes that do not tell what is made of their prompts, and of chats with tools: the next server's own
//! reader of the route makes the prompt, so all that the request says of drawing, tools and templates holds for the rest, too. A server
//! that would begin another message behind the text (older builds do) has more tokens than P + T, and one that makes anything else
//! of the beginning does not know P of them. Another model would go on as well, so the next server has to be made of the same.
//!
//! Only servers that say the text again are asked for the rest: what they say is compared to the letter, and what comes behind it has
//! the blanks that belong there. Readers of older builds take away blanks with which the rest begins.

use serde_json::{Map, Value, json};
use warden_policies::units::{exact, scale};

use super::repeat::Shift;
use super::request::{Why, bytes, has_no_state, is_greedy, untold};
use super::spelling;
use super::transcript::{Stage, Transcript};
use crate::answer::assemble::Kind;

/// Members that limit an answer, by their routes.
const LIMITS: [&str; 4] = ["max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens"];

/// A slot is found again by a tenth of a prompt, if nothing else is said.
const GROWTH: u64 = 4;

/// Tokens of a message whose request names no end.
const MESSAGE: u64 = 4096;

/// What gives an answer a shape, or a state that the next process does not have.
const STATES: [&str; 12] = [
    "grammar",
    "json_schema",
    "response_format",
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

/// A request, and what its client has of the answer.
#[derive(Debug)]
pub(super) struct Prefill {
    kind: Kind,
    body: Map<String, Value>,
    pub(super) text: String,
}

/// What a server said of a request for one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counted {
    /// Tokens of the prompt.
    pub(super) prompt: u64,
    /// Those of them that it knew already.
    cached: u64,
    text: String,
}

impl Prefill {
    /// Of a whole body, as it went to the server that died. Else, why it cannot go on like this.
    pub(super) fn of(heard: &Transcript, body: &[u8]) -> Result<Self, Why> {
        let kind = heard.kind();
        let why = |why: &str| Err(why.to_owned());
        if !matches!(kind, Kind::Chat | Kind::Messages | Kind::Responses) {
            return why("its route has no messages");
        }
        let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
            return why("the request is no JSON object");
        };
        if heard.stage() != Stage::Going {
            return why("its counters are what it lacks");
        }
        let Some(text) = heard.one_text() else {
            return why("it has more than one text");
        };
        if body.get("cache_prompt") == Some(&Value::Bool(false)) {
            return why("it wants nothing of its prompt to be known");
        }
        if text.is_empty() || text.contains('\u{FFFD}') || spelling::has_marks(text) {
            return why("its text would be spelled otherwise as the beginning of a message");
        }
        let said = |name: &&&str| body.get(**name).is_some_and(|value| !is_nothing(value));
        if let Some(name) = STATES.iter().find(said) {
            return Err(format!("it asks for `{name}`"));
        }
        let choice = body.get("tool_choice").unwrap_or(&Value::Null);
        let chosen = choice["type"].as_str().or(choice.as_str());
        if !choice.is_null() && !matches!(chosen, Some("auto" | "none")) {
            return why("it has to call a tool");
        }
        let turns = match kind {
            Kind::Responses => "input",
            _ => "messages",
        };
        match body.get(turns) {
            Some(Value::String(_)) if kind == Kind::Responses => {}
            Some(Value::Array(turns)) if turns.iter().all(is_of_texts) => {
                if turns.last().is_none_or(|last| last["role"] == "assistant") {
                    return why("its last message is the beginning of the answer");
                }
            }
            _ => return why("its messages have more than text"),
        }
        let odd =
            |name: &&&str| body.get(**name).is_some_and(|limit| !limit.is_null() && limit.as_i64().is_none());
        if let Some(name) = LIMITS.iter().find(odd) {
            return Err(format!("`{name}` is no number of tokens"));
        }
        Ok(Self { kind, body, text: text.to_owned() })
    }

    /// The request, for one token.
    pub(super) fn first(&self) -> Vec<u8> {
        bytes(self.of_one(self.body.clone()))
    }

    /// Beginnings of the text, the last of which is all of it. A server with several slots looks for the one that holds a good part of
    /// a prompt: behind a prompt of so many tokens, a text of so many is shown to it in steps that are no larger than that.
    pub(super) fn steps(&self, prompt: u64, tokens: u64) -> Vec<&str> {
        let all = self.text.len();
        let (mut held, mut steps) = (prompt.max(1), Vec::new());
        loop {
            let next = held.saturating_mul(GROWTH).saturating_sub(prompt);
            if next >= tokens {
                break;
            }
            // In bytes; behind a word, where no token goes on.
            let end = scale(all as u64, exact(next) / exact(tokens));
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

    /// The request with a beginning of the text as the beginning of the answer, for one token.
    pub(super) fn second(&self, text: &str) -> Vec<u8> {
        bytes(self.of_one(self.begun(text)))
    }

    /// The same for the rest, of an answer of which the client has so many tokens. `own`: where a request names no end, its server ends an
    /// answer behind as many.
    pub(super) fn rest(&self, had: u64, own: Option<u64>) -> Result<Vec<u8>, Why> {
        let mut body = self.begun(&self.text);
        let left = |most: u64| most.checked_sub(had).filter(|left| *left > 0);
        let full = || "it is as long as it may be".to_owned();
        let mut is_limited = false;
        for name in LIMITS {
            let Some(limit) = body.get_mut(name).filter(|limit| !limit.is_null()) else { continue };
            let Some(most) = limit.as_i64().and_then(|most| u64::try_from(most).ok()) else { continue };
            *limit = json!(left(most).ok_or_else(full)?);
            is_limited = true;
        }
        // Such an end would begin to count anew.
        let of_route = (self.kind == Kind::Messages).then_some(MESSAGE);
        if let Some(most) = [own, of_route].into_iter().flatten().min().filter(|_| !is_limited) {
            let name = if self.kind == Kind::Responses { "max_output_tokens" } else { "max_tokens" };
            body.insert(name.to_owned(), json!(left(most).ok_or_else(full)?));
        }
        body.insert("stream".to_owned(), json!(true));
        Ok(bytes(body))
    }

    /// Asks with which settings a server computes where nothing is said.
    pub(super) fn settings() -> Vec<u8> {
        json!({ "prompt": "a", "n_predict": 1, "stream": false }).to_string().into_bytes()
    }

    /// Whether the same request has the same answer each time, by the answer to [`Self::settings`]. Else, which of the settings has a
    /// state that the next process does not have.
    pub(super) fn is_greedy(answer: &[u8]) -> Result<bool, Why> {
        let told: Value = serde_json::from_slice(answer).unwrap_or_default();
        let settings = &told["generation_settings"];
        if !settings.is_object() {
            return Err(untold());
        }
        has_no_state(settings, &["grammar"])?;
        Ok(is_greedy(Kind::Native, answer).unwrap_or(false))
    }

    /// What a server said to one of the requests for one token.
    pub(super) fn counted(&self, answer: &[u8]) -> Result<Counted, Why> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        let usage = &answer["usage"];
        let (prompt, cached) = match self.kind {
            Kind::Messages => {
                let cached = usage["cache_read_input_tokens"].as_u64();
                (usage["input_tokens"].as_u64().zip(cached).map(|(new, cached)| new + cached), cached)
            }
            Kind::Responses => {
                (usage["input_tokens"].as_u64(), usage["input_tokens_details"]["cached_tokens"].as_u64())
            }
            _ => (usage["prompt_tokens"].as_u64(), usage["prompt_tokens_details"]["cached_tokens"].as_u64()),
        };
        let (Some(prompt), Some(cached)) = (prompt, cached) else {
            return Err("its build does not tell what it knew of a prompt".to_owned());
        };
        let text = match self.kind {
            Kind::Chat => text_of(&answer["choices"][0]["message"]["content"]),
            Kind::Messages => text_of(&answer["content"]),
            _ => answer["output"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|item| text_of(&item["content"]))
                .collect(),
        };
        Ok(Counted { prompt, cached, text })
    }

    /// Whether an answer shows that its server goes on behind a beginning of the text, which has so many tokens. `first`: what it said to the
    /// request without; `before`: to the one with the beginning before this one, if there is one.
    pub(super) fn shows(
        first: &Counted,
        before: Option<&Counted>,
        now: &Counted,
        (text, tokens): (&str, u64),
    ) -> Result<(), Why> {
        // The one token that was drawn may be the text's own; the last one of a beginning may be another one where the text goes on.
        let known = match before {
            None => first.prompt..=first.prompt + 1,
            Some(before) => before.prompt.saturating_sub(2)..=before.prompt + 1,
        };
        if now.prompt != first.prompt + tokens || !known.contains(&now.cached) {
            return Err(
                "its build does not go on behind a text, or the prompt is not known any more".to_owned()
            );
        }
        // One token cannot say a text of several, so that has been said again.
        if tokens < 2 || !now.text.starts_with(text) {
            return Err("its build does not say again what it goes on with".to_owned());
        }
        Ok(())
    }

    /// What has to be counted otherwise where a text of so many tokens stood in the prompt.
    pub(super) fn shift(first: &Counted, tokens: u64) -> Shift {
        Shift { tokens, evaluated: first.prompt.saturating_sub(first.cached) }
    }

    fn begun(&self, text: &str) -> Map<String, Value> {
        let mut body = self.body.clone();
        if self.kind == Kind::Responses {
            let turn = json!({ "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": text }] });
            let before = body.shift_remove("input").unwrap_or_default();
            let mut turns = match before {
                Value::Array(turns) => turns,
                one => vec![json!({ "role": "user", "content": one })],
            };
            turns.push(turn);
            body.insert("input".to_owned(), Value::Array(turns));
        } else if let Some(Value::Array(turns)) = body.get_mut("messages") {
            turns.push(json!({ "role": "assistant", "content": text }));
        }
        body
    }

    fn of_one(&self, mut body: Map<String, Value>) -> Map<String, Value> {
        for name in LIMITS.iter().chain(&["stream_options", "return_progress", "timings_per_token"]) {
            body.shift_remove(*name);
        }
        let limit = if self.kind == Kind::Responses { "max_output_tokens" } else { "max_tokens" };
        body.insert(limit.to_owned(), json!(1));
        body.insert("stream".to_owned(), json!(false));
        body
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        // OpenAI's words for any text.
        Value::Object(format) => format.iter().all(|(name, value)| match name.as_str() {
            "type" => *value == "text",
            "format" => is_nothing(value),
            _ => false,
        }),
        Value::Bool(true) => false,
    }
}

/// Whether a turn has nothing but texts, calls of tools and what came of them.
fn is_of_texts(turn: &Value) -> bool {
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

/// A text, or the texts of its parts.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
