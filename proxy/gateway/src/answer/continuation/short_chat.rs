//! Short chats that show how the next server renders and parses any answer with the same tools, format and
//! template. Pure.
//!
//! The routes of messages and responses show neither prompts nor settings. A short chat shows them, and costs
//! little.

use serde_json::{Map, Value, json};

use super::request::{self, NoContinuationReason, body_bytes};
use super::tool_call::chat_tools;
use crate::answer::AnswerFormat;

/// Members that decide how a chat is rendered and how its answer is parsed.
const RENDERING_MEMBERS: [&str; 7] = [
    "chat_template_kwargs",
    "json_schema",
    "model",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
];

/// Text that a server repeats if it repeats the beginning of an answer; no single token spells it.
const ECHO_TEXT: &str = "One, two, three, four";

/// Marks of a thought in a rendered prompt.
const THOUGHT_MARKS: [&str; 2] = ["<think>", "</think>"];

/// Builds a short chat with a question and, if given, the beginning of the answer.
pub(super) fn rendered_chat(
    kind: AnswerFormat,
    body: &Map<String, Value>,
    question: &str,
    turn: Option<&Value>,
) -> Map<String, Value> {
    let mut turns = vec![json!({ "role": "user", "content": question })];
    turns.extend(turn.cloned());
    let mut chat = Map::new();
    for name in RENDERING_MEMBERS {
        if let Some(value) = body.get(name) {
            chat.insert(name.to_owned(), value.clone());
        }
    }
    chat.insert("messages".to_owned(), Value::Array(turns));
    let tools = chat_tools(kind, body);
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), Value::Array(tools));
    }
    chat
}

/// Like [`rendered_chat`], for a single reproducible answer that reports the settings.
pub(super) fn short_chat(
    kind: AnswerFormat,
    body: &Map<String, Value>,
    question: &str,
    turn: Option<&Value>,
) -> Map<String, Value> {
    let mut chat = rendered_chat(kind, body, question, turn);
    for (name, value) in [("stream", json!(false)), ("verbose", json!(true)), ("temperature", json!(0))] {
        chat.insert(name.to_owned(), value);
    }
    chat.insert("max_tokens".to_owned(), json!(1));
    chat
}

/// Builds the request that shows the grammar for an answer which begins with `turn`.
pub(super) fn grammar_request(
    kind: AnswerFormat,
    body: &Map<String, Value>,
    turn: &Value,
    must_call: bool,
) -> Vec<u8> {
    let mut chat = short_chat(kind, body, "a", Some(turn));
    if must_call {
        chat.insert("tool_choice".to_owned(), json!("required"));
    }
    body_bytes(chat)
}

/// Reads the answer to [`grammar_request`]. `None` if the form of the answer is free. Otherwise returns the
/// text that the grammar reads before the rest, which must end with `text`.
pub(super) fn grammar_start(answer: &[u8], text: &str) -> Result<Option<String>, NoContinuationReason> {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    let settings = &answer["__verbose"]["generation_settings"];
    let Some(grammar) = settings["grammar"].as_str() else { return Err(request::settings_unknown()) };
    if grammar.is_empty() {
        return Ok(None);
    }
    match settings["generation_prompt"].as_str() {
        Some(start) if start.ends_with(text) && settings["grammar_lazy"] == false => {
            Ok(Some(start.to_owned()))
        }
        _ => Err("its build does not apply the grammar of tools from that text on".to_owned()),
    }
}

/// Builds the request that shows whether the build repeats the beginning of an answer.
pub(super) fn echo_request() -> Vec<u8> {
    let turn = json!({ "role": "assistant", "content": ECHO_TEXT });
    body_bytes(short_chat(AnswerFormat::Chat, &Map::new(), "a", Some(&turn)))
}

/// Reads the answer to [`echo_request`].
pub(super) fn is_echoed(answer: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    answer["choices"][0]["message"]["content"].as_str().is_some_and(|text| text.starts_with(ECHO_TEXT))
}

/// Returns whether a prompt of a chat is the beginning of `continued`, the prompt of the same chat with the
/// beginning of its answer: only the thought and the text follow. A template may write the marks of a thought
/// that the answer lacks.
pub(super) fn is_appended(prompt: &str, continued: &str, reasoning: &str, text: &str) -> bool {
    let Some(middle) = continued.strip_suffix(text) else { return false };
    let equal = prompt.bytes().zip(middle.bytes()).take_while(|(one, other)| one == other).count();
    // A common beginning may end within a mark.
    let common = prompt.as_bytes()[..equal].iter().rposition(|byte| *byte == b'<').map_or(equal, |mark| {
        let is_within = !prompt.as_bytes()[mark..equal].contains(&b'>');
        if is_within { mark } else { equal }
    });
    let (Some(closed), Some(added)) = (prompt.get(common..), middle.get(common..)) else { return false };
    if closed.is_empty() && added.is_empty() {
        return reasoning.is_empty();
    }
    let without_marks = |text: &str| {
        let mut text = text.to_owned();
        for mark in THOUGHT_MARKS {
            text = text.replace(mark, "");
        }
        text
    };
    let added = without_marks(added);
    let is_closed = without_marks(closed).trim_ascii().is_empty();
    is_closed && added.trim_ascii() == reasoning.trim_ascii()
}

#[cfg(test)]
#[path = "short_chat_tests.rs"]
mod tests;
