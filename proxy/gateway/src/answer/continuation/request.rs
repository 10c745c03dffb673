//! Requests by which another server computes the rest of an answer. Pure.
//!
//! A request is continued only if each of its members is in the lists below. An unknown member may change
//! sampling or the form of events, so the stream then ends with an error.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::spelling::{THOUGHT_END, unknown_marks_reason};
use crate::answer::AnswerFormat;

/// Reason why an answer is not continued; it follows "the rest of it cannot be computed elsewhere: ".
pub(crate) type NoContinuationReason = String;

/// Sampling members, passed on unchanged.
const SAMPLING_MEMBERS: [&str; 32] = [
    "cache_prompt",
    "dry_allowed_length",
    "dry_base",
    "dry_multiplier",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "dynatemp_range",
    "frequency_penalty",
    "id_slot",
    "ignore_eos",
    "logit_bias",
    "lora",
    "min_keep",
    "min_p",
    "n_cache_reuse",
    "n_discard",
    "n_keep",
    "presence_penalty",
    "repeat_last_n",
    "repeat_penalty",
    "samplers",
    "seed",
    "temperature",
    "timings_per_token",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typ_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
];

/// Members that do not affect tokens, or that the request for the rest replaces.
const NEUTRAL_MEMBERS: [&str; 15] = [
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "model",
    "n_predict",
    "parallel_tool_calls",
    "prompt",
    "return_progress",
    "return_tokens",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "user",
];

/// Members that make the prompt of a chat; the next server's template renders them.
const TEMPLATE_MEMBERS: [&str; 4] =
    ["chat_template_kwargs", "messages", "reasoning_effort", "reasoning_format"];

/// Members that become a grammar, which must start after the client's text.
const SHAPE_MEMBERS: [&str; 3] = ["grammar", "json_schema", "response_format"];

/// Fields that the last event of the rest of a chat needs.
const LAST_EVENT_FIELDS: [&str; 8] =
    ["content", "index", "stop", "stop_type", "timings", "tokens_evaluated", "tokens_predicted", "truncated"];

/// Number of tokens of a probe: enough to see whether the build's chat parser strips the beginning.
const PROBE_TOKENS: u64 = 8;

/// A request whose answer can be continued by its tokens.
#[derive(Debug)]
pub(super) struct ContinuationRequest {
    kind: AnswerFormat,
    body: Map<String, Value>,
    /// Token limit of the whole answer, if the client set one.
    pub(super) limit: Option<u64>,
    /// True if the client of a chat wants usage counters at the end of the stream.
    pub(super) wants_usage: bool,
}

impl ContinuationRequest {
    pub(super) fn from_body(kind: AnswerFormat, body: &[u8]) -> Result<Self, NoContinuationReason> {
        let Ok(Value::Object(body)) = serde_json::from_slice(body) else {
            return Err("the request is no JSON object".to_owned());
        };
        for (name, value) in &body {
            if !is_understood(kind, name, value) {
                return Err(format!("the effect of `{name}` on it is not known"));
            }
        }
        match kind {
            AnswerFormat::Chat => check_messages(body.get("messages"))?,
            _ => check_prompt(body.get("prompt"))?,
        }
        let limit = token_limit(&body)?;
        let wants_usage = body.get("stream_options").is_some_and(|options| options["include_usage"] == true);
        Ok(Self { kind, body, limit, wants_usage })
    }

    /// Builds a probe: the same request for a few tokens, whose answer lists all settings.
    pub(super) fn probe_request(&self) -> Vec<u8> {
        let mut body = self.body.clone();
        for name in ["stream_options", "max_completion_tokens", "return_progress", "timings_per_token"] {
            body.shift_remove(name);
        }
        body.insert("stream".to_owned(), json!(false));
        body.insert("verbose".to_owned(), json!(true));
        body.insert("n_predict".to_owned(), json!(PROBE_TOKENS));
        body.insert("max_tokens".to_owned(), json!(PROBE_TOKENS));
        body_bytes(body)
    }

    pub(super) fn is_shaped(&self) -> bool {
        SHAPE_MEMBERS.iter().any(|name| self.body.get(*name).is_some_and(|value| !is_no_shape(name, value)))
    }

    pub(super) fn has_stop_words(&self) -> bool {
        self.body.get("stop").is_some_and(|stop| !stop.is_null())
    }

    pub(super) fn template_request(&self) -> Vec<u8> {
        body_bytes(self.body.clone())
    }

    /// Builds the request for the rest: the prompt and the tokens of the client's text.
    pub(super) fn rest_request(
        &self,
        settings: &ProbedSettings,
        rendered: Option<String>,
        said: &[u32],
        text: &str,
    ) -> Vec<u8> {
        body_bytes(self.build_rest(settings, rendered, said, text))
    }

    /// Builds a request that shows whether the server starts a grammar after the client's text: the grammar
    /// then allows only [`TEST_LETTER`]. `None` if the form of the answer is free.
    pub(super) fn grammar_test(
        &self,
        settings: &ProbedSettings,
        rendered: Option<String>,
        said: &[u32],
        text: &str,
    ) -> Option<Vec<u8>> {
        settings.shape.as_ref()?;
        let mut body = self.build_rest(settings, rendered, said, text);
        let begun = body.get("generation_prompt").and_then(Value::as_str).unwrap_or_default();
        body.insert(
            "grammar".to_owned(),
            json!(format!("root ::= {} \"{TEST_LETTER}\"", grammar_literal(begun))),
        );
        body.insert("n_predict".to_owned(), json!(PROBE_TOKENS));
        body.insert("stream".to_owned(), json!(false));
        Some(body_bytes(body))
    }

    fn build_rest(
        &self,
        settings: &ProbedSettings,
        rendered: Option<String>,
        said: &[u32],
        text: &str,
    ) -> Map<String, Value> {
        let mut body = self.body.clone();
        body.retain(|name, _| is_sampling(name) || (self.kind == AnswerFormat::Text && name == "model"));
        if let Some(stop) = self.stop_words(settings) {
            body.insert("stop".to_owned(), stop);
        }
        if let Some(limit) = self.limit {
            // If no token is left, the server generates one all the same, which is dropped.
            body.insert("n_predict".to_owned(), json!(limit.saturating_sub(said.len() as u64).max(1)));
        }
        let begun =
            rendered.map_or_else(|| self.body.get("prompt").cloned().unwrap_or_default(), Value::String);
        body.insert("prompt".to_owned(), join_tokens(begun, said));
        if self.kind == AnswerFormat::Chat {
            // Without this list, the last event would repeat the prompt and all settings.
            body.insert("response_fields".to_owned(), json!(LAST_EVENT_FIELDS));
        }
        if let Some((grammar, begun)) = &settings.shape {
            body.insert("grammar".to_owned(), json!(grammar));
            // Some builds start a grammar after given text only if they take it for one that llama-server
            // made.
            body.insert("grammar_type".to_owned(), json!("tool_calls"));
            let is_own = self.body.get("grammar").is_some_and(|grammar| *grammar != "");
            let begun = if is_own { "" } else { begun };
            body.insert("generation_prompt".to_owned(), json!(format!("{begun}{text}")));
        }
        body.insert("stream".to_owned(), json!(true));
        body
    }

    /// Returns the stop words. For a chat, the probe's settings include those that its template adds.
    fn stop_words(&self, settings: &ProbedSettings) -> Option<Value> {
        match self.kind {
            AnswerFormat::Chat => Some(settings.stop.clone())
                .filter(|stop| stop.as_array().is_some_and(|stop| !stop.is_empty())),
            _ => self.body.get("stop").cloned(),
        }
    }
}

/// Builds a request that shows whether the build starts a grammar after a text: the grammar allows only
/// [`TEST_LETTER`] after it.
pub(super) fn grammar_start_test(start: &str) -> Vec<u8> {
    let grammar = format!("root ::= {} \"{TEST_LETTER}\"", grammar_literal(start));
    let test = json!({
        "prompt": "a", "n_predict": PROBE_TOKENS, "stream": false, "temperature": 0, "grammar": grammar,
        "grammar_type": "tool_calls", "generation_prompt": start,
    });
    test.to_string().into_bytes()
}

/// The only text that the test grammar allows after the client's text.
const TEST_LETTER: &str = "q";

/// Reads the answer to [`ContinuationRequest::grammar_test`].
pub(super) fn is_grammar_in_place(answer: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    answer["content"] == TEST_LETTER && answer["stop_type"] == "eos"
}

fn grammar_literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '\u{80}'.. | ' '..='~' => out.push(letter),
            // A control character is one byte, hence two digits. Writing to a String cannot fail.
            _ => drop(write!(out, "\\x{:02X}", u32::from(letter))),
        }
    }
    out.push('"');
    out
}

/// Appends the client's tokens to a prompt, as token numbers. As text, they could be tokenized differently
/// where prompt and answer meet (some vocabularies add a blank), and could form a template marker.
fn join_tokens(prompt: Value, said: &[u32]) -> Value {
    let said = said.iter().map(|id| json!(id));
    match prompt {
        Value::String(text) if said.len() > 0 => {
            Value::Array(std::iter::once(Value::String(text)).chain(said).collect())
        }
        Value::Array(mut parts) => {
            parts.extend(said);
            Value::Array(parts)
        }
        other => other,
    }
}

#[derive(Debug)]
pub(super) struct ProbedSettings {
    stop: Value,
    pub(super) prompt: u64,
    /// Special tokens that the template keeps visible in the generated text.
    pub(super) marks: Vec<u32>,
    /// True if repeating the request gives the same answer.
    pub(super) is_greedy: bool,
    /// Grammar of the answer, and the text that the grammar must read before the answer.
    shape: Option<(String, String)>,
}

impl ProbedSettings {
    pub(super) fn from_probe(kind: AnswerFormat, answer: &[u8]) -> Result<Self, NoContinuationReason> {
        let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
        let told = probe_view(kind, &answer);
        let settings = &told["generation_settings"];
        let (true, Some(prompt)) = (settings.is_object(), told["tokens_evaluated"].as_u64()) else {
            return Err(settings_unknown());
        };
        check_stateless(settings, &["grammar_lazy", "grammar_triggers"])?;
        let marks = settings["preserved_tokens"].as_array().into_iter().flatten();
        let marks = marks.map(|mark| u32::try_from(mark.as_u64()?).ok()).collect::<Option<Vec<_>>>();
        let Some(marks) = marks else { return Err(unknown_marks_reason()) };
        let text = |name: &str| settings[name].as_str().unwrap_or_default().to_owned();
        let shape =
            Some((text("grammar"), text("generation_prompt"))).filter(|(grammar, _)| !grammar.is_empty());
        if kind == AnswerFormat::Chat && !is_passed_whole(&answer, told, shape.is_some()) {
            return Err("its build removes parts of the model's text".to_owned());
        }
        let is_greedy = is_greedy_of(settings).unwrap_or(false);
        Ok(Self { stop: settings["stop"].clone(), prompt, marks, is_greedy, shape })
    }

    pub(super) fn has_shape(&self) -> bool {
        self.shape.is_some()
    }

    /// Returns whether the answer may have begun with text that the client lacks, although the probe's answer
    /// did not: with another random draw, a reasoning model may begin with an empty thought. False if the
    /// prompt itself has ended the thought.
    pub(super) fn may_hide_thought(&self, marks: &str, rendered: &str) -> bool {
        let thinks = marks.contains(THOUGHT_END) || rendered.contains(THOUGHT_END);
        thinks && !self.is_greedy && !rendered.trim_ascii_end().ends_with(THOUGHT_END)
    }
}

pub(super) fn settings_unknown() -> NoContinuationReason {
    "its build does not report its settings".to_owned()
}

/// Settings that need a sampling state, which the next process lacks.
const STATEFUL_SETTINGS: [&str; 3] = ["mirostat", "adaptive_target", "n_probs"];

/// Checks that [`STATEFUL_SETTINGS`] and `more` are not in use. The error names the setting.
pub(super) fn check_stateless(settings: &Value, more: &[&str]) -> Result<(), NoContinuationReason> {
    let is_empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Number(number) => number.as_f64().is_some_and(|number| number <= 0.0),
        _ => false,
    };
    match more.iter().chain(&STATEFUL_SETTINGS).find(|name| !is_empty(&settings[**name])) {
        Some(name) => Err(format!("its server computes with `{name}`")),
        None => Ok(()),
    }
}

fn probe_view(kind: AnswerFormat, answer: &Value) -> &Value {
    if kind == AnswerFormat::Native { answer } else { &answer["__verbose"] }
}

fn is_greedy_of(settings: &Value) -> Option<bool> {
    let temperature = settings["temperature"].as_f64()?;
    Some((temperature <= 0.0 || settings["top_k"] == 1) && settings["mirostat"].as_u64().unwrap_or(0) == 0)
}

/// Returns whether the answer is the same each time; `None` if the probe does not report it.
pub(super) fn is_greedy(kind: AnswerFormat, answer: &[u8]) -> Option<bool> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    is_greedy_of(&probe_view(kind, &answer)["generation_settings"])
}

/// Returns whether the client gets every byte that the model generates. The next server's prompt would lack
/// any text that the build's chat parser strips (leading blanks, thoughts, markers). Blanks and a code fence
/// around an answer with a grammar or schema do not affect the continuation.
fn is_passed_whole(answer: &Value, told: &Value, has_shape: bool) -> bool {
    let message = &answer["choices"][0]["message"];
    let content = match &message["content"] {
        Value::Null => "",
        Value::String(content) => content,
        _ => return false,
    };
    let beside = ["reasoning_content", "tool_calls"].map(|name| &message[name]);
    let nothing = |value: &Value| value.is_null() || *value == "" || *value == json!([]);
    (has_shape || told["content"] == content) && beside.into_iter().all(nothing)
}

fn is_sampling(name: &str) -> bool {
    SAMPLING_MEMBERS.contains(&name)
}

/// Returns whether a member of a request is known and the request for the rest reproduces its effect.
fn is_understood(kind: AnswerFormat, name: &str, value: &Value) -> bool {
    value.is_null()
        || is_sampling(name)
        || NEUTRAL_MEMBERS.contains(&name)
        || (kind == AnswerFormat::Chat && TEMPLATE_MEMBERS.contains(&name))
        || (SHAPE_MEMBERS.contains(&name) && is_no_shape(name, value))
        || match name {
            "continue_final_message"
            | "echo"
            | "grammar_lazy"
            | "logprobs"
            | "post_sampling_probs"
            | "verbose" => *value == false,
            "functions" | "grammar_triggers" | "preserved_tokens" | "tools" => *value == json!([]),
            "n" | "best_of" => *value == 1,
            "n_probs" | "mirostat" | "n_indent" | "t_max_predict_ms" => *value == 0,
            "add_generation_prompt" => kind == AnswerFormat::Chat && *value == true,
            "grammar" => value.is_string(),
            "json_schema" => value.is_object(),
            "response_format" => {
                kind == AnswerFormat::Chat
                    && (value["type"] == "json_object" || value["type"] == "json_schema")
            }
            "tool_choice" => *value == "none" || *value == "auto",
            "suffix" => *value == "",
            _ => false,
        }
}

/// Returns whether a member that can restrict the form of the answer has a value that does not.
fn is_no_shape(name: &str, value: &Value) -> bool {
    match name {
        "grammar" => *value == "",
        "response_format" => {
            value["type"] == "text" && value.as_object().is_some_and(|format| format.len() == 1)
        }
        _ => value.is_null(),
    }
}

/// Checks that a prompt is one text or a list of tokens.
pub(super) fn check_prompt(prompt: Option<&Value>) -> Result<(), NoContinuationReason> {
    let is_one = match prompt {
        Some(Value::String(_)) => true,
        Some(Value::Array(parts)) => {
            parts.iter().any(Value::is_u64) && parts.iter().all(|part| part.is_u64() || part.is_string())
        }
        _ => false,
    };
    if is_one { Ok(()) } else { Err("it has several prompts, or one with more than text".to_owned()) }
}

/// Checks that a conversation has only texts and that the answer is its next message.
fn check_messages(messages: Option<&Value>) -> Result<(), NoContinuationReason> {
    let Some(Value::Array(messages)) = messages else { return Err("it has no messages".to_owned()) };
    for message in messages {
        let is_text = match &message["content"] {
            Value::Array(parts) => parts.iter().all(|part| part["type"] == "text"),
            Value::String(_) | Value::Null => true,
            _ => false,
        };
        if !is_text {
            return Err("its messages have more than text".to_owned());
        }
    }
    if messages.last().is_none_or(|last| last["role"] == "assistant") {
        return Err("its last message is the beginning of the answer".to_owned());
    }
    Ok(())
}

/// Returns the token limit of the answer. Values below 0 mean no limit.
fn token_limit(body: &Map<String, Value>) -> Result<Option<u64>, NoContinuationReason> {
    let mut limit: Option<i64> = None;
    for name in ["n_predict", "max_tokens", "max_completion_tokens"] {
        match body.get(name) {
            None | Some(Value::Null) => {}
            Some(value) => match (value.as_i64(), limit) {
                (Some(one), Some(other)) if one != other => {
                    return Err("its limits contradict each other".to_owned());
                }
                (Some(one), _) => limit = Some(one),
                (None, _) => return Err(format!("`{name}` is no number of tokens")),
            },
        }
    }
    Ok(limit.and_then(|limit| u64::try_from(limit).ok()))
}

pub(super) fn body_bytes(body: Map<String, Value>) -> Vec<u8> {
    Value::Object(body).to_string().into_bytes()
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
